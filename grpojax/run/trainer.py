"""The loop: draw, learn, record. It reads from top to bottom.

The device's queue never runs dry on the host's account: the next rollout is dispatched before the metrics of the
update before it are read.
"""

import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpojax import data, evaluation, variants
from grpojax.host import peers, processes
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models import flops, hf
from grpojax.programs.policy import Policy
from grpojax.records import curve, metrics
from grpojax.rewards import Rewards
from grpojax.run import checks, recorder, step_metrics, watch
from grpojax.run.batch import RolloutBatch, sample_rows
from grpojax.run.critic import RunCritic, annotate
from grpojax.run.held_out import HeldOut, announce
from grpojax.run.in_flight import InFlight
from grpojax.run.learner import Learner
from grpojax.run.method import learns_from_equals
from grpojax.run.programs import learning_of, make_programs
from grpojax.run.recipe import Config
from grpojax.run.rollouts import Rollouts
from grpojax.run.run_state import RunState
from grpojax.run.session import Session, enough_memory
from grpojax.run.teacher import teacher_of
from grpojax.run.today import with_day
from grpojax.types import Rollout, Tokens

REMEDIES = (
    "raise train.microbatches, set model.remat=layer, lower rollout.decode_slots, or spread over more devices "
    "(mesh.fsdp); in a new run lower rollout.prompts or rollout.max_tokens"
)


class Clock:
    """Seconds of the parts of a step, by name; ``since`` is when the first begins."""

    def __init__(self, since: float):
        self.seconds, self._since = Counter[str](), since

    def lap(self, name: str | None) -> None:
        """Ends a part; what is of none has no name."""
        now = time.perf_counter()
        if name is not None:
            self.seconds[name] += now - self._since  # pyrefly: ignore
        self._since = now


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Updates:
    """Updates in flight: what is already known of their step, and the metrics that the device still has.

    Attributes:
      metrics: an update's each; on the host once the updates are over.
      waited: seconds that the host was held up by the updates so far.
      over: when they were over, by `time.perf_counter`; None while they may run.
    """

    number: int
    known: dict[str, float]
    metrics: list[dict[str, Any]]
    waited: float
    over: float | None = None
    tokens: int
    flops: float


