"""Supervised runs, ``grpojax sft`` and ``grpojax dpo``: a step takes a batch of the data and learns from it.

They are runs as any other (`grpojax.train`): `GivenAnswers` is the source, `lesson` makes the rows, and the loss is of
the `grpojax.extensions.supervised.teaching.Teaching`, which has what differs between completions and pairs.
"""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from grpojax import data
from grpojax import losses as L
from grpojax.device import ROWS
from grpojax.extensions.supervised import answer_scoring, teaching
from grpojax.extensions.supervised.answered import Answered, AnsweredProblems
from grpojax.extensions.supervised.finetune_recipe import DPOConfig, SFTConfig
from grpojax.extensions.supervised.supervised_programs import make_supervised_programs
from grpojax.extensions.supervised.teaching import Shapes, Teaching
from grpojax.host import processes
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models import flops, hf
from grpojax.programs import policy_state
from grpojax.programs.policy import Policy, model_facts
from grpojax.run import checks
from grpojax.run.batch import Batch, Sync
from grpojax.run.lesson import Clock, Lesson
from grpojax.run.minibatch import Minibatch
from grpojax.run.opening import Kept, fields, opening
from grpojax.run.run import Run
from grpojax.run.run_state import State
from grpojax.run.setup import Setup
from grpojax.run.today import with_day
from grpojax.types import Samples

BEST = "-eval/loss"  # the metric of the best checkpoint: the largest
PARTS = ("train", "validation", "test")

