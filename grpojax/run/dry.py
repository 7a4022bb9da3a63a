"""A run on devices that compute nothing (`grpojax.device.Dry`): which programs it calls, and with what.

The run's own source and learner take a step. Only samples and rewards are made up.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np

from grpojax import data, evaluation
from grpojax.device import ROWS, Program
from grpojax.evaluation.attempts import problems_at_once
from grpojax.models import DecoderConfig
from grpojax.programs import policy_state
from grpojax.programs.policy import DryPolicy, PolicyShape
from grpojax.programs.sampler import no_samples
from grpojax.programs.state import abstract_state
from grpojax.rewards import RewardsConfig, RewardScores
from grpojax.run import held_out, learn, parts, source
from grpojax.run.batch import Batch
from grpojax.run.make_programs import Programs, make_programs, program_inputs
from grpojax.run.minibatch import Minibatch, room
from grpojax.run.parts.part import Part, read_shape
from grpojax.run.recipe import Config
from grpojax.run.run_state import State
from grpojax.run.setup import Setup
from grpojax.types import Rollout

Phase = Literal["rollout", "scores", "update", "between", "evaluation"]
Noted = tuple[Program, tuple[Any, ...], str]  # a program, its arguments, and what the log says behind its name


class Called(NamedTuple):
    """A call of a program.

    Attributes:
      program: the program.
      args: its arguments, with shapes in place of arrays of the devices.
      phase: the part of a step that calls it; "between" steps, or in an "evaluation".
      samples: whether it runs on the devices that sample.
    """

    program: Program
    args: tuple[Any, ...]
    phase: Phase
    samples: bool = False


class RecipeKind(NamedTuple):
    """A kind of recipe that another command than ``train`` runs (`grpojax.extension.Names.recipes`).

    Attributes:
      load: reads a file with overrides, as `grpojax.run.recipe.load` does.
      step: of a config and its policy: what a step calls, and the run's state by role.
    """

    load: Callable[[str, Sequence[str]], Any]
    step: Callable[[Any, PolicyShape], tuple[list[Called], Mapping[str, Any]]]


class DryRun:
    """The steps of a run, with samples and rewards that are made up. What a step does returns what it has called.

    Args:
      config: the recipe.
      policy: the model.
      programs: of the run.
      added: the variant's parts. They are opened anew, so they must not be those of a run.
      longest_prompt: most tokens of a prompt in the run.
      longest: whether samples are as long as they may be. Otherwise they have one token, and so have the prompts that
        are learned from.
      state: of the run; None makes one.

    Attributes:
      state: shapes of the run's state by role.
    """

    def __init__(
        self,
        config: Config,
        policy: PolicyShape,
        programs: Programs,
        added: Sequence[Part],
        *,
        longest_prompt: int,
        longest: bool = True,
        state: Mapping[str, Any] | None = None,
    ):
        self.config, self.longest_prompt, self.longest, self._shape = config, longest_prompt, longest, policy
        self.policy = DryPolicy(policy, longest=longest)
        self.setup = Setup(
            config=config,
            policy=self.policy,  # pyrefly: ignore
            programs=programs,
            objective=config.method.variant.objective,
            parts=added,
            longest_prompt=longest_prompt,
            ppo_epochs=config.train.ppo_epochs,
        )
        self.setup.open_parts()
        self.state = self._new() if state is None else state
        self.rewards = _Rewards(config)

    def _new(self) -> dict[str, Any]:
        networks = policy_state.networks(self._shape, self.setup.programs.optimizer)
        for part in self.setup.parts:
            networks |= part.networks()
        state, device = abstract_state(networks, self._shape.mesh), self.policy.device
        return device.put(state) if device.mesh is None else state

    def shorter(self) -> "DryRun":
        """The same run with samples of one token. It takes over the parts."""
        programs, added, how = self.setup.programs, self.setup.parts, {"longest_prompt": self.longest_prompt}
        return DryRun(self.config, self._shape, programs, added, **how, longest=False, state=self.state)

    def sample(self) -> list[Called]:
        """Draws a step's samples."""
        config, longest = self.config, self.config.data.max_prompt_tokens
        problems = data.Problems(
            kept=tuple(_problems(max(2, config.rollout.prompts), longest)),
            weights=(1.0,),
            dropped=0,
            skipped=(),
            fingerprint="",
            tokenize=lambda *given: (0,),
        )
        context = source.Context(
            state=State(),
            folder=None,
            sync=lambda arrays: None,
        )
        players = self._players()
        made = source.make(
            config,
            self.policy,
            cast(Any, self.rewards),
            problems,
            parts=self.setup.parts,
            longest_prompt=longest,
            context=context,
            **({} if players is None else {"players": players}),
        )
        state = State(networks=self.state)
        made.next(state, made.begin(state))
        return self._called("rollout")

    def evaluate(self) -> list[Called]:
        """Tries a batch of held-out problems; nothing for a recipe without any."""
        config, drawn = self.config, held_out.config_of(self.config)
        if not (config.data.validation or config.data.test):
            return []
        count = problems_at_once(drawn, drawn.limit or drawn.batch, self.policy.sampling.shards)
        weights, players = self.policy.reshard(policy_state.weights(self.state)), self._players()
        tried = evaluation.evaluate(
            self.policy,
            weights,
            _problems(count, config.data.max_prompt_tokens),
            drawn,
            evaluation.Evaluator(cast(Any, self.rewards), config.evaluate),
            max_prompt_tokens=config.data.max_prompt_tokens,
            sync=lambda arrays: None,
            **({} if players is None else players.in_evaluation(weights, drawn, lambda arrays: None)),
        )
        for _ in tried:
            pass
        return self._called("evaluation")

    def pack(self) -> list[Minibatch]:
        """Samples to learn from, in rows."""
        self._batch = _samples(self.config, self.policy, self.longest, self.longest_prompt)
        return learn.pack(self.setup, self._batch)

    def learn(self, number: int, minis: Sequence[Minibatch]) -> Iterator[list[Called]]:
        """Learns from samples as in the step of that number; first the scores, then the updates."""
        setup = self.setup
        setup.open_parts()
        minis, _ = learn.score(setup, self.state, minis)
        yield self._called("scores")
        progress = None if self.config.train.tokens is None else (0.0, 0.0)
        learn.update(setup, State(networks=self.state, step=number - 1), self._weighed(minis), progress=progress)
        yield self._called("update")

    def _weighed(self, minis: Sequence[Minibatch]) -> list[Minibatch]:
        """Every token weighs 0: no variant is tried on samples that are made up."""
        setup, config, batch, weighed = self.setup, self.config, self._batch, list[Minibatch]()
        names = ["advantages", "weights"]
        names += [name for part in setup.parts for name in part.fills(config.method.variant)]
        zeros = np.zeros(batch.rollout.tokens.shape, np.float32)
        for mini in minis:
            if config.train.skip_zero_advantage and not self.longest:  # a single token teaches
                one = np.zeros((len(mini.prompts), zeros.shape[1]), np.int32)
                one[0, 0] = 1
                mini = learn.minibatch(setup, batch, mini.prompts, one)
            rows = {n: mini.layout.pack(zeros[mini.prompts]) for n in names if n not in mini.rows.arrays}
            weighed.append(mini.with_arrays(self.policy.device.put(rows, ROWS)))
        return weighed

    def end_step(self, number: int) -> list[Called]:
        """Runs the work between the step of that number and the next one."""
        learn.end_step(self.setup, State(networks=self.state, step=number - 1))
        return self._called("between")

    def late(self, fails: bool) -> list[Called]:
        """Asks the parts for what depends on rewards: half of each group is right, or each sample fails."""
        config, setup = self.config, self.setup
        drawn = _samples(config, self.policy, self.longest, self.longest_prompt, drawn=True)
        shape, terms = drawn.rollout.lengths.shape, config.method.rewards.terms
        # A variant may say from which reward on a sample passes.
        outcome = np.broadcast_to(np.float32(-1e6 if fails else np.arange(shape[1]) % 2), shape)
        by_name = {term.metric: outcome for term in terms}
        batch = dataclasses.replace(drawn, total=outcome, reward=outcome, by_name=by_name)
        learn.signals_after_rewards(setup, self.state, learn.replaced(setup, self.state, batch), outcome)
        return self._called("scores")

    def _players(self) -> Any:
        episodes = parts.of(self.config).get("environment")
        return None if episodes is None else episodes.dry_players_of(self.config, self.policy)

    def _called(self, phase: Phase) -> list[Called]:
        """What was called since the last time."""
        found = []
        for device in (self.policy.device, self.policy.sampling_device):
            calls, device.calls = device.calls, []
            samples = device is self.policy.sampling_device
            found += [Called(program, args, phase, samples) for program, args in calls]
        return found


