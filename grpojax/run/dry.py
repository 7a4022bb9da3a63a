"""The programs that a run's steps call to learn, from the learner itself: it takes steps on devices that compute
nothing."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpojax import data
from grpojax.device import Dry, Program
from grpojax.models.experts import choice_dtype
from grpojax.programs import policy_state
from grpojax.programs.policy import PolicyShape
from grpojax.programs.sampler import no_samples
from grpojax.programs.state import abstract_state
from grpojax.run import parts
from grpojax.run.batch import RolloutBatch
from grpojax.run.learner import Learner
from grpojax.run.packed_batch import PackedBatch, room
from grpojax.run.parts.part import Part
from grpojax.run.programs import Programs
from grpojax.run.recipe import Config
from grpojax.types import Rollout, Samples, Tokens

Noted = tuple[Program, tuple[Any, ...], str]  # a program, its arguments, and what the log says behind its name


def learner_calls(
    config: Config, policy: PolicyShape, programs: Programs, added: Sequence[Part], *, longest_prompt: int
) -> Iterator[Noted]:
    """The programs of a run's steps except those that sample, with the shapes that they are called with.

    Rows of an update have two sizes at most: a step with every sample at its longest meets one, and a step with samples
    of one token the other. Those of the shorter samples come first, since samples are rarely all at their longest.

    Args:
      config: the recipe.
      policy: the model.
      programs: the run's.
      added: the variant's parts. They are opened anew, so they must not be those of a run.
      longest_prompt: most tokens of a prompt in the run.
    """
    kinds = {" for shorter samples": 1, " for the longest samples": config.rollout.max_tokens}
    learners = {note: _learner(config, policy, programs, added, longest_prompt=longest_prompt) for note in kinds}
    batches = {note: _samples(config, policy, length, longest_prompt) for note, length in kinds.items()}
    minis = {note: learners[note].pack(batch) for note, batch in batches.items()}
    first, last = ([x.shape for x in jax.tree.leaves([m.packed for m in minis[note]])] for note in kinds)
    for note, learner in learners.items():
        if first == last and note == " for shorter samples":
            continue  # rows have one size
        for part in added:
            part.open(learner.policy, programs, longest_prompt=longest_prompt)
        dry = learner.device
        assert isinstance(dry, Dry), "of `_Policy`"
        for number in sorted({1, parts.warmup_steps(config) + 1}):  # the policy may not learn in the first
            taken = minis.pop(note, None) or learner.pack(batches[note])
            signals = learner.score(taken)
            yield from _noted(dry, "" if first == last else note)  # these compile while the update is traced
            learner.weigh(taken, batches[note], signals)
            learner.update(taken, number, shares=None if config.train.tokens is None else (0.0, 0.0))
            yield from _noted(dry, "" if first == last else note)


def _noted(dry: Dry, note: str) -> list[Noted]:
    """What was called since the last time."""
    calls, dry.calls = dry.calls, []
    return [(program, args, note) for program, args in calls]


def _learner(
    config: Config, policy: PolicyShape, programs: Programs, added: Sequence[Part], *, longest_prompt: int
) -> "_Learner":
    """A learner with shapes for its state."""
    dry = Dry(policy.mesh)
    how = {"max_prompt_tokens": longest_prompt, "parts": added}
    learner = _Learner(_Policy(policy, dry), programs, config.method, config.train, **how)  # pyrefly: ignore
    networks = policy_state.networks(policy, programs.optimizer)
    for part in added:
        networks |= part.networks()
    learner.state = abstract_state(networks, policy.mesh)
    if policy.mesh is None:
        learner.state = dry.put(learner.state)
    return learner


class _Policy:
    """A policy without weights on devices that compute nothing."""

    def __init__(self, shape: PolicyShape, dry: Dry):
        self._shape, self.device, self.sampling_device = shape, dry, dry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shape, name)


class _Learner(Learner):
    """A learner that weighs every token with 0: no variant is tried on samples that are made up."""

    def weigh(
        self, minis: Sequence[PackedBatch], batch: RolloutBatch, signals: Mapping[str, Tokens]
    ) -> tuple[Tokens, dict[str, float], Samples]:
        variant = self.method.variant
        names = ["advantages", "weights", *(name for part in self.parts for name in part.rows(variant))]
        zeros = np.zeros(batch.rollout.tokens.shape, np.float32)
        for mini in minis:
            known = vars(mini.packed.per_token)
            mini.add(self.device, {n: zeros[mini.places] for n in names if known.get(n) is None})
        return zeros, {}, batch.rollout.lengths


def _samples(config: Config, policy: PolicyShape, length: int, longest_prompt: int) -> RolloutBatch:
    """A step's samples of this length, as they are learned from."""
    rollout, method = config.rollout, config.method
    prompts, group = rollout.prompts, method.widest(rollout.group)
    new = no_samples(prompts, group, room(rollout.max_tokens) if method.replaces_samples else rollout.max_tokens)
    ids = (0,) * (longest_prompt if length > 1 else 1)
    more = _more(config, policy, new, longest_prompt)
    return RolloutBatch(
        problems=[data.Problem(uid, ids, "", None, {}) for uid in range(prompts)],
        rollout=dataclasses.replace(new, lengths=new.lengths + length, stopped=~new.stopped, **more),
        dropped=np.zeros(prompts, bool),
    )


def _more(config: Config, policy: PolicyShape, drawn: Rollout, longest_prompt: int) -> dict[str, Any]:
    """What samples of some recipes have besides."""
    more = dict[str, Any]()
    if config.environment is not None:
        more["sampled"] = np.zeros(drawn.tokens.shape, bool)
    if config.rollout.router_replay and policy.config.experts is not None:
        experts = policy.config.experts
        width, dtype = len(policy.config.layers_of("mixture")) * experts.chosen, choice_dtype(experts.count)
        more["choices"] = np.zeros((*drawn.tokens.shape, width), dtype)
        more["prompt_choices"] = np.zeros((len(drawn.tokens), 1, longest_prompt, width), dtype)
    return more
