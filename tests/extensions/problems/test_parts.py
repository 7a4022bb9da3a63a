"""Problems that are made: what a held-out part has is not trained on, in any order of its terms."""

import random

import pytest
from data_files import letters

from grpojax import data
from grpojax.data import DataConfig, Known, SourceConfig
from grpojax.extensions.problems import reasoning, reasoning_gym
from grpojax.host.errors import UserError

WORDS = DataConfig(train="", template="plain")


def loaded(given, known=Known(), config=WORDS):  # noqa: B008  frozen
    return data.load_problems(given, letters, config, known=known)


def known_of(*parts):
    known = Known()
    for part in parts:
        known = known.and_those_of(loaded(part))
    return known


def source(**options):
    return SourceConfig(path="reasoning:sums", options={"most": 12, **options})


@pytest.mark.parametrize("family", ["sums", "stories"])
def test_no_part_has_a_problem_of_another_in_any_order_of_its_terms(family):
    options = {"most": 14} if family == "sums" else {"size": 300}
    parts = [
        {reasoning.content(family, row["question"]) for row in reasoning.rows(family, {**options, "part": part})}
        for part in data.PARTS
    ]
    assert all(parts) and len(set.union(*parts)) == sum(map(len, parts))


@pytest.mark.parametrize(("one", "other", "same"), [
    ("What is 12 + 7?", "What is 7 + 12?", True),
    ("What is 3 + 4 + 5?", "What is 5 + 3 + 4?", True),
    ("12 - 7 + 3 =", "3 + 12 - 7 =", True),
    ("12 - 7 =", "7 - 12 =", False),
    ("-4 + 9 =", "9 + -4 =", True),
    ("-4 + 9 =", "9 - 4 =", True),
    ("1.5 + 2.25 =", "2.25 + 1.5 =", True),
    ("What is 12 + 7?", "What is 11 + 8?", False),
    ("What is 1 + 27?", "What is 12 + 7?", False),
])  # fmt: skip
def test_what_a_sum_asks(one, other, same):
    assert (reasoning.without_order(one) == reasoning.without_order(other)) is same


def test_made_problems_that_a_held_out_part_has_are_left_out_and_counted():
    held = known_of(source(part="train", seed=1, size=40))
    train = loaded(source(part="train"), held)
    mirrored = {reasoning.without_order(p.prompt) for p in train} & {
        c.removeprefix("reasoning ") for c in held.contents
    }
    assert not mirrored and train.left_out > 40
    assert len(train) + train.left_out == len(reasoning.rows("sums", {"most": 12}))
    said = f"{train.left_out} problems of data.train are left out, because data.validation or data.test has them"
    assert said in train.notes("train", WORDS) and not train.warnings("train")
    assert train.fingerprint == loaded(source(part="train")).fingerprint
    with pytest.raises(UserError, match="a held-out part has all its problems; give them another seed or part"):
        loaded(source(part="train", seed=1, size=5), held)


def test_a_chain_of_reasoning_gym_is_the_same_in_any_order(monkeypatch):
    def rows(family, options):
        rng = random.Random(options["seed"])
        drawn = [(rng.randint(0, 9), rng.choice("+-"), rng.randint(0, 9)) for _ in range(300)]
        return [{"question": f"Answer: {a} {sign} {b} =", "answer": "0"} for a, sign, b in drawn]

    monkeypatch.setattr(reasoning_gym, "rows", rows)
    for family in ("chain_sum", "products"):  # in the latter the order would make another problem
        train, held = (SourceConfig(path=f"reasoning_gym:{family}", options={"seed": seed}) for seed in (0, 1))
        held = loaded(held)
        train = loaded(train, Known().and_those_of(held))
        asked = [{reasoning_gym.content(family, p.prompt) for p in part} for part in (train, held)]
        assert train.left_out > 100 and not asked[0] & asked[1] and len(train) + train.left_out == 300
        mirrored = {reasoning.without_order(p.prompt) for p in train} & {
            reasoning.without_order(p.prompt) for p in held
        }
        assert bool(mirrored) is (family == "products")
