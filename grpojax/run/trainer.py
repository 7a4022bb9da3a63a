"""Reinforcement: a step draws samples, gets their rewards, weighs them, and learns from them. Read it from the top.

It runs in `grpojax.run.loop.Loop`, which reads the metrics of the last updates while the next rollout is drawn.
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
from grpojax.host import processes
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models import hf
from grpojax.programs import policy_state
from grpojax.programs.policy import Policy
from grpojax.records import curve, metrics
from grpojax.rewards import Rewards
from grpojax.run import checks, parts, recorder, source, step_metrics, watch
from grpojax.run.alarms import SAID
from grpojax.run.batch import Batch, annotate, sample_rows
from grpojax.run.dry import learner_calls
from grpojax.run.held_out import HeldOut, announce
from grpojax.run.learner import Learner
from grpojax.run.loop import Loop, Task, Updates
from grpojax.run.method import learns_from_equals
from grpojax.run.programs import learning_of, make_programs
from grpojax.run.recipe import Config
from grpojax.run.run_state import State
from grpojax.types import Rollout

REMEDIES = (
    "raise train.microbatches, set model.remat=layer, lower rollout.decode_slots, or spread over more devices "
    "(mesh.fsdp); in a new run lower rollout.prompts or rollout.max_tokens"
)


class Clock:
    """Seconds of the parts of a step, by name; the first began at ``since``, by `time.perf_counter`."""

    def __init__(self, since: float) -> None:
        self.seconds, self._since = Counter[str](), since

    def lap(self, name: str | None) -> None:
        """Ends a phase of the step; None ends a time span that belongs to no phase."""
        now = time.perf_counter()
        if name is not None:
            self.seconds[name] += now - self._since  # pyrefly: ignore
        self._since = now


class Trainer(Task):
    """A run of ``config``, new or resumed from its directory.

    Raises `UserError` if the directory holds a run of another config.

    Args:
      config: the recipe.
      devices: devices to run on; None takes all there are.
      eos_ids: tokens that end a sample in place of the model's; if empty, every sample has the full length.
      on_step: called once a step with the problems and the samples that it learns from.
      take_over: break another process's claim on a run directory in a bucket.

    Attributes:
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
        self.on_step, self.work, self._left = on_step, dict[str, float](), 0
        look = f"{checks.SMALLER}, or look at the samples: grpojax show {config.run.dir}"
        self.loop = Loop(self, memory=REMEDIES, gradient=look, take_over=take_over)
        with self.loop.opening() as held:
            with processes.AllOrNone():
                self._prepare(held, config, devices, eos_ids)
            self._open(held)

    def _prepare(
        self,
        held: contextlib.ExitStack,
        config: Config,
        devices: Sequence[jax.Device] | None,
        eos_ids: tuple[int, ...] | None,
    ) -> None:
        """The part of the preparation that each process does by itself."""
        checks.variant_source(config)
        tokenizer = hf.load_tokenizer(str(data.locate(config.model.path)))
        self.config = config = self.loop.prepare(config, tokenizer)
        kinds = parts.of(config)
        episodes, environments = kinds.get("environment"), None
        if episodes is not None:
            environments = episodes.environments_of(config.environment, tokenizer)
            held.callback(environments.close)
        tools = None if environments is None else environments.tools
        self.tokenize = tokenize = data.Tokenize(tokenizer, config.data, tools=tools)
        self.policy = Policy(config.model, config.mesh, devices, eos_ids=eos_ids, tokenizer=tokenizer)
        if eos_ids is None:
            hf.check_ends(
                config.model.path, self.policy.eos_ids, no_end=config.rollout.no_end, setting="rollout.no_end=true"
            )
        checks.adapter(self.policy)
        checks.shapes(config, self.policy.shards, self.policy.sampling.shards)
        checks.cache(config, self.policy)
        self.rewards = held.enter_context(Rewards(config.method.rewards, read=tokenize.read))
        reads_gold = any(kind.reads_gold for kind in kinds.values())
        compared = self.rewards.compares or reads_gold
        self.players = None
        if episodes is not None:
            self.players = episodes.players_of(config, self.policy, environments, tokenize, self.rewards)
        self.held_out = HeldOut(
            config, self.policy, self.rewards, tokenize, sync=self.session.control.sync, players=self.players
        )
        self.problems = data.load_problems(
            config.data.train,
            tokenize,
            config.data,
            self.rewards.check_gold,
            compared=compared,
            known=self.held_out.known,
            of_row=tokenize.of_row,
        )
        if reads_gold and any(p.gold is None for p in self.problems):
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
        for kind in kinds.values():
            kind.check(self.problems)
        every = [*self.problems, *self.held_out.problems, *self.held_out.test]
        columns = evaluation.columns_of(every)
        self.rewards.check_columns(columns if self.players is None else self.players.columns_with(columns))
        checks.positions(every, config.rollout.max_tokens, self.policy.config.max_positions)
        self.parts = [kind(config, self.policy.shape) for kind in kinds.values()]
        self.policy.load()
        for part in self.parts:
            part.load(self.policy)
        self.session.claim(held, {"train": self.problems.fingerprint, **self.held_out.fingerprints})
        for line in str(config.method.variant).splitlines()[1:]:
            log.info("%s", line)
        twin = variants.twin_at_one_update(config.method.variant)
        if twin and config.train.updates_a_rollout == 1 and not config.method.older:
            log.info("%s", twin)

    def _open(self, held: contextlib.ExitStack) -> None:
        """The run's state, new or restored."""
        config, shape, longest = self.config, self.policy.shape, _longest_prompt(self.config, self.problems)
        learning = learning_of(config, shape)
        checks.warm_up(config.optimizer, learning.updates)
        programs = make_programs(learning, self.parts)
        # Not earlier: until here a recipe may be refused.
        added = [kind(config, shape) for kind in parts.of(config).values()]
        calls = learner_calls(config, shape, programs, added, longest_prompt=longest)
        self.policy.device.compile_ahead(calls)
        held.callback(self.policy.device.close)
        self.learner = Learner(
            self.policy,
            programs,
            config.method,
            config.train,
            max_prompt_tokens=longest,
            parts=self.parts,
        )
        restored = self.loop.restore(held, self.learner.abstract(), best=self.held_out.best)
        if restored is not None:
            self.loop.state = watch.resume(self.session, self.state, config.train)
        checks.length(config, self.state)
        networks = self.learner.start(restored)
        self.loop.state = dataclasses.replace(self.state, networks=networks, budget=config.train.tokens)
        self.source = source.make(
            config,
            self.policy,
            self.rewards,
            self.problems,
            parts=self.parts,
            weights=lambda: (policy_state.weights(self.state.networks), self.state.updates),
            longest_prompt=longest,
            context=source.Context(
                state=dataclasses.replace(self.state, networks={}),
                folder=self.session.directory,
                sync=self.session.control.sync,
            ),
            **({} if self.players is None else {"players": self.players}),
        )
        self.loop.state = dataclasses.replace(self.state, in_flight=None)  # the source has it now
        alarms = watch.Watch(
            self.session.directory,
            judge=self.held_out.evaluator.judge,
            problems=len(self.held_out.problems),
            comparable=config.method.retire is None and config.rollout.curriculum is None,
            uniform=functools.partial(learns_from_equals, config.method.variant, config.rollout),
            errors=self.rewards.first_errors,
            stops=config.train.on_collapse == "stop",
        )
        share = config.train.done(self.done, self.state.sampled_tokens)
        self.loop.start(held, config.train.steps, share=share, alarms=alarms)

    def run(self) -> bool:
        """Trains to the end; False if it was stopped before (the state is saved either way)."""
        finished = super().run()
        for line in (part.warning(self.done) for part in self.parts if finished):
            if line is not None:
                log.warning("%s", line)
        if finished and self._left:
            log.info("%d groups were under way when the run ended: their samples are not learned from", self._left)
        return finished

    # ------------------------------------------------------------------------------------------ a step

    def step(self, state: State) -> tuple[State, Updates]:
        """Waits for a batch of samples, and learns from it."""
        learner, method, number, began = self.learner, self.config.method, state.step + 1, time.perf_counter()
        # While devices draw, the loop records the step before. A save keeps what is in flight if this raises `Stopped`.
        first, state = self.loop.begin(functools.partial(self.source.begin, number))
        clock = Clock(began if first.arrive is None else self.loop.since)
        batch = learner.replace(state.networks, self.source.next(number, first))
        clock.lap("rollout")
        minis, signals = learner.score(state.networks, learner.pack(batch))
        clock.lap("score")
        batch = batch.with_rewards()
        of_problems = self.source.note(batch)
        clock.lap("reward")
        minis, batch, of_signals = learner.weigh(state.networks, minis, batch, signals)

        before, state = self.loop.share, self._counted(state, batch)
        known = step_metrics.of_rollouts(batch, method) | of_problems | of_signals
        known["useful_token_fraction"] = float(np.mean([m.layout.useful for m in minis]))
        if method.older:
            known |= step_metrics.of_version(batch.version, state.updates)
        sampled, train = self._sampled(number, batch), self.config.train
        share = train.done(number, state.sampled_tokens)
        clock.lap(None)
        # From here to the end of the step nothing waits for the device.
        shares = None if train.tokens is None else (before, min(share, 1.0))
        entropy = learner.entropy_of(state)["applied"]
        state, metrics = learner.update(state, minis, shares=shares)
        clock.lap("update")
        state = learner.end_step(state)
        if sampled is not None:
            self.loop.metrics.write_samples(number, sampled)
        self.work = learner.work(batch, number)
        if self.on_step is not None:
            self.on_step(batch.problems, batch.rollout)
        flops = state.flops + sum(self.work.values())
        state = dataclasses.replace(state, step=number, flops=flops, **self.source.after_step())
        adapts = learner.objective.entropy_target is not None
        return state, Updates(
            number=number,
            known=known | self._counts(state, metrics, clock) | ({"entropy_coef": entropy} if adapts else {}),
            metrics=metrics,
            tokens=step_metrics.tokens(batch.everything)[1],
            flops=sum(self.work.values()),
            share=share,
            waited=clock.seconds["update"],
            follow=self._adapted if adapts else None,
        )

    def _counted(self, state: State, batch: Batch) -> State:
        """The state with the tokens of a batch."""
        prompt_tokens, sampled_tokens = step_metrics.tokens(batch.everything)
        self._left = 0 if batch.waiting is None else int(batch.waiting.sum())
        return dataclasses.replace(
            state,
            num_tokens=state.num_tokens + prompt_tokens + sampled_tokens,
            sampled_tokens=state.sampled_tokens + sampled_tokens,
        )

    def _sampled(self, number: int, batch: Batch) -> Callable[[], list[dict[str, Any]]] | None:
        """A function that makes the rows of a step's samples to store; None if those of this step are not stored."""
        if not self.loop.metrics.wants_samples(number):
            return None
        texts, answer = self.policy.texts, self.held_out.evaluator.answer
        columns = {name: x for part in self.parts for name, x in part.columns(batch.signals).items()}
        special = functools.partial(self.tokenize.read, "with_special_tokens", ())

        def rows() -> list[dict[str, Any]]:
            made = sample_rows(batch, texts, answer, special)
            if columns:
                annotate(made, batch.rollout, columns)
            return made

        return rows

    def _counts(self, state: State, metrics: list[dict[str, Any]], clock: Clock) -> dict[str, float]:
        """What a step's metrics say of the run, and the seconds of its phases."""
        seconds = clock.seconds + self.source.seconds
        self.source.seconds.clear()
        return {
            "num_tokens": float(state.num_tokens),
            "sampled_tokens": float(state.sampled_tokens),
            "flops": float(state.flops),
            "empty_updates": float(self.config.train.updates_a_rollout - len(metrics)),
            **{f"time/{name}_s": float(seconds[name]) for name in ("data", "rollout", "score", "reward")},
        }

    def _adapted(self, state: State, values: Mapping[str, float]) -> State:
        """The state with an adaptive entropy bonus that follows the metrics of a step."""
        return self.learner.adapted(state, values.get("entropy", float("nan")))

    # ------------------------------------------------------------------------------------------ what the loop asks for

    @property
    def networks(self) -> Mapping[str, Any]:
        """The weights that are saved, by role."""
        return self.learner.saved(self.state.networks)

    def record(self) -> State:
        """The rest of what is saved."""
        return dataclasses.replace(self.state, in_flight=self.source.record())

    def evaluate(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics of the policy on the validation set; they pick the best checkpoint."""
        values = self.held_out.evaluate(number, self._for_rollouts())
        return values, values

    def test(self, number: int) -> dict[str, float] | None:
        """Metrics of the final policy on the test set; None without one."""
        return self.held_out.read_test(number, self._for_rollouts()) if self.held_out.test else None

    def _for_rollouts(self) -> Any:
        """The policy's weights in the form that it samples with."""
        return self.policy.reshard(policy_state.weights(self.state.networks))

    def check_learned(self) -> None:
        """Raises `UserError` after a run in which no sample had a valid reward: its policy has not changed."""
        if self.loop.watch is not None and self.loop.watch.all_invalid:
            raise UserError(
                f"{self.session.directory}: nothing was learned in {self.done} steps: no sample had a valid reward\n"
                f"{SAID['rewards_invalid'][1]}; then start a new run"
            )

    def report(self) -> None:
        """Prints the held-out reward before and after and three samples, and writes ``curve.png``."""
        if not processes.is_first():
            return
        with recorder.optional("the report"):
            lines = metrics.read_metrics(self.session.directory)
            self.held_out.report(lines)
            path = self.session.directory / "curve.png"
            if curve.draw_curve(lines, path):
                log.info("reward curve: %s", path)


def _longest_prompt(config: Config, problems: data.Problems) -> int:
    """Most tokens of a prompt in the run: those of the data, or more if a plan puts solved problems before prompts, or
    an environment adds to them."""
    most = config.data.max_prompt_tokens
    if config.method.plan is not None or config.environment is not None:
        return most
    return min(most, -(-max(len(p.ids) for p in problems) // 8) * 8)
