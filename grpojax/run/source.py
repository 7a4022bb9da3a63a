"""The source of a step's samples: its protocol, and the plain source, which draws when a step asks for it.

A step asks a source for its `Batch`: `Plain.start` chooses problems and dispatches a rollout,
`Batch.arrived` waits for its samples and submits them to the rewards, and `Plain.next` makes a step's batch of
them. A filter waits for the rewards there and draws more if needed. Otherwise `Batch.with_rewards` waits for
them.

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
from grpojax.programs import batch_shards, policy_state
from grpojax.programs.policy import Policy
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.rewards import Rewards, RewardScores
from grpojax.rewards.scoring import weighted_sum
from grpojax.run.batch import Batch, Fetch, Sync, take
from grpojax.run.problem_order import ProblemOrder
from grpojax.run.recipe import Config
from grpojax.run.run_state import State
from grpojax.types import Array, PerPrompt, Prompts, Rollout
from grpojax.variants import Variant

if TYPE_CHECKING:
    from grpojax.run.parts.part import Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The run that a source draws for.

    Attributes:
      state: where the run is when the source is made.
      folder: the run's directory; None on devices that compute nothing.
      sync: waits for device arrays, unless the run is to stop.
    """

    state: State
    folder: epath.Path | None
    sync: Sync


class Source(Protocol):
    """A way to draw samples.

    Attributes:
      seconds: spent on "data", the choice of problems, since it was cleared.
    """

    seconds: Counter[str]

    def begin(self, state: State) -> Batch:
        """Dispatches the first rollout of the step after ``state``. While devices draw it, the run waits for the step
        before and records it.

        Raises:
          grpojax.run.control.Stopped: the run is to stop; `saved` has what is in flight.
        """
        ...

    def next(self, state: State, first: Batch) -> Batch:
        """The batch of the step after ``state``, from what `begin` returned. Its samples are there; its rewards may be
        under way.

        Raises:
          grpojax.run.control.Stopped: as of `begin`.
        """
        ...

    def note(self, batch: Batch) -> dict[str, float]:
        """Notes what later draws depend on, from a step's batch with its rewards. Returns metrics of it."""
        ...

    def after_step(self) -> dict[str, Any]:
        """What the next draws depend on, once a step has learned from its batch, as of `State.having`."""
        ...

    def saved(self) -> dict[str, Any] | None:
        """A rollout in flight as a save stores it, as JSON; None without one."""
        ...


