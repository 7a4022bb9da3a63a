"""Environments for the tests of episodes: what they answer follows from the turn's text only."""

import os
import random
import time
import zlib

import numpy as np

from grpojax.extensions.episodes.calls import Call
from grpojax.extensions.episodes.environment_types import Reply


class Fake:
    """`grpojax.extensions.episodes.environment_types.Environments`. Two turns of three call a tool. One of nine calls
    fails, and half of these are malformed.

    Args:
      late: seed of how long each answer takes: it comes in the first, second or third call of `replies`. None for at
        once.
      resets: what ``reset`` returns for a row's columns and the sample's number.
      invalid: whether an episode becomes invalid, of its uid and its sample's number.
      lost: whether an episode becomes invalid without a reply that says so, likewise.
      loses: whether an instance is lost, once each, of its uid, its sample's number, and when: the number of turns that
        it was given, or "end" where its reward is asked for.
      repeats: what it says of all rows: whether the same actions give the same observations.
      salt: another one makes other answers.
    """

    tools, rewarded = {None: ()}, {None: True}

    def __init__(
        self,
        late=None,
        resets=lambda row, sample: None,
        invalid=lambda uid, sample: False,
        lost=lambda uid, sample: False,
        loses=lambda uid, sample, when: False,
        repeats=True,
        salt="",
    ):
        self._late = None if late is None else np.random.default_rng(late)
        self._resets, self._invalid, self._lost = resets, invalid, lost
        self._repeats, self._salt = repeats, salt
        self._loses, self.lost = loses, set()
        self.open_now, self._due, self.most, self.closed = {}, {}, 0, False

    def deterministic(self, row):
        return self._repeats

    def open(self, rows):
        self.open_now |= {episode: [] for episode in rows}
        self.most = max(self.most, len(self.open_now))
        return {episode: self._resets(row, episode[1]) for episode, row in rows.items()}

    def _loses_now(self, episode, when):
        if not self._loses(*episode, when) or (episode, when) in self.lost:
            return False
        self.lost.add((episode, when))
        self.open_now[episode].clear()
        return True

    def play(self, turns):
        for episode, text in turns.items():
            self.open_now[episode].append(text)
            number = zlib.crc32((text + self._salt).encode())
            waits = 0 if self._late is None else int(self._late.integers(3))
            if self._loses_now(episode, len(self.open_now[episode])):
                reply = Reply(messages=(), again=True)
            elif self._invalid(*episode):
                reply = Reply(messages=(), invalid="timeout")
            elif number % 3 == 0:
                reply = Reply(messages=())
            else:
                content = str(number)[: 1 + number % 7]
                reply = Reply(messages=({"role": "tool", "content": content},), calls=1,
                              failures=int(number % 9 == 1), malformed=int(number % 18 == 1))  # fmt: skip
            self._due[episode] = waits, reply

    def replies(self, timeout=None):
        if not any(waits == 0 for waits, _ in self._due.values()):
            time.sleep(min(timeout or 0.0, 0.005))
        there = {episode: reply for episode, (waits, reply) in self._due.items() if not waits}
        self._due = {episode: (waits - 1, reply) for episode, (waits, reply) in self._due.items() if waits}
        return there

    def rewards(self, episodes):
        self._due |= {e: (0, Reply(messages=(), again=True)) for e in episodes if self._loses_now(e, "end")}
        there = [e in self.open_now and not self._lost(*e) for e in episodes]
        return [float(len(self.open_now[e])) if here else float("nan") for e, here in zip(episodes, there, strict=True)]

    def close(self, episodes=None):
        self.closed |= episodes is None
        for episode in list(self.open_now) if episodes is None else episodes:
            del self.open_now[episode]


class Echo:
    """A class for a recipe, which runs in worker processes; `calls_in` reads its calls."""

    deterministic = True

    def reset(self, **columns):
        self.turns = 0

    def number(self, text: str) -> str:
        """A number of a text.

        Args:
            text: any
        """
        self.turns += 1
        number = zlib.crc32(text.encode())
        time.sleep(number % 5 / 500)
        return str(number)[: 1 + number % 7]

    def get_reward(self):
        return float(self.turns)


class Slow(Echo):
    """Leaves time to stop the run while its episodes are open."""

    def number(self, text: str) -> str:
        """A number of a text.

        Args:
            text: any
        """
        time.sleep(0.1)
        return super().number(text)


class SlowAndRandom(Slow):
    """States nothing, and answers as it likes."""

    deterministic = False

    def number(self, text: str) -> str:
        """A number.

        Args:
            text: any
        """
        return super().number(f"{text}{os.urandom(4)}")


class LateAndCrashes(Echo):
    """Takes a random time, and for one text of four its worker with it. That its answers repeat is not stated."""

    deterministic = False

    def number(self, text: str) -> str:
        """A number of a text.

        Args:
            text: any
        """
        time.sleep(random.random() / 10)
        if zlib.crc32(text.encode()) % 4 == 0:
            os._exit(1)
        return super().number(text)


def calls_in(text):
    """A call for two texts of three."""
    return [Call("number", {"text": text})] if zlib.crc32(text.encode()) % 3 else []
