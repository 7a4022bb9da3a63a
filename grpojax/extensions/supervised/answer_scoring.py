"""A policy's scores of given answers: the sums of their log-probs, batch by batch."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from etils import epath

from grpojax import data
from grpojax.device import ROWS, Program
from grpojax.extensions.supervised import teaching
from grpojax.extensions.supervised.answered import Answered
from grpojax.host import files, processes
from grpojax.host.console import log
from grpojax.programs import policy_state
from grpojax.programs.policy import Policy
from grpojax.types import Samples

_SCORED_FROM = "scored_from"  # in the file of the reference, beside the sums by name: what they were scored from


class Scorer:
    """Scores answers in batches of one shape.

    Args:
      policy: the policy that scores.
      program: scores (`grpojax.run.make_programs.score_program`).
      shapes: of the batches.
      size: prompts in a batch.
    """

    def __init__(self, policy: Policy, program: Program, shapes: teaching.Shapes, size: int):
        self._policy, self._program, self._shapes, self._size = policy, program, shapes, size

    def sums(
        self, entries: Sequence[Answered], params: Any, check: Callable[[], object] = lambda: None
    ) -> tuple[Samples, Samples]:
        """Sums of the log-probs of each completion's learned tokens ``[N, G]`` under some weights, and their numbers.

        Args:
          entries: the answers.
          params: the weights.
          check: called before each batch. An error that it raises ends the scoring.
        """
        device, group = self._policy.device, self._shapes.group
        sums, lengths = [np.zeros((0, group), np.float32)], [np.zeros((0, group), np.int32)]
        many: Any = list(entries)
        for chunk, real in data.in_order(many, self._size):
            check()
            batch = teaching.to_batch(cast(Any, chunk), self._shapes)
            rows, layout = teaching.pack(batch, self._shapes)
            logps = device.call(self._program, params, device.put(rows, ROWS)).logps
            learned = batch.rollout.sampled.astype(np.float32)
            sums.append((layout.unpack(device.get(logps)) * learned).sum(-1)[:real])
            lengths.append(learned.sum(-1, dtype=np.int32)[:real])
        return np.concatenate(sums), np.concatenate(lengths)

    def reference(
        self, kept: Mapping[str, Sequence[Answered]], file: epath.Path, weights: Mapping[str, str]
    ) -> dict[str, Samples]:
        """The `sums` by name under the policy's weights from before the run. They are scored once and kept in a file.

        They are scored again if the file is of other weights or other answers. If there are several processes, all must
        call it.

        Args:
          kept: the answers by name.
          file: where the sums are kept.
          weights: digests that identify the weights.
        """
        scored_from = _identity(kept, weights)
        found = _read(file)
        if not processes.any_of(found.get(_SCORED_FROM) != scored_from):
            return {name: found[name] for name in kept}
        if found:
            log.warning("%s is of other weights or other answers: they are scored again", file)
        log.info("scoring %d prompts under the reference, once", sum(map(len, kept.values())))
        params = policy_state.at_start(self._policy)  # random factors have no seed here: their product is 0
        scored = {name: self.sums(entries, params)[0] for name, entries in kept.items()}
        if processes.is_first():
            out = io.BytesIO()
            np.savez(out, **scored, **{_SCORED_FROM: scored_from})  # pyrefly: ignore
            files.write(file, out.getvalue())
        return scored


def _identity(kept: Mapping[str, Sequence[Answered]], weights: Mapping[str, str]) -> str:
    """A digest of all that sums of log-probs follow from."""
    answers = {name: [(entry.ids, entry.completions) for entry in entries] for name, entries in kept.items()}
    return hashlib.sha256(json.dumps([answers, dict(weights)], sort_keys=True).encode()).hexdigest()


def _read(file: epath.Path) -> dict[str, Any]:
    """The arrays of a file, and `_SCORED_FROM` as a text; empty if there is none, or it cannot be read."""
    try:
        with np.load(io.BytesIO(files.read(file))) as saved:
            found: dict[str, Any] = dict(saved)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return {}
    return found | {_SCORED_FROM: str(found.get(_SCORED_FROM, ""))}
