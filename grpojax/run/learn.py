"""What a step learns from, and its updates: pack the samples in rows, score them, weigh them, update.

`from_rewards` takes the `grpojax.run.run.Run`. All other functions take a `Setup`, which a run is too, with the
networks by role or the `State`. They pass on a list of `Minibatch`, one for each update of a pass.
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
from grpojax.host.errors import UserError
from grpojax.host.on_host import on_host
from grpojax.programs import batch_shards, packing, policy_state
from grpojax.programs.policy_update import ARRAYS
from grpojax.run import step_metrics, weighing
from grpojax.run.batch import Batch
from grpojax.run.lesson import Clock, Lesson
from grpojax.run.minibatch import Minibatch, whole
from grpojax.run.parts.part import Part
from grpojax.run.run import Run
from grpojax.run.run_state import State
from grpojax.run.setup import Setup
from grpojax.run.work import step_flops
from grpojax.types import Array, Declared, PerPrompt, Prompts, Rollout, Samples, Tokens


def from_rewards(run: Run, state: State, batch: Batch, clock: Clock) -> Lesson:
    """What a step learns from samples and their rewards, which may be under way.

    Args:
      run: that samples.
      state: before the step.
      batch: the step's samples.
      clock: notes how long the phases "score" and "reward" take.
    """
    networks, method = state.networks, run.method
    batch = replaced(run, networks, batch)
    minis, signals = score(run, networks, pack(run, batch))
    clock.lap("score")
    batch = batch.with_rewards()
    of_problems = run.source.note(batch)
    clock.lap("reward")
    minis, batch, of_signals = weigh(run, networks, minis, batch, signals)
    facts = step_metrics.of_rollouts(batch, method) | of_problems | of_signals
    for part in run.parts:
        facts |= part.metrics(batch.everything)
    facts["useful_token_fraction"] = float(np.mean([m.layout.useful for m in minis]))
    if method.older:
        facts |= step_metrics.of_version(batch.version, state.updates)
    prompt_tokens, tokens = step_metrics.tokens(batch.everything)
    stored = run.journal.wants_samples(state.step + 1)
    return Lesson(
        batch=batch,
        minibatches=minis,
        facts=facts,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        flops=work(run, batch, state.step + 1),
        lines=run.lines_of(batch) if stored else None,
    )


def replaced(setup: Setup, networks: Mapping[str, Any], batch: Batch) -> Batch:
    """The samples that are learned from."""
    for part in setup.parts:
        batch = part.replace(networks, batch)
    return batch


def work(setup: Setup, batch: Batch, number: int) -> dict[str, float]:
    """Useful FLOPs of step ``number`` (`grpojax.run.work.step_flops`)."""
    return step_flops(
        setup.policy.config,
        batch,
        learned=batch.taught,
        scores=int(setup.scores_policy),
        ppo_epochs=setup.ppo_epochs,
        picks=setup.objective.needs_covariance_mask,
        policy_learns=not setup.learns_alone(number),
        frozen=setup.policy.adapter is not None,
        parts=[part.flops(batch) for part in setup.parts],
    )


def pack(setup: Setup, batch: Batch) -> list[Minibatch]:
    """Lays the samples out in rows, update by update, and puts them on the devices."""
    split = batch_shards.minibatches(batch.dropped, setup.config.train.minibatches)
    return [minibatch(setup, batch, which, batch.rollout.lengths[which]) for which in split]


def minibatch(setup: Setup, batch: Batch, which: PerPrompt, lengths: Samples) -> Minibatch:
    """A minibatch of some of a batch's prompts, with ``lengths [p, G]`` tokens of their samples."""
    rollout, policy, train = batch.rollout, setup.policy, setup.config.train
    longest = max(setup.longest_prompt, *(len(p.ids) for p in batch.problems))
    prompts = jax.tree.map(lambda x: x[which], data.to_prompts(batch.problems, longest))
    prompts, group = batch_shards.spread(prompts, lengths.shape[1], policy.shards)
    arrays = _known(setup, rollout)
    known = {name: _spread(x[which], prompts, group) for name, x in arrays.items()}
    rows, layout = packing.pack(
        prompts,
        _samples(rollout, which, lengths, prompts, group),
        known,
        shards=policy.shards,
        microbatches=train.microbatches,
        gather=policy.compute.needs_gather,
        least=setup.least_block,
        gaps=train.skip_zero_advantage,
    )
    return Minibatch(which, setup.policy.device.put(rows, ROWS), layout)


def _known(setup: Setup, rollout: Rollout) -> dict[str, Tokens]:
    """The arrays of the loss that the samples have from the beginning."""
    known = dict[str, Tokens]()
    if not setup.method.replaces_samples:
        known["sampler_logps"] = rollout.logps
    if rollout.sampled is not None and setup.objective.needs_displacement_weights:
        before = np.pad(rollout.sampled[..., :-1], ((0, 0), (0, 0), (1, 0)))
        known["action_starts"] = rollout.sampled & ~before
    return known


