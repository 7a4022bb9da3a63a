"""Reward functions that take more than they are given."""

import subprocess

HOARD = []


def hoards(prompts, completions, tokens, **columns):
    """Keeps 40 MiB a call."""
    HOARD.append(bytearray(40 * 2**20))
    return [1.0] * len(completions)


def takes_all(prompts, completions, tokens, **columns):
    return [float(len(bytearray(2**40)))] * len(completions)


def leaves_a_program(prompts, completions, tokens, **columns):
    subprocess.run(["sleep", "321.123"])
    return [1.0] * len(completions)


def mapping(prompts, completions, tokens, **columns):
    return dict.fromkeys(range(len(completions)), 1.0)


def members(prompts, completions, tokens, **columns):
    return set(map(float, range(len(completions))))


def over_float32(prompts, completions, tokens, **columns):
    return [1e300] * len(completions)


def no_columns(prompts, completions, tokens):
    return [1.0] * len(completions)


def scaled(prompts, completions, tokens, *, scale=1.0, **columns):
    return [scale] * len(completions)


class Class:
    def __init__(self, prompts, completions, tokens, **columns):
        pass
