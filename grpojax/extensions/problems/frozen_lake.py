r"""A frozen lake: a walk over a grid with holes, as problems (the source ``grid:frozen_lake``) and as an environment.

The rows have ``question``, which shows the lake, ``board``, its rows with ``/`` between them, and ``level``, the number
of moves that the shortest way takes. Without an ``answer``: set ``data.answer: null``.
"""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any, Literal, cast

from grpojax.extensions.problems.reasoning import TRIES, Made, rows_of
from grpojax.host.errors import UserError, require

STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
RULES = "Cross the lake from S to G by moves to the left, down, right or up. F is ice, H is a hole."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lakes(Made):
    """Lakes with a way across.

    Attributes:
      side: rows of a lake, and its columns.
      holes: share of the fields that are holes.
    """

    side: int = 4
    holes: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, side="[2, 20]", holes="[0, 0.5]")

    @staticmethod
    def content(question: str) -> str:
        """The lake, without the words around it."""
        return question.removeprefix(RULES).strip()

    def rows(self) -> list[dict[str, Any]]:
        """The problems, no two of the same lake; raises `UserError` where there are fewer than ``size``."""
        rng, seen = random.Random(f"lakes {self.seed}"), set()
        found: list[dict[str, Any]] = []
        for _ in range(1000 if self.size is None else self.size):
            for _ in range(TRIES):
                board = self._draw(rng)
                question = f"{RULES}\n{board.replace('/', chr(10))}"
                moves = shortest(board)
                if moves is not None and board not in seen and self.has(question):
                    break
            else:
                raise UserError(f"size={self.size}: only {len(found)} lakes of side={self.side} were found")
            seen.add(board)
            found.append({"question": question, "board": board, "level": moves})
        return found

    def _draw(self, rng: random.Random) -> str:
        fields = ["H" if rng.random() < self.holes else "F" for _ in range(self.side**2)]
        fields[0], fields[-1] = "S", "G"
        return "/".join("".join(fields[i : i + self.side]) for i in range(0, len(fields), self.side))


def shortest(board: str) -> int | None:
    """The least number of moves from S to G; None where there is no way.

    Example:
      >>> shortest("SF/HG"), shortest("SH/HG")
      (2, None)
    """
    fields = board.split("/")
    reached, moves = {(0, 0)}, 0
    while reached:
        if any(fields[r][c] == "G" for r, c in reached):
            return moves
        around = {_step(at, move, len(fields)) for at in reached for move in STEPS}
        fields = ["".join("H" if (r, c) in reached else x for c, x in enumerate(row)) for r, row in enumerate(fields)]
        reached, moves = {(r, c) for r, c in around if fields[r][c] != "H"}, moves + 1
    return None


def _step(at: tuple[int, int], move: str, side: int) -> tuple[int, int]:
    """The field after a move; the edge of the lake holds."""
    row, column = (min(max(x + d, 0), side - 1) for x, d in zip(at, STEPS[move], strict=True))
    return row, column


def rows(name: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lakes, the same ones in every process.

    Args:
      name: "frozen_lake".
      options: the fields of `Lakes`.

    Raises:
      UserError: there is no such name, option or value, or there are not so many lakes.

    Example:
      >>> rows("frozen_lake", {"size": 1})[0]["board"]
      'SFFF/HFHF/FFFF/FHHG'
    """
    if name != "frozen_lake":
        raise UserError(f"grid:{name}: no such grid; there is frozen_lake")
    return rows_of(Lakes, options, source=f"grid:{name}")


def content(name: str, question: str) -> str:
    """What a question asks: the same text for the same lake."""
    return Lakes.content(question)


class FrozenLake:
    """The walk over a lake: an environment with one tool. The reward is 1 at the goal, else 0.

    Args:
      slippery: probability of a slip to a side. The slips of an episode depend on the lake and ``seed``.
      seed: of the slips.
      most_moves: after so many moves the episode is over.
    """

    deterministic = True

    def __init__(self, slippery: float = 0.0, seed: int = 0, most_moves: int = 100):
        self._slippery, self._seed, self._most = slippery, seed, most_moves

    def reset(self, board: str) -> None:
        """Begins at S.

        Args:
          board: rows of S, F, H and G, with ``/`` between them.
        """
        self._fields = board.split("/")
        self._rng = random.Random(f"{board} {self._seed}")
        self._at, self._moves = (0, 0), 0
        self.done = False

    def move(self, direction: Literal["left", "down", "right", "up"]) -> str:
        """Moves by one field.

        Args:
            direction: where to
        """
        if self.done:
            raise ValueError("the walk is over")
        self._moves += 1
        if self._rng.random() < self._slippery:
            sides = ("up", "down") if direction in ("left", "right") else ("left", "right")
            direction = cast(Any, sides[self._rng.random() < 0.5])
        self._at = _step(self._at, direction, len(self._fields))
        here = self._here()
        self.done = here in "GH" or self._moves >= self._most
        said = {"G": "You are at the goal.", "H": "You fell into a hole."}.get(here)
        return said or ("Your time is over." if self.done else self._shown())

    def get_reward(self) -> float:
        """1 at the goal, else 0."""
        return float(self._here() == "G")

    def _here(self) -> str:
        return self._fields[self._at[0]][self._at[1]]

    def _shown(self) -> str:
        """The lake with P where the policy is."""
        return "\n".join(
            "".join("P" if (r, c) == self._at else x for c, x in enumerate(row)) for r, row in enumerate(self._fields)
        )
