"""The source of a step's samples: its protocol, and the plain source, which draws when a step asks for it.

A step asks a source for its `RolloutBatch`: `Plain.start` chooses problems and dispatches a rollout, `Plain.collect`
waits for its samples and submits them to the rewards, and `Plain.batch` makes a step's batch of them. A filter waits
for the rewards there and draws more if needed. Otherwise `RolloutBatch.with_rewards` waits for them.

Other ways to draw are of parts (`grpojax.run.parts.part.Part.draws` and ``source``).
"""

import base64
import dataclasses
import functools
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from etils import epath

from grpojax import allocation, data
from grpojax.evaluation import columns_of, submit
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.host.on_host import on_host
from grpojax.programs import batch_shards, packing
from grpojax.programs.policy import Policy
from grpojax.programs.sampler import SamplerConfig
from grpojax.rewards import Rewards, Scores
from grpojax.rewards.scoring import weighted_sum
from grpojax.run.batch import RolloutBatch, take
from grpojax.run.curriculum import Curriculum
from grpojax.run.recipe import Config
from grpojax.run.run_state import RunState
from grpojax.types import Array, PerPrompt, Prompts, Rollout
from grpojax.variants import Variant

if TYPE_CHECKING:
    from grpojax.run.parts.part import Part

# Waits for device arrays. In a run, all processes then agree whether it goes on.
Sync = Callable[[Any], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The run that a source draws for.

    Attributes:
      state: where a resumed run is.
      folder: the run's directory; None on devices that compute nothing.
      sync: waits for device arrays, unless the run is to stop.
      begin: ``begin(start)`` gives ``start()``, which dispatches a step's rollout. While the devices work on it, the
        run waits for the step before and records it.
      since: when the updates before those in flight were over, or the step began.
    """

    state: RunState
    folder: epath.Path | None
    sync: Sync
    begin: Callable[[Callable[[], Any]], Any]
    since: Callable[[], float]


class Source(Protocol):
    """A way to draw samples.

    Attributes:
      seconds: spent on "data", the choice of problems, and on "rollout", waiting for samples, since it was cleared.
    """

    seconds: Counter[str]

    def next(self, number: int) -> RolloutBatch:
        """The batch of the step with that number. Its samples are there; its rewards may be under way.

        Raises:
          grpojax.run.control.Stopped: the run is to stop; `record` has what is in flight.
        """
        ...

    def note(self, batch: RolloutBatch) -> dict[str, float]:
        """Notes what later draws depend on, from a step's batch with its rewards. Returns metrics of it."""
        ...

    def write(self, state: RunState) -> None:
        """Stores the state that the next draws depend on, once a step has learned from its batch."""
        ...

    def record(self) -> dict[str, Any] | None:
        """A rollout in flight as a save stores it, as JSON; None without one."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Samples that the devices are drawing.

    Attributes:
      rollout: the samples on the devices.
      rows: number of its prompts; the last ones may only fill up the shards.
      prompts: number of prompts that were asked for.
    """

    rollout: Rollout
    rows: int
    prompts: int

    def fetch(self, policy: Policy, sync: Sync) -> Rollout:
        """Waits for the samples and brings them to the host, ``[P, G, ...]``."""
        sync(self.rollout)
        return jax.tree.map(lambda x: x[: self.prompts], policy.fetch(self.rollout, self.rows))


@dataclasses.dataclass(kw_only=True)
class InFlight:
    """A dispatched rollout.

    Attributes:
      number: number of the rollout in the run.
      problems: problems of its P prompts.
      dispatched: the samples, and what a subclass of `Plain` draws with them.
      samples: the same on the host; None until they are there.
      version: version of the weights that draw it: the number of the policy's updates in them.
      passes: pass over the data that each problem belongs to.
    """

    number: int
    problems: Sequence[data.Problem]
    dispatched: Sequence[Dispatched] = ()
    samples: Sequence[Rollout] | None = None
    version: int = 0
    passes: Sequence[int] = ()

    def on_host(self, policy: Policy, sync: Sync) -> Sequence[Rollout]:
        """Waits for the samples."""
        if self.samples is None:
            self.samples = [each.fetch(policy, sync) for each in self.dispatched]
        else:
            sync(())
        return self.samples

    def record(self, policy: Policy) -> dict[str, Any]:
        """The rollout as JSON, from which a resumed run restores it. It has the samples, since the weights that drew
        them are gone then. Waits for the samples, and is the same on all processes."""
        samples = self.on_host(policy, jax.block_until_ready)
        return {
            "number": self.number,
            "version": self.version,
            "uids": [p.uid for p in self.problems],
            "passes": list(self.passes),
            "samples": [{name: to_text(y) for name, y in vars(x).items() if y is not None} for x in samples],
        }


class Plain:
    """Draws a step's groups when the step begins, from the current policy.

    Args:
      config: the recipe.
      policy: the policy that samples.
      rewards: the rewards.
      problems: the problems.
      weights: returns the policy's current weights, and the number of updates in them.
      longest_prompt: most tokens of a prompt in the run.
      context: of the run.

    Attributes:
      curriculum: what chooses the problems of each rollout. A part may put another with the same methods in its place.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        rewards: Rewards,
        problems: data.Problems,
        *,
        weights: Callable[[], tuple[Any, int]],
        longest_prompt: int,
        context: Context,
    ):
        self.config, self.policy, self.rewards, self.problems = config.rollout, policy, rewards, problems
        self.method, self.weights, self.longest_prompt, self.context = config.method, weights, longest_prompt, context
        self.sync, self.columns = context.sync, columns_of(problems)
        self._seed, self._truncated = config.train.seed, config.train.truncated
        self.curriculum: Any = Curriculum(
            problems,
            config.rollout.prompts,
            config.train.seed,
            retire=config.method.retire,
            deciding=config.method.deciding,
            state=context.state,
        )
        self.drawn, self.seconds = context.state.rollouts, Counter[str]()

    # -------------------------------------------------------------------------------------------------- a step

    def next(self, number: int) -> RolloutBatch:
        """Dispatches the rollout of a step and waits for its samples."""
        first = self.context.begin(self.start)
        return self.batch(number, first, since=self.context.since())

    def batch(self, number: int, first: InFlight, *, since: float) -> RolloutBatch:
        """The batch of a step, once the samples of its first rollout are there. The wait for them began at ``since``,
        by `time.perf_counter`."""
        made = self._unfiltered(first) if self.method.filter is None else self._filtered(number, first)
        self.seconds["rollout"] += time.perf_counter() - since  # pyrefly: ignore
        return made

    def _unfiltered(self, first: InFlight) -> RolloutBatch:
        batch = self.collect(first)
        return dataclasses.replace(
            batch, dropped=~batch.rollout.lengths.any(1), version=self.version([first], [batch]), passes=first.passes
        )

    def _filtered(self, number: int, first: InFlight) -> RolloutBatch:
        """Waits for the rewards, and draws more until the number of kept groups is that of a rollout."""
        chosen, size = self.method.filter, self.config.prompts
        assert chosen is not None and chosen.max_rollouts is not None, "of a method it is filled in"
        started, drawn = [first], [self._judged(first)]
        keeps = [self.keeps(drawn[0])]
        wanted = int(drawn[0].rollout.lengths.any(1).sum())
        while sum(k.sum() for k in keeps) < wanted and len(drawn) < chosen.max_rollouts:
            started.append(self.start())
            drawn.append(self._judged(started[-1]))
            keeps.append(self.keeps(drawn[-1]))
        keep, there = np.concatenate(keeps), np.concatenate([d.rollout.lengths.any(1) for d in drawn])
        if not keep.any():
            log.warning(
                "step %d: the filter dropped all %d groups by %r: this step teaches nothing",
                number,
                there.sum(),
                self.method.deciding,
            )
        order = np.argsort(~keep, kind="stable")[:size]
        learned = np.zeros_like(keep)
        learned[order] = keep[order]
        return dataclasses.replace(
            take(drawn, order),
            dropped=~keep[order],
            kept_share=float(keep[there].mean()),
            version=self.version(started, drawn, learned),
            rollouts=drawn,
        )

    def _judged(self, in_flight: InFlight) -> RolloutBatch:
        """A rollout with its rewards, for which it waits."""
        return dataclasses.replace(self.collect(in_flight).with_rewards(), passes=in_flight.passes)

    @on_host()
    def keeps(self, batch: RolloutBatch) -> PerPrompt:
        """``[P]`` bool: the groups that dynamic sampling keeps."""
        variant, chosen, by_name = self.method.variant, self.method.filter, batch.by_name
        if self._truncated != "train":  # samples cut at the limit teach nothing
            by_name = {name: np.where(batch.rollout.stopped, x, np.nan) for name, x in by_name.items()}
        keep = allocation.keep_prompts if variant.keep is None else variant.keep
        success = {} if chosen is None or chosen.success is None else {"success": chosen.success}
        try:
            return np.asarray(keep(by_name, self.method.deciding, **success)) & batch.rollout.lengths.any(1)
        except ValueError as e:
            raise UserError(f"filter of variant {variant.name!r}: {e}") from e

    def version(
        self, started: Sequence[InFlight], drawn: Sequence[RolloutBatch], learned: PerPrompt | None = None
    ) -> int:
        """Number of updates in the weights that drew the oldest samples of a step, which are those of its first
        rollout.

        Args:
          started, drawn: its rollouts.
          learned: the groups to learn from, out of all; None for all that have samples.
        """
        return started[0].version

    def note(self, batch: RolloutBatch) -> dict[str, float]:
        """Notes what later draws depend on, from a step's batch with its rewards. Returns metrics of it."""
        self.curriculum.note((drawn, drawn.passes) for drawn in batch.as_drawn)
        return self.curriculum.metrics()

    def write(self, state: RunState) -> None:
        """Puts down what the next draws follow from."""
        state.rollouts = self.drawn
        self.curriculum.write(state)

    def record(self) -> dict[str, Any] | None:
        """None: between two steps no rollout is in flight."""
        return None

    # ------------------------------------------------------------------------------------------------ a rollout

    def start(self) -> InFlight:
        """Dispatches the next rollout. Its problems and its draws depend on its number in the run."""
        number = self.drawn
        self.drawn += 1
        version = self.weights()[1]
        problems, passes = self.choose(number)
        return dataclasses.replace(self.draw(problems, number), version=version, passes=passes)

    def choose(self, number: int) -> tuple[Sequence[data.Problem], Sequence[int]]:
        """The problems of the rollout with that number, and the pass over the data that each belongs to."""
        started = time.perf_counter()
        chosen = self.curriculum.draw(number)
        self.seconds["data"] += time.perf_counter() - started  # pyrefly: ignore
        return chosen

    def draw(self, problems: Sequence[data.Problem], number: int) -> InFlight:
        """Dispatches a rollout of these problems, with the draws of that number in the run.

        Args:
          problems: of its prompts.
          number: of the rollout.
        """
        dispatched = self.dispatch(self.params(), problems, self.key(number))
        return InFlight(number=number, problems=problems, dispatched=dispatched)

    def dispatch(self, params: Any, problems: Sequence[data.Problem], key: Array) -> list[Dispatched]:
        """Dispatches the samples of these problems; ``params`` are the weights that the policy samples with."""
        prompts = self.prompts(problems, self.config.group)
        sampled = self.policy.sample(params, prompts, key, self.config)
        return [Dispatched(rollout=sampled, rows=len(problems), prompts=len(problems))]

    def resumed(self, record: Mapping[str, Any]) -> InFlight:
        """A rollout that the run had drawn before it was stopped, from `InFlight.record`."""
        problems = {p.uid: p for p in self.problems}
        return InFlight(
            number=record["number"],
            problems=[problems[uid] for uid in record["uids"]],
            samples=[Rollout(**{name: from_text(x) for name, x in each.items()}) for each in record["samples"]],
            version=record["version"],
            passes=record["passes"],
        )

    def collect(self, in_flight: InFlight) -> RolloutBatch:
        """Waits for the samples of a rollout, during which the run may stop, and submits them to the rewards."""
        return self.submit(in_flight.problems, *in_flight.on_host(self.policy, self.sync))

    def submit(self, problems: Sequence[data.Problem], rollout: Rollout, *more: Rollout) -> RolloutBatch:
        """Submits samples to the rewards: each process its own rows. ``more`` is what a subclass drew with them."""
        wait = submit(self.rewards, problems, rollout, self.policy.texts, self.columns)
        return RolloutBatch(problems=problems, rollout=rollout, pending=[functools.partial(self.rewarded, wait)])

    def rewarded(self, wait: Callable[[], Scores], batch: RolloutBatch) -> RolloutBatch:
        """A batch with its rewards, ``[P * G]`` each, for which ``wait`` waits."""
        scores, shape, tokens = wait(), batch.rollout.lengths.shape, batch.rollout.tokens.shape
        signals = _of_steps(scores, self.method.variant, self.config.max_tokens)
        return dataclasses.replace(
            batch,
            total=scores.total.reshape(shape),
            reward=weighted_sum(self.rewards.config.terms, scores.by_name).reshape(shape),
            by_name={name: x.reshape(shape) for name, x in scores.by_name.items()},
            invalid=scores.invalid,
            signals={**batch.signals, **{name: x.reshape(tokens) for name, x in signals.items()}},
        )

    # ---------------------------------------------------------------------------------- what rollouts are drawn by

    def params(self) -> Any:
        """The policy's weights in the form that it samples with."""
        return self.policy.reshard(self.weights()[0], self.config.weights)

    def key(self, number: int) -> Array:
        """The random key of all draws of that rollout."""
        return jax.random.fold_in(jax.random.key(self._seed), number)

    def prompts(self, problems: Sequence[data.Problem], group: int = 0) -> Prompts:
        """Prompts ``[P, L]``, L one of few lengths; ``group`` as in `grpojax.data.to_prompts`."""
        longest = packing.bucket(max(len(p.ids) for p in problems), self.longest_prompt)
        return data.to_prompts(problems, longest, group)

    def dispatch_any(
        self, params: Any, prompts: Prompts, key: Array, config: SamplerConfig, *, name: str = "rollout"
    ) -> Dispatched:
        """Dispatches samples of any number of prompts. To fill the shards, the last ones get some prompts again.
        ``name`` is as of `Policy.sample`."""
        n = len(prompts.lengths)
        rows = batch_shards.filled(n, self.policy.sampling.shards)
        filled = jax.tree.map(lambda x: x[np.arange(rows) % n], prompts)
        rollout = self.policy.sample(params, filled, key, config, name=name)
        return Dispatched(rollout=rollout, rows=rows, prompts=n)


def _of_steps(scores: Scores, variant: Variant, longest: int) -> dict[str, Array]:
    """The rewards for steps of ``N`` samples as a signal, ``{"step_rewards": [N, T]}``, NaN where no step ends; none
    for a variant that reads none.

    Args:
      scores: of the samples.
      variant: of the run.
      longest: most tokens of a sample, T.

    Raises:
      UserError: the variant reads them and no reward gives any, or the other way round.
    """
    if "step_rewards" not in variant.needs:
        if scores.stepped:
            raise UserError(
                f"reward {scores.stepped[0]!r} gives rewards to steps, and variant {variant.name!r} reads "
                "none: take grpo_process, or give that reward weight 0"
            )
        return {}
    if scores.step_rewards is not None:
        return {"step_rewards": scores.step_rewards}
    if np.isfinite(scores.total).any():
        raise UserError(
            f"variant {variant.name!r} learns from rewards of steps, and no reward of the run gives "
            "any: take equations, or a function that returns a list of (token end, reward) for a sample"
        )
    return {"step_rewards": np.full((scores.total.size, longest), np.nan, np.float32)}


def make(
    config: Config,
    policy: Policy,
    rewards: Rewards,
    problems: data.Problems,
    *,
    parts: Sequence["Part"],
    **options: Any,
) -> Source:
    """The source of a recipe's run: the part's that draws in a way of its own, or `Plain`, as all parts wrap it.

    Args:
      config, policy, rewards, problems: as of `Plain`.
      parts: of the run.
      options: as of `Plain`, or as the part's source takes them.
    """
    kind = next((part.draws for part in parts if part.draws is not None), Plain)
    source = kind(config, policy, rewards, problems, **options)
    for part in parts:
        source = part.source(source)
    return source


def to_text(x: np.ndarray) -> dict[str, Any]:
    """An array as JSON, bit for bit.

    Example:
      >>> from_text(to_text(np.float32([[0.1, 0.2]]))).tolist() == np.float32([[0.1, 0.2]]).tolist()
      True
    """
    packed = zlib.compress(np.ascontiguousarray(x).tobytes(), 1)
    return {"dtype": str(x.dtype), "shape": list(x.shape), "zlib": base64.b64encode(packed).decode()}


def from_text(record: Mapping[str, Any]) -> np.ndarray:
    """The array that `to_text` was given."""
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(record["zlib"])), record["dtype"])
    return numbers.reshape(record["shape"]).copy()
