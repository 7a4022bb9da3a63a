"""One step of learning: pack the samples in rows, score them, weigh them, update.

These four pass on a list of `Minibatch`, one for each update of a pass.
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
from grpojax.programs.policy import Policy
from grpojax.programs.policy_update import ARRAYS
from grpojax.programs.state import Network, abstract_state, bound
from grpojax.run import weighing
from grpojax.run.batch import Batch
from grpojax.run.method import Method
from grpojax.run.minibatch import Minibatch, whole
from grpojax.run.parts.part import Part
from grpojax.run.programs import Programs
from grpojax.run.run_state import State
from grpojax.run.sections import TrainConfig
from grpojax.run.work import step_flops
from grpojax.types import Array, Declared, PerPrompt, Prompts, Rollout, Samples, Tokens


class Learner:
    """What a run does with a batch on its devices: rows, scores, weights, updates. It holds no state of the run; its
    methods take the networks by role, or the `State`, and return what follows.

    Args:
      policy: the model; its weights are taken over by `start`.
      programs: the run's programs.
      method: the variant, rewards and filter.
      train: passes, minibatches, micro-batches.
      max_prompt_tokens: longest prompt.
      parts: the variant's parts (`grpojax.run.parts`).

    Attributes:
      scores_a_step: forward passes over all samples in a step, besides sampling and updates.
      least: number of positions below which a smaller block of rows is not faster (`grpojax.programs.blocks.sizes`).
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
        self.objective = method.variant.objective
        self._needs_entropy = "entropy" in method.variant.needs
        self._needs_old_logps = method.needs_old_logps(train.updates_a_rollout)
        self._needs_policy_logps = any(part.needs_policy_logps(method.variant) for part in parts)
        self._scores_policy = method.scores_policy(train.updates_a_rollout)
        self.scores_a_step = int(self._scores_policy) + sum(part.passes for part in parts)
        for part in parts:
            part.open(policy, programs, longest_prompt=max_prompt_tokens)

    def work(self, batch: Batch, number: int) -> dict[str, float]:
        """Useful FLOPs of step ``number`` (`grpojax.run.work.step_flops`)."""
        return step_flops(
            self.policy.config,
            batch,
            learned=batch.taught,
            scores=int(self._scores_policy),
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

    def start(self, restored: Mapping[str, Any] | None) -> dict[str, Any]:
        """The networks at a run's start, by role (`grpojax.run.run_state.State`). Takes the policy's weights over.

        Args:
          restored: an earlier result of `saved`; None in a new run.
        """
        params, self.policy.params = self.policy.params, None
        networks = dict[str, Any]()
        for part in self.parts:
            networks |= part.start(params, restored)
        networks |= restored or {}
        networks |= policy_state.start(
            self.policy,
            params,
            self.programs.optimizer,
            seed=self.train.seed,
            restored=networks.get("policy"),
        )
        return bound(networks, self.device)

    def saved(self, networks: Mapping[str, Any]) -> dict[str, Any]:
        """The networks that a checkpoint has."""
        return {role: networks[role] for role in self._networks()}

    def replace(self, networks: Mapping[str, Any], batch: Batch) -> Batch:
        """The samples that are learned from."""
        for part in self.parts:
            batch = part.replace(networks, batch)
        return batch

    def pack(self, batch: Batch) -> list[Minibatch]:
        """Lays the samples out in rows, update by update, and puts them on the devices."""
        split = batch_shards.minibatches(batch.dropped, self.train.minibatches)
        return [self._lay_out(batch, places, batch.rollout.lengths[places]) for places in split]

    def _lay_out(self, batch: Batch, places: PerPrompt, lengths: Samples) -> Minibatch:
        """A minibatch of some of a batch's prompts, with ``lengths [p, G]`` tokens of their samples."""
        rollout, policy, train = batch.rollout, self.policy, self.train
        longest = max(self.max_prompt_tokens, *(len(p.ids) for p in batch.problems))
        prompts = jax.tree.map(lambda x: x[places], data.to_prompts(batch.problems, longest))
        prompts, group = batch_shards.spread(prompts, lengths.shape[1], policy.shards)
        arrays = self._known(rollout)
        known = {name: _spread(x[places], prompts, group) for name, x in arrays.items()}
        rows, layout = blocks.pack(
            prompts,
            _samples(rollout, places, lengths, prompts, group),
            known,
            shards=policy.shards,
            microbatches=train.microbatches,
            gather=policy.compute.needs_gather,
            least=self.least,
            gaps=train.skip_zero_advantage,
        )
        return Minibatch(places, self.device.put(rows, ROWS), layout)

    def _known(self, rollout: Rollout) -> dict[str, Tokens]:
        """The arrays of the loss that the samples have from the beginning."""
        known = dict[str, Tokens]()
        if not self.method.replaces_samples:
            known["sampler_logps"] = rollout.logps
        if rollout.sampled is not None and self.objective.needs_displacement_weights:
            before = np.pad(rollout.sampled[..., :-1], ((0, 0), (0, 0), (1, 0)))
            known["action_starts"] = rollout.sampled & ~before
        return known

    def score(
        self, networks: Mapping[str, Any], minis: Sequence[Minibatch]
    ) -> tuple[list[Minibatch], dict[str, Tokens]]:
        """Runs the parts' programs that need no rewards, and scores the samples by the policy before its updates if a
        term or the variant needs it (`Method.scores_policy`). The quickstart runs no program here.

        Returns the minibatches with what a loss reads of the scores, and the signals for the variant: fields of
        `grpojax.advantages.Signals`, ``[P, G, T]`` on the host.
        """
        programs, device, signals = self.programs, self.device, dict[str, Tokens]()
        minis = list(minis)
        for part in self.parts:
            made, arrays = part.before(networks, minis)
            signals |= _declared_by(part, made)
            minis = self._filled(minis, arrays)
        if self._scores_policy:
            weights = policy_state.weights(networks)
            own = [device.call(programs.score_policy, weights, m.rows.bare) for m in minis]
            logps = [scores.logps for scores in own]
            if self._needs_old_logps:
                minis = self._filled(minis, {"old_logps": logps})
            if self._needs_policy_logps:
                signals["behavior_logps"] = whole(device, minis, logps)
            if self._needs_entropy:
                signals["entropy"] = whole(device, minis, [s.entropy for s in own])
        if jax.default_backend() == "cpu":  # scores and rewards would take turns on the same cores
            jax.block_until_ready([m.rows for m in minis])
        return minis, signals

    def _filled(self, minis: Sequence[Minibatch], arrays: Mapping[str, Sequence[Array]]) -> list[Minibatch]:
        """The minibatches with arrays of the devices by name, one ``[M, B, R, S]`` for each minibatch."""
        for name in arrays:
            self._declared(name)
        return [m.with_arrays({name: each[i] for name, each in arrays.items()}) for i, m in enumerate(minis)]

    def _declared(self, name: str) -> Declared:
        """What an array of the rows is; raises `ValueError` for one that neither the policy's loss nor a part declares,
        since no loss would read it."""
        for declared in (ARRAYS, *(part.arrays for part in self.parts)):
            if name in declared:
                return declared[name]
        raise ValueError(f"no loss reads an array {name!r}: `arrays` of the part that fills it must declare it")

    def signals_after_rewards(
        self, networks: Mapping[str, Any], batch: Batch, counted: Samples
    ) -> tuple[dict[str, Array], dict[str, float]]:
        """The parts' signals that need the rewards, and their metrics (`grpojax.run.parts.part.Part.after`)."""
        signals, metrics, started = dict[str, Array](), dict[str, float](), time.perf_counter()
        for part in self.parts:
            made, measured = part.after(networks, batch, counted)
            signals |= _declared_by(part, made)
            metrics |= measured
        if signals:
            metrics["time/late_s"] = time.perf_counter() - started
        return signals, metrics

    def weigh(
        self, networks: Mapping[str, Any], minis: Sequence[Minibatch], batch: Batch, signals: Mapping[str, Tokens]
    ) -> tuple[list[Minibatch], Batch, dict[str, float]]:
        """Sets advantages, token weights and the parts' arrays in the rows.

        Args:
          networks: of the run, before the step's updates.
          minis: the minibatches, scored.
          batch: the samples and their rewards.
          signals: those of `score`.

        Returns:
          The minibatches; the batch with its advantages and all signals; and metrics of the variant's parts.
        """
        counted, cut = weighing.counted(batch, self.train.truncated)
        late, metrics = self.signals_after_rewards(networks, batch, counted)
        signals = {**batch.signals, **signals, **late}
        sizes: dict[str, int] = dict(zip(("P", "G", "T"), batch.rollout.tokens.shape, strict=True))
        for part in self.parts:
            for name in part.signals.keys() & signals.keys():
                part.signals[name].check(name, signals[name], sizes)
        if (valid := signals.get("valid")) is not None:
            counted = np.where(valid, counted, np.nan)  # parts leave samples out, too
        with on_host():
            batch = dataclasses.replace(
                batch,
                signals=signals,
                counted=counted,
                live=batch.sampled & (np.isfinite(counted) & ~cut)[..., None],
                minibatches=[m.places for m in minis],
            )
            batch = dataclasses.replace(batch, advantages=weighing.advantages(self.method, batch))
            arrays = {"advantages": batch.advantages, "weights": weighing.weights(self.objective, batch)}
            for part in self.parts:
                added, measured = part.weigh(batch)
                metrics |= measured
                arrays |= added
            for name, x in arrays.items():
                self._declared(name).check(name, x, sizes)
        lengths = np.array(batch.rollout.lengths)
        weighed = list[Minibatch]()
        for mini in minis:
            places = mini.places
            if self.train.skip_zero_advantage:
                lengths[places] = weighing.lengths_that_teach(arrays["advantages"], arrays["weights"], lengths, places)
                mini = self._lay_out(batch, places, lengths[places])
            rows = {name: mini.layout.pack(x[places]) for name, x in arrays.items()}
            live = bool(batch.live[places].any())
            weighed.append(dataclasses.replace(mini.with_arrays(self.device.put(rows, ROWS)), live=live))
        return weighed, dataclasses.replace(batch, taught=lengths), metrics

    def update(
        self,
        state: State,
        minis: Sequence[Minibatch],
        *,
        shares: tuple[float, float] | None = None,
    ) -> tuple[State, list[dict[str, Any]]]:
        """Dispatches the updates of a step. By default (one update a rollout, no second network) this is one call of
        ``programs.update``, which `grpojax.run.programs.make_programs` makes of
        `grpojax.programs.policy_update.policy_objective` and that of `grpojax.losses.policy_loss`.

        Args:
          state: before the step, whose number random draws of its losses depend on. Its networks are taken over.
          minis: scored and weighed.
          shares: share of the run before this step and after it, if the optimiser's schedules follow it.

        Returns:
          The state with the networks and the number of updates after them; and the metrics of each update, which are
          still on the device. A minibatch without weights has none.
        """
        number, networks, updates = state.step + 1, dict(state.networks), state.updates
        frozen = policy_state.frozen(networks)
        if self.objective.entropy_target is not None:
            frozen["entropy_coef"] = np.float32(self.entropy_of(state)["applied"])
        call, taken, count = self.device.call, [], self.train.ppo_epochs * len(minis)
        second, learns_alone = self._second, self._learns_alone(number)
        for n in range(count):
            mini = minis[n % len(minis)]
            if not mini.live:
                continue
            rows = mini.rows
            if shares is not None:
                frozen["share"] = np.float32(shares[0] + (shares[1] - shares[0]) * n / count)
            given = frozen if second is None else {**frozen, **second.frozen(networks)}
            if second is not None and learns_alone:
                networks[second.learns], measured = call(
                    self.programs.update_without_policy[second.learns], networks[second.learns], given, rows
                )
                taken.append({f"{second.learns}/{name}": value for name, value in measured.items()})
                continue
            if self.objective.needs_covariance_mask:  # by the policy before this update
                logps = call(self.programs.score, policy_state.weights(networks), rows.bare).logps
                places = self.device.put(mini.layout.index, ROWS)
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.train.seed), number), n)
                mask = call(self.programs.covariance_mask, key, logps, rows, places)
                rows = rows.with_arrays({"covariance_mask": mask})
            if second is None:
                networks["policy"], metrics = call(self.programs.update, networks["policy"], given, rows)
            else:  # each learns from the other as it was before this update
                both = {role: networks[role] for role in ("policy", second.learns)}
                both, metrics = call(self.programs.update, both, given, rows)
                networks |= both
            taken.append(metrics)
            updates += 1
        return dataclasses.replace(state, networks=networks, updates=updates), taken

    def end_step(self, state: State) -> State:
        """Runs the parts' work between the step after ``state.step`` and the next one."""
        networks = dict(state.networks)
        for part in self.parts:
            networks |= part.end_step(networks, state.step + 1)
        return dataclasses.replace(state, networks=networks)

    def entropy_of(self, state: State) -> Mapping[str, float]:
        """``coef`` of an adaptive entropy bonus, and the one that is ``applied``: 0 while no entropy is known."""
        return state.entropy or {"coef": self.objective.entropy_coef, "applied": 0.0}

    def adapted(self, state: State, entropy: float) -> State:
        """The state with the entropy bonus adapted to the entropy of the step before."""
        coefs, target, step = self.entropy_of(state), self.objective.entropy_target, self.objective.entropy_step
        if target is not None and np.isfinite(entropy):
            coef, _ = L.adapt_entropy_coef(coefs["coef"], entropy, target, step)
            _, applied = L.adapt_entropy_coef(coef, entropy, target, step)
            coefs = {"coef": float(coef), "applied": float(applied)}
        return dataclasses.replace(state, entropy=coefs)


