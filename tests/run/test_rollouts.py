"""What is drawn, and that it follows from the run's record alone."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from runs import draw, numbers, opened

from grpojax import data
from grpojax.data import Pass
from grpojax.host.errors import UserError
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.records.samples import read_samples
from grpojax.run import checks
from grpojax.run import recipe as config
from grpojax.run.problem_order import ProblemOrder
from grpojax.run.run_state import State
from grpojax.run.sections import RetireConfig
from grpojax.train import train

pytestmark = pytest.mark.usefixtures("fakes")

CULLING = ("variant=culling", "rollout.prompts=20", "rollout.retire={readmit_after: 1}")


@pytest.fixture
def graded(recipe, tmp_path):
    """Thirty problems, of which every third is solved by whatever is said."""
    rows = [json.loads(line) for line in (recipe.parent / "sums.jsonl").read_text().splitlines()]
    rows = [row | {"level": float(i % 3 == 0)} for i, row in enumerate(rows)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "data.jsonl"


def load(recipe, data, directory, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", f"data.train={data}", "data.validation=null", "rewards.0.name=tiny_run:level",
        "filter=none", "variant=scale_rl", "train.steps=7", "train.checkpoint_every=1", "rollout.group=2",
        "rollout.max_tokens=4", *overrides,
    ])  # fmt: skip


def trainer_of(recipe):
    return opened(recipe, eos_ids=())


def drawn(directory, steps):
    return [sorted({s["uid"] for s in read_samples(directory, n)[1]}) for n in range(1, steps + 1)]


@pytest.mark.slow
def test_solved_prompts_are_not_drawn_in_later_passes(recipe, graded, tmp_path):
    """ScaleRL's rule is on prompts, not on the groups of a step; a pass takes 30 draws."""
    trainer = trainer_of(load(recipe, graded, tmp_path / "run"))
    assert train(trainer)
    batches = drawn(tmp_path / "run", 7)
    first = sum(batches[:3], [])
    assert len(set(first)) == 24 and any(uid % 3 == 0 for uid in first)
    solved = {uid for uid in first if uid % 3 == 0}  # known before the second pass begins, in the fourth batch
    assert not solved & {uid for batch in batches[4:] for uid in batch}
    assert {uid for uid, _ in trainer.state.solved} == set(range(0, 30, 3))
    assert set(trainer.state.passes[0]["left_out"]) >= solved


def test_waiting_for_rewards_notes_nothing(recipe, graded, tmp_path):
    trainer = trainer_of(load(recipe, graded, tmp_path / "run"))
    batch = draw(trainer)
    judged = [batch.with_rewards() for _ in range(2)]

    def solved():
        return {uid for uid, _ in trainer.source.after_step()["solved"]}

    assert not solved()
    trainer.source.note(judged[1])
    assert solved() == {p.uid for p in batch.problems if p.uid % 3 == 0}


@pytest.mark.in_ci("culling")
@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), CULLING], ids=["scale_rl", "culling"])
def test_a_resumed_run_draws_what_it_would_have_drawn(recipe, graded, tmp_path, overrides):
    """Culling here with two sources, and solved problems that come back."""
    data = f"[{graded}, {graded}]" if overrides else graded
    assert train(trainer_of(load(recipe, data, tmp_path / "whole", *overrides)))
    first = trainer_of(load(recipe, data, tmp_path / "parts", *overrides))
    assert not train(first, lambda *_: first.state.step == 3 and first.control.ask("SIGTERM"))
    again = trainer_of(load(recipe, data, tmp_path / "parts", *overrides))
    assert again.state.step == 3 and train(again)
    assert again.state.solved
    if overrides:  # the second pass had twenty, and the third has all
        assert [(p["number"], p["start"], len(p["left_out"])) for p in again.state.passes] == [(2, 50, 0)] * 2
    assert drawn(tmp_path / "parts", 7) == drawn(tmp_path / "whole", 7)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@pytest.mark.slow
def test_culling_shrinks_the_next_pass_by_exactly_what_is_solved(recipe, graded, tmp_path):
    """Passes of 30, 20 and 20 prompts, in rollouts of ten of the same size: the tokens drawn are the same."""
    trainer = trainer_of(load(recipe, graded, tmp_path / "run", "variant=culling", "rollout.prompts=10"))
    assert train(trainer)
    batches = drawn(tmp_path / "run", 7)
    assert all(len(set(batch)) == 10 for batch in batches)
    hard = {uid for uid in range(30) if uid % 3}
    assert set(sum(batches[:3], [])) == set(range(30))
    assert set(sum(batches[3:5], [])) == hard and set(sum(batches[5:], [])) == hard
    (last,) = trainer.state.passes
    assert Pass(**last) == Pass(number=2, start=50, left_out=tuple(range(0, 30, 3)))


@pytest.mark.parametrize(("overrides", "sources", "count", "told"), [
    ((), 1, 140, True), ((), 1, 139, False), (("filter={max_rollouts: 2}",), 1, 140, False), ((), 2, 140, False),
    (("train.steps=null", "train.tokens=9"), 1, 140, False), (("variant=grpo",), 1, 140, False),
])  # fmt: skip
def test_a_run_within_its_first_pass_leaves_nothing_out_and_says_so(
    recipe, graded, tmp_path, caplog, overrides, sources, count, told
):
    """Seven steps of 20 prompts."""
    loaded = load(recipe, graded, tmp_path / "run", "rollout.prompts=20", *overrides)
    problem = data.Problem(0, (1,), "", None, {})
    problems = data.Problems(
        kept=(problem,) * count, weights=(1.0,) * sources, dropped=0, skipped=(), fingerprint="", tokenize=None
    )
    checks.passes(loaded, problems)
    assert ("draws at most 140 prompts and the data has 140 problems" in caplog.text) == told


