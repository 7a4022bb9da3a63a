"""What a run of a recipe calls, from its dry steps."""

import jax

from grpojax.run import dry, parts


def every(config, shape):
    """All calls of a run whose samples are as long as they may be, and none before it is ready."""
    run = dry.run_of(config, shape)
    steps = sorted({1, parts.warmup_steps(config) + 1})
    found = [*run.sample(), *run.late(fails=True), *run.late(fails=False)]
    found += [call for number in steps for calls in run.learn(number, run.pack()) for call in calls]
    return [*found, *run.end_step(config.train.reference_every or 1), *run.evaluate()]


def shapes(call):
    """The arguments of a call, with shapes in place of all arrays; keys and numbers lie on no device."""

    def of(x):
        return x if isinstance(x, jax.ShapeDtypeStruct) else jax.eval_shape(lambda: x)

    return jax.tree.map(of, call.args)
