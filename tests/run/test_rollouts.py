"""What is drawn, and that it follows from the run's record alone."""

import json

import pytest
from runs import Trainer, numbers

from grpojax.host.errors import UserError
from grpojax.records.samples import read_samples
from grpojax.run import recipe as config


@pytest.fixture
def graded(recipe, tmp_path):
    """Thirty problems, of which every third is solved by whatever is said."""
    rows = [json.loads(line) for line in (recipe.parent / "sums.jsonl").read_text().splitlines()]
    rows = [row | {"level": float(i % 3 == 0)} for i, row in enumerate(rows)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "data.jsonl"


def load(recipe, data, directory, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", f"data.train={data}", "data.eval=null", "rewards.0.name=tiny_run:level", "filter=none",
        "variant=scale_rl", "train.steps=7", "train.checkpoint_every=1", "rollout.group=2", "rollout.max_tokens=4",
        *overrides,
    ])  # fmt: skip


def trainer_of(recipe):
    return Trainer(recipe, eos_ids=())


def drawn(directory, steps):
    return [sorted({s["uid"] for s in read_samples(directory, n)[1]}) for n in range(1, steps + 1)]


def test_solved_prompts_are_not_drawn_in_later_passes(recipe, graded, tmp_path):
    """ScaleRL's rule is on prompts, not on the groups of a step; a pass takes 30 draws."""
    trainer = trainer_of(load(recipe, graded, tmp_path / "run"))
    assert trainer.run()
    batches = drawn(tmp_path / "run", 7)
    first = sum(batches[:3], [])
    assert len(set(first)) == 24 and any(uid % 3 == 0 for uid in first)
    solved = {uid for uid in first if uid % 3 == 0}  # known before the second pass begins, in the fourth batch
    assert not solved & {uid for batch in batches[4:] for uid in batch}
    assert trainer.meta["retired"] == list(range(0, 30, 3)) and set(trainer.meta["pass"]["retired"]) >= solved


def test_a_resumed_run_draws_what_it_would_have_drawn(recipe, graded, tmp_path):
    assert trainer_of(load(recipe, graded, tmp_path / "whole")).run()
    first = trainer_of(load(recipe, graded, tmp_path / "parts"))
    first.on_step = lambda *_: setattr(first.session, "_stop", first.done + 1 == 3)
    assert not first.run()
    again = trainer_of(load(recipe, graded, tmp_path / "parts"))
    assert again.done == 3 and again.run()
    assert drawn(tmp_path / "parts", 7) == drawn(tmp_path / "whole", 7)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


def test_prompts_are_retired_from_one_source_only(recipe, graded, tmp_path):
    with pytest.raises(UserError, match="one source only"):
        trainer_of(load(recipe, f"[{graded}, {graded}]", tmp_path / "run"))
