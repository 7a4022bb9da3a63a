"""Opens a run of a recipe: everything that may be refused is refused here, before the first step."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from grpojax import data, evaluation, variants
from grpojax.device import compiling
from grpojax.host import processes
from grpojax.host.compile_cache import keep_compiled
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.host.watchdog import Watchdog
from grpojax.models import hf
from grpojax.programs.policy import Policy
from grpojax.rewards import Rewards
from grpojax.run import checks, learn, parts, source, watch
from grpojax.run.batch import Batch, annotate, sample_rows
from grpojax.run.control import RunControl
from grpojax.run.dry import learner_calls
from grpojax.run.ending import enough_memory, hang
from grpojax.run.held_out import HeldOut, announce
from grpojax.run.journal import Journal
from grpojax.run.make_programs import make_programs, program_inputs
from grpojax.run.parts.part import Part
from grpojax.run.profiling import Profile
from grpojax.run.recipe import Config
from grpojax.run.run import Run
from grpojax.run.run_state import State
from grpojax.run.setup import Setup
from grpojax.run.store import Recipe, Store
from grpojax.run.today import with_day
from grpojax.run.trial import learns_from_equals, try_out

MEMORY = (
    "raise train.microbatches, set model.remat=layer, lower rollout.decode_slots, or spread over more devices "
    "(mesh.fsdp); in a new run lower rollout.prompts or rollout.max_tokens"
)


def open_run(
    config: Config,
    devices: Sequence[jax.Device] | None = None,
    *,
    eos_ids: tuple[int, ...] | None = None,
    take_over: bool = False,
    learns: bool = True,
) -> Run:
    """Opens a run, new or resumed from its directory.

    Args:
      config: the recipe.
      devices: devices to run on; None takes all there are.
      eos_ids: tokens that end a sample in place of the model's; if empty, every sample has the full length.
      take_over: break another process's claim on a run directory in a bucket.
      learns: whether it will learn. If not, updates and scores are not compiled ahead.

    Raises:
      UserError: the directory holds a run of another recipe, or the recipe's data, model, sizes or rewards do not go
        together.
    """
    with opening(MEMORY) as held:
        with processes.AllOrNone():  # each process does this by itself
            checks.variant_source(config)
            try_out(config.method.variant, config.rollout)
            tokenizer = hf.load_tokenizer(str(data.locate(config.model.path)))
            config = with_day(config, tokenizer, config.run.dir)
            kept = Kept.of(config, take_over=take_over)
            made = _prepare(held, config, tokenizer, kept, devices, eos_ids)
            _tell(config)
        return _started(held, config, kept, made, learns)


@contextlib.contextmanager
def opening(memory: str) -> Iterator[contextlib.ExitStack]:
    """A context in which a run is opened. What it holds is released if that raises, and otherwise by `Run.close`.

    Args:
      memory: the remedy for the error if memory runs out.
    """
    with contextlib.ExitStack() as guard:
        held = guard.enter_context(contextlib.ExitStack())
        with processes.telling(), enough_memory(lambda: "before the first step", memory):
            yield held
        guard.pop_all()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What any run has beside its steps: the fields of `Run` with these names."""

    control: RunControl
    store: Store
    journal: Journal
    watchdog: Watchdog
    profile: Profile

    @classmethod
    def of(cls, config: Recipe, *, take_over: bool) -> "Kept":
        """Those of a recipe. Checks the run's directory, and opens this process's cache of compiled programs."""
        # First: its keys have the number of earlier ones in them, which must be the same on all processes.
        control = RunControl(config.train.checkpoint_minutes)
        store = Store(config, take_over=take_over)
        keep_compiled(config.compile_cache, config.run.dir)
        return cls(
            control=control,
            store=store,
            journal=Journal(config, store),
            watchdog=Watchdog(functools.partial(hang, config.train.hang_policy), compiling),
            profile=Profile(config.profile, config.run.dir),
        )

    def restore(
        self, held: contextlib.ExitStack, abstract: Mapping[str, Any], *, best: str | None
    ) -> dict[str, Any] | None:
        """Weights by role of the newest checkpoint, whose state becomes the journal's; None in a new run.

        Args:
          held: releases the checkpoints.
          abstract: of `Setup.abstract`.
          best: the metric whose largest value's checkpoint stays; None without a validation set.
        """
        self.store.open(held, best)
        held.callback(self.profile.close)
        restored = self.store.restore(abstract)
        if restored is None:
            return None
        weights, self.journal.state = restored
        return weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Made:
    """What each process makes by itself."""

    policy: Policy
    tokenize: data.Tokenize
    rewards: Rewards
    players: Any
    held_out: HeldOut
    problems: data.Problems
    parts: Sequence[Part]


