"""What a supervised run does beside its steps, also when something fails."""

import answered_runs
import jax
import pytest
from failing_runs import check_first_writes, check_told

from grpojax.extensions.supervised import finetune, finetune_recipe

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def run_of(recipe, tmp_path):
    answers = answered_runs.make(tmp_path, recipe.parent)
    given = [f"run.dir={tmp_path / 'run'}", "train.steps=1"]
    return lambda: finetune.open_finetune(finetune_recipe.load_sft(answers["sft"], given), jax.devices()[:1])


@pytest.mark.slow
def test_the_first_writes_anew_what_all_have_read(run_of, monkeypatch):
    """Of a run that goes on: in a bucket the first takes objects away that another process has listed."""
    check_first_writes(run_of, monkeypatch, ["read_metrics"])


@pytest.mark.parametrize("where", ["start", "loop"])
def test_an_error_is_told_before_what_is_held_is_let_go_of(run_of, monkeypatch, where):
    check_told(run_of, monkeypatch, where)