class Plain:
    """Draws a step's groups when the step begins, from the current policy.

    Args:
      config: the recipe.
      policy: the policy that samples.
      rewards: the rewards.
      problems: the problems.
      longest_prompt: most tokens of a prompt in the run.
      context: of the run.

    Attributes:
      order: what chooses the problems of each rollout. A part may put another with the same methods in its place.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        rewards: Rewards,
        problems: data.Problems,
        *,
        longest_prompt: int,
        context: Context,
    ):
        self.config, self.policy, self.rewards, self.problems = config.rollout, policy, rewards, problems
        self.method, self.longest_prompt, self.context = config.method, longest_prompt, context
        self.sync, self.columns = context.sync, columns_of(problems)
        self._seed, self._truncated = config.train.seed, config.train.truncated
        self.order: Any = ProblemOrder(
            problems,
            config.rollout.prompts,
            config.train.seed,
            retire=config.method.retire,
            deciding=config.method.deciding,
            state=context.state,
        )
        self.rollouts, self.seconds = context.state.rollouts, Counter[str]()

    # -------------------------------------------------------------------------------------------------- a step

    def begin(self, state: State) -> Batch:
        """Dispatches the first rollout of a step."""
        return self.start(state)

    def next(self, state: State, first: Batch) -> Batch:
        """The batch of a step, once the samples of its first rollout are there."""
        return self._unfiltered(first) if self.method.filter is None else self._filtered(state, first)

    def _unfiltered(self, first: Batch) -> Batch:
        batch = first.arrived()
        dropped = ~batch.rollout.lengths.any(1)
        return dataclasses.replace(batch, dropped=dropped, version=self.version([first], [batch]))

    def _filtered(self, state: State, first: Batch) -> Batch:
        """Waits for the rewards, and draws more until the number of kept groups is that of a rollout."""
        chosen, size = self.method.filter, self.config.prompts
        # At most three in all by default, or one if the variant does not draw again (`grpojax.run.run_method.resolve`).
        assert chosen is not None and chosen.max_rollouts is not None
        started, drawn = [first], [first.arrived().with_rewards()]
        keeps = [self.keeps(drawn[0])]
        wanted = int(drawn[0].rollout.lengths.any(1).sum())
        while sum(k.sum() for k in keeps) < wanted and len(drawn) < chosen.max_rollouts:
            started.append(self.start(state))
            drawn.append(started[-1].arrived().with_rewards())
            keeps.append(self.keeps(drawn[-1]))
        keep, there = np.concatenate(keeps), np.concatenate([d.rollout.lengths.any(1) for d in drawn])
        if not keep.any():
            log.warning(
                "step %d: the filter dropped all %d groups by %r: this step teaches nothing",
                state.step + 1,
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

    @on_host()
    def keeps(self, batch: Batch) -> PerPrompt:
        """``[P]`` bool: the groups that dynamic sampling keeps."""
        variant, chosen, by_name = self.method.variant, self.method.filter, batch.by_name
        there, stopped = batch.rollout.lengths.any(1), batch.rollout.stopped
        if self._truncated == "drop":  # samples cut at the limit are in no statistic
            by_name = {name: np.where(stopped, x, np.nan) for name, x in by_name.items()}
        elif self._truncated == "mask":  # they are, but a group of them alone teaches nothing
            there &= stopped.any(1)
        keep = allocation.keep_prompts if variant.keep is None else variant.keep
        success = {} if chosen is None or chosen.success is None else {"success": chosen.success}
        try:
            return np.asarray(keep(by_name, self.method.deciding, **success)) & there
        except ValueError as e:
            raise UserError(f"filter of variant {variant.name!r}: {e}") from e

    def version(self, started: Sequence[Batch], drawn: Sequence[Batch], learned: PerPrompt | None = None) -> int:
        """The version of the weights (`State.updates`) that drew the oldest samples of a step: here those of its first
        rollout.

        Args:
          started: its rollouts as they were dispatched.
          drawn: the same with their samples.
          learned: the groups to learn from, out of all; None for all that have samples.
        """
        return started[0].version

    def note(self, batch: Batch) -> dict[str, float]:
        """Notes what later draws depend on, from a step's batch with its rewards. Returns metrics of it."""
        self.order.note((drawn, drawn.passes) for drawn in batch.as_drawn)
        return self.order.metrics()

    def after_step(self) -> dict[str, Any]:
        """The number of rollouts, and how far the run is with the problems."""
        return {"rollouts": self.rollouts, **self.order.saved()}

    def saved(self) -> dict[str, Any] | None:
        """None: between two steps no rollout is in flight."""
        return None

    # ------------------------------------------------------------------------------------------------ a rollout

    def start(self, state: State) -> Batch:
        """Dispatches the next rollout, from the policy of ``state``. Its problems and its draws depend on its number in
        the run."""
        number = self.rollouts
        self.rollouts += 1
        problems, passes = self.choose(number)
        drawn = self.draw(self.params(state), problems, number)
        return dataclasses.replace(drawn, version=state.updates, passes=passes)

    def choose(self, number: int) -> tuple[Sequence[data.Problem], Sequence[int]]:
        """The problems of the rollout with that number, and the pass over the data that each belongs to."""
        started = time.perf_counter()
        chosen = self.order.draw(number)
        self.seconds["data"] += time.perf_counter() - started  # pyrefly: ignore
        return chosen

    def draw(self, params: Any, problems: Sequence[data.Problem], number: int) -> Batch:
        """Dispatches a rollout of these problems, with the draws of that number in the run.

        Args:
          params: the weights that the policy samples with.
          problems: of its prompts.
          number: of the rollout.
        """
        fetches = self.dispatch(params, problems, self.key(number))
        return Batch(number=number, problems=problems, fetches=fetches, arrive=self.arrived)

    def dispatch(self, params: Any, problems: Sequence[data.Problem], key: Array) -> list[Fetch]:
        """Dispatches the samples of these problems, and returns what waits for them; ``params`` are the weights that
        the policy samples with."""
        prompts = self.prompts(problems, self.config.group)
        sampled = self.policy.sample(params, prompts, key, self.config)
        return [fetching(self.policy, sampled, len(problems), len(problems))]

    def resumed(self, saved: Mapping[str, Any]) -> Batch:
        """A rollout that the run had drawn before it was stopped, from `saved_of`."""
        problems, versions = {p.uid: p for p in self.problems}, saved.get("versions")
        samples = [Rollout(**{name: from_text(x) for name, x in each.items()}) for each in saved["samples"]]
        return Batch(
            number=saved["number"],
            problems=[problems[uid] for uid in saved["uids"]],
            fetches=[functools.partial(_there, rollout) for rollout in samples],
            arrive=self.arrived,
            version=saved["version"],
            versions=None if versions is None else from_text(versions),
            passes=saved["passes"],
        )

    def arrived(self, batch: Batch) -> Batch:
        """Waits for the samples of a rollout, during which the run may stop, and submits them to the rewards."""
        submitted = self.submit(batch.problems, *(fetch(self.sync) for fetch in batch.fetches))
        return dataclasses.replace(submitted, number=batch.number, version=batch.version, passes=batch.passes)

    def submit(self, problems: Sequence[data.Problem], rollout: Rollout, *more: Rollout) -> Batch:
        """Submits samples to the rewards: each process its own rows. ``more`` is what a subclass drew with them."""
        wait = submit(self.rewards, problems, rollout, self.policy.texts, self.columns)
        return Batch(problems=problems, rollout=rollout, pending=[functools.partial(self.rewarded, wait)])

    def rewarded(self, wait: Callable[[], RewardScores], batch: Batch) -> Batch:
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

    def params(self, state: State) -> Any:
        """The policy's weights in the form that it samples with."""
        return self.policy.reshard(policy_state.weights(state.networks), self.config.weights)

    def key(self, number: int) -> Array:
        """The random key of all draws of that rollout."""
        return jax.random.fold_in(jax.random.key(self._seed), number)

    def prompts(self, problems: Sequence[data.Problem], group: int = 0) -> Prompts:
        """Prompts ``[P, L]``; ``group`` as in `grpojax.data.to_prompts`. L is that of the run's longest prompt, or of
        these if they are longer."""
        longest = max(self.longest_prompt, *(len(p.ids) for p in problems))
        return data.to_prompts(problems, longest, group)

    def dispatch_any(
        self, params: Any, prompts: Prompts, key: Array, config: SamplerConfig, *, name: str = "rollout"
    ) -> Fetch:
        """Dispatches samples of any number of prompts, and returns what waits for them. To fill the shards, the last
        ones get some prompts again. ``name`` is as of `Policy.sample`."""
        n = len(prompts.lengths)
        rows = batch_shards.filled(n, self.policy.sampling.shards)
        filled = jax.tree.map(lambda x: x[np.arange(rows) % n], prompts)
        rollout = self.policy.sample(params, filled, key, config, name=name)
        return fetching(self.policy, rollout, rows, n)