def score(
    setup: Setup, networks: Mapping[str, Any], minis: Sequence[Minibatch]
) -> tuple[list[Minibatch], dict[str, Tokens]]:
    """Runs the parts' programs that need no rewards, and scores the samples by the policy before its updates if a
    term or the variant needs it (`RunMethod.scores_policy`). The quickstart runs no program here.

    Returns the minibatches with what a loss reads of the scores, and the signals for the variant: fields of
    `grpojax.advantages.Signals`, ``[P, G, T]`` on the host.
    """
    programs, device, variant = setup.programs, setup.policy.device, setup.method.variant
    minis, signals = list(minis), dict[str, Tokens]()
    for part in setup.parts:
        made, arrays = part.before(networks, minis)
        signals |= _declared_by(part, made)
        minis = _filled(setup, minis, arrays)
    if setup.scores_policy:
        weights = policy_state.weights(networks)
        own = [device.call(programs.score_policy, weights, m.rows.bare) for m in minis]
        logps = [scores.logps for scores in own]
        if setup.method.needs_old_logps(setup.config.train.updates_a_rollout):
            minis = _filled(setup, minis, {"old_logps": logps})
        if any(part.needs_policy_logps(variant) for part in setup.parts):
            signals["behavior_logps"] = whole(device, minis, logps)
        if "entropy" in variant.needs:
            signals["entropy"] = whole(device, minis, [s.entropy for s in own])
    if jax.default_backend() == "cpu":  # scores and rewards would take turns on the same cores
        jax.block_until_ready([m.rows for m in minis])
    return minis, signals


def _filled(setup: Setup, minis: Sequence[Minibatch], arrays: Mapping[str, Sequence[Array]]) -> list[Minibatch]:
    """The minibatches with arrays of the devices by name, one ``[M, B, R, S]`` for each minibatch."""
    for name in arrays:
        _declared(setup, name)
    return [m.with_arrays({name: each[i] for name, each in arrays.items()}) for i, m in enumerate(minis)]


def _declared(setup: Setup, name: str) -> Declared:
    """What an array of the rows is; raises `ValueError` for one that neither the policy's loss nor a part declares,
    since no loss would read it."""
    for declared in (ARRAYS, *(part.arrays for part in setup.parts)):
        if name in declared:
            return declared[name]
    raise ValueError(f"no loss reads an array {name!r}: `arrays` of the part that fills it must declare it")


def signals_after_rewards(
    setup: Setup, networks: Mapping[str, Any], batch: Batch, counted: Samples
) -> tuple[dict[str, Array], dict[str, float]]:
    """The parts' signals that need the rewards, and their metrics (`grpojax.run.parts.part.Part.after`)."""
    signals, metrics, started = dict[str, Array](), dict[str, float](), time.perf_counter()
    for part in setup.parts:
        made, measured = part.after(networks, batch, counted)
        signals |= _declared_by(part, made)
        metrics |= measured
    if signals:
        metrics["time/late_s"] = time.perf_counter() - started
    return signals, metrics


def weigh(
    setup: Setup, networks: Mapping[str, Any], minis: Sequence[Minibatch], batch: Batch, signals: Mapping[str, Tokens]
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
    counted, cut = weighing.rewards_that_count(batch, setup.config.train.truncated)
    late, metrics = signals_after_rewards(setup, networks, batch, counted)
    signals = {**batch.signals, **signals, **late}
    sizes: dict[str, int] = dict(zip(("P", "G", "T"), batch.rollout.tokens.shape, strict=True))
    for part in setup.parts:
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
            minibatches=[m.prompts for m in minis],
        )
        batch = dataclasses.replace(batch, advantages=weighing.advantages(setup.method, batch))
        arrays = {"advantages": batch.advantages, "weights": weighing.weights(setup.objective, batch)}
        for part in setup.parts:
            added, measured = part.weigh(batch)
            metrics |= measured
            arrays |= added
        for name, x in arrays.items():
            _declared(setup, name).check(name, x, sizes)
    lengths = np.array(batch.rollout.lengths)
    weighed = list[Minibatch]()
    for mini in minis:
        which = mini.prompts
        if setup.config.train.skip_zero_advantage:
            lengths[which] = weighing.lengths_that_teach(arrays["advantages"], arrays["weights"], lengths, which)
            there, mini = mini.rows.arrays.keys(), minibatch(setup, batch, which, lengths[which])
            if lost := sorted(there - mini.rows.arrays.keys()):
                raise UserError(
                    f"train.skip_zero_advantage=true: {lost[0]!r} is made of all samples, before any is left out; set "
                    "it to false"
                )
        rows = {name: mini.layout.pack(x[which]) for name, x in arrays.items()}
        any_live = bool(batch.live[which].any())
        weighed.append(dataclasses.replace(mini.with_arrays(setup.policy.device.put(rows, ROWS)), any_live=any_live))
    return weighed, dataclasses.replace(batch, taught=lengths), metrics


