"""The loop: rollout, rewards, scores, advantages, updates. The one mutable place.

The device's queue never runs dry on the host's account: the next rollout is dispatched before the metrics of the
update before it are read.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpojax import advantages, diagnostics, evaluation, losses, masked
from grpojax.data import problems as data
from grpojax.host import processes as hosts
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.host.files import write_json
from grpojax.models import Compute, hf, sharding
from grpojax.models.flops import PEAK_FLOPS, forward_flops
from grpojax.programs import packing
from grpojax.programs import update as step
from grpojax.programs.compiling import Programs
from grpojax.programs.sampler import SamplerConfig, sample_groups
from grpojax.records import evaluations
from grpojax.records import metrics as tracking
from grpojax.records.checkpoint import Checkpoints, SaveError
from grpojax.records.curve import draw_curve
from grpojax.records.metrics import log
from grpojax.rewards import Rewards, Scores
from grpojax.run.recipe import Config
from grpojax.types import Prompts, Rollout, TrainBatch


@dataclasses.dataclass
class _Pending:
    """Updates in flight: what is already known of the step, and the metrics that the device still owes."""

    number: int
    known: dict[str, float]
    owed: list[dict[str, Any]]
    started: float
    step_started: float
    flops: float


@dataclasses.dataclass
class _Sampled:
    """The samples of a step on the host, and their rewards once they are asked for.

    ``dropped`` marks groups ``[P]`` that fill up a batch and weigh nothing; ``kept_share`` is of all groups drawn.
    """

    problems: list[data.Problem]
    rollout: Rollout
    wait: Callable[[], Scores]
    dropped: np.ndarray
    kept_share: float = 1.0

    def scores(self) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, int]]:
        """``(total [P, G], by name [P, G], invalid)``; waits for them."""
        scores, shape = self.wait(), self.rollout.lengths.shape
        by_name = {k: v.reshape(shape) for k, v in scores.by_name.items()}
        return scores.total.reshape(shape), by_name, scores.invalid


class Policy:
    """A model on its devices with its tokenizer, its programs, and nothing of the run."""

    def __init__(self, config: Config, devices=None):
        devices = devices or jax.devices()
        self.mesh = None if len(devices) == 1 else sharding.make_mesh(config.mesh, devices)
        if self.mesh is None:
            sharding.make_mesh(config.mesh, devices)  # refuses sizes that one device cannot have
        self.lanes = sharding.lanes(self.mesh)
        self.folder = str(data.locate(config.model.path))
        self.compute = Compute(
            dtype=config.model.dtype,
            remat=config.model.remat,
            attention=config.model.attention,
            mesh=self.mesh,
        )
        self.tokenizer = hf.load_tokenizer(self.folder)
        self.eos_ids = hf.eos_ids(self.folder, self.tokenizer)
        model = hf.load(self.folder, mesh=self.mesh)
        self.config = model.config
        self.graph, self.params = step.params_of(model)
        self.reshard = step.make_reshard(self.graph, self.compute)
        self.programs = Programs()

    def sample(self, params, prompts: Prompts, key, config: SamplerConfig) -> Rollout:
        """Dispatches a rollout of host prompts; ``params`` are the rollout's (`step.make_reshard`)."""
        spread, group = packing.spread(prompts, config.group, self.lanes)
        config = SamplerConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(SamplerConfig)})
        if group != config.group:
            config = dataclasses.replace(config, group=group, slots=min(config.slots, group))
        placed = jax.tree.map(
            lambda x: hosts.place(x, sharding.named(self.mesh, ("lane",) + (None,) * (x.ndim - 1))), spread
        )

        def run(params, prompts, key):
            return sample_groups(self.graph, params, prompts, key, config, eos_ids=self.eos_ids, compute=self.compute)

        return self.programs(f"rollout ({config.group} a prompt)", run, params, placed, key, static=config)

    def fetch(self, rollout: Rollout, n_prompts: int) -> Rollout:
        """A rollout on the host, ``[P, G, ...]``."""
        return jax.tree.map(lambda x: packing.gather_groups(hosts.fetch(x), n_prompts), rollout)

    def decode(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


class Trainer:
    """A run of ``config``, new or resumed from its directory.

    Raises `UserError` where the directory holds a run of another config.

    Args:
      config: the recipe.
      devices: what to run on; None takes all there are.
    """

    def __init__(self, config: Config, devices=None):
        with contextlib.ExitStack() as held:  # let go of if what follows raises
            with hosts.AllOrNone():
                self._prepare(config, devices, held)
            self._open(held)
            self._held = held.pop_all()

    def _prepare(self, config: Config, devices, held: contextlib.ExitStack) -> None:
        """All that one process does by itself."""
        self.config = config
        self.directory = Path(config.run.dir)
        if hosts.is_first():
            self._check_directory()
        self._filter = config.make_filter()
        self._deciding = config.deciding_reward
        self.policy = policy = Policy(config, devices)
        self.variant = config.make_variant()
        self.rewards = held.enter_context(Rewards(config.make_rewards()))
        tokenize = data.Tokenize(policy.tokenizer, config.data)
        self.problems = data.load_problems(config.data.train, tokenize, config.data, self.rewards.check_gold)
        for line in self.problems.notes("train", config.data):
            log.info("%s", line)
        self.batches = data.Batches(self.problems, config.rollout.prompts, config.train.seed, self.problems.weights)
        self._columns = evaluation.columns_of(self.problems)
        self.evaluator = evaluation.Evaluator(self.rewards, config.evaluate)
        self.eval_problems: list[data.Problem] = []
        held_out = None
        if config.data.eval:
            held_out = data.load_problems(config.data.eval, tokenize, config.data, self.rewards.check_gold)
            for line in held_out.notes("eval", config.data):
                log.info("%s", line)
            self.eval_problems = list(held_out[: config.train.eval_limit])
        if config.rollout.prompts // config.train.minibatches < policy.lanes and config.train.minibatches > 1:
            raise UserError(
                f"train.minibatches={config.train.minibatches} leaves {config.rollout.prompts // config.train.minibatches} "
                f"prompts for {policy.lanes} batch shards"
            )

        if hosts.is_first():
            self._claim_directory(held)
            self._check_data(held_out.fingerprint if held_out else None)

    def _open(self, held: contextlib.ExitStack) -> None:
        """The run's state, new or restored, and its programs."""
        config, policy = self.config, self.policy
        optimizer = step.make_optimizer(config.optimizer, config.train.updates)
        objective = self.variant.objective
        temperature = config.rollout.temperature
        _, abstract = step.abstract_state(policy.config, optimizer, policy.mesh)
        self.checkpoints = Checkpoints(
            self.directory / "checkpoints",
            keep=config.train.keep,
            best=evaluation.BEST if self.eval_problems else None,
        )
        held.callback(self._close_checkpoints)
        self.train_step = step.make_train_step(
            policy.graph, objective, optimizer, policy.compute, temperature=temperature, entropy=True
        )
        self.score = step.make_score(policy.graph, policy.compute, temperature=temperature)
        self._entropy = "entropy" in self.variant.needs
        self.score_policy = self.score
        if self._entropy:
            self.score_policy = step.make_score(policy.graph, policy.compute, temperature=temperature, entropy=True)
        self.ref_params = None
        if objective.needs_reference:
            self.ref_params = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(policy.params)
        self.meta: dict[str, Any] = {"step": 0, "rollouts": 0, "num_tokens": 0, "skipped": 0}
        if self.checkpoints.latest() is not None:
            self.state, self.meta, broken = self.checkpoints.restore_newest(abstract)
            for number in broken:
                log.warning("the checkpoint of step %d cannot be read; moved to %s", number, self.directory / "broken")
            log.info("resumed %s at step %d", self.directory, self.meta["step"])
        else:
            self.state = step.init_state(policy.params, optimizer, policy.mesh)
        policy.params = None
        self.done: int = self.meta["step"]
        self._dispatched: int = self.meta["rollouts"]
        kind = tracking.Metrics if hosts.is_first() else tracking.NoMetrics
        self.metrics = kind(self.directory, self.done, config.tracking)
        held.callback(self.metrics.close)
        self.table = tracking.Table(config.train.steps)
        self.peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
        self._save_problem: str | None = None
        self._checkpoint_s = 0.0  # spent on saves since the last line of metrics
        self.on_step: Callable[[list[data.Problem], Rollout], None] = lambda problems, rollout: None
        self.attempts: list[evaluation.Attempt] = []
        self._stop = False

    def _check_directory(self) -> None:
        """Refuses a directory that is neither new nor this config's run, or that cannot be one."""
        resolved = settings.to_dict(self.config)
        file = self.directory / "config.json"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"run.dir={str(self.directory)!r} cannot be made: {e.strerror}") from None
        if file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            differ = [d for d in settings.diff(before, resolved) if not d.startswith("run.")]
            if differ:
                raise UserError(
                    f"{self.directory} holds a run of another config: {'; '.join(differ[:5])}\n"
                    "give it another run.dir, or the config it was started with"
                )
            return
        if any(self.directory.iterdir()):
            raise UserError(f"{self.directory} exists and holds no run; give the run another run.dir")

    def _claim_directory(self, held: contextlib.ExitStack) -> None:
        """Locks the directory and writes the resolved config; from here on it is this run's."""
        lock = held.enter_context((self.directory / "lock").open("a"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{self.directory} is in use by another process; give this run another run.dir") from None
        file = self.directory / "config.json"
        if not file.exists():
            write_json(file, settings.to_dict(self.config))

    def _check_data(self, held_out: str | None) -> None:
        """Refuses to go on with data that is not what the run started with."""
        file = self.directory / "data.json"
        now = {"train": self.problems.fingerprint, "eval": held_out}
        if not file.exists():
            return write_json(file, now)
        before = json.loads(file.read_text(encoding="utf-8"))
        if changed := [name for name in now if before.get(name) != now[name]]:
            raise UserError(
                f"the rows of data.{' and data.'.join(changed)} have changed since {self.directory} was started\n"
                "restore the file, or give the run another run.dir"
            )

    # ------------------------------------------------------------------------------------------ the loop

    def run(self) -> bool:
        """Trains to the end; False if a SIGTERM or SIGINT asked to stop (the state is saved either way)."""
        handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._loop()
            self._save_waits()
            if self._save_problem:
                raise UserError(
                    f"the last save failed: {self._save_problem}\n"
                    f"see to it and run the same command: it goes on from step {self.checkpoints.latest() or 0}"
                )
            return self.done == self.config.train.steps
        except (jax.errors.JaxRuntimeError, MemoryError) as e:
            if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in str(e):
                raise
            raise UserError(
                f"out of memory after step {self.done}: raise train.microbatches (update), lower rollout.prompts, "
                "rollout.slots or rollout.max_tokens (sampling), set model.remat=layer, or spread over more devices "
                f"(mesh.fsdp)\n{' '.join(str(e).split())[:300]}"
            ) from e
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)
            self.close()

    def close(self) -> None:
        """Gives back what the run holds: worker processes, files, the directory's lock."""
        self._held.close()

    def _close_checkpoints(self) -> None:
        try:
            self.checkpoints.close()
        except SaveError as e:
            log.warning("%s", e)

    def _loop(self) -> None:
        train = self.config.train
        pending: _Pending | None = None
        if self.done == 0:
            self._evaluate(0)
        saved = True
        while self.done < train.steps and not hosts.any_of(self._stop):
            started = time.perf_counter()
            dispatched = self._dispatch_rollout()
            if pending:
                self._finish(pending)
                started = time.perf_counter()  # the rollout was queued behind that update
            sampled = self._collect(*dispatched)
            self.meta["rollouts"] = self._dispatched  # what a save accounts for: not the next one, under way
            pending = self._learn(sampled, started)
            self.done += 1
            last = self.done == train.steps
            evaluates = last or (train.eval_every and self.done % train.eval_every == 0)
            saved = last or (train.checkpoint_every and self.done % train.checkpoint_every == 0)
            if evaluates or saved:
                self._finish(pending)
                pending = None
            scores = self._evaluate(self.done) if evaluates else None
            if saved:
                self._save(scores)
        if pending:
            self._finish(pending)
        if not saved:
            self._save(None)

    def _on_signal(self, number, frame) -> None:
        if self._stop:
            raise KeyboardInterrupt
        log.info("%s: saving after this step; again to stop at once", signal.Signals(number).name)
        self._stop = True

    def _dispatch_rollout(self) -> tuple[list[data.Problem], Rollout]:
        """Starts the next rollout; its problems and its draws follow from its number in the run."""
        config, number = self.config, self._dispatched
        self._dispatched += 1
        problems = self.batches[number]
        longest = packing.bucket(max(len(p.ids) for p in problems), config.data.max_prompt_tokens)
        key = jax.random.fold_in(jax.random.key(config.train.seed), number)
        params = self.policy.reshard(self.state.params)
        prompts = data.to_prompts(problems, longest, config.rollout.group)
        return problems, self.policy.sample(params, prompts, key, config.rollout)

    def _collect(self, problems: list[data.Problem], dispatched: Rollout) -> _Sampled:
        """A rollout on the host with its rewards under way; with dynamic sampling, as many as it takes."""
        size = self.config.rollout.prompts
        first = self._sampled(problems, self.policy.fetch(dispatched, size))
        if self._filter is None:
            return first
        drawn, keeps = [first], [self._keep(first)]
        while sum(k.sum() for k in keeps) < size and len(drawn) < self._filter.max_rollouts:
            problems, dispatched = self._dispatch_rollout()
            drawn.append(self._sampled(problems, self.policy.fetch(dispatched, size)))
            keeps.append(self._keep(drawn[-1]))
        keep = np.concatenate(keeps)
        if not keep.any():
            log.warning("the filter dropped all %d groups by %r: this step teaches nothing", len(keep), self._deciding)
        order = np.argsort(~keep, kind="stable")[:size]
        take = lambda xs: np.concatenate(xs)[order]  # noqa: E731
        scores = [d.wait() for d in drawn]
        each = lambda xs: take([x.reshape(size, -1) for x in xs]).reshape(-1)  # noqa: E731
        merged = Scores(
            total=each([s.total for s in scores]),
            by_name={name: each([s.by_name[name] for s in scores]) for name in scores[0].by_name},
            invalid=dict(sum((Counter(s.invalid) for s in scores), Counter())),
        )
        everything = [p for d in drawn for p in d.problems]
        return _Sampled(
            problems=[everything[i] for i in order],
            rollout=jax.tree.map(lambda *xs: take(xs), *(d.rollout for d in drawn)),
            wait=lambda: merged, dropped=~keep[order], kept_share=float(keep.mean()),
        )  # fmt: skip

    def _keep(self, sampled: _Sampled) -> np.ndarray:
        """``[P]`` bool: the groups that dynamic sampling keeps."""
        _, by_name, _ = sampled.scores()
        if self.variant.keep is not None:
            given = self._filter and self._filter.success
            success = {} if given is None else {"success": given}
            return np.asarray(self.variant.keep(by_name, self._deciding, **success))
        values = by_name[self._deciding]
        return ~np.asarray(masked.all_equal(values, np.isfinite(values), 1))

    def _sampled(self, problems: list[data.Problem], rollout: Rollout) -> _Sampled:
        """Submits a rollout to the rewards."""
        wait = evaluation.submit(self.rewards, problems, rollout, self.policy.decode, self._columns)
        return _Sampled(problems, rollout, wait, np.zeros(len(problems), bool))

    def _learn(self, sampled: _Sampled, started: float) -> _Pending:
        """Scores and advantages of a rollout, while its rewards come in; dispatches its updates."""
        config, policy, objective = self.config, self.policy, self.variant.objective
        n_prompts, group = config.rollout.prompts, config.rollout.group
        problems, rollout = sampled.problems, sampled.rollout
        rolled = time.perf_counter()

        mask = np.asarray(masked.from_lengths(rollout.lengths, config.rollout.max_tokens))
        longest = packing.bucket(max(len(p.ids) for p in problems), config.data.max_prompt_tokens)
        prompts, part = packing.spread(data.to_prompts(problems, longest), group, policy.lanes)
        spread = lambda x: np.asarray(x).reshape(len(prompts.lengths), part, *x.shape[2:])  # noqa: E731
        zeros = np.zeros(mask.shape, np.float32)
        batch = TrainBatch(
            prompts=prompts, tokens=spread(rollout.tokens), lengths=spread(rollout.lengths), advantages=spread(zeros),
            weights=spread(zeros), sampler_logps=spread(rollout.logps),
        )  # fmt: skip
        minis = [self._minibatch(batch, i) for i in range(config.train.minibatches)]
        packed = [
            packing.pack(
                m,
                lanes=policy.lanes,
                microbatches=config.train.microbatches,
                seats=policy.compute.needs_seats,
            )
            for m in minis
        ]
        placed = [step.place_rows(p, policy.mesh) for p, _ in packed]

        def whole(scores):
            """Of every minibatch's rows back to ``[P, G, T]`` on the host."""
            parts = [lay.unpack(hosts.fetch(s)) for (_, lay), s in zip(packed, scores, strict=True)]
            return self._whole(parts, n_prompts)

        # Scores: of the reference if a term asks for it, of the policy itself if the ratio will leave 1 or the variant
        # reads its entropy.
        ref = entropy = None
        if objective.needs_reference:
            scores = [policy.programs("score", self.score, self.ref_params, p.rows).logps for p in placed]
            placed = [dataclasses.replace(p, ref_logps=s) for p, s in zip(placed, scores, strict=True)]
            if objective.kl_in != "loss":
                ref = whole(scores)
        moves = config.train.updates_a_rollout > 1
        if moves or self._entropy:
            name = "score with entropy" if self._entropy else "score"
            own = [policy.programs(name, self.score_policy, self.state.params, p.rows) for p in placed]
            if moves:
                logps = [s.logps for s in own]
                placed = [dataclasses.replace(p, behavior_logps=s) for p, s in zip(placed, logps, strict=True)]
            if self._entropy:
                entropy = whole([s.entropy for s in own])
        if jax.default_backend() == "cpu":
            jax.block_until_ready(placed)
        scored = time.perf_counter()

        totals, by_name, invalid = sampled.scores()
        rewarded = time.perf_counter()
        signals = advantages.Signals(
            outcome=by_name[self._deciding],
            lengths=rollout.lengths,
            mask=mask,
            behavior_logps=rollout.logps,
            tokens=rollout.tokens,
            ref_logps=ref,
            entropy=entropy,
        )
        # Dropped groups are in no statistic either.
        counted = np.where(sampled.dropped[:, None], np.nan, totals)
        try:
            adv = np.asarray(self.variant.advantage(counted, signals))
        except ValueError as e:
            self._save(None)
            raise UserError(f"step {self.done + 1}, variant {self.variant.name!r}: {e}") from e
        valid = mask & np.isfinite(counted)[..., None]
        batch = dataclasses.replace(batch, advantages=spread(adv), weights=spread(valid.astype(np.float32)))
        dropped = spread(np.repeat(sampled.dropped[:, None], group, axis=1))
        ready = []
        for i, (p, (_, layout)) in enumerate(zip(placed, packed, strict=True)):
            mini = self._minibatch(batch, i)
            # A minibatch is an update of its own: its weights are computed on it. Its groups must be whole for that.
            groups = lambda x: x.reshape(-1, group, x.shape[-1])  # noqa: E731
            counts = groups(mini.weights) > 0
            weights = losses.loss_weights(
                counts, objective.aggregate, constant=objective.constant, count_empty=objective.count_empty
            )
            if objective.count_empty and objective.aggregate != "token_mean":
                # Means over samples or prompts are over those that were not dropped.
                kept = 1.0 - self._share(dropped, i).mean()
                weights = weights / max(kept, 1.0 / dropped.size)
            host = {"advantages": mini.advantages, "weights": weights}
            if objective.needs_displacement_weights:
                host["displacement_weights"] = losses.displacement_weights(groups(mini.advantages), counts)
            shape = mini.weights.shape
            host = {name: layout.pack(np.asarray(x).reshape(shape)) for name, x in host.items()}
            ready.append(dataclasses.replace(p, **step.place_rows(host, policy.mesh)))

        known = self._known(sampled, totals, by_name, invalid)
        known |= {
            "useful_token_fraction": float(np.mean([layout.useful for _, layout in packed])),
            "time/rollout_s": rolled - started,
            "time/score_s": scored - rolled,
            "time/reward_s": rewarded - scored,
        }
        # From here to the end of the step nothing waits for the device.
        dispatched_at = time.perf_counter()
        owed = []
        for _ in range(config.train.iterations):
            for p in ready:
                self.state, metrics = policy.programs("update", self.train_step, self.state, p)
                owed.append(metrics)
                if jax.default_backend() == "cpu" and policy.mesh is not None:
                    jax.block_until_ready(self.state)
        number = self.done + 1
        if self.metrics.wants_samples(number):
            self.metrics.write_samples(number, self._sample_rows(sampled, totals, by_name, adv))
        forward = forward_flops(policy.config, [len(p.ids) for p in problems], rollout.lengths)
        scores = bool(objective.needs_reference) + (moves or self._entropy)
        self.on_step(problems, rollout)
        flops = forward * (1 + scores + 3 * config.train.iterations)
        return _Pending(number, known, owed, dispatched_at, started, flops)

    def _minibatch(self, batch: TrainBatch, i: int) -> TrainBatch:
        """The i-th share of every lane's prompts."""
        return jax.tree.map(lambda x: self._share(x, i), batch)

    def _share(self, x: np.ndarray, i: int) -> np.ndarray:
        by_lane = x.reshape(self.policy.lanes, -1, *x.shape[1:])
        each = by_lane.shape[1] // self.config.train.minibatches
        return by_lane[:, i * each : (i + 1) * each].reshape(-1, *x.shape[1:])

    def _whole(self, parts: list[np.ndarray], n_prompts: int) -> np.ndarray:
        """Minibatches ``[P / n, G, T]`` back to the batch: the inverse of `_minibatch`."""
        lanes = self.policy.lanes
        by_lane = [p.reshape(lanes, -1, *p.shape[1:]) for p in parts]
        whole = np.concatenate(by_lane, axis=1)
        return packing.gather_groups(whole.reshape(-1, *whole.shape[2:]), n_prompts)

    def _known(self, sampled: _Sampled, totals, by_name, invalid: dict[str, int]) -> dict[str, float]:
        """Metrics that the host can tell."""
        rollout = sampled.rollout
        finite = np.isfinite(totals)
        count = np.maximum(finite.sum(1), 1)
        mean = np.where(finite, totals, 0.0).sum(1) / count
        std = np.sqrt((np.where(finite, totals - mean[:, None], 0.0) ** 2).sum(1) / np.maximum(count - 1, 1))
        mean_of = lambda x: float(x.mean()) if x.size else math.nan  # noqa: E731  of nothing: not 0, but unknown
        ended = rollout.lengths[rollout.stopped]
        prompt_tokens = sum(len(p.ids) for p in sampled.problems) * rollout.lengths.shape[1]
        self.meta["num_tokens"] += int(rollout.lengths.sum()) + prompt_tokens
        known = {
            "reward": mean_of(totals[finite]),
            "reward_std": mean_of(std[finite.any(1)]),
            "frac_reward_zero_std": float(np.asarray(masked.all_equal(totals, finite, 1)).mean()),
            "rewards/invalid": float(1 - finite.mean()),
            "completions/mean_length": float(rollout.lengths.mean()),
            "completions/min_length": float(rollout.lengths.min()),
            "completions/max_length": float(rollout.lengths.max()),
            "completions/clipped_ratio": float(1 - rollout.stopped.mean()),
            "completions/mean_terminated_length": mean_of(ended),
            "num_tokens": float(self.meta["num_tokens"]),
        }
        for name, values in by_name.items():
            ok = values[np.isfinite(values)]
            known[f"rewards/{name}/mean"] = mean_of(ok)
            known[f"rewards/{name}/std"] = float(ok.std()) if ok.size else math.nan
        known |= {f"rewards/invalid/{kind}": float(n) for kind, n in invalid.items()}
        groups = diagnostics.group_statistics(by_name[self._deciding])
        known |= {f"groups/{name}": float(x) for name, x in groups.items()}
        if self._filter:
            known["groups/kept"] = sampled.kept_share
            known["groups/missing"] = float(sampled.dropped.mean())
        return known

    def _sample_rows(self, sampled: _Sampled, totals, by_name, adv) -> list[dict[str, Any]]:
        """A row for each sample: what it was asked, what it said, and what became of it."""
        rollout = sampled.rollout
        mean = adv.sum(-1) / np.maximum(rollout.lengths, 1)
        number_or_none = lambda x: float(x) if np.isfinite(x) else None  # noqa: E731
        rows = []
        for p, problem in enumerate(sampled.problems):
            for g, n in enumerate(rollout.lengths[p].tolist()):
                text = self.policy.decode(rollout.tokens[p, g, :n].tolist())
                rows.append({
                    "uid": problem.uid, "sample": g, "prompt": problem.prompt, "completion": text,
                    "reward": number_or_none(totals[p, g]),
                    "rewards": {name: number_or_none(x[p, g]) for name, x in by_name.items()},
                    "advantage": number_or_none(mean[p, g]), "length": n,
                    "stop": "eos" if rollout.stopped[p, g] else "length", "gold": problem.gold,
                    "answer": self.evaluator.answer(text),
                })  # fmt: skip
        return rows

    def _finish(self, pending: _Pending) -> None:
        """Waits for a step's updates and records its metrics."""
        owed = jax.device_get(pending.owed)
        now = time.perf_counter()
        mean = lambda name: float(np.mean([m[name] for m in owed]))  # noqa: E731
        tokens = max(sum(float(m["tokens"]) for m in owed), 1.0)
        share = lambda name: float(sum(float(m[name]) for m in owed) / tokens)  # noqa: E731
        values = dict(pending.known)
        values |= {name: mean(name) for name in ("loss", "policy_loss", "grad_norm")}
        values |= {"entropy": share("entropy_sum"), "ratio_mean": share("ratio_sum")}
        first = owed[0]
        if "clip_low_sum" in first:
            low, high = share("clip_low_sum"), share("clip_high_sum")
            values |= {
                "clip_ratio/low_mean": low,
                "clip_ratio/high_mean": high,
                "clip_ratio/region_mean": low + high,
            }
        values["sampling/logp_difference_mean"] = float(first["logp_difference_sum"] / max(float(first["tokens"]), 1.0))
        values["sampling/logp_difference_max"] = float(first["logp_difference_max"])
        for name in ("kl_loss", "llds_loss"):
            if name in first:
                values[name] = mean(name)
        for name, key in (
            ("kl", "kl_sum"),
            ("importance_mean", "importance_sum"),
            ("off_policy", "off_policy_sum"),
        ):
            if key in first:
                values[name] = share(key)
        for m in owed:
            self.meta["skipped"] = self.meta["skipped"] + 1 if m["skipped"] else 0
        values["skipped_updates"] = float(sum(m["skipped"] for m in owed))
        seconds = now - pending.step_started
        values["time/update_s"] = now - pending.started
        values |= {"time/step_s": seconds, "time/checkpoint_s": self._checkpoint_s}
        self._checkpoint_s = 0.0
        sampled = values["completions/mean_length"] * self.config.rollout.prompts * self.config.rollout.group
        values["tokens_per_s"] = sampled / seconds
        if self.peak:
            values["utilisation"] = pending.flops / seconds / self.peak / jax.device_count()
        self.metrics.write(pending.number, values)
        if pending.number % self.config.train.log_every == 0:
            self.table.row(pending.number, values)
        if values["skipped_updates"]:
            log.warning("step %d: %d updates skipped, gradient not finite", pending.number, values["skipped_updates"])
        if self.meta["skipped"] >= self.config.train.max_skipped:
            self._save(None)
            self._save_waits()
            raise UserError(
                f"step {pending.number}: {self.meta['skipped']} updates in a row had a gradient that is not finite; the "
                "weights before them are saved\nlower optimizer.learning_rate or optimizer.grad_clip, or look at the "
                f"samples: grpojax show {self.directory}"
            )

    def _evaluate(self, number: int) -> dict[str, float] | None:
        if not self.eval_problems:
            return None
        drawing = self._drawing()
        batches = evaluation.evaluate(
            self.policy,
            self.policy.reshard(self.state.params),
            self.eval_problems,
            drawing,
            self.evaluator,
            max_prompt_tokens=self.config.data.max_prompt_tokens,
        )
        done = [attempt for batch in batches for attempt in batch]
        if hosts.is_first():
            evaluations.write(self.directory / "eval" / f"step_{number}.jsonl", done)
        values = self.evaluator.metrics(done, drawing.ks)
        self.metrics.write(number, values)
        log.info("step %d  %s on %d problems", number, evaluation.headline(values, drawing), len(done))
        self.attempts = done
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _drawing(self) -> evaluation.EvalConfig:
        train, rollout = self.config.train, self.config.rollout
        return evaluation.EvalConfig.in_training(
            samples=train.eval_samples,
            temperature=train.eval_temperature,
            limit=train.eval_limit,
            max_tokens=rollout.max_tokens,
            cache_dtype=rollout.cache_dtype,
        )

    def _save(self, scores: dict[str, float] | None) -> None:
        """Starts a save. One that fails costs nothing but itself: the run goes on, and the next one tries again."""
        started = time.perf_counter()
        self.meta["step"] = self.done
        try:
            self.checkpoints.save(self.done, self.state, dict(self.meta), scores)
            self._save_problem = None
        except SaveError as e:
            self._note_failed_save(e)
        self._checkpoint_s += time.perf_counter() - started

    def _save_waits(self) -> None:
        """Until what was saved last is on disk."""
        try:
            self.checkpoints.wait()
        except SaveError as e:
            self._note_failed_save(e)

    def _note_failed_save(self, error: SaveError) -> None:
        self._save_problem = " ".join(str(error).split())[:300]
        log.warning("a save failed; the checkpoints before it are untouched: %s", self._save_problem)

    def report(self) -> None:
        """Accuracy before and after, three samples, and ``curve.png`` in the run directory."""
        if not hosts.is_first():
            return
        lines = tracking.read_metrics(self.directory)
        if text := evaluation.report(lines, self._drawing()):
            log.info("%s", text)
        for attempt in self.attempts[:3]:
            sample = attempt.samples[0]
            verdict = evaluation.verdict(attempt, sample)
            log.info("Q: %s\n%s\n[%s]", attempt.prompt, sample.completion.strip(), verdict)
        path = self.directory / "curve.png"
        draw_curve(lines, path)
        log.info("reward curve: %s", path)


def load_policy_params(policy: Policy, config: Config, run_dir: str | Path, step_number: int | None = None):
    """The policy's weights in a run's checkpoint (the newest, or the given step)."""
    optimizer = step.make_optimizer(config.optimizer, config.train.updates)
    _, abstract = step.abstract_state(policy.config, optimizer, policy.mesh)
    checkpoints = Checkpoints(Path(run_dir) / "checkpoints", keep=config.train.keep)
    try:
        return checkpoints.restore_params(abstract.params, step_number)
    finally:
        checkpoints.close()