def _prepare(
    held: contextlib.ExitStack,
    config: Config,
    tokenizer: Any,
    kept: Kept,
    devices: Sequence[jax.Device] | None,
    eos_ids: tuple[int, ...] | None,
) -> _Made:
    """The model, the rewards and the data. Claims the run's directory."""
    kinds = parts.of(config)
    episodes, environments = kinds.get("environment"), None
    if episodes is not None:
        environments = episodes.environments_of(config.environment, tokenizer)
        held.callback(environments.close)
    tools = None if environments is None else environments.tools
    tokenize = data.Tokenize(tokenizer, config.data, tools=tools)
    policy = Policy(config.model, config.mesh, devices, eos_ids=eos_ids, tokenizer=tokenizer)
    if eos_ids is None:
        hf.check_ends(config.model.path, policy.eos_ids, no_end=config.rollout.no_end, setting="rollout.no_end=true")
    checks.adapter(policy)
    checks.shapes(config, policy.shards, policy.sampling.shards)
    checks.cache(config, policy)
    rewards = held.enter_context(Rewards(config.method.rewards, read=tokenize.read))
    reads_gold = any(kind.reads_gold for kind in kinds.values())
    compared = rewards.compares or reads_gold
    players = None
    if episodes is not None:
        players = episodes.players_of(config, policy, environments, tokenize, rewards)
    held_out = HeldOut(config, policy, rewards, tokenize, sync=kept.control.sync, players=players)
    problems = data.load_problems(
        config.data.train,
        tokenize,
        config.data,
        rewards.check_gold,
        compared=compared,
        known=held_out.known,
        of_row=tokenize.of_row,
    )
    if reads_gold and any(p.gold is None for p in problems):
        raise UserError(f"variant {config.method.variant.name!r} needs the true answers: set data.answer")
    announce(problems, "train", config.data)
    for line in rewards.notes(tokenize.special, tokenize.tail(problems[0].ids)):
        log.warning("%s", line)
    if len(problems) < (size := config.rollout.prompts):
        log.info(
            "the data has %d problems for rollout.prompts=%d: passes over it follow one another within a step, and "
            "a problem that is drawn again gets samples of its own",
            len(problems),
            size,
        )
    checks.passes(config, problems)
    for kind in kinds.values():
        kind.check(problems)
    every = [*problems, *held_out.problems, *held_out.test]
    columns = evaluation.columns_of(every)
    rewards.check_columns(columns if players is None else players.columns_with(columns))
    checks.positions(every, config.rollout.max_tokens, policy.config.max_positions)
    added = [kind(config, policy.shape) for kind in kinds.values()]
    policy.load()
    for part in added:
        part.load(policy)
    kept.store.claim(held, {"train": problems.fingerprint, **held_out.fingerprints})
    return _Made(
        policy=policy,
        tokenize=tokenize,
        rewards=rewards,
        players=players,
        held_out=held_out,
        problems=problems,
        parts=added,
    )


def _tell(config: Config) -> None:
    """Says what the variant is."""
    for line in str(config.method.variant).splitlines()[1:]:
        log.info("%s", line)
    twin = variants.twin_at_one_update(config.method.variant)
    if twin and config.train.updates_a_rollout == 1 and not config.method.older:
        log.info("%s", twin)


