"""The parts of the data: what a held-out part has is not trained on, and what is in two files is counted."""

import json
import random

import pytest
from chat_tokenizer import Fake
from data_files import letters

from grpojax import data
from grpojax.data import DataConfig, Known, SourceConfig
from grpojax.environments import reasoning, reasoning_gym
from grpojax.host.errors import UserError

WORDS = DataConfig(train="", template="plain")


def loaded(given, known=Known(), config=WORDS):  # noqa: B008  frozen
    return data.load_problems(given, letters, config, known=known)


def known_of(*parts):
    known = Known()
    for part in parts:
        known = known.and_those_of(loaded(part))
    return known


def written(path, *questions):
    path.write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions))
    return str(path)


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


def test_rows_of_files_that_are_in_two_parts_are_counted_with_the_remedy(tmp_path):
    held = known_of(written(tmp_path / "test.jsonl", "a?", "b?"), written(tmp_path / "validation.jsonl", "c?"))
    train = loaded(written(tmp_path / "train.jsonl", "b?", "c?", "d?", "b?", "a"), held)
    assert len(train) == 5 and train.left_out == 0 and not train.notes("train", WORDS)
    (said,) = train.warnings("train")
    assert said.startswith("3 problems of data.train are word for word in data.validation or data.test too")
    assert "take them out of one of the files, or cut a source by rows: [start, stop]" in said
    validation = loaded(str(tmp_path / "validation.jsonl"), known_of(str(tmp_path / "train.jsonl")))
    assert validation.warnings("validation")[0].startswith(
        "1 problems of data.validation are word for word in data.test too"
    )


def test_answers_that_are_in_two_parts(tmp_path):
    for name, questions in (("train", ("a", "b", "b", "c")), ("test", ("b",))):
        rows = [{"prompt": q, "completion": str(n)} for n, q in enumerate(questions)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    config = data.AnsweredConfig(train="", template="plain")
    tokenize = data.Tokenize(Fake(), config.questions())

    def read(path, known=Known(), group=2):  # noqa: B008  frozen
        return data.load_answered(path, tokenize, config, data.read_answer, end=0, group=group, known=known)

    held = Known().and_those_of(read(str(tmp_path / "test.jsonl")).kept)
    train = read(str(tmp_path / "train.jsonl"), held)
    assert train.warnings("train")[0].startswith("1 problems of data.train are word for word")
    sums = [{"path": "reasoning:sums", "options": {"most": 4, "seed": seed}} for seed in (0, 1)]
    first, second = (SourceConfig(**s) for s in sums)
    held = Known().and_those_of(read(second).kept[:3])
    left = read(first, held)
    assert left.left_out >= 3 and [entry.uid for entry in left.kept] == list(range(len(left.kept)))


@pytest.mark.parametrize(("rows", "want"), [
    ([0, -2], "abc"), ([-2, None], "de"), ([1, 3], "bc"), ([3, 99], "de"),
])  # fmt: skip
def test_a_part_of_the_rows(tmp_path, rows, want):
    file = SourceConfig(path=written(tmp_path / "d.jsonl", *"abcde"), rows=rows)
    assert "".join(p.prompt for p in loaded(file)) == want and [p.uid for p in loaded(file)] == list(range(len(want)))


@pytest.mark.parametrize("rows", [(3, 3), (5, 2), (-2, -2), (-1, -5)])
def test_no_rows_are_refused(rows):
    with pytest.raises(UserError, match="takes no row"):
        SourceConfig(path="d.jsonl", rows=rows)
