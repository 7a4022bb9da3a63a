"""Runs some of whose groups begin with a part of a solution."""

import json

import numpy as np
import pytest
import run_calls
import runs
from runs import numbers, opened, plain_source

from grpojax.extensions.guidance.guided import passing
from grpojax.host.errors import UserError
from grpojax.records.samples import read_samples
from grpojax.run import recipe as config
from grpojax.train import step, train

SAID = "s = 12"  # the beginning of all solutions, which no random policy writes


@pytest.fixture(scope="module")
def solved(recipe, tmp_path_factory):
    """Problems with a solution, and a reward that only samples after a whole solution get."""
    file = tmp_path_factory.mktemp("solved") / "solved.jsonl"
    rows = [json.loads(line) for line in (recipe.parent / "sums.jsonl").read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "solution": f"{SAID} {row['answer']}"}) + "\n" for row in rows))
    return file


def load(recipe, directory, solved, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", f"data.train={solved}", "data.validation=null", "data.max_prompt_tokens=16",
        "rollout.prompts=8", "rollout.guidance={share: 0.25, start: 1.0}", "train.steps=4", "train.checkpoint_every=2",
        f"rewards=[{{name: format, options: {{pattern: '{SAID}.*'}}}}]", *overrides,
    ])  # fmt: skip


@pytest.mark.usefixtures("fakes")
def test_failed_prompts_are_guided_and_no_problem_is_skipped(recipe, tmp_path, solved):
    run = opened(load(recipe, tmp_path, solved))
    source, state, drawn = plain_source(run), run.state, []
    for _ in range(4):
        state, updates = step(run, state)
        drawn.append(updates.batch)
    run.close()
    aided = [batch.aided.sum() for batch in drawn]
    assert aided == [0, 2, 2, 2]  # all fail without a prefix; a quarter of eight groups is guided from then on
    assert np.flatnonzero(drawn[1].aided).tolist() == [2, 6]  # in both halves of the batch
    plain = [p.uid for batch in drawn for p, a in zip(batch.problems, batch.aided, strict=True) if not a]
    order = [p.uid for n in range(4) for p in source.order.draw(n)[0]]
    assert plain == order[: len(plain)] == order[:26]
    for batch in drawn[1:]:
        right = passing(batch, "format", None)
        assert right[batch.aided].all() and not right[~batch.aided].any()
        assert [bool(source.guide.prefix_of(p)) for p in batch.problems] == batch.aided.tolist()


@pytest.mark.usefixtures("fakes")
def test_where_nothing_fits_it_is_said_once(recipe, tmp_path, solved, caplog):
    assert train(opened(load(recipe, tmp_path, solved, "data.max_prompt_tokens=4", "train.checkpoint_every=0")))
    assert caplog.text.count("has a solution in the column 'solution' of which a part fits") == 1


@pytest.mark.slow
def test_a_prefix_is_context_and_its_samples_are_the_policys(recipe, tmp_path, solved):
    """The trainer's log-probs are the sampler's, so both have read the prefix."""
    never = ("rewards.0={name: 'tiny_run:parity'}", "rollout.guidance.success=2")
    assert train(opened(load(recipe, tmp_path, solved, *never)))
    lines = [line for line in numbers(tmp_path) if "reward" in line]
    assert [line["guidance/share"] for line in lines] == [0, 0.25, 0.25, 0.25]
    assert all(abs(line["sampling/kl"]) < 1e-5 for line in lines)
    rows = [row for n in range(1, 5) for row in read_samples(tmp_path, n)[1]]
    assert {row["prefix_tokens"] > 0 for row in rows} == {True, False}


@pytest.mark.slow
def test_a_broken_run_goes_on_bit_for_bit(recipe, tmp_path, solved):
    for prefix in ("solution", "own"):
        how = ("rewards.0={name: 'tiny_run:parity'}", "rollout.group=2", f"rollout.guidance.prefix={prefix}")
        whole, broken = tmp_path / f"{prefix}_whole", tmp_path / f"{prefix}_broken"
        assert train(opened(load(recipe, whole, solved, *how)))
        short = load(recipe, broken, solved, *how, "train.steps=2")
        assert train(opened(short))
        assert train(opened(load(recipe, broken, solved, *how)))
        assert numbers(broken) == numbers(whole)


@pytest.mark.slow
def test_a_dry_step_calls_what_a_run_calls(recipe, tmp_path, solved, monkeypatch):
    case = [f"data.train={solved}", "rollout.guidance={share: 0.25}"]
    run_calls.check(run_calls.record(monkeypatch), recipe, tmp_path, case)


@pytest.mark.slow
def test_two_processes_guide_the_same_prompts(recipe, tmp_path, solved):
    overrides = (
        f"data.train={solved}", "data.validation=null", "data.max_prompt_tokens=16", "train.steps=3",
        "rollout.guidance={share: 0.25, start: 1.0}", f"rewards=[{{name: format, options: {{pattern: '{SAID}.*'}}}}]",
    )  # fmt: skip
    together = runs.start_together(recipe, tmp_path / "two", *overrides, processes=2, devices=1)
    for process in together:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
    assert [x["guidance/share"] for x in numbers(tmp_path / "two") if "reward" in x] == [0, 0.25, 0.25]


@pytest.mark.parametrize(("given", "said"), [
    (["rollout.ahead=1"], "ahead=1: which prompts are guided follows from the rewards of the rollout before"),
    (["rollout.guidance.share=0.1"], "less than one group: set share to at least 0.125"),
    (["variant=grpo_process"], "rewards of steps"),
    (["rollout.overlap=0.5"], "each draw samples in a way of their own"),
    (["rollout.guidance={size: 3}"], "size"),
])  # fmt: skip
def test_what_it_does_not_go_with_is_refused(recipe, tmp_path, solved, given, said):
    with pytest.raises(UserError, match=said):
        load(recipe, tmp_path, solved, *given)


@pytest.mark.usefixtures("fakes")
def test_a_column_that_is_not_there_is_named(recipe, tmp_path, solved):
    with pytest.raises(UserError, match="column='steps': no problem has such a column.* one of answer"):
        opened(load(recipe, tmp_path, solved, "rollout.guidance.column=steps"))