class Trainer:
    """A run of ``config``, new or resumed from its directory.

    Raises `UserError` where the directory holds a run of another config.

    Args:
      config: the recipe.
      devices: what to run on; None takes all there are.
      eos_ids: tokens that end a sample in place of the model's; none at all lets every sample run to the end.
      on_step: called once a step with the problems and the samples that it learns from.
      take_over: break another process's claim on a run directory in a bucket.

    Attributes:
      state: what a checkpoint has of the run besides the weights.
      work: useful FLOPs of the last step, by phase (`grpojax.run.work.step_flops`).
    """

    def __init__(
        self,
        config: Config,
        devices: Sequence[jax.Device] | None = None,
        *,
        eos_ids: tuple[int, ...] | None = None,
        on_step: Callable[[Sequence[data.Problem], Rollout], None] | None = None,
        take_over: bool = False,
    ):
        self.config, self.on_step, self._take_over = config, on_step, take_over
        self.state, self.work = RunState(), dict[str, float]()
        # Let go of if what follows raises.
        with contextlib.ExitStack() as held, peers.telling(), enough_memory(lambda: self.done, REMEDIES):
            with processes.AllOrNone():
                self._prepare(held, devices, eos_ids)
            self._open(held)
            self._held = held.pop_all()

    def _prepare(
        self, held: contextlib.ExitStack, devices: Sequence[jax.Device] | None, eos_ids: tuple[int, ...] | None
    ) -> None:
        """All that one process does by itself."""
        checks.variant_source(self.config)
        tokenizer = hf.load_tokenizer(str(data.locate(self.config.model.path)))
        self.config = config = with_day(self.config, tokenizer, self.config.run.dir)
        self.session = Session(config, take_over=self._take_over)
        self.tokenize = tokenize = data.Tokenize(tokenizer, config.data)
        self.policy = Policy(config.model, config.mesh, devices, eos_ids=eos_ids, tokenizer=tokenizer)
        if eos_ids is None:
            hf.check_ends(
                config.model.path, self.policy.eos_ids, no_end=config.rollout.no_end, setting="rollout.no_end=true"
            )
        checks.shapes(config, self.policy.shards, self.policy.sampling.shards)
        checks.cache(config, self.policy)
        self.rewards = held.enter_context(Rewards(config.method.rewards, read=tokenize.read))
        needs_truth = "ground_truth" in config.method.variant.needs
        compared = self.rewards.compares or needs_truth
        self.held_out = HeldOut(config, self.policy, self.rewards, tokenize, sync=self.session.control.sync)
        self.problems = data.load_problems(
            config.data.train,
            tokenize,
            config.data,
            self.rewards.check_gold,
            compared=compared,
            known=self.held_out.known,
        )
        if needs_truth and any(p.gold is None for p in self.problems):
            raise UserError(f"variant {config.method.variant.name!r} needs the true answers: set data.answer")
        announce(self.problems, "train", config.data)
        for line in self.rewards.notes(tokenize.special, tokenize.tail(self.problems[0].ids)):
            log.warning("%s", line)
        if len(self.problems) < (size := config.rollout.prompts):
            log.info(
                "the data has %d problems for rollout.prompts=%d: passes over it follow one another within a step, and "
                "a problem that is drawn again gets samples of its own",
                len(self.problems),
                size,
            )
        checks.passes(config, self.problems)
        if config.rollout.curriculum is not None:
            data.check_levels(self.problems)
        every = [*self.problems, *self.held_out.problems, *self.held_out.test]
        self.rewards.check_columns(evaluation.columns_of(every))
        checks.positions(every, config.rollout.max_tokens, self.policy)
        self.critic = _critic_of(config, self.policy)
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        self.teacher = teacher_of(self.policy, config.method, longest=longest)
        self.session.claim(held, {"train": self.problems.fingerprint, **self.held_out.fingerprints})
        for line in str(config.method.variant).splitlines()[1:]:
            log.info("%s", line)
        twin = variants.twin_at_one_update(config.method.variant)
        if twin and config.train.updates_a_rollout == 1 and not config.method.older:
            log.info("%s", twin)

    def _open(self, held: contextlib.ExitStack) -> None:
        """The run's state, new or restored."""
        config = self.config
        self.session.open(held, self.held_out.best)
        learning = learning_of(
            config,
            self.policy.graph,
            self.policy.compute,
            critic=None if self.critic is None else self.critic.model,
            teacher=None if self.teacher is None else self.teacher.graph,
        )
        self.learner = Learner(
            self.policy,
            make_programs(learning),
            config.method,
            config.train,
            max_prompt_tokens=_longest_prompt(config, self.problems),
            critic=self.critic,
            teacher=self.teacher,
        )
        restored = self.session.restore(self.learner.abstract())
        if restored is not None:
            self.state = restored[1]
            watch.resume(self.session, self.state, config.train)
            self.learner.entropy_coefs = self.state.entropy or self.learner.entropy_coefs
            self.learner.updates = self.state.updates
        self.learner.start(restored and restored[0])
        checks.length(config, self.state)
        self._saved, self._since, self._left = self.done, 0.0, 0
        self.updates: _Updates | None = None
        self.rollouts = Rollouts(
            self.policy,
            lambda: (self.learner.state["policy"].params, self.learner.updates),
            config.rollout,
            config.method,
            self.rewards,
            self.problems,
            seed=config.train.seed,
            max_prompt_tokens=_longest_prompt(config, self.problems),
            truncated=config.train.truncated,
            state=self.state,
            sync=self.session.control.sync,
        )
        self.in_flight: InFlight | None = None  # that was started while the step before was learned from
        if self.state.in_flight is not None:
            self.in_flight, self.state.in_flight = self.rollouts.resumed(self.state.in_flight), None
        self.watch = watch.Watch(
            self.session.directory,
            judge=self.held_out.evaluator.judge,
            problems=len(self.held_out.problems),
            comparable=config.method.retire is None and config.rollout.curriculum is None,
            uniform=functools.partial(learns_from_equals, config.method.variant, config.rollout),
        )
        with processes.AllOrNone():  # the first writes these files anew, once all have read them
            self._evaluated, self._tested = _replay(self)
        self.metrics = recorder.Recorder(self.session.directory, self.done, config.tracking)
        held.callback(self.metrics.close)
        self.table = metrics.Table(config.train.steps)
        self.session.settle(finished=self.share >= 1)

    @property
    def done(self) -> int:
        """Steps behind the run."""
        return self.state.step

    @property
    def share(self) -> float:
        """Of the whole run, what is behind it."""
        return self.config.train.done(self.done, self.state.sampled_tokens)

    # ------------------------------------------------------------------------------------------ the loop

    def run(self) -> bool:
        """Trains to the end; False if it was told to stop before (the state is saved either way)."""
        try:
            with peers.telling(), enough_memory(lambda: self.done, REMEDIES):
                with self.session.conduct(self._rescue) as outcome:
                    self._loop()
            finished = outcome.finished
            if self.critic is not None and self.done <= self.critic.config.warmup_steps and finished:
                log.warning("the run ended in critic.warmup_steps=%d: the policy has learned nothing", self.done)
            if finished and self._left:
                log.info("%d groups were under way when the run ended: their samples are not learned from", self._left)
            return finished
        finally:
            self.close()

    def close(self) -> None:
        """Gives back what the run holds: worker processes, files, the directory's lock."""
        self._held.close()

    def _rescue(self) -> int:
        """Whatever ends a run must not cost what was learned. The step that is saved."""
        self._finish()
        if self.done != self._saved:
            self._save()
        return self.done

    def _loop(self) -> None:
        train, session = self.config.train, self.session
        # Of a run that was stopped, the evaluation that was due after its last step.
        if self.done == 0 or (self.held_out.problems and self._evaluates() and self._evaluated < self.done):
            self._evaluate()
        while self.share < 1:
            session.watchdog.begin(self.done + 1)
            session.profile.begin(self.done + 1, self.learner.state)
            self._step()
            session.profile.end(self.done, self.learner.state)
            saves = self.share >= 1 or (train.checkpoint_every and self.done % train.checkpoint_every == 0)
            saves, evaluates = saves or session.control.due, self._evaluates()
            if evaluates or saves:
                self._finish()
            session.watchdog.end()
            if saves:  # first, as an evaluation takes long and may fail
                self._save(judged=evaluates and bool(self.held_out.problems))
            if evaluates:
                self._evaluate()
        if self.held_out.test and not self._tested:
            self._test()

    def _step(self) -> None:
        """One step: waits for a batch of samples, and learns from it. The updates are under way when it returns."""
        learner, state, method, number = self.learner, self.state, self.config.method, self.done + 1
        if self.updates is None:  # what an evaluation or a save took is no part of the step
            self._since = time.perf_counter()
        in_flight = self.in_flight or self._start()
        clock = Clock(time.perf_counter() if self.in_flight else self._since)
        batch = self.rollouts.collect(number, in_flight)  # or `Stopped`, and `_save` keeps what is in flight
        clock.lap("rollout")
        ahead = self.config.rollout.ahead > 0 and self.config.train.done(number, 0) < 1
        following = self._start() if ahead else None  # from here on, while this step is judged and learned from
        self._finish()  # behind the last rollout none is started
        clock.lap(None)

        batch = learner.replace(batch)
        clock.lap("rollout")
        packed = learner.pack(batch)
        signals = learner.score(packed)
        clock.lap("score")
        batch = batch.with_rewards()
        clock.lap("reward")
        advantages, of_signals, lengths = learner.weigh(packed, batch, signals)

        self.rollouts.write(state)  # what a save accounts for: not the next rollout, under way
        shares = self._count(batch)
        known = step_metrics.of_rollouts(batch, method) | of_signals
        known["useful_token_fraction"] = float(np.mean([m.layout.useful for m in packed]))
        if method.older:
            known |= step_metrics.of_version(batch.version, learner.updates)
        rows = self._rows(number, batch, advantages, signals)
        warming_up = self.critic is not None and number <= self.critic.config.warmup_steps
        clock.lap(None)
        # From here to the end of the step nothing waits for the device.
        metrics = learner.update(packed, number, self.policy.wait_on_cpu, shares=shares, warming_up=warming_up)
        clock.lap("update")
        learner.end_step(number)
        if rows is not None:
            self.metrics.write_samples(number, rows)
        self.work = learner.work(batch, lengths, warming_up=warming_up)
        state.flops += sum(self.work.values())
        if self.on_step is not None:
            self.on_step(batch.problems, batch.rollout)
        self.updates = self._under_way(number, known, metrics, clock, batch)
        state.step, state.updates, self.in_flight = number, learner.updates, following

    def _start(self) -> InFlight:
        """Dispatches the next rollout; the device has that to do while the step before is waited for and recorded."""
        if jax.default_backend() == "gpu":
            # There the host drives a program's loops: the call of a rollout returns at its end, and what the updates
            # before it took would be counted as the rollout's.
            self._await_updates()
        in_flight = self.rollouts.start()
        self._finish()
        return in_flight

    def _count(self, batch: RolloutBatch) -> tuple[float, float] | None:
        """Counts the tokens of a batch; the shares of the run before it and after it, of a run that ends by tokens."""
        state, train, before = self.state, self.config.train, self.share
        prompt_tokens, sampled_tokens = step_metrics.tokens(batch.everything)
        state.num_tokens += prompt_tokens + sampled_tokens
        state.sampled_tokens += sampled_tokens
        self._left = 0 if batch.waiting is None else int(batch.waiting.sum())
        return None if train.tokens is None else (min(before, 1.0), min(self.share, 1.0))

    def _rows(
        self, number: int, batch: RolloutBatch, advantages: Tokens, signals: Mapping[str, Tokens]
    ) -> Callable[[], list[dict[str, Any]]] | None:
        """What makes the rows of a step's samples as they are kept; None where those of this step are not."""
        if not self.metrics.wants_samples(number):
            return None
        critic, texts, answer = self.critic, self.policy.texts, self.held_out.evaluator.answer
        said = None if critic is None else critic.said(signals)
        special = functools.partial(self.tokenize.read, "with_special_tokens", ())

        def rows() -> list[dict[str, Any]]:
            made = sample_rows(batch, advantages, texts, answer, special)
            if said is not None:
                annotate(made, batch.rollout.tokens, batch.rollout.lengths, said)
            return made

        return rows

    def _under_way(
        self, number: int, known: dict[str, float], metrics: list[dict[str, Any]], clock: Clock, batch: RolloutBatch
    ) -> _Updates:
        """The updates that a step has dispatched, with what the host knows of the step by now."""
        state, rollouts, seconds = self.state, self.rollouts, clock.seconds
        data_s, rollouts.data_s = rollouts.data_s, 0.0
        known |= {
            "num_tokens": float(state.num_tokens),
            "sampled_tokens": float(state.sampled_tokens),
            "flops": float(state.flops),
            "time/data_s": data_s,
            **{f"time/{name}_s": seconds[name] for name in ("rollout", "score", "reward")},
        }
        return _Updates(
            number=number,
            known=known,
            metrics=metrics,
            waited=seconds["update"],
            tokens=step_metrics.tokens(batch.everything)[1],
            flops=sum(self.work.values()),
        )

    def _await_updates(self) -> _Updates | None:
        """The updates that are under way, if any are, once they are over."""
        if self.updates is not None and self.updates.over is None:
            asked = time.perf_counter()
            metrics = jax.device_get(self.updates.metrics)
            over = time.perf_counter()
            waited = self.updates.waited + over - asked
            self.updates = dataclasses.replace(self.updates, metrics=metrics, over=over, waited=waited)
        return self.updates

    def _finish(self) -> None:
        """Waits for the updates that are under way, if any are, and records their step. The next rollout is on the
        device by now, so that nothing here may ask the device for anything else."""
        updates, self.updates = self._await_updates(), None
        if updates is None:
            return
        assert updates.over is not None
        seconds, self._since = updates.over - self._since, updates.over  # the next rollout is queued behind the updates
        train, state, number = self.config.train, self.state, updates.number
        values = updates.known | step_metrics.of_updates(updates.metrics)
        skipped = [step_metrics.skipped(m) for m in updates.metrics]
        for each in skipped:
            state.skipped = state.skipped + 1 if each else 0
        values["skipped_updates"] = float(sum(skipped))
        values["empty_updates"] = float(train.updates_a_rollout - len(skipped))
        if self.learner.objective.entropy_target is not None:
            values["entropy_coef"] = self.learner.entropy_coefs["applied"]
            self.learner.adapt(values.get("entropy", float("nan")))
            state.entropy = self.learner.entropy_coefs
        values |= {"time/update_s": updates.waited, "time/step_s": seconds}
        values["time/checkpoint_s"], self.session.save_s = self.session.save_s, 0.0
        values["tokens_per_s"] = updates.tokens / seconds
        if peak := flops.PEAK_FLOPS.get(jax.devices()[0].device_kind):
            values["utilisation"] = updates.flops / seconds / peak / self.policy.count
        self.metrics.write(number, values | self.watch.note(number, values))
        if number % train.log_every == 0:
            self.table.row(number, values, share=train.done(number, int(values["sampled_tokens"])))
        checks.finite(number, values, state.skipped, self.config)
        watch.heed(self.watch, number, self.session, state, train)

    def _evaluates(self) -> bool:
        """Whether held-out problems are due after the step that was last done."""
        every = self.config.train.eval_every
        return self.share >= 1 or (every > 0 and self.done % every == 0)

    def _evaluate(self) -> None:
        number = self.done
        values = self.held_out.evaluate(number, self.policy.reshard(self.learner.state["policy"].params))
        if values is not None:
            self.metrics.write(number, values | self.watch.note(number, values))
            self.session.score(number, values)
            watch.heed(self.watch, number, self.session, self.state, self.config.train)

    def _test(self) -> None:
        """Evaluates the final policy on the test set. A run that is stopped in it does so when it goes on."""
        values = self.held_out.read_test(self.done, self.policy.reshard(self.learner.state["policy"].params))
        self.metrics.write(self.done, values)
        self._tested = True

    def _save(self, *, judged: bool = False) -> None:
        self._saved = self.done
        self.metrics.flush()
        in_flight = None if self.in_flight is None else self.in_flight.record()
        self.session.save(self.learner.saved(), dataclasses.replace(self.state, in_flight=in_flight), judged=judged)

    def report(self) -> None:
        """Held-out reward before and after, three samples, and ``curve.png`` in the run directory."""
        if not processes.is_first():
            return
        with recorder.optional("the report"):
            lines = metrics.read_metrics(self.session.directory)
            self.held_out.report(lines)
            path = self.session.directory / "curve.png"
            curve.draw_curve(lines, path)
            log.info("reward curve: %s", path)


