"""Runs by two processes beside those by one with as many devices.

Sums over devices are added in another order across processes, so equality is to rounding: 1e-6 of each number. The
optimiser's eps is large, since Adam makes of a gradient of nothing but rounding a full step.
"""

import pytest
from runs import numbers, opened
from several import together

from grpojax.run import recipe as config
from grpojax.train import train

EVERY = ["optimizer={learning_rate: 1.0e-3, eps: 1.0e-3}", "train.checkpoint_every=0", "mesh.data=2", "mesh.fsdp=2"]
REINFORCED = ["rewards=[{name: 'tiny_run:parity'}]", "data.validation=null", "train.eval_every=0", "train.steps=3"]


def check(command, recipe, folder, cases, by_one):
    """Each of some cases, settings by name, has the same metrics either way; ``by_one`` trains with settings."""
    commands = [[command, recipe, f"run.dir={folder / 'several' / name}", *case] for name, case in cases.items()]
    said = together(*commands, processes=2)
    assert all(lines[-1] == "status 0" for of_one in said for lines in of_one), said
    assert all([x for x in lines if x] == ["status 0"] for of_one in said[1:] for lines in of_one), said[1:]
    for name, case in cases.items():
        assert by_one([f"run.dir={folder / 'one' / name}", *case])
        same(numbers(folder / "several" / name), numbers(folder / "one" / name), name)


def check_reinforced(recipe, folder, cases):
    """Recipes of `tiny_run` with the settings of each case."""
    cases = {name: [*EVERY, *REINFORCED, *case] for name, case in cases.items()}
    check("train", recipe, folder, cases, lambda given: train(opened(config.load(recipe, given), devices=4)))


def same(several, one, name):
    assert len(several) == len(one) >= 3
    for got, want in zip(several, one, strict=True):
        assert got.keys() == want.keys()
        for metric, value in want.items():
            assert got[metric] == value or got[metric] == pytest.approx(value, rel=1e-6, abs=1e-6), (
                name, want["step"], metric,
            )  # fmt: skip
