"""What tests of environments share."""

import json


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def all_replies(workers, n, seconds=30):
    found = {}
    while len(found) < n:
        got = workers.replies(seconds)
        assert got, f"{len(found)} replies of {n}"
        found |= got
    return found
