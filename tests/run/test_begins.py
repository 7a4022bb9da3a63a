"""How a run begins: what is refused leaves its directory free, and a few problems make any step."""

import json

import pytest
from runs import numbers, opened

from grpojax.host.errors import UserError
from grpojax.records.samples import read_samples
from grpojax.run import recipe as config
from grpojax.train import train

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", "grpojax")
    return caplog


def few(recipe, folder, directory, *overrides):
    rows = (recipe.parent / "sums.jsonl").read_text().splitlines()[:3]
    (folder / "few.jsonl").write_text("".join(json.dumps(json.loads(row) | {"scale": 7}) + "\n" for row in rows))
    given = [
        f"run.dir={directory}",
        f"data.train={folder / 'few.jsonl'}",
        "data.validation=null",
        "train.checkpoint_every=1",
    ]
    return config.load(recipe, [*given, "train.steps=3", "rollout.max_tokens=4", "rollout.group=2", *overrides])


@pytest.mark.slow
def test_three_problems_make_steps_of_eight_prompts(recipe, tmp_path, said):
    """Each with samples of its own, and bit for bit after a stop."""
    whole = opened(few(recipe, tmp_path, tmp_path / "whole"), eos_ids=())
    assert train(whole)
    told = [r.getMessage() for r in said.records if "3 problems for rollout.prompts=8" in r.getMessage()]
    assert len(told) == 1 and "passes over it follow one another within a step" in told[0]
    drawn = [read_samples(tmp_path / "whole", n)[1] for n in (1, 2, 3)]
    assert sorted(len([r for r in sum(drawn, []) if r["uid"] == uid]) for uid in range(3)) == [16, 16, 16]
    first = [r["completion"] for r in drawn[0] if r["uid"] == 0]
    assert len(first) >= 4 and len(set(first)) > len(first) // 2  # the same draws would give two texts
    part = opened(few(recipe, tmp_path, tmp_path / "part"), eos_ids=())
    assert not train(part, lambda *_: part.state.step == 1 and part.control.ask("SIGTERM"))
    assert train(opened(few(recipe, tmp_path, tmp_path / "part"), eos_ids=()))
    assert numbers(tmp_path / "part") == numbers(tmp_path / "whole")


@pytest.mark.slow
def test_a_refused_recipe_leaves_no_trace_and_a_run_without_a_step_gives_way(recipe, tmp_path, said):
    place = tmp_path / "run"
    with pytest.raises(UserError, match="reward 'misbehaving:scaled' has an option 'scale', and the data has a column"):
        opened(few(recipe, tmp_path, place, "rewards.0.name=misbehaving:scaled"))
    assert not place.exists()
    opened(few(recipe, tmp_path, place)).close()
    assert (place / "config.json").exists()
    opened(few(recipe, tmp_path, place, "train.seed=5")).close()
    assert (
        f"{place} held a run without a step; it begins anew with this recipe (changed: train.seed: 0 -> 5)" in said.text
    )
    assert json.loads((place / "config.json").read_text())["train"]["seed"] == 5


def test_a_run_that_fails_in_its_first_step_gives_way_too(recipe, tmp_path, said):
    """After its evaluation, which is kept."""
    place, held_out = tmp_path / "run", f"data.validation={recipe.parent / 'sums.jsonl'}"
    with pytest.raises(UserError, match="gives rewards to steps, and variant 'grpo' reads none"):
        train(opened(few(recipe, tmp_path, place, "rewards.0.name=tiny_run:last_step", held_out), eos_ids=()))
    opened(few(recipe, tmp_path, place), eos_ids=()).close()
    assert f"and what else was there is in {place}/replaced/1" in said.text
    assert '"eval/reward"' in (place / "replaced/1/metrics.jsonl").read_text()
    assert (place / "metrics.jsonl").read_text() == ""