def _of_steps(scores: RewardScores, variant: Variant, longest: int) -> dict[str, Array]:
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


def fetching(policy: Policy, rollout: Rollout, rows: int, prompts: int) -> Fetch:
    """What waits for samples and brings them to the host, ``[P, G, ...]``. It does so once, since a save may ask for
    them before the step does, and then lets go of those on the devices.

    Args:
      policy: that draws them.
      rollout: the samples on the devices.
      rows: number of its prompts; the last ones may only fill up the shards.
      prompts: number of prompts that were asked for.
    """
    waiting, here = [rollout], list[Rollout]()

    def fetch(sync: Sync) -> Rollout:
        if here:
            return _there(here[0], sync)
        sync(waiting[0])
        here.append(jax.tree.map(lambda x: x[:prompts], policy.fetch(waiting[0], rows)))
        waiting.clear()
        return here[0]

    return fetch


def _there(rollout: Rollout, sync: Sync) -> Rollout:
    sync(())
    return rollout


def saved_of(batch: Batch) -> dict[str, Any]:
    """A dispatched rollout as JSON, from which a resumed run restores it (`Plain.resumed`). It has the samples, since
    the weights that drew them are gone then. Waits for the samples, and is the same on all processes."""
    samples = [fetch(jax.block_until_ready) for fetch in batch.fetches]
    return {
        "number": batch.number,
        "version": batch.version,
        "uids": [p.uid for p in batch.problems],
        "passes": list(batch.passes),
        "samples": [{name: to_text(y) for name, y in vars(x).items() if y is not None} for x in samples],
        **({} if batch.versions is None else {"versions": to_text(batch.versions)}),
    }


def to_text(x: np.ndarray) -> dict[str, Any]:
    """An array as JSON, bit for bit.

    Example:
      >>> from_text(to_text(np.float32([[0.1, 0.2]]))).tolist() == np.float32([[0.1, 0.2]]).tolist()
      True
    """
    packed = zlib.compress(np.ascontiguousarray(x).tobytes(), 1)
    return {"dtype": str(x.dtype), "shape": list(x.shape), "zlib": base64.b64encode(packed).decode()}


def from_text(written: Mapping[str, Any]) -> np.ndarray:
    """The array that `to_text` was given."""
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(written["zlib"])), written["dtype"])
    return numbers.reshape(written["shape"]).copy()
