"""A supervised run on devices that compute nothing, as `grpojax.run.dry` for one that samples."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from grpojax import losses as L
from grpojax.device import ROWS
from grpojax.extensions.supervised import teaching
from grpojax.extensions.supervised.answer_scoring import Scorer
from grpojax.extensions.supervised.finetune_recipe import DPOConfig, SFTConfig, load_dpo, load_sft
from grpojax.extensions.supervised.supervised_programs import make_supervised_programs
from grpojax.programs import policy_state
from grpojax.programs.policy import DryPolicy, PolicyShape
from grpojax.programs.state import abstract_state
from grpojax.run import learn
from grpojax.run.dry import Called, RecipeKind
from grpojax.run.minibatch import Minibatch
from grpojax.run.run_state import State
from grpojax.run.setup import Setup

UPDATES = 1000  # steps of a run, whose length depends on its data: no shape depends on the schedule


def step(config: SFTConfig | DPOConfig, policy: PolicyShape) -> tuple[list[Called], Mapping[str, Any]]:
    """What a step calls, and an evaluation, and the run's state: every prompt has the most answers that it may have."""
    kind, dry = teaching.teaching_of(config), DryPolicy(policy)
    entries, shapes = teaching.longest_entries(config, policy)
    loss = kind.objective(policy.graph, policy.compute)
    programs = make_supervised_programs(policy, loss, config.optimizer, UPDATES)
    state = abstract_state(policy_state.networks(policy, programs.optimizer), policy.mesh)
    setup = Setup(config=config, policy=cast(Any, dry), programs=programs, objective=L.Objective())
    reference = np.zeros((len(entries), shapes.group), np.float32)
    rows, layout = kind.part(teaching.to_batch(entries, shapes, reference), shapes)
    mini = Minibatch(np.arange(len(entries)), dry.device.put(rows, ROWS), layout)
    learn.update(setup, State(networks=state), [mini])
    found = [Called(*call, "update") for call in dry.device.calls]
    if config.data.validation is not None or config.data.test is not None or kind.needs_reference:
        dry.device.calls.clear()
        Scorer(dry, programs.score, shapes, len(entries)).sums(entries, policy_state.weights(state))
        found += [Called(*call, "between") for call in dry.device.calls]
    return found, state


SFT, DPO = RecipeKind(load=load_sft, step=step), RecipeKind(load=load_dpo, step=step)
