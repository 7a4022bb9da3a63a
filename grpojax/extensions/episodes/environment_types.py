"""What a run asks of its environments, and what they answer: episodes of several turns, on the host's side.

`grpojax.extensions.episodes.instances.Workers` is what a run uses; a test may give its own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Episode = tuple[int, int]
"""The uid of a problem, and the number of the sample in its group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What an environment gives back for one turn of an episode.

    Attributes:
      messages: chat messages to append, such as ``{"role": "tool", "name": "add", "content": "12"}``. Empty if the turn
        called nothing: then the episode is over.
      done: the environment has ended the episode.
      calls: tool calls of this turn.
      failures: those of them that were malformed, or whose tool raised.
      malformed: those of the failures that reached no tool: they could not be read, did not fit the schema, or were
        over the most calls of a turn.
      invalid: why the episode does not count any more, such as "timeout"; None if it does.
      again: the instance was lost through no fault of its own, and could not be made as it was: a new one stands after
        its ``reset``, and the episode is to be drawn again from its first turn. Then there are no messages.
    """

    messages: tuple[Mapping[str, Any], ...]
    done: bool = False
    calls: int = 0
    failures: int = 0
    malformed: int = 0
    invalid: str | None = None
    again: bool = False


class Environments(Protocol):
    """The environments of a run, one instance for each episode.

    Attributes:
      tools: JSON schemas of each environment's tools in OpenAI's form, for the chat template's ``tools``, by what
        the column ``environment`` of a row says. Those of an only environment stand under None.
      rewarded: whether each environment has ``get_reward``, likewise.
    """

    tools: Mapping[str | None, tuple[Mapping[str, Any], ...]]
    rewarded: Mapping[str | None, bool]

    def deterministic(self, row: Mapping[str, Any]) -> bool:
        """Whether the class of a row's environment states that the same actions give the same observations."""
        ...

    def open(
        self, rows: Mapping[Episode, Mapping[str, Any]]
    ) -> Mapping[Episode, str | Sequence[Mapping[str, Any]] | None]:
        """Resets one instance for each episode with the columns of its problem; gives what each ``reset`` returned."""
        ...

    def play(self, turns: Mapping[Episode, str]) -> None:
        """Hands in the policy's text of a turn, for each of some episodes. Returns at once."""
        ...

    def replies(self, timeout: float | None = None) -> Mapping[Episode, Reply]:
        """The replies that are there. Waits until one is, or until ``timeout`` seconds are over.

        `Reply.again` also comes where a reward or a snapshot was asked for.
        """
        ...

    def rewards(self, episodes: Sequence[Episode]) -> Sequence[float | None]:
        """``get_reward()`` of each episode, None where its class has none."""
        ...

    def snapshots(self, episodes: Sequence[Episode]) -> Sequence[Any]:
        """The instances of episodes, for rewards that ask for the column ``environments``."""
        ...

    def close(self, episodes: Sequence[Episode] | None = None) -> None:
        """Drops the instances of these episodes; None drops all, and ends the workers."""
        ...