def _declared_by(part: Part, signals: Mapping[str, Array]) -> Mapping[str, Array]:
    """The signals of a part; raises `ValueError` for one that it does not declare, since a variant may miss it."""
    for name in signals:
        if name not in part.signals:
            raise ValueError(f"{type(part).__name__} gives a signal {name!r} that its `signals` does not declare")
    return signals


def _samples(rollout: Rollout, places: PerPrompt, lengths: Samples, prompts: Prompts, group: int) -> Rollout:
    """Samples of the prompts at ``places`` as their ``prompts`` were spread, ``group`` to each, with these lengths."""

    def mine(x: Array) -> Array:
        return None if x is None else _spread(x[places], prompts, group)

    choices = rollout.prompt_choices
    if choices is not None:
        choices = np.repeat(choices[places, :1], len(prompts.lengths) // len(places), 0)
    return Rollout(
        tokens=mine(rollout.tokens),
        lengths=_spread(lengths, prompts, group),
        choices=mine(rollout.choices),
        prompt_choices=choices,
    )


def _spread(x: Array, prompts: Prompts, group: int) -> Array:
    """``[p, G, ...]`` as the prompts were spread over the shards, ``[P', G', ...]``."""
    return x.reshape(len(prompts.lengths), group, *x.shape[2:])
