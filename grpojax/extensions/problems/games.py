"""The games for one player of textarena (arXiv:2504.11442). Needs the extra ``textarena``."""

import contextlib
import importlib.util
import random
import sys
from collections.abc import Iterator
from typing import Any

from grpojax.host.errors import UserError

with contextlib.suppress(ImportError):  # here, so that a worker has it before its limits of time and memory hold
    import textarena  # pyrefly: ignore[missing-import]


class TextArena:
    """A game of textarena: an environment with one tool. The reward is the game's own, 0 before its end.

    Args:
      game: such as "GuessTheNumber-v0". Some need data of nltk, which must be there before.
      options: settings of the game's class.
    """

    deterministic = True

    def __init__(self, game: str, options: dict[str, Any] | None = None):
        if importlib.util.find_spec("textarena") is None:
            raise UserError("the environment textarena needs the package: pip install 'grpojax[textarena]'")
        self._name = game if game.endswith("-raw") else f"{game}-raw"
        self._states: tuple[Any, Any] | None = None
        with self._random():
            self._game = textarena.make(self._name, **(options or {}))

    def reset(self, seed: int = 0, **columns: object) -> str:
        """Begins a game.

        Args:
          seed: which one; a column of that name, or the same one for all rows.
        """
        self.done = False
        with self._random():
            self._game.reset(num_players=1, seed=int(seed))
            _numpy_seed(int(seed))
        if not isinstance(self._game.state, textarena.SinglePlayerState):
            raise UserError(f"game {self._name!r} is for several players")
        return self._seen()

    def play(self, move: str) -> str:
        """Makes a move.

        Args:
            move: in the form that the game asks for
        """
        if self.done:
            raise ValueError("the game is over")
        with self._random():
            self.done, _ = self._game.step(action=move)
        return self._seen() or ("The game is over." if self.done else "")

    def get_reward(self) -> float:
        """The game's own reward, 0 before its end."""
        rewards = self._game.state.rewards
        return float(rewards[0]) if self.done and rewards else 0.0

    def _seen(self) -> str:
        with self._random():
            _, seen = self._game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(str(text).strip() for _, text, kind in seen if kind != own)

    @contextlib.contextmanager
    def _random(self) -> Iterator[None]:
        """Gives the game the random numbers that it left off at: games draw from those of the process, which others
        draw from too."""
        outside = _states()
        if self._states is not None:
            _set_states(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(outside)


def _states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def _numpy_seed(seed: int) -> None:
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
