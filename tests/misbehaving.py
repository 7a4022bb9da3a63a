"""Reward functions that take more resources than they are given."""

import os
import subprocess
import time

import numpy as np

from grpojax.host.errors import UserError

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


def one_for_all(prompts, completions, tokens, **columns):
    return [0.5]


def takes_what_it_gets(prompts, completions, tokens, *, tags, **columns):
    """Empties all of its arguments, after it has counted."""
    n = [float(len(ids)) + len(of_sample) for ids, of_sample in zip(tokens, tags, strict=True)]
    for of_sample in (*tokens, *tags):
        of_sample.clear()
    prompts.clear(), completions.clear(), tokens.clear(), tags.clear()
    return n


def uses_up_its_options(prompts, completions, tokens, *, values=(3.0,), **columns):
    return [values.pop() for _ in completions]


def says(prompts, completions, tokens, *, value, **columns):
    """Whatever the data has for it to return."""
    return value[0]


def swings(prompts, completions, tokens, **columns):
    return [1e37 * (-1) ** i for i in range(len(completions))]


def column_vector(prompts, completions, tokens, **columns):
    return np.zeros((len(completions), 1), np.float32)


def forks(prompts, completions, tokens, **columns):
    """The other process, which goes on from here as well."""
    return [float(os.fork())] * len(completions)


def chatters(prompts, completions, tokens, **columns):
    """Raises with a message of a megabyte."""
    raise RuntimeError("x" * 2**20)


def no_tokens(prompts, completions, **columns):
    return [1.0] * len(completions)


def no_columns(prompts, completions, tokens):
    return [1.0] * len(completions)


def asks(prompts, completions, tokens, totl, note=None, **columns):
    return [1.0] * len(completions)


def by_pieces(prompts, completions, tokens, *, pieces, **columns):
    return [float(len(p)) for p in pieces]


def scaled(prompts, completions, tokens, *, scale=1.0, **columns):
    return [scale] * len(completions)


def refuses(prompts, completions, tokens, **columns):
    raise UserError("limit=3: too low\nset limit: 4")


class Class:
    def __init__(self, prompts, completions, tokens, **columns):
        pass


def without_tokens(prompts, completions, total, **columns):
    """As TRL calls it: the third parameter is a column."""
    return [0.0] * len(total)


def hangs_and_counts(prompts, completions, tokens, *, file, **columns):
    with open(file, "a") as f:
        f.write("called\n")
    while True:
        time.sleep(1)
