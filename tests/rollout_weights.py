"""Training weights in the form that a rollout takes."""

from grpojax.programs import state


def for_rollouts(params, config, compute, weights="compute"):
    """By `grpojax.programs.state.make_reshard`, which may have nothing to do."""
    program = state.make_reshard(config, compute, weights)
    return params if program is None else program(params)
