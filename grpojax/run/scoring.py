"""A policy's scores of given answers: the sums of their log-probs, batch by batch."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from grpojax import data
from grpojax.host import files, processes
from grpojax.host.console import log
from grpojax.programs.policy import Policy
from grpojax.programs.state import place_rows
from grpojax.run import teaching
from grpojax.types import Samples, TrainBatch

Program = Callable[..., Any]  # of `grpojax.programs.policy_update.make_score`


class Scorer:
    """Scores answers in batches of one shape.

    Args:
      policy: the policy that scores.
      program: the program that scores.
      shapes: of the batches.
      size: prompts in a batch.
    """

    def __init__(self, policy: Policy, program: Program, shapes: teaching.Shapes, size: int):
        self._policy, self._program, self._shapes, self._size = policy, program, shapes, size

    def sums(
        self, entries: Sequence[data.Answered], params: Any, check: Callable[[], None] = lambda: None
    ) -> tuple[Samples, Samples]:
        """Sums of each completion's log-probs ``[N, G]`` under some weights, and their lengths.

        Args:
          entries: the answers.
          params: the weights.
          check: called before each batch. An error that it raises ends the scoring.
        """
        group = self._shapes.group
        sums, lengths = [np.zeros((0, group), np.float32)], [np.zeros((0, group), np.int32)]
        many: Any = list(entries)
        for chunk, real in data.in_order(many, self._size):
            check()
            batch: TrainBatch = teaching.to_batch(chunk, self._shapes)  # pyrefly: ignore
            packed, layout = teaching.pack(batch, self._shapes)
            rows = place_rows(packed.rows, self._policy.mesh)
            logps = self._program(params, rows).logps
            sums.append(layout.unpack(processes.fetch(logps)).sum(-1)[:real])
            lengths.append(np.asarray(batch.lengths)[:real])
        return np.concatenate(sums), np.concatenate(lengths)

    def reference(self, kept: Mapping[str, Sequence[data.Answered]], file: epath.Path) -> dict[str, Samples]:
        """The `sums` by name under the policy's weights from before the run. They are scored once and kept in a file.

        If there are several processes, all must call it.
        """
        if not processes.any_of(not file.exists()):
            with np.load(io.BytesIO(files.read(file))) as saved:
                return {name: saved[name] for name in kept}
        log.info("scoring %d prompts under the reference, once", sum(map(len, kept.values())))
        scored = {name: self.sums(entries, self._policy.params)[0] for name, entries in kept.items()}
        if processes.is_first():
            out = io.BytesIO()
            np.savez(out, **scored)  # pyrefly: ignore
            files.write(file, out.getvalue())
        return scored