def _critic_of(config: Config, policy: Policy) -> RunCritic | None:
    """The network that learns beside the policy, where the variant has one."""
    own = config.method.variant.critic
    if own is None or config.own_critic is None:
        return None
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    return RunCritic(policy, config.own_critic, own, longest=longest)


def _longest_prompt(config: Config, problems: data.Problems) -> int:
    """Room for any prompt of the run: what the data needs, but where a plan puts solved problems before them."""
    most = config.data.max_prompt_tokens
    if config.method.plan is not None:
        return most
    return min(most, -(-max(len(p.ids) for p in problems) // 8) * 8)


def _replay(trainer: Trainer) -> tuple[int, bool]:
    """Has the watch take in what was recorded of the steps that are done.

    Returns:
      The last step that was evaluated, -1 for none, and whether the test set was read at the newest step.
    """
    session = trainer.session
    lines = [x for x in metrics.read_metrics(session.directory) if x["step"] <= trainer.done]
    asked = bool(lines) and session.record.changed(("train.eval_", "evaluate", "rewards"))
    trainer.watch.replay(x for x in lines if not (asked and "eval/reward" in x))
    tested = any("test/problems" in x and x["step"] == trainer.done for x in lines)
    return max((x["step"] for x in lines if "eval/reward" in x), default=-1), tested
