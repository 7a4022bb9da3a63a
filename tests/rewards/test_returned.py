"""What a reward function may return and do to its arguments: numbers count, anything else is an invalid sample."""

import decimal
import fractions
import math
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from grpojax.advantages import Signals
from grpojax.host import isolation
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards, sandbox, steps, worker
from grpojax.variants import get


def samples(n, **columns):
    return worker.SampleTexts([""] * n, [f"c{i}" for i in range(n)], [[0] * (i + 1) for i in range(n)], columns)


def judged(name, n=3, twice=False, **columns):
    """Values and reasons of n samples."""
    outcomes, _ = worker.judge(f"misbehaving:{name}", "{}", samples(n, **columns), twice)
    return [o.value for o in outcomes], [o.reason for o in outcomes], [o.detail for o in outcomes]


class Scalar:
    """As a tensor without axes of another library."""

    shape = ()

    def __init__(self, value):
        self._value = value

    def item(self):
        return self._value

    def __float__(self):
        return float(self._value)


@pytest.mark.parametrize(("value", "want"), [
    (True, 1.0), (np.bool_(False), 0.0), (7, 7.0), (np.int8(-3), -3.0), (fractions.Fraction(3, 8), 0.375),
    (decimal.Decimal("0.25"), 0.25), (np.float16(0.5), 0.5), (np.array(1.5), 1.5), (Scalar(0.75), 0.75),
    (-1e12, -1e12), (np.float32(0.1), float(np.float32(0.1))),
])  # fmt: skip
def test_what_is_a_number(value, want):
    (outcome,) = worker.outcomes_of([value], [[1]])
    assert outcome == worker.RewardOutcome(want)


@pytest.mark.parametrize(("value", "reason"), [
    (None, "none"), (math.nan, "nan"), (math.inf, "nan"), (-math.inf, "nan"), (1e38, "nan"), (-2e12, "nan"),
    (10**400, "nan"), (fractions.Fraction(-10) ** 5000, "nan"), (decimal.Decimal("NaN"), "nan"), ("1", "type"),
    (b"1", "type"),
    (np.str_("1"), "type"), (1j, "type"), (np.complex64(1), "type"), (Scalar(2j), "type"), ({"a": 1}, "type"),
    ({1.0}, "type"), (np.ones(1), "type"), (np.ones((1, 1)), "type"), ([1.0], "type"), ([(1, 1j)], "type"),
    ([(1, 1e30)], "nan"), (object(), "type"), (lambda: 1.0, "type"), (np.datetime64("2024-01-01"), "type"),
])  # fmt: skip
def test_what_is_none_leaves_the_other_samples(value, reason):
    bad, good = worker.outcomes_of([value, 1.0], [[1], [1]])
    assert bad.reason == reason and math.isnan(bad.value) and good == worker.RewardOutcome(1.0)


@pytest.mark.parametrize(("values", "reason", "said"), [
    (None, "type", "NoneType"),
    (1.0, "type", "float"),
    ("ab", "type", "str"),
    ({0: 1.0, 1: 1.0}, "type", "dict"),
    ({1.0, 2.0}, "type", "set"),
    ((x for x in (1.0, 2.0)), "type", "generator"),
    (np.ones((2, 1)), "type", r"shape (2, 1), not one of shape (2,)"),
    (np.ones((1, 2)), "type", r"shape (1, 2)"),
    (np.float32(1), "type", "shape ()"),
    ([], "count", "0 values for 2"),
    ([1.0], "count", "1 values for 2"),
    (np.ones(3), "count", "3 values for 2"),
])  # fmt: skip
def test_what_is_no_list_of_one_number_a_sample(values, reason, said):
    outcomes = worker.outcomes_of(values, [[1], [1]])
    assert [o.reason for o in outcomes] == [reason] * 2 and all(said in o.detail for o in outcomes)


@pytest.mark.parametrize("values", [(0.0, 1.0), deque([0, 1]), range(2), np.arange(2), {"a": 0, "b": 1}.values()])
def test_any_sequence_will_do(values):
    assert [o.value for o in worker.outcomes_of(values, [[1], [1]])] == [0.0, 1.0]