def run_of(config: Config, policy: PolicyShape, *, read_shape: Callable[[str], DecoderConfig] = read_shape) -> DryRun:
    """The dry run of a recipe whose prompts are as long as they may be.

    Args:
      config: the recipe.
      policy: the model on its devices, which need not be there.
      read_shape: the shape of another model that the recipe names by its path.

    Raises:
      UserError: sizes that do not divide over the devices.
    """
    added: list[Part] = [kind(config, policy, read_shape) for kind in parts.of(config).values()]
    programs = make_programs(program_inputs(config, policy), added)
    return DryRun(config, policy, programs, added, longest_prompt=config.data.max_prompt_tokens)


def learner_calls(
    config: Config, policy: PolicyShape, programs: Programs, added: Sequence[Part], *, longest_prompt: int
) -> Iterator[Noted]:
    """The programs of a run's steps except those that sample and those that depend on rewards, with the shapes that
    they are called with.

    Rows of an update have two sizes at most: a step with every sample at its longest meets one, and a step with samples
    of one token the other. Those of the shorter samples come first, since samples are rarely all at their longest.

    Args:
      config, policy, programs, added, longest_prompt: as of `DryRun`.
    """
    whole = DryRun(config, policy, programs, added, longest_prompt=longest_prompt)
    runs = {" for shorter samples": whole.shorter(), " for the longest samples": whole}
    minis = {note: run.pack() for note, run in runs.items()}
    first, last = ([x.shape for x in jax.tree.leaves([m.rows for m in each])] for each in minis.values())
    for note, run in runs.items():
        if first == last and note == " for shorter samples":
            continue  # rows have one size
        for number in sorted({1, parts.warmup_steps(config) + 1}):  # the policy may not learn in the first
            # Scores compile while the update is traced.
            for calls in run.learn(number, minis.pop(note, None) or run.pack()):
                yield from ((call.program, call.args, "" if first == last else note) for call in calls)


