"""One step of learning: pack the samples in rows, score them, weigh them, update.

These four pass on a list of `PackedBatch`, one for each update of a pass.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpojax import data
from grpojax import losses as L
from grpojax.device import ROWS
from grpojax.host.on_host import on_host
from grpojax.programs import batch_shards, blocks, policy_state
from grpojax.programs.packing import Layout, Packed
from grpojax.programs.policy import Policy
from grpojax.programs.state import Network, abstract_state, bound
from grpojax.run import weighing
from grpojax.run.batch import RolloutBatch
from grpojax.run.method import Method
from grpojax.run.packed_batch import PackedBatch, whole
from grpojax.run.parts.part import Part, Weighed
from grpojax.run.programs import Programs
from grpojax.run.sections import TrainConfig
from grpojax.run.work import step_flops
from grpojax.types import Array, PerToken, Samples, Tokens, TrainBatch


class Learner:
    """The networks of a run and the programs that train them.

    Args:
      policy: the model; its weights are taken over by `start`.
      programs: the run's programs.
      method: the variant, rewards and filter.
      train: passes, minibatches, micro-batches.
      max_prompt_tokens: longest prompt.
      parts: the variant's parts (`grpojax.run.parts`).

    Attributes:
      state: by role, a `grpojax.types.TrainState` for networks that learn, such as ``policy``, and plain weights for
        others.
      scores_a_step: forward passes over all samples in a step, besides sampling and updates.
      entropy_coefs: the coefficient of an adaptive entropy bonus, and the one that the next step applies.
      least: number of positions below which a smaller block of rows is not faster (`grpojax.programs.blocks.sizes`).
      updates: number of the policy's updates that were dispatched, skipped ones included: the version of its weights.
    """

    def __init__(
        self,
        policy: Policy,
        programs: Programs,
        method: Method,
        train: TrainConfig,
        *,
        max_prompt_tokens: int,
        parts: Sequence[Part] = (),
    ):
        self.policy, self.programs, self.method, self.train = policy, programs, method, train
        self.parts, self.device = parts, policy.device
        # At most one: `grpojax.run.parts.kinds` refuses more.
        self._second = next((part for part in parts if part.learns), None)
        self._warmup = 0 if self._second is None else self._second.warmup_steps(self._second.config)
        self.max_prompt_tokens = max_prompt_tokens
        self.least = blocks.LEAST.get(policy.compute.platform or jax.default_backend(), blocks.LEAST["tpu"])
        self.objective = objective = method.variant.objective
        self._needs_entropy = "entropy" in method.variant.needs
        self._moves = method.scores_old(train.updates_a_rollout)
        self._compares = any(part.compares(method.variant) for part in parts)
        self._scores_self = method.scores_self(train.updates_a_rollout)
        self.scores_a_step = int(self._scores_self) + sum(part.passes for part in parts)
        self.state: dict[str, Any] = {}
        self.updates = 0
        self.entropy_coefs = {"coef": objective.entropy_coef, "applied": 0.0}  # no entropy is known yet
        for part in parts:
            part.open(policy, programs, longest_prompt=max_prompt_tokens)

    def work(self, batch: RolloutBatch, lengths: Samples, number: int) -> dict[str, float]:
        """Useful FLOPs of step ``number``, whose updates took ``lengths [P, G]`` tokens of ``batch``
        (`grpojax.run.work.step_flops`)."""
        return step_flops(
            self.policy.config,
            batch,
            learned=lengths,
            scores=int(self._scores_self),
            iterations=self.train.ppo_epochs,
            picks=self.objective.needs_covariance_mask,
            policy_learns=not self._learns_alone(number),
            frozen=self.policy.adapter is not None,
            parts=[part.flops(batch) for part in self.parts],
        )

    def abstract(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of the saved state, by role."""
        return abstract_state(self._networks(), self.policy.mesh)

    def _networks(self) -> dict[str, Network]:
        """The networks that are saved, by role. Weights that never change are read from the model again."""
        networks = {"policy": policy_state.networks(self.policy.shape, self.programs.optimizer)["policy"]}
        for part in self.parts:
            added = part.networks()
            networks |= {role: added[role] for role in part.saved()}
        return networks

    def _learns_alone(self, number: int) -> bool:
        """Whether only the second network learns in a step, and the policy does not change."""
        return number <= self._warmup

    def start(self, restored: Mapping[str, Any] | None) -> None:
        """Takes over the policy's weights; ``restored`` is an earlier result of `saved`, None in a new run."""
        params, self.policy.params = self.policy.params, None
        for part in self.parts:
            self.state |= part.start(params, restored)
        self.state |= restored or {}
        self.state |= policy_state.start(
            self.policy,
            params,
            self.programs.optimizer,
            seed=self.train.seed,
            restored=self.state.get("policy"),
        )
        self.state = bound(self.state, self.device)

    @property
    def weights(self) -> Any:
        """The policy's weights as its programs take them."""
        return policy_state.weights(self.state)

    def saved(self) -> dict[str, Any]:
        """The part of the state that is saved in a checkpoint."""
        return {role: self.state[role] for role in self._networks()}

    def replace(self, batch: RolloutBatch) -> RolloutBatch:
        """The samples that are learned from."""
        for part in self.parts:
            batch = part.replace(self.state, batch)
        return batch

    def pack(self, batch: RolloutBatch) -> list[PackedBatch]:
        """Lays the samples out in rows, update by update, and puts them on the devices."""
        problems, rollout, policy = batch.problems, batch.rollout, self.policy
        group = rollout.lengths.shape[1]
        longest = max(self.max_prompt_tokens, *(len(p.ids) for p in problems))
        prompts = data.to_prompts(problems, longest)
        action_starts = None
        if rollout.sampled is not None and self.objective.needs_displacement_weights:
            before = np.pad(rollout.sampled[..., :-1], ((0, 0), (0, 0), (1, 0)))
            action_starts = rollout.sampled & ~before
        minis = []
        for places in batch_shards.minibatches(batch.dropped, self.train.minibatches):
            mine = jax.tree.map(lambda x, at=places: x[at], prompts)
            mine, samples = batch_shards.spread(mine, group, policy.shards)
            tokens, lengths, logps, starts = (
                None if x is None else x[places].reshape(len(mine.lengths), samples, *x.shape[2:])
                for x in (rollout.tokens, rollout.lengths, rollout.logps, action_starts)
            )
            per_token = PerToken(
                sampler_logps=None if self.method.replaces_samples else logps,
                action_starts=starts,
            )
            share = TrainBatch(prompts=mine, tokens=tokens, lengths=lengths, per_token=per_token)
            if rollout.choices is not None:
                share = _with_choices(share, rollout.choices[places], rollout.prompt_choices[places])
            minis.append(PackedBatch(places, share, *self._rows(share)))
        return minis

    def _rows(self, batch: TrainBatch) -> tuple[Packed, Layout]:
        """A batch in rows on the devices, in one of two sizes."""
        policy, train = self.policy, self.train
        packed, layout = blocks.pack(
            batch,
            shards=policy.shards,
            microbatches=train.microbatches,
            gather=policy.compute.needs_gather,
            least=self.least,
            gaps=train.skip_zero_advantage,
        )
        return self.device.put(packed, ROWS), layout

    def score(self, minis: Sequence[PackedBatch]) -> dict[str, Tokens]:
        """Runs the parts' programs that need no rewards, and scores the samples by the policy before its updates if a
        term or the variant needs it (`Method.scores_self`). The quickstart runs no program here.

        Returns the signals for the variant: fields of `grpojax.advantages.Signals`, ``[P, G, T]`` on the host.
        """
        programs, device, signals = self.programs, self.device, {}
        for part in self.parts:
            signals |= part.before(self.state, minis)
        if self._scores_self:
            own = [device.call(programs.score_policy, self.weights, m.packed.rows) for m in minis]
            if self._moves:
                for mini, scores in zip(minis, own, strict=True):
                    mini.set(old_logps=scores.logps)
            if self._compares:
                signals["behavior_logps"] = whole(device, minis, [s.logps for s in own])
            if self._needs_entropy:
                signals["entropy"] = whole(device, minis, [s.entropy for s in own])
        if jax.default_backend() == "cpu":  # scores and rewards would take turns on the same cores
            jax.block_until_ready([m.packed for m in minis])
        return signals

    def signals_after_rewards(self, batch: RolloutBatch, counted: Samples) -> tuple[dict[str, Array], dict[str, float]]:
        """The parts' signals that need the rewards, and their metrics (`grpojax.run.parts.part.Part.after`)."""
        signals, metrics, started = dict[str, Array](), dict[str, float](), time.perf_counter()
        for part in self.parts:
            made, measured = part.after(self.state, batch, counted)
            signals |= made
            metrics |= measured
        if signals:
            metrics["time/late_s"] = time.perf_counter() - started
        return signals, metrics

    def weigh(
        self, minis: Sequence[PackedBatch], batch: RolloutBatch, signals: Mapping[str, Tokens]
    ) -> tuple[Tokens, dict[str, float], Samples]:
        """Sets advantages, token weights and the parts' arrays in the rows.

        Args:
          minis: the packed batches, scored.
          batch: the samples and their rewards.
          signals: the result of `score`.

        Returns:
          ``(advantages, metrics, lengths)``: ``[P, G, T]``; metrics of the variant's parts; and ``[P, G]`` the lengths
          of the samples in the updates, 0 where one is left out.
        """
        dropped = batch.dropped
        counted, cut = weighing.counted(batch, self.train.truncated)
        late, metrics = self.signals_after_rewards(batch, counted)
        signals = {**signals, **late}
        valid = {**batch.signals, **signals}.get("valid")
        counted = counted if valid is None else np.where(valid, counted, np.nan)  # parts leave samples out, too
        with on_host():
            mask = batch.sampled
            advantages = weighing.advantages(self.method, batch, counted, mask, signals)
            live = mask & (np.isfinite(counted) & ~cut)[..., None]
            rows = [weighing.rows(self.objective, m.places, advantages, live, dropped) for m in minis]
            weighed = Weighed(
                batch=batch,
                counted=counted,
                mask=mask,
                live=live,
                signals=signals,
                advantages=advantages,
                places=[m.places for m in minis],
            )
            for part in self.parts:
                added, measured = part.weigh(weighed)
                metrics |= measured
                rows = [row | more for row, more in zip(rows, added, strict=True)]
        lengths = np.array(batch.rollout.lengths)
        for mini, host in zip(minis, rows, strict=True):
            mini.live = bool(live[mini.places].any())
            if self.train.skip_zero_advantage:
                lengths[mini.places] = weighing.lengths_that_teach(host, lengths[mini.places])
                mini.packed, mini.layout = self._rows(mini.of(lengths[mini.places]))
            mini.add(self.device, host)
        return advantages, metrics, lengths

    def update(
        self,
        minis: Sequence[PackedBatch],
        number: int,
        *,
        shares: tuple[float, float] | None = None,
    ) -> list[dict[str, Any]]:
        """Dispatches the updates, and returns their metrics, which are still on the device; a minibatch without weights
        has none. By default (one update a rollout, no second network) this is one call of ``programs.update``, which
        `grpojax.run.programs.make_programs` makes of `grpojax.programs.policy_update.policy_objective` and that of
        `grpojax.losses.policy_loss`.

        Args:
          minis: scored and weighed.
          number: number of the step; random draws of its losses depend on it.
          shares: share of the run before this step and after it, if the optimiser's schedules follow it.
        """
        adaptive = self.objective.entropy_target is not None
        frozen = policy_state.frozen(self.state)
        if adaptive:
            frozen["entropy_coef"] = np.float32(self.entropy_coefs["applied"])
        call, taken, count = self.device.call, [], self.train.ppo_epochs * len(minis)
        second, learns_alone = self._second, self._learns_alone(number)
        for n in range(count):
            mini = minis[n % len(minis)]
            if not mini.live:
                continue
            if shares is not None:
                frozen["share"] = np.float32(shares[0] + (shares[1] - shares[0]) * n / count)
            given = frozen if second is None else {**frozen, **second.frozen(self.state)}
            if second is not None and learns_alone:
                self.state[second.learns], measured = call(
                    self.programs.update_without_policy[second.learns], self.state[second.learns], given, mini.packed
                )
                taken.append({f"{second.learns}/{name}": value for name, value in measured.items()})
                continue
            if self.objective.needs_covariance_mask:  # by the policy before this update
                logps = call(self.programs.score, self.weights, mini.packed.rows).logps
                mini.set(covariance_mask=None)
                places = self.device.put(mini.layout.index, ROWS)
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.train.seed), number), n)
                mini.set(covariance_mask=call(self.programs.covariance_mask, key, logps, mini.packed, places))
            if second is None:
                self.state["policy"], metrics = call(self.programs.update, self.state["policy"], given, mini.packed)
            else:  # each learns from the other as it was before this update
                both = {role: self.state[role] for role in ("policy", second.learns)}
                both, metrics = call(self.programs.update, both, given, mini.packed)
                self.state |= both
            taken.append(metrics)
            self.updates += 1
        return taken

    def end_step(self, number: int) -> None:
        """Runs the parts' work between steps."""
        for part in self.parts:
            self.state |= part.end_step(self.state, number)

    def adapt(self, entropy: float) -> None:
        """Adapts the entropy bonus to the entropy of the step before."""
        target, step = self.objective.entropy_target, self.objective.entropy_step
        if target is not None and np.isfinite(entropy):
            coef, _ = L.adapt_entropy_coef(self.entropy_coefs["coef"], entropy, target, step)
            _, applied = L.adapt_entropy_coef(coef, entropy, target, step)
            self.entropy_coefs = {"coef": float(coef), "applied": float(applied)}


def _with_choices(batch: TrainBatch, choices: np.ndarray, of_prompts: np.ndarray) -> TrainBatch:
    """A spread batch with the choices of a rollout, ``[p, G, T, C]`` and, for prompts, ``[p, parts, L, C]``."""
    copies = len(batch.prompts.lengths) // len(of_prompts)
    return dataclasses.replace(
        batch,
        choices=choices.reshape(*np.shape(batch.tokens), -1),
        prompt_choices=np.repeat(of_prompts[:, 0], copies, 0),
    )