def test_what_a_function_does_to_its_arguments_stays_with_it():
    given = samples(3, tags=[["a"], [], ["b", "c"]])
    outcomes, _ = worker.judge("misbehaving:takes_what_it_gets", "{}", given)
    assert [o.value for o in outcomes] == [2.0, 2.0, 5.0]
    assert given == samples(3, tags=[["a"], [], ["b", "c"]])


def test_what_it_does_to_its_options_too():
    for _ in range(2):
        outcomes, _ = worker.judge("misbehaving:uses_up_its_options", '{"values": [1, 2]}', samples(2))
        assert [o.value for o in outcomes] == [2.0, 1.0]


def anything(rng, depth=0):
    """A random value: numbers and what resembles them, and collections of those."""
    kinds = 9 if depth > 2 else 14
    kind = rng.integers(kinds)
    size = int(rng.integers(4))
    if kind >= 9:
        inner = [anything(rng, depth + 1) for _ in range(size)]
        return [inner, tuple(inner), dict(enumerate(inner)), [(i + 1, x) for i, x in enumerate(inner)], deque(inner)][
            kind - 9
        ]
    return [
        None, float(rng.normal()), int(rng.integers(-9, 9)) ** int(rng.integers(1, 400)), "12"[:size], bool(size % 2),
        [math.nan, math.inf, -math.inf, 1e300][size], complex(size), np.full((size,) * int(rng.integers(3)), 0.5),
        fractions.Fraction(size, 7),
    ][kind]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_whatever_it_returns_each_sample_has_a_number_or_a_reason(seed):
    rng, valid = np.random.default_rng(seed), 0
    for _ in range(250):
        n = int(rng.integers(1, 5))
        value = anything(rng) if rng.random() < 0.3 else [anything(rng) for _ in range(n)]
        outcomes, _ = worker.judge("misbehaving:says", "{}", samples(n, value=[value] * n), bool(rng.integers(2)))
        assert len(outcomes) == n
        for o in outcomes:
            assert (abs(o.value) <= steps.LARGEST and not o.reason) or (
                math.isnan(o.value) and o.reason in worker.REASONS
            )
        valid += sum(not o.reason for o in outcomes)
    assert valid > 100


@pytest.mark.parametrize("n", [1, 2, 5])
def test_one_value_for_all_is_refused_also_of_one_sample(n):
    values, reasons, said = judged("one_for_all", n, twice=True)
    assert reasons == ["count"] * n and np.isnan(values).all() and f"1 values for {max(n, 2)} completions" in said[0]


def test_huge_rewards_and_a_column_vector_are_invalid():
    assert judged("swings")[1] == ["nan"] * 3 and judged("column_vector")[1] == ["type"] * 3


def test_a_tracebacks_length_has_a_limit():
    _, reasons, said = judged("chatters", 1)
    assert reasons == ["error"] and len(said[0]) < 10_000 and "RuntimeError: xxx" in said[0]


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "opo"])
@pytest.mark.slow
def test_rewards_as_large_as_they_may_be_make_finite_advantages(name):
    shape = 4, 6
    tokens = np.zeros((*shape, 3), np.float32)
    signals = Signals(
        lengths=np.full(shape, 3, np.int32), mask=tokens == 0, behavior_logps=tokens, ref_logps=tokens, entropy=tokens
    )
    signs = np.random.default_rng(0).choice([-1, 1], shape).astype(np.float32)
    advantages = np.asarray(get(name).advantage(signs * np.float32(steps.LARGEST), signals))
    assert np.isfinite(advantages).all() and advantages.any()


def test_a_weight_has_a_size():
    for weight in (math.nan, math.inf, 1e7):
        with pytest.raises(UserError, match=r"weight=.*: must be at least -1e6 and at most 1e6"):
            RewardConfig(name="answer", weight=weight)


# ------------------------------------------------------------------------------------ in the worker processes


