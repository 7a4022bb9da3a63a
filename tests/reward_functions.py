"""Reward functions that behave and that do not, for workers to import. ``k`` is a column of sample numbers."""

import asyncio
import os
import signal
import subprocess
import sys
import time

from grpojax.host.errors import UserError

STAYS = "98765.3"  # seconds of the program that `clings` leaves behind


def tokens(prompts, completions, tokens, **columns):
    return [float(len(ids)) for ids in tokens]


async def later(prompts, completions, tokens, *, k, scale=1, **columns):
    await asyncio.sleep(0.01)
    return [scale * i for i in k]


def loaded(prompts, completions, tokens, **columns):
    """Whether jax, or a test's own main script, came along."""
    bad = "jax" in sys.modules or "_pytest" in sys.modules
    return [float(bad) for _ in completions]


def pid(prompts, completions, tokens, **columns):
    return [float(os.getpid()) for _ in completions]


def raises(prompts, completions, tokens, *, k, **columns):
    if 3 in k:
        raise ZeroDivisionError("the third")
    return [1.0] * len(k)


def leaves(prompts, completions, tokens, *, k, **columns):
    if 3 in k:
        sys.exit(0)
    return [1.0] * len(k)


def hangs(prompts, completions, tokens, *, k, **columns):
    while 3 in k:
        pass
    return [1.0] * len(k)


def sleeps_in_c(prompts, completions, tokens, *, k, **columns):
    if 3 in k:
        (10**7) ** (10**7)  # signals are not looked at
    return [1.0] * len(k)


def clings(prompts, completions, tokens, *, k, **columns):
    """Ignores every signal, and leaves a program behind that has its own session."""
    if 3 in k:
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        subprocess.Popen(["sleep", STAYS], start_new_session=True)
        time.sleep(100)
    return [1.0] * len(k)


def dies(prompts, completions, tokens, *, k, **columns):
    if 3 in k:
        os.kill(os.getpid(), 9)
    return [1.0] * len(k)


def eats(prompts, completions, tokens, *, k, **columns):
    if 3 in k:
        bytearray(2**30)
    return [1.0] * len(k)


def some_nan(prompts, completions, tokens, *, k, **columns):
    return [float("nan") if i == 3 else 1.0 for i in k]


def some_none(prompts, completions, tokens, *, k, **columns):
    return [None if i == 3 else 1.0 for i in k]


def some_text(prompts, completions, tokens, *, k, **columns):
    return ["1.0" if i == 3 else 1.0 for i in k]


def too_many(prompts, completions, tokens, **columns):
    return [1.0] * (len(completions) + 1)


def no_list(prompts, completions, tokens, **columns):
    return 1.0


def slow(prompts, completions, tokens, **columns):
    time.sleep(0.1 * len(completions))
    return [1.0] * len(completions)


def runs_a_program(prompts, completions, tokens, **columns):
    done = subprocess.run([sys.executable, "-c", "print(2)"], capture_output=True, text=True)
    return [float(done.stdout)] * len(completions)


def bad_steps(prompts, completions, tokens, *, k, **columns):
    """The k-th way to be wrong; 0 is right."""
    n = len(tokens[0])
    ways = ([(2, 0.5), (n, 1)], [(0, 1.0)], [(n + 1, 1.0)], [(2, 1.0), (2, 0.0)], [(3, 1.0), (2, 0.0)],
            [(2, float("nan"))], [(1, None)], [(1.0, 1.0)], [1.0], [(True, 1.0)])  # fmt: skip
    return [ways[i] for i in k]


def steps_or_not(prompts, completions, tokens, *, k, **columns):
    return [[(1, 2.0), (3, -1.0)] if i == 3 else float(i) for i in k]


def ends_of_pieces(prompts, completions, tokens, *, pieces, **columns):
    return [[(i + 1, 1.0) for i, piece in enumerate(of_sample) if "=" in piece] for of_sample in pieces]


_client = []


async def with_client(prompts, completions, tokens, **columns):
    """Asks a task that it keeps between calls, as clients of servers keep their connections."""

    async def answer(asked):
        while True:
            (await asked.get()).set_result(1.0)

    if not _client:
        asked = asyncio.Queue()
        _client.extend([asked, asyncio.create_task(answer(asked))])
    answers = [asyncio.get_running_loop().create_future() for _ in completions]
    for each in answers:
        _client[0].put_nowait(each)
    return [await asyncio.wait_for(each, 1) for each in answers]


class Refusal(UserError):
    """Cannot be unpickled."""

    def __init__(self, number, what):
        super().__init__(f"{number}: {what}")


def refuses(prompts, completions, tokens, **columns):
    raise Refusal(7, "no such key")
