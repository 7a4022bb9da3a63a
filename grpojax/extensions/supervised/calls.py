"""The programs of a supervised run with their arguments, only shapes (as `grpojax.run.calls`)."""

from grpojax.extensions.supervised import teaching
from grpojax.extensions.supervised.finetune_recipe import DPOConfig, SFTConfig, load_dpo, load_sft
from grpojax.extensions.supervised.programs import make_supervised_programs
from grpojax.models import flops
from grpojax.programs import policy_state
from grpojax.programs.calls import Call
from grpojax.programs.policy import PolicyShape
from grpojax.programs.state import abstract_state
from grpojax.run.calls import Recipe, RunCalls, update_flops

UPDATES = 1000  # steps of a run, whose length depends on its data: no shape depends on the schedule


def calls_of(config: SFTConfig | DPOConfig, policy: PolicyShape) -> RunCalls:
    """As `grpojax.run.calls.calls_of` for a supervised run: every prompt has the most answers that it may have."""
    kind, data = teaching.teaching_of(config), config.data
    part, rows, batch = teaching.longest_batch(config, policy)
    loss = kind.objective(policy.graph, policy.compute)
    programs = make_supervised_programs(policy.graph, policy.compute, loss, config.optimizer, UPDATES, policy.adapter)
    state = abstract_state(policy_state.networks(policy, programs.optimizer), policy.mesh)
    learned, base, params = state["policy"], policy_state.frozen(state), policy_state.weights(state)
    sizes = batch.prompts.lengths, batch.lengths
    work = update_flops(policy, sizes)
    found = {"update": Call(programs.update, (learned, base, part), (learned, base), flops=work)}
    if data.validation is not None or data.test is not None or kind.needs_reference:
        scored = flops.forward_flops(policy.config, *sizes)
        found["score"] = Call(programs.score, (params, rows), params, flops=scored)
    return RunCalls(found, state)


SFT, DPO = Recipe(load=load_sft, calls_of=calls_of), Recipe(load=load_dpo, calls_of=calls_of)
