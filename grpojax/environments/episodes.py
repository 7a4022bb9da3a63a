"""What a run asks of its environments, and what they answer: episodes of several turns, on the host's side.

`grpojax.environments.instances.Workers` is what a run uses; a test may give its own.
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
    """

    messages: tuple[Mapping[str, Any], ...]
    done: bool = False
    calls: int = 0
    failures: int = 0
    malformed: int = 0
    invalid: str | None = None


class Environments(Protocol):
    """The environments of a run, one instance for each episode.

    Attributes:
      tools: JSON schemas of the tools in OpenAI's form, for the chat template's ``tools``.
      deterministic: whether the same actions give the same observations, as the class states. Then open episodes can
        be replayed after a resume.
    """

    tools: tuple[Mapping[str, Any], ...]
    deterministic: bool

    def open(
        self, rows: Mapping[Episode, Mapping[str, Any]]
    ) -> Mapping[Episode, str | Sequence[Mapping[str, Any]] | None]:
        """Resets one instance for each episode with the columns of its problem; gives what each ``reset`` returned."""
        ...

    def play(self, turns: Mapping[Episode, str]) -> None:
        """Hands in the policy's text of a turn, for each of some episodes. Returns at once."""
        ...

    def replies(self, timeout: float | None = None) -> Mapping[Episode, Reply]:
        """The replies that are there. Waits until one is, or until ``timeout`` seconds are over."""
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