@pytest.fixture(scope="module")
def rewards():
    each = ("one_for_all", "takes_what_it_gets", "swings", "column_vector", "forks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "processes_can_be_contained", lambda: False)  # `forks` tells ids that are true here
        made = Rewards([RewardConfig(name=f"misbehaving:{name}", label=name, weight=1.0) for name in each])
    with made:
        yield made


def gone(pid):
    """Whether a process has ended, as it should in a moment; nobody need have asked for its status."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("n", [1, 9, 16])  # 9 leave a job of one sample, as jobs begin with 8
def test_a_batch_through_the_workers(rewards, n):
    ids = [[0] * (i % 3) for i in range(n)]
    scores = rewards([""] * n, [""] * n, ids, {"tags": [["t"] for _ in range(n)]})
    assert scores.invalid == {"one_for_all/count": n, "swings/nan": n, "column_vector/type": n}
    assert scores.by_name["takes_what_it_gets"].tolist() == [len(x) + 1 for x in ids]
    assert all(gone(int(pid)) for pid in scores.by_name["forks"])


def test_a_column_with_the_name_of_an_option_is_refused_with_both(rewards):
    """One that the recipe sets, or that has a default; a keyword without one is how a function asks for a column."""
    told = r"reward 'misbehaving:scaled' has an option 'scale', and the data has a column 'scale'.*\n.*data.columns"
    for options in ({}, {"scale": 2.0}):
        with Rewards([RewardConfig(name="misbehaving:scaled", options=options)]) as made:
            made.check_columns(["level", "answer"])
            with pytest.raises(UserError, match=told):
                made.check_columns(["level", "scale"])
            with pytest.raises(UserError, match=told):
                made([""], [""], [[]], {"scale": [7]})
    rewards.check_columns(["tags", "scale"])


def test_a_column_that_is_not_there_is_refused_with_those_that_are():
    """By position or by keyword only; an option gives it too, and a default asks for none."""
    with Rewards([RewardConfig(name="misbehaving:asks")]) as made:
        made.check_columns(["totl"])
        told = r"reward 'misbehaving:asks' asks for 'totl'; the data has kind, total\ngive options.totl, or.*'gold'"
        with pytest.raises(UserError, match=told):
            made.check_columns(["total", "kind"])
    with Rewards([RewardConfig(name="misbehaving:asks", options={"totl": 1})]) as made:
        made.check_columns(["total"])
    with Rewards([RewardConfig(name="misbehaving:takes_what_it_gets")]) as made:
        with pytest.raises(UserError, match="asks for 'tags'; the data has none"):
            made.check_columns([])
    with Rewards([RewardConfig(name="http")]) as made:
        with pytest.raises(UserError, match="reward 'http' asks for 'url'; .*\ngive options.url"):
            made.check_columns(["question"])


def test_pieces_are_a_column_only_where_a_reward_wants_them():
    name = "misbehaving:by_pieces"
    with Rewards([RewardConfig(name=name, pieces=True)]) as made:
        made.check_columns([])
    with Rewards([RewardConfig(name=name)]) as made, pytest.raises(UserError, match="'pieces'.*\n.*pieces: true"):
        made.check_columns([])


@pytest.mark.parametrize(("name", "options", "taken", "columns", "optional"), [
    ("misbehaving:scaled", ["scale"], ("scale",), (), ()),
    ("misbehaving:takes_what_it_gets", [], (), ("tags",), ()),
    ("reward_functions:later", [], ("scale",), ("k",), ()),
    ("misbehaving:asks", ["totl"], (), (), ("note",)),
])  # fmt: skip
def test_options_are_keywords_with_a_default_and_columns_those_without(name, options, taken, columns, optional):
    assert sandbox.probe(name, options) == sandbox.Probe("", taken, columns, optional)


def test_a_function_asks_for_a_column_with_none_as_its_default_too():
    with Rewards([RewardConfig(name="misbehaving:asks", options={"totl": 1})]) as made:
        assert made.asks_for("note") and not made.asks_for("totl")


def test_a_column_among_the_first_three_parameters_is_refused():
    """Those are given by position: a function as TRL calls it, without ``tokens``, cannot get its column."""
    with Rewards([RewardConfig(name="misbehaving:without_tokens")]) as made:
        made.check_columns(["kind"])
        with pytest.raises(UserError, match="'misbehaving:without_tokens' has 'total'.*\n.*tokens"):
            made.check_columns(["kind", "total"])