MEMORY = (
    "raise train.microbatches, set model.remat=layer, or spread over more devices (mesh.fsdp); in a new run lower "
    "train.batch_size or data.max_tokens"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Made:
    """What each process makes by itself.

    Attributes:
      policy: the model that learns.
      teaching: what it learns by.
      answers: the parts of the data, by name.
      shapes: the sizes of all batches.
      updates: number of updates of the whole run.
    """

    policy: Policy
    teaching: Teaching
    answers: Mapping[str, AnsweredProblems]
    shapes: Shapes
    updates: int

    def kept(self, name: str) -> Sequence[Answered]:
        """The entries of a part of the data; none of a part that is not given."""
        return self.answers[name].kept if name in self.answers else ()


def open_finetune(
    config: SFTConfig | DPOConfig, devices: Sequence[jax.Device] | None = None, *, take_over: bool = False
) -> Run:
    """Opens a supervised run, new or resumed from its directory.

    Args:
      config: the recipe; its class says what kind of training it is.
      devices: devices to run on; None takes all there are.
      take_over: break another process's claim on a run directory in a bucket.

    Raises:
      UserError: the directory holds a run of another config, or the data or the sizes do not go with it.
    """
    with opening(MEMORY) as held:
        with processes.AllOrNone():  # each process does this by itself
            tokenizer = hf.load_tokenizer(str(data.locate(config.model.path)))
            config = with_day(config, tokenizer, config.run.dir)
            kept = Kept.of(config, take_over=take_over)
            made = _prepare(config, tokenizer, devices)
            prints = {name: made.answers[name].fingerprint if name in made.answers else None for name in PARTS}
            kept.store.claim(held, prints)
        return _started(held, config, kept, made)


def _prepare(config: SFTConfig | DPOConfig, tokenizer: Any, devices: Sequence[jax.Device] | None) -> _Made:
    """The model and the data."""
    train, kind = config.train, teaching.teaching_of(config)
    if config.mesh.rollout:
        raise UserError(f"mesh.rollout={config.mesh.rollout}: nothing is sampled here; leave it out")
    tokenize = data.Tokenize(tokenizer, config.data.questions())
    policy = Policy(config.model, config.mesh, devices, tokenizer=tokenizer)
    checks.adapter(policy)
    policy.load()
    # If several tokens end a sample, this is the one that ends a message of the chat, or else the tokenizer's.
    own = (hf.turn_end(tokenizer) if tokenize.chat else None, tokenizer.eos_token_id, *policy.eos_ids)
    end = next((token for token in own if token is not None), None)
    if end is None:
        raise UserError(f"model.path={config.model.path!r} names no token that ends an answer (eos_token_id)")
    if len(policy.eos_ids) > 1:
        log.info("answers end with %r", tokenizer.convert_ids_to_tokens(end))
    answers, known = dict[str, AnsweredProblems](), data.Known()
    for name in reversed(PARTS):
        if (given := getattr(config.data, name)) is None:
            continue
        loaded = answers[name] = kind.answers(given, tokenize, config.data, end, known)
        known = known.and_those_of(loaded.kept)
        for line in loaded.notes(name, config.data):
            log.info("%s", line)
        for line in loaded.warnings(name):
            log.warning("%s", line)
    shapes = _shapes(config, policy, [entry for part in answers.values() for entry in part.kept])
    count = len(answers["train"].kept)
    if train.batch_size > count:
        raise UserError(f"train.batch_size={train.batch_size} is more than the {count} entries of the data")
    updates = train.updates(count)
    checks.warm_up(config.optimizer, updates)
    return _Made(policy=policy, teaching=kind, answers=answers, shapes=shapes, updates=updates)


def _started(held: contextlib.ExitStack, config: SFTConfig | DPOConfig, kept: Kept, made: _Made) -> Run:
    """The run, whose state is new or restored."""
    policy, kind, journal, train = made.policy, made.teaching, kept.journal, config.train
    loss = kind.objective(policy.graph, policy.compute)
    programs = make_supervised_programs(policy.shape, loss, config.optimizer, made.updates)
    setup = Setup(config=config, policy=policy, programs=programs, objective=L.Objective())
    scorer = answer_scoring.Scorer(policy, programs.score, made.shapes, train.batch_size)
    entries = {name: made.kept(name) for name in PARTS}
    if kind.needs_reference:
        weights = model_facts(config.resolved())["weights"]
        reference = scorer.reference(entries, kept.store.directory / "reference.npz", weights)
    else:
        reference = {x: np.zeros((len(each), made.shapes.group), np.float32) for x, each in entries.items()}
    held_out = HeldOutAnswers(kind, scorer, entries, reference, kept.control.sync)
    restored = kept.restore(held, setup.abstract(), best=held_out.best)
    journal.state = dataclasses.replace(journal.state, networks=setup.start(restored))
    if journal.state.step > made.updates:
        raise UserError(f"{made.updates} steps: the run in {config.run.dir} is at step {journal.state.step} already")

    def progress(state: State) -> float:
        return state.step / made.updates

    journal.open(
        held,
        policy,
        made.updates,
        progress=progress,
        gradient=checks.SMALLER,
        columns=kind.columns,
    )
    many: Any = entries["train"]
    batches = data.Batches(many, train.batch_size, train.seed, made.answers["train"].weights)
    return Run(
        **fields(setup),
        **fields(kept),
        source=GivenAnswers(batches, made.shapes, reference["train"], kept.control.sync),
        learn_from=functools.partial(lesson, made),
        held_out=held_out,
        progress=progress,
        samples=False,
        # On a CPU an update ahead gains nothing, and the times of two updates would mix.
        steps_in_flight=int(jax.default_backend() != "cpu"),
        held=held,
        memory=MEMORY,
    )


class GivenAnswers:
    """Gives each step the next batch of the data (`grpojax.run.source.Source`).

    Args:
      batches: the entries of each step.
      shapes: the sizes of all batches.
      reference: sums of log-probs by the reference, for each entry ``[N, G]``.
      sync: a step begins unless the run is to stop.
    """

    def __init__(self, batches: Any, shapes: Shapes, reference: Samples, sync: Sync):
        self.batches, self.shapes, self._reference, self._sync = batches, shapes, reference, sync
        self.seconds = Counter[str]()

    def begin(self, state: State) -> Batch:
        """The answers of the step after ``state``. Nothing is under way."""
        self._sync(())
        entries = cast(Sequence[Answered], self.batches[state.step])
        return teaching.to_batch(entries, self.shapes, self._reference[[e.uid for e in entries]])

    def next(self, state: State, first: Batch) -> Batch:
        """They are there."""
        return first

    def note(self, batch: Batch) -> dict[str, float]:
        """Nothing: the order of the data is fixed."""
        return {}

    def after_step(self) -> dict[str, Any]:
        """Nothing: the next batch follows from the number of steps."""
        return {}

    def saved(self) -> None:
        """Nothing is in flight between two steps."""


def lesson(made: _Made, run: Run, state: State, batch: Batch, clock: Clock) -> Lesson:
    """What a step learns from given answers."""
    rows, layout = made.teaching.part(batch, made.shapes)
    prompts, lengths = np.array([len(p.ids) for p in batch.problems]), batch.rollout.lengths
    passes = 3 if run.policy.adapter is None else 2  # frozen weights get no gradient
    return Lesson(
        batch=batch,
        minibatches=[Minibatch(np.arange(len(prompts)), run.policy.device.put(rows, ROWS), layout)],
        facts={
            "epoch": (state.step + 1) * len(prompts) / len(made.answers["train"].kept),
            "useful_token_fraction": layout.useful,
        },
        prompt_tokens=int(prompts.sum()),
        tokens=int(lengths.sum()),
        flops={"update": passes * flops.forward_flops(run.policy.config, prompts, lengths)},
    )


class HeldOutAnswers:
    """Scores ``data.validation`` and ``data.test`` (`grpojax.run.run.Evaluation`).

    Args:
      kind: has the metrics.
      scorer: scores answers.
      entries: the parts of the data by name, empty where one is not given.
      reference: sums of log-probs by the reference, by name, ``[N, G]``.
      sync: if it raises `grpojax.run.control.Stopped`, the evaluation is done later.

    Attributes:
      best: the metric whose largest value's checkpoint stays; None without a validation set.
    """

    def __init__(
        self,
        kind: Teaching,
        scorer: answer_scoring.Scorer,
        entries: Mapping[str, Sequence[Answered]],
        reference: Mapping[str, Samples],
        sync: Sync,
    ):
        self.kind, self.scorer, self.entries, self._reference, self._sync = kind, scorer, entries, reference, sync
        self.best = BEST if entries["validation"] else None

    def evaluate(self, state: State) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics of the policy on the validation set; its loss chooses the best checkpoint."""
        values = self._score("validation", state)
        log.info(
            "step %d  held-out loss %.4f of %d prompts",
            state.step,
            values["eval/loss"],
            len(self.entries["validation"]),
        )
        return values, {BEST: -values["eval/loss"]}

    def read_test(self, state: State) -> dict[str, float] | None:
        """Metrics of the final policy on the test set; None without one."""
        if not (count := len(self.entries["test"])):
            if self.best:
                log.info("no data.test: the held-out figures are of data.validation, which also chooses checkpoints")
            return None
        log.info("evaluating data.test, once and with the final weights: %d prompts", count)
        values = {name.replace("eval/", "test/", 1): value for name, value in self._score("test", state).items()}
        log.info("test loss %.4f of %d prompts, read once with the final weights", values["test/loss"], count)
        return values | {"test/problems": float(count)}

    def _score(self, name: str, state: State) -> dict[str, float]:
        weights = policy_state.weights(state.networks)
        logps, lengths = self.scorer.sums(self.entries[name], weights, lambda: self._sync(()))
        return self.kind.held_out(logps, lengths, self._reference[name])


def _shapes(config: SFTConfig | DPOConfig, policy: Policy, entries: Sequence[Answered]) -> Shapes:
    """The sizes that all batches share; raises `UserError` if they do not fit the devices or the model."""
    teaching.check_cut(config, policy.shards)
    prompt = max(len(entry.ids) for entry in entries)
    completion = max(len(ids) for entry in entries for ids in entry.completions)
    if prompt + completion > policy.config.max_positions:
        raise UserError(
            f"prompts of up to {prompt} tokens and answers of up to {completion} are over the model's "
            f"max_position_embeddings={policy.config.max_positions}: lower data.max_prompt_tokens or data.max_tokens"
        )
    return Shapes(
        group=max(len(entry.completions) for entry in entries),
        prompt=prompt,
        completion=completion,
        shards=policy.shards,
        microbatches=config.train.microbatches,
        gather=policy.compute.needs_gather,
    )
