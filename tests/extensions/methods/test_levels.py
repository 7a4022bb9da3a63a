"""A curriculum by solve rate: what is drawn follows from the rates in the run's record."""

import dataclasses
import json
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from runs import numbers, opened, start, start_together, train_apart

from grpojax import data
from grpojax.extensions.methods.levels import Level, LevelCurriculum
from grpojax.extensions.methods.method_sections import CurriculumConfig
from grpojax.host.errors import UserError
from grpojax.records.samples import read_samples
from grpojax.run import recipe as config
from grpojax.run.run_state import State
from grpojax.train import train

# Level 1 is always solved, level 3 never, level 2 by one sample of two.
REWARDS = {1: 1.0, 2: None, 3: 0.0}


@pytest.fixture
def leveled(recipe, tmp_path):
    rows = [json.loads(line) for line in (recipe.parent / "sums.jsonl").read_text().splitlines()]
    rows = [row | {"level": 1 + i % 3, "always": REWARDS[1 + i % 3]} for i, row in enumerate(rows)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "data.jsonl"


def overrides(data_file, directory, *more):
    return [
        f"run.dir={directory}", f"data.train={data_file}", "data.validation=null", "rewards.0.name=tiny_run:by_level",
        "train.steps=6", "train.checkpoint_every=1", "rollout.group=4", "rollout.max_tokens=4", "rollout.prompts=7",
        "rollout.curriculum={floor: 0.3, memory: 0.5}", *more,
    ]  # fmt: skip


def load(recipe, *given):
    return config.load(recipe, overrides(*given))


def drawn(directory, steps):
    """Of each step its prompts, in their order."""
    rows = [read_samples(directory, n)[1] for n in range(1, steps + 1)]
    return [[r["uid"] for r in step if r["sample"] == 0] for step in rows]


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_a_run_draws_what_is_solved_half_the_time(recipe, leveled, tmp_path):
    """Problem by problem as a plain reading of the rates has it, and bit for bit after a stop in the middle."""
    trainer = opened(load(recipe, leveled, tmp_path / "whole"), eos_ids=())
    assert train(trainer)
    rates, owed, counts = dict.fromkeys("123", 0.5), dict.fromkeys("123", 0.0), []
    lines = [line for line in numbers(tmp_path / "whole") if "reward" in line]
    for n, line in enumerate(lines, 1):
        weights = {x: p * (1 - p) for x, p in rates.items()}
        share = {x: 0.1 + 0.7 * w / sum(weights.values()) for x, w in weights.items()}
        rows = read_samples(tmp_path / "whole", n)[1]
        of = [str(1 + r["uid"] % 3) for r in rows if r["sample"] == 0]
        counts.append(of.count("2"))
        for level in of:
            owed = {x: o + share[x] for x, o in owed.items()}
            assert level == max(owed, key=owed.get)
            owed[level] -= 1
        for x in rates:
            solved = [r["reward"] for r in rows if str(1 + r["uid"] % 3) == x]
            if solved:
                rates[x] = 0.5 * rates[x] + 0.5 * np.mean(solved)
            assert line[f"levels/{x}/solve_rate"] == pytest.approx(rates[x])
        assert sum(line[f"levels/{x}/share"] for x in rates) == pytest.approx(1)
    assert counts[-1] > counts[0] and rates["1"] > 0.9 and rates["3"] < 0.1 and 0.2 < rates["2"] < 0.8
    first = opened(load(recipe, leveled, tmp_path / "parts"), eos_ids=())
    assert not train(first, lambda *_: first.state.step == 3 and first.control.ask("SIGTERM"))
    again = opened(load(recipe, leveled, tmp_path / "parts"), eos_ids=())
    assert again.state.step == 3 and train(again)
    assert drawn(tmp_path / "parts", 6) == drawn(tmp_path / "whole", 6)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert again.state.kept["levels"] == trainer.state.kept["levels"]


@pytest.mark.exhaustive("run/test_rollouts.py::test_a_resumed_run_draws_what_it_would_have_drawn")
def test_kill_nine_forgets_no_prompt_that_is_retired(recipe, leveled, tmp_path):
    """Which tells from the fifth step on."""
    given = overrides(leveled, "", "train.steps=8", "rollout.curriculum=null", "variant=culling")[1:]
    train_apart(recipe, tmp_path / "whole", *given)
    process = start(recipe, tmp_path / "killed", *given)
    assert any("step 3/8" in line for line in process.stdout)
    process.kill()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL and numbers(tmp_path / "killed")[-1]["step"] < 8
    train_apart(recipe, tmp_path / "killed", *given)
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    batches = drawn(tmp_path / "killed", 8)
    assert batches == drawn(tmp_path / "whole", 8)
    solved = [sum(uid % 3 == 0 for uid in batch) for batch in batches]
    assert sum(solved[:5]) >= 8 > 2 >= sum(solved[5:])


@pytest.mark.exhaustive("host/test_processes.py::test_counts_are_added_up")
def test_two_processes_draw_what_one_does(recipe, leveled, tmp_path):
    """With solved problems in context too: both agree on rates and exemplars."""
    given = overrides(
        leveled, "", "variant=xrpo", "rollout.sample_allocation={probe: 1, exemplars: 1}", "rollout.prompts=8"
    )
    given = [*given[1:], "data.max_prompt_tokens=16", "mesh.fsdp=2", "train.steps=4"]
    for process in start_together(recipe, tmp_path / "two", *given, processes=2, devices=1):
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said
    one = opened(config.load(recipe, [f"run.dir={tmp_path / 'one'}", *given]), devices=2)
    assert train(one) and one.state.kept["exemplars"]
    assert drawn(tmp_path / "two", 4) == drawn(tmp_path / "one", 4)
    names = "seeded/share", "seeded/solved", "levels/2/solve_rate", "levels/3/share"
    lines = [[{name: x.get(name) for name in names} for x in numbers(tmp_path / run)] for run in ("two", "one")]
    assert lines[0] == lines[1] and any(x["seeded/share"] for x in lines[0])


def curriculum(levels="aab", **options):
    problems = [data.Problem(uid, (1,), "q", None, {}, level=x) for uid, x in enumerate(levels)]
    made = data.Problems(tuple(problems), (1.0,), 0, (), "", tuple)
    return LevelCurriculum(made, 2, 0, config=CurriculumConfig(**options), deciding="x", state=State()), problems


def judged(problems, values, aided=None, set_aside=None):
    values = np.array(values, np.float32)
    return SimpleNamespace(problems=problems, by_name={"x": values}, aided=aided, set_aside=set_aside)


def test_rates_are_of_samples_without_solved_problems_before_them():
    """Those of a are 1, 0 and of the failed probe 0, 0; without a reward a sample counts nowhere, nor does b."""
    nan = np.nan
    made, (one, two, three) = curriculum(memory=0.75)
    failed = judged([two], [[0, 0]])
    seeded = np.array([False, True, False])
    made.note([(judged([one, two, three], [[1, 0], [1, 1], [nan, nan]], seeded, failed), [0] * 3)])
    assert made.metrics()["levels/a/solve_rate"] == pytest.approx(0.75 * 0.5 + 0.25 * 0.25)
    assert made.metrics()["levels/b/solve_rate"] == 0.5
    assert made.saved()["levels"]["a"]["rate"] == made.metrics()["levels/a/solve_rate"]


def test_a_graded_reward_needs_a_success():
    made, problems = curriculum()
    given = judged(problems, [[0.5, 1], [0.25, 0], [0.75, 0.5]])
    with pytest.raises(
        UserError, match="levels are drawn by the reward 'x', which gave 0.5.*rollout.curriculum.success"
    ):
        made.note([(given, [0] * 3)])
    made, _ = curriculum(success=0.5, memory=0.0)
    made.note([(given, [0] * 3)])
    assert (made.metrics()["levels/a/solve_rate"], made.metrics()["levels/b/solve_rate"]) == (0.5, 1.0)


def test_what_it_does_not_go_with(recipe, leveled, tmp_path):
    load(recipe, leveled, tmp_path / "run", "filter={max_rollouts: 2}")
    for more, match in (
        (["rollout.retire={share: 1.0}"], r"solved prompts are retired \(by rollout.retire or variant 'grpo'\)"),
        (["variant=culling"], "variant 'culling'"),
        (["rollout.curriculum={floor: 0}"], "floor=0"),
        (["rollout.curriculum={memory: 1}"], "memory=1"),
    ):
        with pytest.raises(UserError, match=match):
            load(recipe, leveled, tmp_path / "run", *more)
    with pytest.raises(UserError, match="data.level, or a source's level: is for rollout.curriculum"):
        load(recipe, leveled, tmp_path / "run", "rollout.curriculum=null", "data.level=hardness")
    with pytest.raises(UserError, match="30 of 30 problems have no level, such as '0.0='"):
        opened(load(recipe, recipe.parent / "sums.jsonl", tmp_path / "run"))
    assert not (tmp_path / "run/config.json").exists()  # the same directory takes a recipe that is right


@pytest.mark.slow
def test_a_filter_notes_every_rollout(recipe, leveled, tmp_path):
    """Levels that are always or never solved are dropped by it, and their rates move all the same."""
    trainer = opened(load(recipe, leveled, tmp_path / "run", "filter={max_rollouts: 2}", "train.steps=3"), eos_ids=())
    assert train(trainer)
    levels = {x: Level(**given) for x, given in trainer.state.kept["levels"].items()}
    assert sum(x.drawn for x in levels.values()) == 7 * trainer.state.rollouts > 21
    assert levels["1"].rate > 0.8 and levels["3"].rate < 0.2
    assert dataclasses.replace(levels["2"], rate=0.5) != Level()
