"""Which checkpoints of a run stay, and which one is the best.

The best one is chosen by scores, which an evaluation gives after a checkpoint is saved. They are kept in
``scores.json`` next to the checkpoints.
"""

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence

from etils import epath

from grpojax.host import files, processes


class Keeping:
    """Decides by step which checkpoints stay; it touches no checkpoint.

    Args:
      file: where the scores are kept.
      keep: how many of the newest stay.
      best: name of a metric whose largest value's checkpoint stays as well; None for none.

    Attributes:
      held: a step whose checkpoint stays in any case; None for none.
      awaited: a step whose score is still to come. While it is the newest, the checkpoint to go back to stays. None for
        none.
    """

    def __init__(self, file: epath.Path, *, keep: int, best: str | None):
        self._file, self._keep, self._best = file, keep, best
        self.held: int | None = None
        self.awaited: int | None = None
        self._scores: dict[int, dict[str, float]] = {}
        with contextlib.suppress(FileNotFoundError):
            read = json.loads(file.read_text(encoding="utf-8"))
            self._scores = {int(step): scores for step, scores in read.items()}

    def score(self, step: int, scores: Mapping[str, float], *, there: Collection[int]) -> None:
        """Keeps the scores of a step, and forgets the scores of steps that are not ``there``.

        Raises:
          OSError: the first process could not write the scores, so only this one knows them.
        """
        self._scores = {n: x for n, x in self._scores.items() if n in there} | {step: dict(scores)}
        if processes.is_first():
            files.write_json(self._file, self._scores)

    def good(self, steps: Sequence[int]) -> int | None:
        """The best of these steps, or the newest if no score says which is best; None if there are none."""
        best = self._best_of(steps)
        return max(steps, default=None) if best is None else best

    def staying(self, steps: Sequence[int]) -> set[int]:
        """The steps, out of all, whose checkpoints stay."""
        newest = max(steps, default=None)
        before = self.good([n for n in steps if n != newest]) if newest == self.awaited else None
        chosen = {*sorted(steps)[-self._keep :], self.held, self._best_of(steps), before}
        return {n for n in steps if n in chosen}

    def _best_of(self, steps: Sequence[int]) -> int | None:
        scored = [(self._scores[n][self._best], n) for n in steps if self._best in self._scores.get(n, {})]
        return max(scored)[1] if scored else None