@pytest.mark.parametrize(("updates", "told"), [(3, True), (999, True), (1000, False), (None, False)])
def test_a_warm_up_longer_than_the_run_is_said(caplog, updates, told):
    checks.warm_up(OptimizerConfig(warmup_steps=1000, learning_rate=1e-5), updates)
    assert bool(caplog.messages) == told
    if updates == 3:
        assert caplog.messages == [
            "optimizer.warmup_steps=1000 is more than the run's 3 updates: the learning rate ends at 0.3 % of 1e-05"
        ]


@pytest.mark.slow
def test_where_all_are_solved_all_are_drawn_again(recipe, graded, tmp_path, caplog):
    """Everything is over -1; the second pass would be empty, the third is not told by what the first said."""
    options = "variant=culling", "rollout.prompts=10", "rollout.retire={success: -1.0}", "train.steps=6"
    trainer = trainer_of(load(recipe, graded, tmp_path / "run", *options))
    assert train(trainer)
    batches = drawn(tmp_path / "run", 6)
    assert set(sum(batches[:3], [])) == set(sum(batches[3:], [])) == set(range(30))
    assert "rollout 3: all problems of source 1 are solved; they are drawn again" in caplog.text


def test_any_variant_may_retire_and_says_what_it_lacks(recipe, graded, tmp_path):
    def retire(*overrides):
        return load(recipe, graded, tmp_path / "run", *overrides).method.retire

    assert retire("variant=grpo") is None and retire("variant=culling") == RetireConfig(share=1.0)
    assert retire("rollout.retire={readmit_after: 2}") == RetireConfig(share=0.9, readmit_after=2)
    given = retire("variant=grpo", "rollout.retire={share: 0.7, success: 0.5}")
    assert given == RetireConfig(share=0.7, success=0.5)
    with pytest.raises(UserError, match="variant 'grpo' retires no prompts by itself.*set rollout.retire.share"):
        retire("variant=grpo", "rollout.retire={readmit_after: 2}")
    with pytest.raises(UserError, match="readmit_after"):
        retire("rollout.retire={readmit_after: 0}")


@pytest.mark.parametrize(("more", "deciding"), [((), "answer"), (("filter={metric: repetition}",), "repetition")])
def test_a_reward_that_teaches_nothing_does_not_decide_what_success_is(recipe, graded, tmp_path, more, deciding):
    given = "rewards=[{name: repetition, weight: 0.0}, {name: answer}, {name: answer_format}]"
    assert load(recipe, graded, tmp_path / "run", given, *more).method.deciding == deciding


def test_a_graded_reward_retires_by_a_success_that_is_given(recipe, graded, tmp_path):
    """Of lengths from 1 on all prompts would be solved at once."""
    options = "variant=culling", "rewards.0.name=tiny_run:length", "train.steps=2"
    trainer = trainer_of(load(recipe, graded, tmp_path / "run", *options))
    with pytest.raises(UserError, match="retired by the reward 'tiny_run:length', which gave .*rollout.retire.success"):
        train(trainer)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_sample_without_a_reward_retires_no_prompt(share):
    """It may have failed. A sample that was not drawn is none, as of a plan that gives prompts different numbers."""
    values = np.array([[1, 1, 1, 1], [1, 1, 1, np.nan], [1, np.nan, np.nan, np.nan], [np.nan] * 4], np.float32)
    problems = [data.Problem(uid, (1,), "q", None, {}) for uid in range(4)]

    def retired(lengths):
        order = ProblemOrder(
            data.Problems(tuple(problems), (1.0,), 0, (), "", len), 2, 0,
            retire=RetireConfig(share=share), deciding="x", state=State(),
        )  # fmt: skip
        judged = SimpleNamespace(
            problems=problems, by_name={"x": values}, aided=None, rollout=SimpleNamespace(lengths=lengths)
        )
        order.note([(judged, [0] * 4)])
        return [uid for uid, _ in order.saved()["solved"]]

    assert retired(np.full((4, 4), 3)) == ([0] if share == 1 else [0, 1])  # of four, three pass for sure
    assert retired(np.where(np.isfinite(values), 3, 0)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("variant", "filter_of_it", "rollouts"),
    [
        ("scale_rl", "auto", 1),  # leaves groups out of the loss only
        ("scale_rl", "{success: 0.5}", 1),
        ("scale_rl", "{max_rollouts: 2}", 2),
        ("dapo", "auto", 3),
        ("magistral", "auto", 3),
        ("ngrpo", "auto", 3),
        ("grpo", "{metric: 'tiny_run:level'}", 3),
    ],
)
def test_how_many_rollouts_a_filter_draws(recipe, graded, tmp_path, variant, filter_of_it, rollouts):
    made = load(recipe, graded, tmp_path, f"variant={variant}", f"filter={filter_of_it}")
    assert made.method.filter.max_rollouts == rollouts