def _started(held: contextlib.ExitStack, config: Config, kept: Kept, made: _Made, learns: bool) -> Run:
    """The run, whose state is new or restored."""
    policy, journal, train = made.policy, kept.journal, config.train
    shape, longest = policy.shape, _longest_prompt(config, made.problems)
    inputs = program_inputs(config, shape)
    checks.warm_up(config.optimizer, inputs.updates)
    programs = make_programs(inputs, made.parts)
    # Not earlier: until here a recipe may be refused.
    others = [kind(config, shape) for kind in parts.of(config).values()]  # a dry run opens parts of its own
    if learns:
        policy.device.compile_ahead(learner_calls(config, shape, programs, others, longest_prompt=longest))
        held.callback(policy.device.close)
    setup = Setup(
        config=config,
        policy=policy,
        programs=programs,
        objective=config.method.variant.objective,
        parts=made.parts,
        longest_prompt=longest,
        ppo_epochs=train.ppo_epochs,
    )
    setup.open_parts()
    restored = kept.restore(held, setup.abstract(), best=made.held_out.best)
    state = journal.state
    if restored is not None:
        state = watch.resume(kept.store, state, train)
    checks.length(config, state)
    state = dataclasses.replace(state, networks=setup.start(restored), budget=train.tokens)
    samples_from = source.make(
        config,
        policy,
        made.rewards,
        made.problems,
        parts=made.parts,
        longest_prompt=longest,
        context=source.Context(
            state=dataclasses.replace(state, networks={}),
            folder=kept.store.directory,
            sync=kept.control.sync,
        ),
        **({} if made.players is None else {"players": made.players}),
    )
    journal.state = dataclasses.replace(state, in_flight=None)  # the source has it now

    def progress(state: State) -> float:
        return train.done(state.step, state.sampled_tokens)

    journal.open(
        held,
        policy,
        train.steps,
        progress=progress,
        gradient=f"{checks.SMALLER}, or look at the samples: grpojax show {config.run.dir}",
        alarms=_alarms(config, kept.store, made),
        follow=functools.partial(learn.adapted, setup),
    )
    return Run(
        **fields(setup),
        **fields(kept),
        source=samples_from,
        learn_from=learn.from_rewards,
        held_out=made.held_out,
        progress=progress,
        by_progress=train.tokens is not None,
        lines_of=functools.partial(_lines_of, made),
        held=held,
        memory=MEMORY,
    )


def fields(x: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, as they are."""
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}


def _alarms(config: Config, store: Store, made: _Made) -> watch.Watch:
    """What looks at the metrics of the run."""
    return watch.Watch(
        store.directory,
        judge=made.held_out.evaluator.judge,
        problems=len(made.held_out.problems),
        comparable=config.method.retire is None and config.rollout.curriculum is None,
        uniform=functools.partial(learns_from_equals, config.method.variant, config.rollout),
        errors=made.rewards.first_errors,
        stops=config.train.on_collapse == "stop",
    )


def _lines_of(made: _Made, batch: Batch) -> Callable[[], list[dict[str, Any]]]:
    """A function that makes the lines of a batch's samples to store."""
    texts, answer = made.policy.texts, made.held_out.evaluator.answer
    columns = {name: x for part in made.parts for name, x in part.columns(batch).items()}
    special = functools.partial(made.tokenize.read, "with_special_tokens", ())

    def lines() -> list[dict[str, Any]]:
        stored = sample_rows(batch, texts, answer, special)
        if columns:
            annotate(stored, batch.rollout, columns)
        return stored

    return lines


def _longest_prompt(config: Config, problems: data.Problems) -> int:
    """Most tokens of a prompt in the run: those of the data, or more if a part adds to prompts."""
    most = config.data.max_prompt_tokens
    if any(kind.longer_prompts for kind in parts.of(config).values()):
        return most
    return min(most, -(-max(len(p.ids) for p in problems) // 8) * 8)