class _Rewards:
    """Gives 0 and 1 in turn to samples, in place of `grpojax.rewards.Rewards`."""

    needs_pieces = False

    def __init__(self, config: Config):
        self.config: RewardsConfig = config.method.rewards
        self._steps = "step_rewards" in config.method.variant.needs

    def check_columns(self, columns: Iterable[str]) -> None:
        """Takes all."""

    def texts(self, prompts: Sequence[Any], completions: Sequence[Any]) -> dict[str, list[str]]:
        """None."""
        return {}

    def submit(self, prompts: Sequence[str], *given: Any, **more: Any) -> "_Rewards":
        """Of samples with these prompts."""
        self._count = len(prompts)
        return self

    def result(self) -> RewardScores:
        """The rewards."""
        total, names = np.arange(self._count, dtype=np.float32) % 2, [term.metric for term in self.config.terms]
        return RewardScores(
            total=total,
            by_name=dict.fromkeys(names, total),
            reasons={name: np.full(self._count, -1, np.int8) for name in names},
            step_rewards=total[:, None] if self._steps else None,
            stepped=tuple(names[:1]) if self._steps else (),
        )


def _problems(count: int, tokens: int) -> list[data.Problem]:
    """Problems whose prompts have so many tokens, of two levels."""
    return [data.Problem(uid, (0,) * tokens, "", "0", {}, level=str(uid % 2)) for uid in range(count)]


def _samples(config: Config, policy: DryPolicy, longest: bool, longest_prompt: int, *, drawn: bool = False) -> Batch:
    """A step's samples as they are learned from, or as they were ``drawn``."""
    rollout, method = config.rollout, config.method
    prompts, group = rollout.prompts, method.widest(rollout.group)
    tokens = room(rollout.max_tokens) if method.replaces_samples and not drawn else rollout.max_tokens
    new = no_samples(prompts, group, tokens)
    lengths = new.lengths + (rollout.max_tokens if longest else 1)
    more = _more(config, policy, new, longest_prompt)
    return Batch(
        problems=_problems(prompts, longest_prompt if longest else 1),
        rollout=dataclasses.replace(new, lengths=lengths, stopped=~new.stopped, **more),
        dropped=np.zeros(prompts, bool),
    )


def _more(config: Config, policy: DryPolicy, drawn: Rollout, longest_prompt: int) -> dict[str, Any]:
    """What samples of some recipes have besides."""
    more = dict[str, Any]()
    if config.environment is not None:
        more["sampled"] = np.zeros(drawn.tokens.shape, bool)
    if config.rollout.router_replay and policy.config.mlp is not None:
        of_layer, dtype = policy.config.mlp.choice()
        width = len(policy.config.mlp_layers) * of_layer
        more["choices"] = np.zeros((*drawn.tokens.shape, width), dtype)
        more["prompt_choices"] = np.zeros((len(drawn.tokens), 1, longest_prompt, width), dtype)
    return more
