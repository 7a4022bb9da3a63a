"""One step of learning: pack the samples in rows, score them, weigh them, update.

What moves between the four is a list of `PackedBatch`, one for each update of a pass.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpojax import data, masked
from grpojax import losses as L
from grpojax.host.on_host import on_host
from grpojax.programs import batch_shards, blocks
from grpojax.programs.compiling import call_and_compile
from grpojax.programs.critic_update import ROLE as CRITIC
from grpojax.programs.critic_update import TRUNK
from grpojax.programs.packing import Layout, Packed
from grpojax.programs.policy import Policy
from grpojax.programs.state import Network, abstract_state, beside, decoder_network, frozen_copy, init_state, place_rows
from grpojax.run import weighing
from grpojax.run.batch import RolloutBatch
from grpojax.run.critic import RunCritic
from grpojax.run.critic import frozen as frozen_of
from grpojax.run.late_signals import Late
from grpojax.run.method import Method
from grpojax.run.packed_batch import PackedBatch, whole
from grpojax.run.programs import CriticPrograms, Programs
from grpojax.run.sections import TrainConfig
from grpojax.run.teacher import RunTeacher
from grpojax.run.true_answers import answer_tokens
from grpojax.run.work import step_flops
from grpojax.types import PerToken, Samples, Tokens, TrainBatch


class Learner:
    """The networks of a run and the programs that train them.

    Args:
      policy: the model; its weights are taken over by `start`.
      programs: of the run.
      method: what is learned by.
      train: passes, minibatches, micro-batches.
      max_prompt_tokens: longest prompt.
      critic, teacher: of a variant that has one.

    Attributes:
      state: by role. ``policy`` and ``critic`` are a `grpojax.types.TrainState`, ``reference`` and ``critic_trunk``
        plain weights.
      scores_a_step: forwards of policy and reference beyond those of sampling and updates.
      entropy_coefs: of an adaptive bonus, its coefficient and what of it is applied in the next step.
      least: positions of a shard that are worth a block (`grpojax.programs.blocks.sizes`).
      updates: of the policy that were dispatched, those included that were skipped: the version of its weights.
    """

    def __init__(
        self,
        policy: Policy,
        programs: Programs,
        method: Method,
        train: TrainConfig,
        *,
        max_prompt_tokens: int,
        critic: RunCritic | None = None,
        teacher: RunTeacher | None = None,
    ):
        self.policy, self.programs, self.method, self.train = policy, programs, method, train
        self.critic, self.teacher = critic, teacher
        self.max_prompt_tokens = max_prompt_tokens
        self.least = blocks.LEAST.get(policy.compute.platform or jax.default_backend(), blocks.LEAST["tpu"])
        self.objective = objective = method.variant.objective
        self._needs_entropy = "entropy" in method.variant.needs
        self._late = Late(policy, programs, method, train, longest_prompt=max_prompt_tokens)
        self._moves = method.scores_old(train.updates_a_rollout)
        self._kl_in_reward = objective.needs_reference and objective.kl_in != "loss"
        # Advantages compare the policy with another: by the trainer's own numerics, not the sampler's.
        self._compares = self._kl_in_reward or teacher is not None
        self._scores_self = self._moves or self._needs_entropy or self._compares
        self.scores_a_step = int(objective.needs_reference) + int(self._scores_self)
        self.state: dict[str, Any] = {}
        self.updates = 0
        self._sizes: tuple[Sequence[blocks.Block], int] = (), 0  # the two sizes of rows; completions of a prompt
        self._called: set[Any] = set()
        self.entropy_coefs = {"coef": objective.entropy_coef, "applied": 0.0}  # no entropy is known yet

    def work(self, batch: RolloutBatch, lengths: Samples, *, warming_up: bool = False) -> dict[str, float]:
        """Useful FLOPs of a step that has learned from ``lengths`` of ``batch`` (`grpojax.run.work.step_flops`)."""
        return step_flops(
            self.policy.config,
            batch,
            learned=lengths,
            scores=self.scores_a_step,
            iterations=self.train.ppo_epochs,
            picks=self.objective.needs_covariance_mask,
            late=self._late.flops,
            critic=None if self.critic is None else self.critic.model,
            teacher=None if self.teacher is None else self.teacher.config,
            warming_up=warming_up,
        )

    def abstract(self) -> dict[str, Any]:
        """Of what is saved: shapes, dtypes and shardings by role."""
        _, network = decoder_network(self.policy.config, self.programs.optimizer, self.policy.mesh)
        networks = {"policy": network}
        if self.train.reference_every:
            networks["reference"] = Network(params=network.params)
        if self.critic is not None:
            networks |= self.critic.networks(self._of_critic.optimizer)
        return abstract_state(networks, self.policy.mesh)

    def start(self, restored: Mapping[str, Any] | None) -> None:
        """Takes the policy's weights over; ``restored`` is what `saved` gave before, None in a new run."""
        params, self.policy.params = self.policy.params, None
        if self.objective.needs_reference and "reference" not in (restored or {}):
            averaged = self.train.reference_every > 0
            self.state["reference"] = frozen_copy(params, self.policy.compute, averaged=averaged)
        if self.critic is not None:
            self.state |= self.critic.start(params, self._of_critic.optimizer, restored=restored is not None)
        if restored is None:
            self.state["policy"] = init_state(params, self.programs.optimizer, self.policy.mesh)
        else:
            self.state |= restored
        self.state = beside(self.state, params, self.policy.mesh)

    @property
    def _of_critic(self) -> CriticPrograms:
        assert self.programs.critic is not None
        return self.programs.critic

    def _run(self, function: Any, *args: Any) -> Any:
        """``function(*args)``; of the two sizes of rows, its first call compiles both, one of them in a thread."""
        called = function, *sorted({str(x.dtype) for x in jax.tree.leaves(args[0])})
        if called in self._called:
            return function(*args)
        self._called.add(called)
        return call_and_compile(function, args, blocks.others(*self._sizes, args))

    def saved(self) -> dict[str, Any]:
        """What a checkpoint has of the state: what never changes is read from the model again."""
        kept = {"reference"} if self.train.reference_every else set()
        return {role: x for role, x in self.state.items() if role not in {"reference", TRUNK} - kept}

    def replace(self, batch: RolloutBatch) -> RolloutBatch:
        """The samples as they are learned from: for a variant that puts other text in their place it waits for the
        rewards, which are still those of what was drawn."""
        if not self.method.replaces_samples:
            return batch
        batch = batch.with_rewards()
        return self._late.replace(self.state["policy"].params, batch, *weighing.counted(batch, self.train.truncated))

    def pack(self, batch: RolloutBatch) -> list[PackedBatch]:
        """Lays the samples out in rows, update by update, and puts them on the devices."""
        problems, rollout, policy = batch.problems, batch.rollout, self.policy
        group = rollout.lengths.shape[1]
        longest = max(self.max_prompt_tokens, *(len(p.ids) for p in problems))
        prompts = data.to_prompts(problems, longest)
        minis = []
        for places in batch_shards.minibatches(batch.dropped, self.train.minibatches):
            mine, part = batch_shards.spread(jax.tree.map(lambda x, at=places: x[at], prompts), group, policy.shards)
            tokens, lengths, logps = (
                x[places].reshape(len(mine.lengths), part, *x.shape[2:])
                for x in (rollout.tokens, rollout.lengths, rollout.logps)
            )
            per_token = PerToken(sampler_logps=None if self.method.replaces_samples else logps)
            share = TrainBatch(prompts=mine, tokens=tokens, lengths=lengths, per_token=per_token)
            minis.append(PackedBatch(places, share, *self._rows(share)))
        return minis

    def _rows(self, batch: TrainBatch) -> tuple[Packed, Layout]:
        """A batch in rows on the devices, in one of two sizes."""
        policy, gather = self.policy, self.policy.compute.needs_gather
        how = {
            "shards": policy.shards,
            "microbatches": self.train.microbatches,
            "least": self.least,
            "gaps": self.train.skip_zero_advantage,
        }
        self._sizes = blocks.sizes_of(batch, **how), np.shape(batch.lengths)[1] if gather else 0
        packed, layout = blocks.pack(batch, gather=gather, **how)
        return place_rows(packed, policy.mesh), layout

    def score(self, minis: Sequence[PackedBatch]) -> dict[str, Tokens]:
        """Log-probs under the reference and under the policy before its updates, where a term or the variant asks.

        Returns what the variant reads of them: fields of `grpojax.advantages.Signals`, ``[P, G, T]`` on the host.
        """
        programs, objective, signals = self.programs, self.objective, {}
        if objective.needs_reference:
            ref = [self._run(programs.score, self.state["reference"], m.packed.rows).logps for m in minis]
            for mini, logps in zip(minis, ref, strict=True):
                mini.set(ref_logps=logps)
            if self._kl_in_reward:
                signals["ref_logps"] = whole(minis, ref)
        if self._scores_self:
            own = [self._run(programs.score_policy, self.state["policy"].params, m.packed.rows) for m in minis]
            if self._moves:
                for mini, scores in zip(minis, own, strict=True):
                    mini.set(behavior_logps=scores.logps)
            if self._compares:
                signals["behavior_logps"] = whole(minis, [s.logps for s in own])
            if self._needs_entropy:
                signals["entropy"] = whole(minis, [s.entropy for s in own])
        if self.teacher is not None:
            read = [self._run(programs.teacher, self.teacher.params, m.packed.rows).logps for m in minis]
            signals["ref_logps"] = whole(minis, read)
        if self.critic is not None:
            trunk, params = frozen_of(self.state), self.state[CRITIC].params
            said = [self._run(self._of_critic.score, params, trunk, m.packed.rows) for m in minis]
            if self.critic.critic.loss.needs_outputs:
                for mini, outputs in zip(minis, said, strict=True):
                    mini.set(critic_outputs=outputs)
            signals[self.critic.critic.signal] = whole(minis, said)
        if jax.default_backend() == "cpu":
            jax.block_until_ready([m.packed for m in minis])
        return signals

    def weigh(
        self, minis: Sequence[PackedBatch], batch: RolloutBatch, signals: Mapping[str, Tokens]
    ) -> tuple[Tokens, dict[str, float], Samples]:
        """Puts advantages, the weights of every token, and what a critic learns from into the rows.

        Args:
          minis: scored.
          batch: the samples and their rewards.
          signals: of `score`.

        Returns:
          ``(advantages, metrics, lengths)``: ``[P, G, T]``; what the variant's networks and signals say; and ``[P, G]``
          of the samples as the updates take them, 0 where one is left out.
        """
        dropped = batch.dropped
        counted, cut = weighing.counted(batch, self.train.truncated)
        late, told = self._late(self.state["policy"].params, batch, counted)
        with on_host():
            mask = np.asarray(masked.from_lengths(batch.rollout.lengths, batch.rollout.tokens.shape[2]))
            advantages = weighing.advantages(self.method, batch, counted, mask, {**signals, **late})
            live = mask & (np.isfinite(counted) & ~cut)[..., None]
            targets = None
            if self.critic is not None:
                rule = self.critic.critic
                targets = weighing.advantages(self.method, batch, counted, mask, signals, rule.targets)
                told |= self.critic.told(signals[rule.signal], targets, live & ~dropped[:, None, None])
            own = self.critic is not None and self.critic.critic.loss.own_weights
            given, answer = (advantages, live, dropped, targets), self._answer(batch)
            rows = [weighing.rows(self.objective, m.places, *given, own=own, answer=answer) for m in minis]
        if self.teacher is not None:
            told |= self.teacher.told(signals["behavior_logps"], signals["ref_logps"], live & ~dropped[:, None, None])
        lengths = np.array(batch.rollout.lengths)
        for mini, host in zip(minis, rows, strict=True):
            mini.live = bool(live[mini.places].any())
            if self.train.skip_zero_advantage:
                lengths[mini.places] = weighing.lengths_that_teach(host, lengths[mini.places])
                mini.packed, mini.layout = self._rows(mini.of(lengths[mini.places]))
            mini.add(self.policy, host)
        return advantages, told, lengths

    def _answer(self, batch: RolloutBatch) -> tuple[Tokens, float] | None:
        """The tokens of the samples' answers and their weight in LLDS's term; None where they count as all others."""
        options = self.method.variant.options
        weight = options.get("answer_weight", 1.0)
        if not self.objective.needs_displacement_weights or weight == 1.0:
            return None
        return answer_tokens(batch.rollout, self.policy.tokenizer, options.get("marker")), weight

    def update(
        self,
        minis: Sequence[PackedBatch],
        number: int,
        ready: Callable[[Any], None],
        *,
        shares: tuple[float, float] | None = None,
        warming_up: bool = False,
    ) -> list[dict[str, Any]]:
        """Dispatches the updates, and returns the metrics that the device owes; a minibatch without weights has none.

        Args:
          minis: scored and weighed.
          number: of the step, which what its losses draw follows from.
          ready: called with the state after each update.
          shares: of the run, before this step and after it, where the optimiser's schedules follow these.
          warming_up: only the critic learns.
        """
        adaptive = self.objective.entropy_target is not None
        frozen = {"entropy_coef": np.float32(self.entropy_coefs["applied"])} if adaptive else {}
        owed, count = [], self.train.ppo_epochs * len(minis)
        for n in range(count):
            mini = minis[n % len(minis)]
            if not mini.live:
                continue
            if shares is not None:
                frozen["share"] = np.float32(shares[0] + (shares[1] - shares[0]) * n / count)
            if warming_up:
                given = {**frozen, **frozen_of(self.state)}
                self.state[CRITIC], told = self._run(self._of_critic.update, self.state[CRITIC], given, mini.packed)
                owed.append({f"{CRITIC}/{name}": value for name, value in told.items()})
                ready(self.state)
                continue
            if self.objective.needs_covariance_mask:  # by the policy as it is before this update
                logps = self._run(self.programs.score, self.state["policy"].params, mini.packed.rows).logps
                mini.set(covariance_mask=None)
                places = place_rows(mini.layout.index, self.policy.mesh)
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.train.seed), number), n)
                mini.set(covariance_mask=self.programs.covariance_mask(key, logps, mini.packed, places))
            if self.critic is not None:  # each learns by the other as it was
                both, given = (
                    {role: self.state[role] for role in ("policy", CRITIC)},
                    {**frozen, **frozen_of(self.state)},
                )
                both, metrics = self._run(self.programs.update, both, given, mini.packed)
                self.state |= both
            else:
                self.state["policy"], metrics = self._run(
                    self.programs.update, self.state["policy"], frozen, mini.packed
                )
            owed.append(metrics)
            self.updates += 1
            ready(self.state)
        return owed

    def end_step(self, number: int) -> None:
        """What happens between steps: the reference is refreshed where it is time."""
        every, mix = self.train.reference_every, self.train.reference_mix
        if every and number % every == 0:
            params = self.state["policy"].params
            self.state["reference"] = self.programs.refresh(self.state["reference"], params, mix)

    def adapt(self, entropy: float) -> None:
        """Moves an adaptive entropy bonus by what was measured in the step before."""
        target, step = self.objective.entropy_target, self.objective.entropy_step
        if target is not None and np.isfinite(entropy):
            coef, _ = L.adapt_entropy_coef(self.entropy_coefs["coef"], entropy, target, step)
            _, applied = L.adapt_entropy_coef(coef, entropy, target, step)
            self.entropy_coefs = {"coef": float(coef), "applied": float(applied)}
