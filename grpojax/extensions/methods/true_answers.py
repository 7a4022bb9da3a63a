"""The likelihood of the true answer after each sample's reasoning, and learning from the text that has it."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from grpojax import masked
from grpojax.device import Program
from grpojax.extensions.methods.regroup import regroup, tokens_at_once
from grpojax.extensions.methods.splicing import SplicedAnswers, side_by_side, splice_groups, with_answers
from grpojax.host.errors import UserError
from grpojax.host.on_host import on_host
from grpojax.models import flops
from grpojax.programs import policy_state
from grpojax.programs.sampler import no_samples
from grpojax.run import weighing
from grpojax.run.batch import Batch
from grpojax.run.make_programs import ProgramInputs, score_program
from grpojax.run.parts.part import Declared, Networks, Part
from grpojax.types import Array, PerPrompt, Rollout, Samples, Tokens

PROGRAM = "true answers"


def likelihoods(logps: Tokens, mask: Tokens, kind: str, *, relative: bool = False) -> Samples:
    """The likelihood of each sample's answer, from the log-probs where ``mask``, ``[n, G]`` float32.

    Of an answer with the probabilities ``p_1 .. p_k``: "joint" is their product, "per_token" its k-th root, "mean" is
    ``Σ p_j / k``, and "log" is ``Σ log p_j``. Without any token, "log" is -inf, and the others are 0.

    With ``relative``, for "joint" and "per_token", the results are divided by the group's largest, in log space:
    otherwise the product over a long answer underflows in float32.

    Example:
      >>> logps, mask = np.log([[[0.5, 0.2, 0.8]]]), np.ones((1, 1, 3), bool)
      >>> [round(float(likelihoods(logps, mask, kind)[0, 0]), 4) for kind in ("joint", "per_token", "mean", "log")]
      [0.08, 0.4309, 0.5, -2.5257]
    """
    count = mask.sum(-1)
    total = np.where(count > 0, np.where(mask, logps, 0.0).sum(-1), -np.inf)
    if kind == "log":
        return total.astype(np.float32)
    if kind == "mean":
        return (np.where(mask, np.exp(logps), 0.0).sum(-1) / np.maximum(count, 1)).astype(np.float32)
    value = total / np.maximum(count, 1) if kind == "per_token" else total
    if relative:
        largest = value.max(-1, keepdims=True)
        value = value - np.where(np.isfinite(largest), largest, 0.0)
    return np.exp(value).astype(np.float32)


def derivatives(logps: Tokens, mask: Tokens, kind: str, likelihood: Samples) -> Tokens:
    """``∂ likelihood / ∂ log p_j`` of each of the answer's tokens, ``[n, G, T]`` float32; 0 where not ``mask``.

    It is 1 for "log", the likelihood for "joint", a k-th of it for "per_token", and ``p_j / k`` for "mean".

    Args:
      logps, mask, kind: as in `likelihoods`.
      likelihood: its result. If that is relative to the group's largest, so are the derivatives.

    Example:
      >>> logps, mask = np.log([[[0.5, 0.2, 0.8]]]), np.ones((1, 1, 3), bool)
      >>> found = derivatives(logps, mask, "mean", likelihoods(logps, mask, "mean"))
      >>> [round(float(x), 4) for x in found[0, 0]]
      [0.1667, 0.0667, 0.2667]
    """
    count = np.maximum(mask.sum(-1, keepdims=True), 1)
    by_token = {
        "log": np.ones_like(logps),
        "joint": likelihood[..., None],
        "per_token": likelihood[..., None] / count,
        "mean": np.exp(np.where(mask, logps, 0.0)) / count,
    }[kind]
    return np.where(mask, by_token, 0.0).astype(np.float32)


class _Scored(NamedTuple):
    """Spliced samples ``[n, G, T]``, with what the policy says of their answers.

    ``weights`` are the `derivatives` of the likelihood. What ends an answer has their mean, and other tokens have NaN.
    """

    likelihood: Samples
    weights: Tokens
    answers: SplicedAnswers
    counts: dict[str, int]


class _Found(NamedTuple):
    """Likelihoods ``[P, G]``, the groups that have them, the spliced samples of these groups, and their metrics. A
    sample of such a group whose text is too long has none, and is not ``valid``."""

    likelihood: Samples
    valid: Samples
    chosen: PerPrompt
    scored: _Scored | None
    metrics: dict[str, float]


class TrueAnswers(Part):
    """The likelihood of the true answer after each sample's reasoning. With ``train_on=spliced``, the policy learns
    from that text in place of the drawn one."""

    options = ("groups", "likelihood", "relative_to", "marker", "include_marker", "missing", "fail_reward")
    reads_gold = True
    signals = {
        "likelihood": Declared("P G", "likelihood of the true answer after a sample's reasoning"),
        "valid": Declared("P G", "whether a sample counts: the answer could be put in its place", "bool"),
        "answer_weights": Declared("P G T", "its derivative by the log-prob of each of its tokens, NaN elsewhere"),
    }
    work = 0.0  # FLOPs of the step

    def make(self, inputs: ProgramInputs) -> Mapping[str, Program]:
        """``(params, rows) -> Scores``."""
        how = {"model": inputs.model, "compute": inputs.compute, "temperature": inputs.temperature}
        return {PROGRAM: score_program(PROGRAM, inputs.graph, **how)}

    def replace(self, networks: Networks, batch: Batch) -> Batch:
        """The batch with the true answers spliced into the samples that are scored by their likelihood. It waits for
        the rewards, which stay those of the drawn samples.

        Spliced text ends like a sample. So samples that have weight 0 because they were cut stay as drawn.
        """
        if not self.method.replaces_samples:
            return batch
        batch = batch.with_rewards()
        counted, cut = weighing.rewards_that_count(batch, self.config.train.truncated)
        started, self.work = time.perf_counter(), 0.0
        found = self._splice(policy_state.weights(networks), batch, counted)
        answers = None
        if found.scored is not None:
            answers = found.scored.answers
            learned = (np.isfinite(counted) & ~cut)[found.chosen]
            answers = dataclasses.replace(answers, lengths=np.where(learned, answers.lengths, 0))
        rollout = with_answers(batch.rollout, found.chosen, answers)
        weights = np.full(rollout.tokens.shape, np.nan, np.float32)
        if answers is not None and found.scored is not None:
            weights[found.chosen] = np.where(answers.lengths[..., None] > 0, found.scored.weights, np.nan)
        made = {"likelihood": found.likelihood, "valid": found.valid, "answer_weights": weights}
        return dataclasses.replace(
            batch,
            rollout=rollout,
            drawn=batch.rollout,
            signals={**batch.signals, **made},
            metrics={**batch.metrics, **found.metrics, "time/late_s": time.perf_counter() - started},
        )

    def after(self, networks: Networks, batch: Batch, counted: Samples) -> tuple[dict[str, Array], dict[str, float]]:
        if not self.method.replaces_samples:
            self.work = 0.0
            found = self._splice(policy_state.weights(networks), batch, counted)
            return {"likelihood": found.likelihood, "valid": found.valid}, found.metrics
        if batch.drawn is None:
            raise UserError(
                f"variant {self.variant.name!r} with train_on=spliced learns from other text than was drawn, "
                "and here samples are learned from as they are: set variant.train_on=sampled"
            )
        return {}, {}  # `replace` has run before

    def flops(self, batch: Batch) -> dict[str, float]:
        return {"late": self.work}

    def _splice(self, params: Any, batch: Batch, counted: Samples) -> _Found:
        """The true answer's likelihood after each sample's reasoning; NaN in groups that do not need it."""
        options = self.variant.options
        likelihood = np.full(counted.shape, np.nan, np.float32)
        outcome = batch.by_name[self.method.deciding]
        known = np.isfinite(counted)
        wanted = known.any(1)
        if options["groups"] == "all_fail":
            with on_host():
                wanted = np.asarray(masked.all_fail(outcome, known & np.isfinite(outcome), options["fail_reward"]))
        chosen, scored = np.flatnonzero(wanted), None
        counts = dict.fromkeys(("scored", "missing_marker", "repeated_marker", "too_long"), 0)
        if len(chosen):
            scored = self._score(params, batch, chosen)
            likelihood[chosen], counts = scored.likelihood, scored.counts
        metrics = {f"ground_truth/{name}": float(n) for name, n in counts.items()}
        return _Found(likelihood, np.isfinite(likelihood) | ~wanted[:, None], chosen, scored, metrics)

    def _score(self, params: Any, batch: Batch, chosen: PerPrompt) -> _Scored:
        """The true answers of some groups, spliced into their samples, with their likelihoods."""
        options, policy, most = self.variant.options, self.policy, len(batch.problems)
        problems = [batch.problems[int(i)] for i in chosen]
        gold = [p.gold for p in problems if p.gold is not None]
        if len(gold) < len(problems):
            raise UserError(f"variant {self.variant.name!r} needs the true answers: set data.answer")
        rollout = jax.tree.map(lambda x: x[chosen], batch.rollout)

        def spliced(rollout: Rollout, missing: str) -> SplicedAnswers:
            marked = {"marker": options["marker"], "include_marker": options["include_marker"], "missing": missing}
            eos = policy.eos_ids[0] if policy.eos_ids else None
            return splice_groups(rollout, gold, policy.tokenizer, eos=eos, **marked)

        answers = spliced(rollout, options["missing"])
        group, bare = answers.lengths.shape[1], 0
        given = answers
        if options["relative_to"] == "no_reasoning":
            # One more sample a group, without text before the answer. A group that is split over shards has one in
            # each of them, so that it still divides.
            bare = max(1, policy.shards // most)
            given = side_by_side(answers, spliced(no_samples(len(chosen), bare, rollout.tokens.shape[2]), "append"))
        room = policy.config.max_positions - np.array([len(p.ids) for p in problems])[:, None]
        long = given.lengths > room
        given = dataclasses.replace(given, lengths=np.where(long, 0, given.lengths))
        self.work += flops.forward_flops(policy.config, [len(p.ids) for p in problems], given.lengths)
        parts = regroup(
            policy,
            problems,
            given.tokens,
            given.lengths,
            most=most,
            longest_prompt=self.longest_prompt,
            tokens_at_once=tokens_at_once(batch.rollout.tokens.size, self.config.train, policy.shards),
        )
        score = self.programs.parts[PROGRAM]
        logps = np.concatenate([part.fetch(policy.device.call(score, params, part.rows).logps) for part in parts])
        # Only of those that fit: one that is too long would set the unit of the others' rewards.
        kind, mask = options["likelihood"], given.mask & ~long[..., None]
        values = likelihoods(logps, mask, kind, relative=kind == "joint")
        weights = derivatives(logps, mask, kind, values)
        if bare:
            without = np.where(long[:, group:], -np.inf if kind == "log" else 0.0, values[:, group:])[:, :1]
            weights = np.where((values > without)[..., None], weights, 0.0)
            values = np.maximum(values - without, 0.0)
        answers, long = dataclasses.replace(answers, lengths=given.lengths[:, :group]), long[:, :group]
        counts = {
            "scored": int((answers.lengths > 0).sum()),
            "missing_marker": int((answers.markers == 0).sum()),
            "repeated_marker": int((answers.markers > 1).sum()),
            "too_long": int(long.sum()),
        }
        return _Scored(
            np.where(long, np.nan, values[:, :group]), _with_ends(weights[:, :group], answers), answers, counts
        )


def _with_ends(weights: Tokens, answers: SplicedAnswers) -> Tokens:
    """The weights of answers, with their mean on the tokens behind them, and NaN on those before."""
    count = np.maximum(answers.mask.sum(-1, keepdims=True), 1)
    mean = weights.sum(-1, keepdims=True) / count
    last = answers.tokens.shape[2] - 1 - answers.mask[..., ::-1].argmax(-1)[..., None]
    end = (np.arange(answers.tokens.shape[2]) > last) & answers.mask.any(-1, keepdims=True)
    return np.where(answers.mask, weights, np.where(end, mean, np.nan)).astype(np.float32)
