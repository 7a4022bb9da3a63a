"""Which samples of a run are exported, in which order, and what is said of the others."""

import pytest

from grpojax.extensions.experiments import traces
from grpojax.extensions.experiments.traces import TraceConfig, select_traces
from grpojax.host.errors import UserError


def sample(uid, completion, verdict=1.0, *, reward=None, stop="eos", number=0):
    total = verdict if reward is None else reward
    return {"uid": uid, "sample": number, "prompt": f"P{uid}", "completion": completion, "reward": total,
            "rewards": {"other": 0.0, "answer": verdict}, "stop": stop, "gold": "1"}  # fmt: skip


STEPS = [
    (1, [sample(7, "a"), sample(7, "b", 0.0), sample(7, "c", reward=3.0), sample(4, "a")]),
    (3, [sample(7, "a"), sample(7, "d", None), sample(4, "cut", stop="length"), sample(7, "e", reward=2.0)]),
    (4, [sample(4, "  "), sample(4, "f", reward=0.5), sample(9, "g", 0.5)]),
]


def taken(**options):
    got = select_traces(STEPS, TraceConfig(**{"decides": "answer", **options}))
    return [(step, s["uid"], s["completion"]) for step, s in got.samples], got.left_out


def test_what_is_right_whole_and_new_is_taken_in_order():
    rows, left_out = taken()
    assert rows == [(1, 7, "a"), (1, 7, "c"), (1, 4, "a"), (3, 7, "e"), (4, 4, "f")]
    assert left_out == {"wrong": 4, "cut": 1, "duplicate": 1, "over": 0}
    assert len(rows) + sum(left_out.values()) == sum(len(samples) for _, samples in STEPS)


def test_the_most_of_a_prompt_are_the_best_and_then_the_first():
    rows, left_out = taken(most=2)
    assert rows == [(1, 7, "c"), (1, 4, "a"), (3, 7, "e"), (4, 4, "f")] and left_out["over"] == 1
    rows, left_out = taken(most=1)
    assert rows == [(1, 7, "c"), (1, 4, "a")] and left_out["over"] == 3


def test_thresholds():
    assert taken(success=0.5)[0][-1] == (4, 9, "g")
    assert taken(least_reward=2.0)[0] == [(1, 7, "c"), (3, 7, "e")]
    assert taken(success=2.0)[0] == []
    with pytest.raises(UserError, match="no reward 'length' in step 1; it has other, answer"):
        taken(decides="length")
    with pytest.raises(UserError, match="step 2 has episodes .*(?s:.*)read_samples"):
        select_traces([(2, [{**sample(7, "ab"), "turns": ["a", "5", "b"]}])], TraceConfig(decides="answer"))
    with pytest.raises(UserError, match="most=-1: must be at least 0"):
        taken(most=-1)


def test_a_line_says_where_it_comes_from():
    asked = [{"role": "user", "content": "P7"}]
    assert traces.trace_row(3, sample(7, "a", number=2), asked, "runs/x", "tiny") == {
        "messages": [*asked, {"role": "assistant", "content": "a"}],
        "run": "runs/x", "step": 3, "uid": 7, "sample": 2, "reward": 1.0, "rewards": {"other": 0.0, "answer": 1.0},
        "gold": "1", "model": "tiny",
    }  # fmt: skip
    assert len(asked) == 1
