"""How a supervised run begins again where one failed."""

import answered_runs
import jax
import pytest

from grpojax.extensions.supervised import finetune, finetune_recipe

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", "grpojax")
    return caplog


def test_so_does_a_supervised_run(recipe, tmp_path, said):
    """And what it has scored under the reference is not taken for another's."""
    answers = answered_runs.make(tmp_path, recipe.parent)
    place = tmp_path / "run"

    def run_of(seed):
        given = [f"run.dir={place}", "train.steps=1", f"train.seed={seed}"]
        return finetune.open_finetune(finetune_recipe.load_dpo(answers["dpo"], given), jax.devices()[:1])

    run_of(0).close()
    scored = (place / "reference.npz").stat().st_mtime_ns
    run_of(1).close()
    assert (place / "reference.npz").stat().st_mtime_ns > scored
    assert f"and what else was there is in {place}/replaced/1" in said.text