def update(
    setup: Setup,
    state: State,
    minis: Sequence[Minibatch],
    *,
    progress: tuple[float, float] | None = None,
) -> tuple[State, list[dict[str, Any]]]:
    """Dispatches the updates of a step. By default (one update a rollout, no second network) this is one call of
    ``programs.update``. `grpojax.run.make_programs.make_programs` makes that program of the loss by
    `grpojax.programs.policy_update.policy_objective`, which calls `grpojax.losses.policy_loss`.

    Args:
      state: before the step, whose number random draws of its losses depend on. Its networks are taken over.
      minis: scored and weighed.
      progress: share of the run before this step and after it, if the optimiser's schedules follow it.

    Returns:
      The state with the networks and the number of updates after them; and the metrics of each update, which are
      still on the device. A minibatch in which no token counts has none.
    """
    number, networks, updates = state.step + 1, dict(state.networks), state.updates
    frozen = policy_state.frozen(networks)
    if setup.objective.entropy_target is not None:
        frozen["entropy_coef"] = np.float32(entropy_of(setup, state)["applied"])
    call, taken, count = setup.policy.device.call, [], setup.ppo_epochs * len(minis)
    second, learns_alone = setup.second, setup.learns_alone(number)
    for n in range(count):
        mini = minis[n % len(minis)]
        if not mini.any_live:
            continue
        rows = mini.rows
        if progress is not None:
            frozen["progress"] = np.float32(progress[0] + (progress[1] - progress[0]) * n / count)
        given = frozen if second is None else {**frozen, **second.frozen(networks)}
        if second is not None and learns_alone:
            alone = setup.programs.update_without_policy[second.learns]
            given["policy"] = networks["policy"].params  # as the joint update gives them
            networks[second.learns], measured = call(alone, networks[second.learns], given, rows)
            taken.append({f"{second.learns}/{name}": value for name, value in measured.items()})
            continue
        if setup.objective.needs_covariance_mask:  # by the policy before this update
            logps = call(setup.programs.score, policy_state.weights(networks), rows.bare).logps
            index = setup.policy.device.put(mini.layout.index, ROWS)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(setup.config.train.seed), number), n)
            assert setup.programs.covariance_mask is not None, "the objective has one"
            mask = call(setup.programs.covariance_mask, key, logps, rows, index)
            rows = rows.with_arrays({"covariance_mask": mask})
        if second is None:
            networks["policy"], metrics = call(setup.programs.update, networks["policy"], given, rows)
        else:  # each learns from the other as it was before this update
            both = {role: networks[role] for role in ("policy", second.learns)}
            both, metrics = call(setup.programs.update, both, given, rows)
            networks |= both
        taken.append(metrics)
        updates += 1
    return dataclasses.replace(state, networks=networks, updates=updates), taken


def end_step(setup: Setup, state: State) -> State:
    """Runs the parts' work between the step after ``state.step`` and the next one."""
    networks = dict(state.networks)
    for part in setup.parts:
        networks |= part.end_step(networks, state.step + 1)
    return dataclasses.replace(state, networks=networks)


def entropy_of(setup: Setup, state: State) -> Mapping[str, float]:
    """``coef`` of an adaptive entropy bonus, and the one that is ``applied``: 0 while no entropy is known."""
    return state.entropy or {"coef": setup.objective.entropy_coef, "applied": 0.0}


def adapted(setup: Setup, state: State, values: Mapping[str, float]) -> State:
    """The state with an adaptive entropy bonus that follows the metrics of a step."""
    coefs, target, step = entropy_of(setup, state), setup.objective.entropy_target, setup.objective.entropy_step
    if target is None:
        return state
    entropy = values.get("entropy", float("nan"))
    if np.isfinite(entropy):
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


def _samples(rollout: Rollout, which: PerPrompt, lengths: Samples, prompts: Prompts, group: int) -> Rollout:
    """Samples of the prompts at ``which`` as their ``prompts`` were spread, ``group`` to each, with these lengths."""

    def mine(x: Array) -> Array:
        return None if x is None else _spread(x[which], prompts, group)

    choices = rollout.prompt_choices
    if choices is not None:
        choices = np.repeat(choices[which, :1], len(prompts.lengths) // len(which), 0)
    return Rollout(
        tokens=mine(rollout.tokens),
        lengths=_spread(lengths, prompts, group),
        choices=mine(rollout.choices),
        prompt_choices=choices,
    )


def _spread(x: Array, prompts: Prompts, group: int) -> Array:
    """``[p, G, ...]`` as the prompts were spread over the shards, ``[P', G', ...]``."""
    return x.reshape(len(prompts.lengths), group, *x.shape[2:])
