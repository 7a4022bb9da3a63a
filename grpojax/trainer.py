"""The loop: rollout, rewards, scores, advantages, updates. The one mutable place.

The device's queue never runs dry on the host's account: the next rollout is dispatched before the metrics of the
update before it are read.
"""

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpojax import advantages, data, evaluate, losses, masked, packing, settings, sharding, step, tracking
from grpojax.checkpoint import Checkpoints
from grpojax.config import Config
from grpojax.errors import UserError
from grpojax.models import Compute, hf
from grpojax.rewards import Rewards
from grpojax.sampler import SamplerConfig, sample_groups
from grpojax.tracking import log
from grpojax.types import Prompts, Rollout, TrainBatch


@dataclasses.dataclass
class _Pending:
    """Updates in flight: what is already known of the step, and the metrics that the device still owes."""

    number: int
    known: dict[str, float]
    owed: list[dict[str, Any]]
    started: float
    step_started: float


class Policy:
    """A model on its devices with its tokenizer, its programs, and nothing of the run."""

    def __init__(self, config: Config, devices=None):
        if jax.process_count() > 1:
            raise UserError(f"{jax.process_count()} processes: a run takes one process with all its devices")
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
        self.programs = tracking.Programs()

    def sample(self, params, prompts: Prompts, key, config: SamplerConfig) -> Rollout:
        """Dispatches a rollout of host prompts; ``params`` are the rollout's (`step.make_reshard`)."""
        spread, group = packing.spread(prompts, config.group, self.lanes)
        config = SamplerConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(SamplerConfig)})
        if group != config.group:
            config = dataclasses.replace(config, group=group, slots=min(config.slots, group))
        placed = jax.tree.map(
            lambda x: jax.device_put(x, sharding.named(self.mesh, ("lane",) + (None,) * (x.ndim - 1))), spread
        )

        def run(params, prompts, key):
            return sample_groups(
                self.graph, params, prompts, key, config, eos_ids=self.eos_ids, compute=self.compute
            )

        return self.programs("rollout", run, params, placed, key)

    def fetch(self, rollout: Rollout, n_prompts: int) -> Rollout:
        """A rollout on the host, ``[P, G, ...]``."""
        return jax.tree.map(lambda x: packing.gather_groups(np.asarray(x), n_prompts), rollout)

    def decode(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def attempts(
        self, params, problems, config: evaluate.EvalConfig, judge: evaluate.Judge, *, max_prompt_tokens: int,
        start: int = 0,
    ) -> Iterator[list[evaluate.Attempt]]:  # fmt: skip
        """Tries the problems from ``start`` on, batch by batch; ``params`` are the rollout's."""
        size = min(max(1, config.batch // config.sampler.group), len(problems))
        size = -(-size // self.lanes) * self.lanes

        def sample(prompts):
            return self.fetch(self.sample(params, prompts, jax.random.key(config.seed), config.sampler), size)

        return evaluate.attempts(
            problems, sample, self.decode, judge, size=size, max_prompt_tokens=max_prompt_tokens, start=start
        )


class Trainer:
    """A run of ``config``, new or resumed from its directory.

    Raises `UserError` where the directory holds a run of another config.
    """

    def __init__(self, config: Config):
        self.config = config
        self.directory = Path(config.run.dir)
        self._check_directory()
        self.policy = policy = Policy(config)
        self.variant = config.make_variant()
        self.rewards = Rewards(config.make_rewards())
        tokenize = data.Tokenize(policy.tokenizer, config.data)
        self.problems = data.load_problems(config.data.train, tokenize, config.data, self.rewards.check_gold)
        for line in self.problems.notes("train", config.data):
            log.info("%s", line)
        self.batches = data.Batches(
            self.problems, config.rollout.prompts, config.train.seed, self.problems.weights
        )
        self.eval_problems: list[data.Problem] = []
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

        optimizer = step.make_optimizer(config.optimizer, config.train.updates)
        objective = self.variant.objective
        temperature = config.rollout.temperature
        _, abstract = step.abstract_state(policy.config, optimizer, policy.mesh)
        self._claim_directory()
        self.checkpoints = Checkpoints(
            self.directory / "checkpoints",
            keep=config.train.keep,
            best="eval/accuracy" if self.eval_problems else None,
        )
        self.train_step = step.make_train_step(
            policy.graph, objective, optimizer, policy.compute, temperature=temperature, entropy=True
        )
        self.score = step.make_score(policy.graph, policy.compute, temperature=temperature)
        self.ref_params = None
        if objective.needs_reference:
            self.ref_params = jax.tree.map(lambda x: x.copy(), policy.params)
        self.done = self.checkpoints.latest() or 0
        if self.done:
            self.state, meta = self.checkpoints.restore(abstract)
            policy.params = None
            log.info("resumed %s at step %d", self.directory, meta["step"])
        else:
            self.state = step.init_state(policy.params, optimizer, policy.mesh)
            policy.params = None
        self.metrics = tracking.Metrics(self.directory, self.done)
        self.on_step: Callable[[list[data.Problem], Rollout], None] = lambda problems, rollout: None
        self.attempts: list[evaluate.Attempt] = []
        self._stop = False

    def _check_directory(self) -> None:
        """Refuses a directory that is neither new nor this config's run."""
        resolved = settings.to_dict(self.config)
        file = self.directory / "config.json"
        if file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            differ = [d for d in settings.diff(before, resolved) if not d.startswith("run.")]
            if differ:
                raise UserError(
                    f"{self.directory} holds a run of another config: {'; '.join(differ[:5])}\n"
                    "give it another run.dir, or the config it was started with"
                )
            return
        if self.directory.exists() and any(self.directory.iterdir()):
            raise UserError(f"{self.directory} exists and holds no run; give the run another run.dir")

    def _claim_directory(self) -> None:
        """Writes the resolved config; from here on the directory is this run's."""
        file = self.directory / "config.json"
        if not file.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps(settings.to_dict(self.config), indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, file)

    # ------------------------------------------------------------------------------------------ the loop

    def run(self) -> bool:
        """Trains to the end; False if a SIGTERM or SIGINT asked to stop (the state is saved either way)."""
        train = self.config.train
        handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        pending: _Pending | None = None
        try:
            if self.done == 0:
                self._evaluate(0)
            while self.done < train.steps and not self._stop:
                started = time.perf_counter()
                problems = self.batches[self.done]
                rollout = self._dispatch_rollout(problems)
                if pending:
                    self._finish(pending)
                pending = self._learn(problems, rollout, started)
                self.done += 1
                last = self.done == train.steps
                evaluates = last or (train.eval_every and self.done % train.eval_every == 0)
                saves = (
                    last or self._stop or (train.checkpoint_every and self.done % train.checkpoint_every == 0)
                )
                if evaluates or saves:
                    self._finish(pending)
                    pending = None
                scores = self._evaluate(self.done) if evaluates else None
                if saves:
                    self._save(scores)
            if pending:
                self._finish(pending)
                self._save(None)
            self.checkpoints.wait()
            return self.done == train.steps
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)
            self.checkpoints.close()
            self.metrics.close()
            self.rewards.close()

    def _on_signal(self, number, frame) -> None:
        if self._stop:
            raise KeyboardInterrupt
        log.info("%s: saving after this step; again to stop at once", signal.Signals(number).name)
        self._stop = True

    def _dispatch_rollout(self, problems) -> Rollout:
        config = self.config
        longest = packing.bucket(max(len(p.ids) for p in problems), config.data.max_prompt_tokens)
        key = jax.random.fold_in(jax.random.key(config.train.seed), self.done)
        params = self.policy.reshard(self.state.params)
        return self.policy.sample(params, data.to_prompts(problems, longest), key, config.rollout)

    def _learn(self, problems, dispatched: Rollout, started: float) -> _Pending:
        """Rewards, scores and advantages of a rollout; dispatches its updates."""
        config, policy, objective = self.config, self.policy, self.variant.objective
        n_prompts, group = config.rollout.prompts, config.rollout.group
        rollout = policy.fetch(dispatched, n_prompts)
        rolled = time.perf_counter()
        totals, by_name, invalid = self._reward(problems, rollout)
        rewarded = time.perf_counter()

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

        # Scores: of the reference if a term asks for it, and of the policy itself if the ratio will leave 1.
        if objective.needs_reference:
            scores = [policy.programs("score", self.score, self.ref_params, p.rows) for p in placed]
            placed = [dataclasses.replace(p, ref_logps=s) for p, s in zip(placed, scores, strict=True)]
            if objective.kl_in == "reward":
                ref = self._whole(
                    [lay.unpack(s) for (_, lay), s in zip(packed, scores, strict=True)], n_prompts
                )
                totals = totals - objective.kl_coef * np.where(mask, rollout.logps - ref, 0.0).sum(-1)
        if config.train.iterations * config.train.minibatches > 1:
            scores = [policy.programs("score", self.score, self.state.params, p.rows) for p in placed]
            placed = [dataclasses.replace(p, behavior_logps=s) for p, s in zip(placed, scores, strict=True)]
        if config.train.log_every and jax.default_backend() == "cpu":
            jax.block_until_ready(placed)
        scored = time.perf_counter()

        signals = advantages.Signals(
            lengths=rollout.lengths, mask=mask, behavior_logps=rollout.logps, tokens=rollout.tokens
        )
        adv = np.asarray(self.variant.advantage(totals, signals))
        valid = mask & np.isfinite(totals)[..., None]
        batch = dataclasses.replace(batch, advantages=spread(adv), weights=spread(valid.astype(np.float32)))
        ready = []
        for i, (p, (_, layout)) in enumerate(zip(placed, packed, strict=True)):
            mini = self._minibatch(batch, i)
            # A minibatch is an update of its own: its weights are computed on it. Its groups must be whole for that.
            groups = lambda x: x.reshape(-1, group, x.shape[-1])  # noqa: E731
            weights = losses.loss_weights(
                groups(mini.weights) > 0, objective.aggregate, constant=objective.constant
            )
            weights = np.asarray(weights).reshape(mini.weights.shape)
            host = {"advantages": layout.pack(mini.advantages), "weights": layout.pack(weights)}
            ready.append(dataclasses.replace(p, **step.place_rows(host, policy.mesh)))

        dispatched_at = time.perf_counter()
        owed = []
        for _ in range(config.train.iterations):
            for p in ready:
                self.state, metrics = policy.programs("update", self.train_step, self.state, p)
                owed.append(metrics)
                if jax.default_backend() == "cpu" and policy.mesh is not None:
                    jax.block_until_ready(self.state)
        useful = float(np.mean([layout.useful for _, layout in packed]))
        known = self._known(rollout, totals, by_name, mask, useful)
        known |= {f"rewards/invalid/{kind}": float(count) for kind, count in invalid.items()}
        known |= {
            "time/rollout_s": rolled - started,
            "time/reward_s": rewarded - rolled,
            "time/score_s": scored - rewarded,
        }
        self.on_step(problems, rollout)
        return _Pending(self.done + 1, known, owed, dispatched_at, started)

    def _minibatch(self, batch: TrainBatch, i: int) -> TrainBatch:
        """The i-th share of every lane's prompts."""
        n = self.config.train.minibatches
        if n == 1:
            return batch
        lanes = self.policy.lanes

        def share(x):
            by_lane = x.reshape(lanes, -1, *x.shape[1:])
            each = by_lane.shape[1] // n
            return by_lane[:, i * each : (i + 1) * each].reshape(-1, *x.shape[1:])

        return jax.tree.map(share, batch)

    def _whole(self, parts: list[np.ndarray], n_prompts: int) -> np.ndarray:
        """Minibatches ``[P / n, G, T]`` back to the batch: the inverse of `_minibatch`."""
        lanes = self.policy.lanes
        by_lane = [p.reshape(lanes, -1, *p.shape[1:]) for p in parts]
        whole = np.concatenate(by_lane, axis=1)
        return packing.gather_groups(whole.reshape(-1, *whole.shape[2:]), n_prompts)

    def _reward(self, problems, rollout: Rollout):
        n, group = rollout.lengths.shape
        ids = [rollout.tokens[p, g, : rollout.lengths[p, g]].tolist() for p in range(n) for g in range(group)]
        texts = [self.policy.decode(i) for i in ids]
        each = [p for p in problems for _ in range(group)]
        shared = set.intersection(*(set(p.columns) for p in problems))
        columns = {c: [p.columns[c] for p in each] for c in sorted(shared)}
        columns["gold"] = [p.gold for p in each]
        scores = self.rewards([p.prompt for p in each], texts, ids, columns, group=group)
        by_name = {k: v.reshape(n, group) for k, v in scores.by_name.items()}
        return scores.total.reshape(n, group), by_name, scores.invalid

    def _known(self, rollout, totals, by_name, mask, useful) -> dict[str, float]:
        """Metrics that the host can tell."""
        finite = np.isfinite(totals)
        value = np.where(finite, totals, 0.0)
        count = np.maximum(finite.sum(1), 1)
        mean = value.sum(1) / count
        std = np.sqrt((np.where(finite, totals - mean[:, None], 0.0) ** 2).sum(1) / np.maximum(count - 1, 1))
        known = {
            "reward": float(value.sum() / max(finite.sum(), 1)),
            "reward_std": float(std.mean()),
            "frac_reward_zero_std": float(np.asarray(masked.all_equal(totals, finite, 1)).mean()),
            "rewards/invalid": float(1 - finite.mean()),
            "completions/mean_length": float(rollout.lengths.mean()),
            "completions/max_length": float(rollout.lengths.max()),
            "completions/clipped_ratio": float(1 - rollout.stopped.mean()),
            "useful_token_fraction": useful,
            "num_tokens": float(mask.sum()),
        }
        for name, values in by_name.items():
            ok = np.isfinite(values)
            known[f"rewards/{name}/mean"] = float(values[ok].mean()) if ok.any() else 0.0
        return known

    def _finish(self, pending: _Pending) -> None:
        """Waits for a step's updates and records its metrics."""
        owed = jax.device_get(pending.owed)
        now = time.perf_counter()
        mean = lambda name: float(np.mean([m[name] for m in owed]))  # noqa: E731
        tokens = max(sum(float(m["tokens"]) for m in owed), 1.0)
        share = lambda name: float(sum(float(m[name]) for m in owed) / tokens)  # noqa: E731
        values = dict(pending.known)
        values |= {name: mean(name) for name in ("loss", "policy_loss", "grad_norm")}
        values |= {
            "entropy": share("entropy_sum"),
            "ratio_mean": share("ratio_sum"),
            "clip_ratio/low_mean": share("clip_low_sum"),
            "clip_ratio/high_mean": share("clip_high_sum"),
        }
        first = owed[0]
        values["sampling/logp_difference_mean"] = float(
            first["logp_difference_sum"] / max(float(first["tokens"]), 1.0)
        )
        values["sampling/logp_difference_max"] = float(first["logp_difference_max"])
        if "kl_sum" in first:
            values["kl"] = share("kl_sum")
        values["time/update_s"] = now - pending.started
        values["time/step_s"] = now - pending.step_started
        self.metrics.write(pending.number, values)
        if pending.number % self.config.train.log_every == 0 or pending.number == self.config.train.steps:
            log.info(
                "step %d/%d  reward %.3f  zero-std %.2f  length %.1f  entropy %.3f  grad %.3f  %.2f s",
                pending.number, self.config.train.steps, values["reward"], values["frac_reward_zero_std"],
                values["completions/mean_length"], values["entropy"], values["grad_norm"], values["time/step_s"],
            )  # fmt: skip

    # --------------------------------------------------------------------------------- evaluation and saves

    def _evaluate(self, number: int) -> dict[str, float] | None:
        if not self.eval_problems:
            return None
        config, evaluation = self.config, evaluate.EvalConfig.in_training(self.config)
        batches = self.policy.attempts(
            self.policy.reshard(self.state.params), self.eval_problems, evaluation,
            evaluate.judge_of(config.make_rewards()), max_prompt_tokens=config.data.max_prompt_tokens,
        )  # fmt: skip
        done = [attempt for batch in batches for attempt in batch]
        evaluate.write(self.directory / "eval" / f"step_{number}.jsonl", done)
        by_problem = evaluate.by_problem(done, evaluation.ks)
        values = {f"eval/{name}": float(x.mean()) for name, x in by_problem.items()}
        self.metrics.write(number, values)
        log.info(
            "step %d  held-out %s %.1f %% of %d",
            number,
            evaluation.accuracy_name,
            100 * values["eval/accuracy"],
            len(done),
        )
        self.attempts = done
        return values

    def _save(self, scores: dict[str, float] | None) -> None:
        self.checkpoints.save(self.done, self.state, {"step": self.done}, scores)

    def report(self) -> None:
        """Accuracy before and after, three samples, and ``curve.png`` in the run directory."""
        lines = tracking.read_metrics(self.directory)
        evals = [line for line in lines if "eval/accuracy" in line]
        if evals:
            first, last = evals[0], evals[-1]
            log.info(
                "held-out %s: %.1f %% before (step %d), %.1f %% after (step %d)",
                evaluate.EvalConfig.in_training(self.config).accuracy_name,
                100 * first["eval/accuracy"], first["step"], 100 * last["eval/accuracy"], last["step"],
            )  # fmt: skip
        for attempt in self.attempts[:3]:
            sample = attempt.samples[0]
            verdict = "right" if sample.correct else f"wrong, gold {attempt.gold}"
            log.info("Q: %s\n%s\n[%s]", attempt.prompt, sample.completion.strip(), verdict)
        path = self.directory / "curve.png"
        tracking.draw_curve(lines, path)
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
