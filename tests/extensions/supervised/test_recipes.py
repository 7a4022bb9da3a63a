"""Recipes of supervised runs: on what they are based, and what starts from them."""

from pathlib import Path

from grpojax.extensions.supervised.finetune_recipe import load_sft
from grpojax.host import settings
from grpojax.run import recipe as config

CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_experiments_start_from_the_policy_that_their_head_makes():
    base, start = CONFIGS / "experiments" / "base.yaml", CONFIGS / "experiments" / "start.yaml"
    recipe, supervised = config.load(base), load_sft(start)
    command = (
        f"grpojax sft configs/experiments/start.yaml && grpojax export {supervised.run.dir} --to {recipe.model.path}"
    )
    for path in (base, start):
        assert f"#   {command}\n" in path.read_text()
    levels = [source.options["levels"] for source in (recipe.data.train, recipe.data.validation, recipe.data.test)]
    assert levels == [[0, 1, 2, 3, 4, 5, 6]] * 3


def test_supervised_recipes_have_bases_too(tmp_path):
    (tmp_path / "mine.yaml").write_text(f"base: {CONFIGS / 'supervised/sft.yaml'}\ntrain: {{epochs: 3}}\n")
    loaded, base = load_sft(tmp_path / "mine.yaml"), load_sft(CONFIGS / "supervised/sft.yaml")
    assert settings.diff(base.resolved(), loaded.resolved()) == ["train.epochs: 2 -> 3"]
