"""Signals that are known only after the rewards: computed for the groups that need them, before the advantages."""

import dataclasses
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from grpojax import masked
from grpojax.advantages import Signals
from grpojax.credit.hidden_states import outcome_signs
from grpojax.host.errors import UserError
from grpojax.host.on_host import on_host
from grpojax.models import flops
from grpojax.programs.policy import Policy
from grpojax.run import true_answers
from grpojax.run.batch import RolloutBatch
from grpojax.run.influence import Influences
from grpojax.run.method import Method
from grpojax.run.programs import Programs
from grpojax.run.regroup import regroup
from grpojax.run.sections import TrainConfig
from grpojax.types import Array, PerPrompt, Samples

Made = tuple[dict[str, Array], dict[str, float]]  # signals, and metrics of them


class _Found(NamedTuple):
    """Likelihoods ``[P, G]``, the groups that have them, what was spliced of these, and what is told of it."""

    likelihood: Samples
    chosen: PerPrompt
    answers: true_answers.Answers | None
    told: dict[str, float]


class Late:
    """What late signals are computed with; nothing for a variant that has none.

    Args:
      policy: shards and tokenizer.
      programs: of the run.
      method: the variant, and the reward that says whether a sample succeeded.
      train: an update's micro-batches say how much is computed at once.
      longest_prompt: most tokens of a prompt in the run.

    Attributes:
      flops: useful ones of the last call.
    """

    def __init__(
        self,
        policy: Policy,
        programs: Programs,
        method: Method,
        train: TrainConfig,
        *,
        longest_prompt: int,
    ):
        self.policy, self.method, self.train, self.score = policy, method, train, programs.score
        self.longest_prompt = longest_prompt
        self.influences = Influences(policy, programs.influence, longest_prompt=longest_prompt)
        self.flops = 0.0

    def _makers(self, batch: RolloutBatch) -> list[Callable[..., Any]]:
        needs = {"ground_truth": self._true_answers, "hidden_states": self._influence}
        makers = [make for need, make in needs.items() if need in self.method.variant.needs]
        if not self.method.replaces_samples:
            return makers
        if batch.drawn is None:
            raise UserError(
                f"variant {self.method.variant.name!r} with train_on=spliced learns from other text than was drawn, "
                "and here samples are learned from as they are: set variant.train_on=sampled"
            )
        return []  # `replace` has been there

    def __call__(self, params: Any, batch: RolloutBatch, counted: Samples) -> Made:
        """Fields of `grpojax.advantages.Signals`, and what is to be logged of them.

        Args:
          params: the policy's weights, as they are before the step's first update.
          batch: the samples and their rewards.
          counted: ``[P, G]`` the rewards, NaN where a sample does not count.
        """
        signals: dict[str, Array] = {}
        metrics: dict[str, float] = {}
        makers, started = self._makers(batch), time.perf_counter()
        if batch.drawn is None:
            self.flops = 0.0
        for make in makers:
            made, measured = make(params, batch, counted)
            signals |= made
            metrics |= measured
        if makers:
            metrics["time/late_s"] = time.perf_counter() - started
        return signals, metrics

    def replace(self, params: Any, batch: RolloutBatch, counted: Samples, cut: Samples) -> RolloutBatch:
        """The batch with the true answers spliced into the samples whose likelihood they are judged by.

        Spliced text ends as a sample does, so that those which weigh nothing because they were cut stay as drawn.

        Args:
          params, batch, counted: as in `__call__`, which has nothing left to do then.
          cut: ``[P, G]`` bool, samples that weigh nothing because they were cut at the limit.
        """
        started, self.flops = time.perf_counter(), 0.0
        found = self._splice(params, batch, counted)
        answers = found.answers
        if answers is not None:
            learned = (np.isfinite(counted) & ~cut)[found.chosen]
            answers = dataclasses.replace(answers, lengths=np.where(learned, answers.lengths, 0))
        return dataclasses.replace(
            batch,
            rollout=true_answers.replace(batch.rollout, found.chosen, answers),
            drawn=batch.rollout,
            signals={**batch.signals, "likelihood": found.likelihood},
            metrics={**batch.metrics, **found.told, "time/late_s": time.perf_counter() - started},
        )

    def _tokens_at_once(self, batch: RolloutBatch) -> int:
        """Of a shard, those of an update's micro-batch."""
        return tokens_at_once(batch.rollout.tokens.size, self.train, self.policy.shards)

    def _true_answers(self, params: Any, batch: RolloutBatch, counted: Samples) -> Made:
        found = self._splice(params, batch, counted)
        return {"likelihood": found.likelihood}, found.told

    def _splice(self, params: Any, batch: RolloutBatch, counted: Samples) -> _Found:
        """The true answer's likelihood after each sample's reasoning, NaN in groups that do not ask for it."""
        options = self.method.variant.options
        likelihood = np.full(counted.shape, np.nan, np.float32)
        outcome = batch.by_name[self.method.deciding]
        known = np.isfinite(counted)
        wanted = known.any(1)
        if options["groups"] == "all_fail":
            with on_host():
                wanted = np.asarray(masked.all_fail(outcome, known & np.isfinite(outcome), options["fail_reward"]))
        chosen = np.flatnonzero(wanted)
        counts, answers = dict.fromkeys(("scored", "missing_marker", "repeated_marker", "too_long"), 0.0), None
        if len(chosen):
            likelihood[chosen], answers, counts = self._likelihood(params, batch, chosen)
        told = {f"ground_truth/{name}": float(n) for name, n in counts.items()}
        return _Found(likelihood, chosen, answers, told)

    def _likelihood(
        self, params: Any, batch: RolloutBatch, chosen: PerPrompt
    ) -> tuple[Samples, true_answers.Answers, dict[str, float]]:
        options, policy = self.method.variant.options, self.policy
        problems = [batch.problems[int(i)] for i in chosen]
        gold = [p.gold for p in problems if p.gold is not None]
        if len(gold) < len(problems):
            raise UserError(f"variant {self.method.variant.name!r} needs the true answers: set data.answer")
        rollout = type(batch.rollout)(
            **{f.name: getattr(batch.rollout, f.name)[chosen] for f in dataclasses.fields(batch.rollout)}
        )
        answers = true_answers.splice_groups(
            rollout,
            gold,
            policy.tokenizer,
            marker=options["marker"],
            include_marker=options["include_marker"],
            missing=options["missing"],
            eos=policy.eos_ids[0] if policy.eos_ids else None,
        )
        room = policy.config.max_positions - np.array([len(p.ids) for p in problems])[:, None]
        long = answers.lengths > room
        counts = {
            "scored": float((answers.lengths > 0).sum() - long.sum()),
            "missing_marker": float((answers.markers == 0).sum()),
            "repeated_marker": float((answers.markers > 1).sum()),
            "too_long": float(long.sum()),
        }
        answers = dataclasses.replace(answers, lengths=np.where(long, 0, answers.lengths))
        self.flops += flops.forward_flops(policy.config, [len(p.ids) for p in problems], answers.lengths)
        parts = regroup(
            policy,
            problems,
            answers.tokens,
            answers.lengths,
            most=len(batch.problems),
            longest_prompt=self.longest_prompt,
            tokens_at_once=self._tokens_at_once(batch),
        )
        logps = [part.fetch(self.score(params, part.rows).logps) for part in parts]
        kind = options["likelihood"]
        # Of those that fit: one that is too long would be the unit of the others' rewards.
        values = true_answers.likelihoods(
            np.concatenate(logps), answers.mask & ~long[..., None], kind, relative=kind == "joint"
        )
        # Where likelihoods are all there is, a reward of 0 and 1 among them would be in another unit.
        return np.where(long, 0.0 if options["groups"] == "all" else np.nan, values), answers, counts

    def _influence(self, params: Any, batch: RolloutBatch, counted: Samples) -> Made:
        """NTHR's scores, 0 in groups that are not mixed, which ask for none."""
        options, rollout = self.method.variant.options, batch.rollout
        outcome = batch.by_name[self.method.deciding]
        with on_host():
            sign = np.asarray(outcome_signs(Signals(outcome=outcome, valid=np.isfinite(counted))))
        mixed = (sign > 0).any(1) & (sign < 0).any(1)
        scores, means = np.zeros(rollout.tokens.shape, np.float32), np.zeros(counted.shape, np.float32)
        chosen = np.flatnonzero(mixed)
        if len(chosen):
            with on_host():
                mask = np.asarray(masked.from_lengths(rollout.lengths[chosen], rollout.tokens.shape[2]))
            right = mask & (sign[chosen] > 0)[..., None]
            groups = [batch.problems[int(i)] for i in chosen], rollout.tokens[chosen], rollout.lengths[chosen]
            self.flops += self.influences.flops(*groups)
            found = self.influences(
                params,
                *groups,
                right.astype(np.float32),
                most=len(batch.problems),
                tokens_at_once=self._tokens_at_once(batch),
                own=not options["self_term"],
            )
            scores[chosen] = found.scores
            total = np.where(mask, found.scores, 0.0).sum(-1)
            if found.own is not None:
                total = total - found.own
            means[chosen] = total / np.maximum(rollout.lengths[chosen], 1)
        made = {"influence": scores, "influence_means": means}
        if options["select"] == "random":
            # Of the samples themselves, so that a resumed run draws the same.
            seed = zlib.crc32(np.ascontiguousarray(rollout.tokens).tobytes())
            made["draws"] = np.random.default_rng(seed).random(rollout.tokens.shape, np.float32)
        return made, {"nthr/mixed_groups": float(len(chosen))}


def tokens_at_once(tokens: int, train: TrainConfig, shards: int) -> int:
    """Of a shard, those of an update's micro-batch; ``tokens`` are all that a batch has room for."""
    return max(1, tokens // (train.minibatches * train.microbatches * shards))
