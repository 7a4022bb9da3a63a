"""The loop: draw, learn, record. It reads from top to bottom.

The device's queue never runs dry on the host's account: the next rollout is dispatched before the metrics of the
update before it are read.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
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
from grpojax.run.critic import RunCritic, annotate
from grpojax.run.flight import Flight
from grpojax.run.held_out import HeldOut, announce
from grpojax.run.judged import Judged, Sampled, sample_rows
from grpojax.run.learner import Learner
from grpojax.run.method import learns_from_equals
from grpojax.run.programs import learning_of, make_programs
from grpojax.run.recipe import Config
from grpojax.run.rollouts import Rollouts
from grpojax.run.session import Session, enough_memory
from grpojax.run.teacher import teacher_of
from grpojax.run.today import with_day
from grpojax.types import Rollout, Tokens

REMEDIES = (
    "raise train.microbatches, set model.remat=layer, lower rollout.decode_slots, or spread over more devices "
    "(mesh.fsdp); in a new run lower rollout.prompts or rollout.max_tokens"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pending:
    """Updates in flight: what is already known of the step, and the metrics that the device still owes.

    Attributes:
      owed: an update's metrics each; on the host once the updates are over.
      waited: seconds that the host was held up by the updates so far.
      over: when they were over, by `time.perf_counter`; None while they may run.
    """

    number: int
    known: dict[str, float]
    owed: list[dict[str, Any]]
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
      done: steps behind the run.
      meta: the record beside its checkpoints.
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
        self.done, self.work = 0, dict[str, float]()
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
        checks.shapes(config, self.policy.lanes, self.policy.sampling.lanes)
        checks.cache(config, self.policy)
        self.rewards = held.enter_context(Rewards(config.method.rewards, read=tokenize.read))
        needs_truth = "ground_truth" in config.method.variant.needs
        compared = self.rewards.compares or needs_truth
        self.held_out = HeldOut(config, self.policy, self.rewards, tokenize, sync=self.session.course.turn)
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
        self.meta = dict[str, Any]()
        for count in ("step", "rollouts", "updates", "num_tokens", "sampled_tokens", "skipped", "flops"):
            self.meta[count] = 0
        restored = self.session.restore(self.learner.abstract())
        if restored is not None:
            self.meta |= {"flops": None} | restored[1]  # a checkpoint of an older version has not counted them
            watch.resume(self.session, self.meta, config.train)
            self.learner.entropy_coefs = self.meta.get("entropy", self.learner.entropy_coefs)
            self.learner.updates = self.meta["updates"]
        self.learner.start(restored and restored[0])
        self.done = self.meta["step"]
        checks.length(config, self.done, self.meta)
        self._saved = self.done
        self.pending: _Pending | None = None
        self._begun, self._left = 0.0, 0
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
            state=self.meta,
            sync=self.session.course.turn,
        )
        self.flight: Flight | None = None  # that was started while the step before was learned from
        if "flight" in self.meta:
            self.flight = self.rollouts.resumed(self.meta.pop("flight"))
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
        self.session.settle(finished=_share(self) >= 1)

    # ------------------------------------------------------------------------------------------ the loop

    def run(self) -> bool:
        """Trains to the end; False if it was told to stop before (the state is saved either way)."""
        try:
            with peers.telling(), enough_memory(lambda: self.done, REMEDIES):
                finished = self.session.conduct(self._loop, self._rescue)
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
        train, session, ahead = self.config.train, self.session, self.config.rollout.ahead > 0
        # Of a run that was stopped, the evaluation that was due after its last step.
        if self.done == 0 or (self.held_out.problems and _evaluates(self) and self._evaluated < self.done):
            self._evaluate(self.done)
        while _share(self) < 1:
            session.watchdog.begin(self.done + 1)
            session.profile.begin(self.done + 1, self.learner.state)
            if self.pending is None:  # what an evaluation or a save took is no part of the step
                self._begun = time.perf_counter()
            ready, following = self.flight, None
            flight = ready or _start(self)
            waiting = time.perf_counter() if ready else self._begun
            sampled = self.rollouts.collect(self.done + 1, flight)  # or `Stopped`, and `_save` keeps what was in flight
            waited = time.perf_counter() - waiting
            if ahead and train.done(self.done + 1, 0) < 1:
                following = _start(self)  # from here on, while this step is judged and learned from
            self._finish()  # behind the last rollout none is started
            self.pending = self._step(sampled, waited)
            self.done, self.flight = self.done + 1, following
            session.profile.end(self.done, self.learner.state)
            saves = _share(self) >= 1 or (train.checkpoint_every and self.done % train.checkpoint_every == 0)
            saves, evaluates = saves or session.course.due, _evaluates(self)
            if evaluates or saves:
                self._finish()
            session.watchdog.end()
            if saves:  # first, as an evaluation takes long and may fail
                self._save(judged=evaluates and bool(self.held_out.problems))
            if evaluates:
                self._evaluate(self.done)
        if self.held_out.test and not self._tested:
            self._test()

    def _step(self, sampled: Sampled, waited: float) -> _Pending:
        """Learns from a rollout that was waited for so long; its updates are under way when this returns."""
        learner, number, begun = self.learner, self.done + 1, time.perf_counter()
        sampled = learner.replace(sampled)
        rolled = time.perf_counter()
        minis = learner.prepare(sampled)
        signals = learner.score(minis)
        scored_at = time.perf_counter()
        batch, drawn = sampled.judged()
        rewarded = time.perf_counter()
        advantages, told, lengths = learner.weigh(minis, batch, sampled.dropped, signals)
        self._left = 0 if sampled.waiting is None else int(sampled.waiting.sum())
        self.meta |= self.rollouts.state()  # what a save accounts for: not the next rollout, under way
        prompt_tokens, sampled_tokens = step_metrics.tokens(drawn)
        before = _share(self)
        self.meta["num_tokens"] += prompt_tokens + sampled_tokens
        self.meta["sampled_tokens"] += sampled_tokens
        after = self.config.train.done(number, self.meta["sampled_tokens"])
        known = step_metrics.of_rollouts(sampled, batch, drawn, self.config.method) | {
            **told,
            "num_tokens": float(self.meta["num_tokens"]),
            "sampled_tokens": float(self.meta["sampled_tokens"]),
            "useful_token_fraction": float(np.mean([m.layout.useful for m in minis])),
            "time/data_s": self.rollouts.data_s,
            "time/rollout_s": waited + rolled - begun,
            "time/score_s": scored_at - rolled,
            "time/reward_s": rewarded - scored_at,
        }
        self.rollouts.data_s = 0.0
        if self.config.method.older:
            known |= step_metrics.of_version(sampled.version, learner.updates)
        samples = self.metrics.wants_samples(number)
        said = self.critic.said(signals) if samples and self.critic is not None else None
        # From here to the end of the step nothing waits for the device.
        dispatched = time.perf_counter()
        warming_up = self.critic is not None and number <= self.critic.config.warmup_steps
        shares = None if self.config.train.tokens is None else (min(before, 1.0), min(after, 1.0))
        owed = learner.update(minis, number, self.policy.alone, shares=shares, warming_up=warming_up)
        updating = time.perf_counter() - dispatched
        self.meta["updates"] = learner.updates
        learner.end_step(number)
        if samples:
            special = functools.partial(self.tokenize.read, "with_special_tokens", ())
            rows = functools.partial(_rows, self.policy, self.held_out.evaluator, special, batch, advantages, said)
            self.metrics.write_samples(number, rows)
        self.work = learner.work(drawn, batch, lengths, warming_up=warming_up)
        if self.meta["flops"] is not None:
            self.meta["flops"] += sum(self.work.values())
            known["flops"] = float(self.meta["flops"])
        if self.on_step is not None:
            self.on_step(sampled.problems, sampled.rollout)
        return _Pending(
            number=number,
            known=known,
            owed=owed,
            waited=updating,
            tokens=sampled_tokens,
            flops=sum(self.work.values()),
        )

    def _await_updates(self) -> _Pending | None:
        """The updates of the step that is `pending`, if one is, once they are over."""
        if self.pending is not None and self.pending.over is None:
            asked = time.perf_counter()
            owed = jax.device_get(self.pending.owed)
            over = time.perf_counter()
            waited = self.pending.waited + over - asked
            self.pending = dataclasses.replace(self.pending, owed=owed, over=over, waited=waited)
        return self.pending

    def _finish(self) -> None:
        """Waits for the updates of the step that is `pending`, if one is, and records its metrics. The next rollout is
        on the device by now, so that nothing here may ask the device for anything else."""
        pending, self.pending = self._await_updates(), None
        if pending is None:
            return
        assert pending.over is not None
        seconds, self._begun = pending.over - self._begun, pending.over  # the next rollout is queued behind the updates
        train, number, owed = self.config.train, pending.number, pending.owed
        values = pending.known | step_metrics.of_updates(owed)
        for m in owed:
            self.meta["skipped"] = self.meta["skipped"] + 1 if step_metrics.skipped(m) else 0
        values["skipped_updates"] = float(sum(step_metrics.skipped(m) for m in owed))
        values["empty_updates"] = float(train.updates_a_rollout - len(owed))
        if self.learner.objective.entropy_target is not None:
            values["entropy_coef"] = self.learner.entropy_coefs["applied"]
            self.learner.adapt(values.get("entropy", float("nan")))
            self.meta["entropy"] = self.learner.entropy_coefs
        values |= {"time/update_s": pending.waited, "time/step_s": seconds}
        values["time/checkpoint_s"], self.session.save_s = self.session.save_s, 0.0
        values["tokens_per_s"] = pending.tokens / seconds
        if peak := flops.PEAK_FLOPS.get(jax.devices()[0].device_kind):
            values["utilisation"] = pending.flops / seconds / peak / self.policy.count
        self.metrics.write(number, values | self.watch.note(number, values))
        if number % train.log_every == 0:
            self.table.row(number, values, share=train.done(number, int(values["sampled_tokens"])))
        checks.finite(number, values, self.meta["skipped"], self.config)
        watch.heed(self.watch, number, self.session, self.meta, train)

    def _evaluate(self, number: int) -> None:
        values = self.held_out.evaluate(number, self.policy.reshard(self.learner.state["policy"].params))
        if values is not None:
            self.metrics.write(number, values | self.watch.note(number, values))
            self.session.score(number, values)
            watch.heed(self.watch, number, self.session, self.meta, self.config.train)

    def _test(self) -> None:
        """Evaluates the final policy on the test set. A run that is stopped in it does so when it goes on."""
        values = self.held_out.read_test(self.done, self.policy.reshard(self.learner.state["policy"].params))
        self.metrics.write(self.done, values)
        self._tested = True

    def _save(self, *, judged: bool = False) -> None:
        self.meta["step"] = self._saved = self.done
        self.metrics.flush()
        in_flight = {} if self.flight is None else {"flight": self.flight.record()}
        self.session.save(self.learner.saved(), self.meta | in_flight, judged=judged)

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


def _rows(
    policy: Policy,
    evaluator: evaluation.Evaluator,
    special: Callable[[Sequence[Sequence[int]]], list[str]],
    batch: Judged,
    advantages: Tokens,
    said: Tokens | None,
) -> list[dict[str, Any]]:
    """A step's samples as they are kept; ``special`` makes texts with special tokens, ``said`` is what a critic said of
    their tokens."""
    rows = sample_rows(batch, advantages, policy.texts, evaluator.answer, special)
    if said is not None:
        annotate(rows, batch.rollout.tokens, batch.rollout.lengths, said)
    return rows


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


def _start(trainer: Trainer) -> Flight:
    """Dispatches the next rollout; the device has that to do while the step before is waited for and recorded."""
    if jax.default_backend() == "gpu":
        # There the host drives a program's loops: the call of a rollout returns at its end, and what the updates before
        # it took would be counted as the rollout's.
        trainer._await_updates()
    flight = trainer.rollouts.start()
    trainer._finish()
    return flight


def _evaluates(trainer: Trainer) -> bool:
    """Whether held-out problems are due after the step that was last done."""
    every = trainer.config.train.eval_every
    return _share(trainer) >= 1 or (every > 0 and trainer.done % every == 0)


def _share(trainer: Trainer) -> float:
    """Of the whole run, what is behind it."""
    return trainer.config.train.done(trainer.done, trainer.meta["sampled_tokens"])
