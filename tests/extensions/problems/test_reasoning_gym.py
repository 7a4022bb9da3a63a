"""reasoning-gym's families as sources of problems, and its scores as rewards."""

import datetime
import subprocess
import sys

import pytest
from data_files import load, refusal
from reward_examples import score

from grpojax.data import SourceConfig
from grpojax.extensions.problems import reasoning_gym
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig

pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym, which compiles C")


def source(family, weight=1.0, **options):
    return SourceConfig(path=f"reasoning_gym:{family}", weight=weight, options=options)


@pytest.mark.slow
def test_a_mixture_of_families_is_loaded_and_scored():
    """The package's own scores: a right answer among other text is worth its share of the characters."""
    sums = source("chain_sum", 3.0, size=5, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    problems = load([sums, source("letter_counting", size=3)], max_prompt_tokens=2000)
    assert problems.weights == (3.0, 1.0)
    assert [p.source for p in problems] == [0] * 5 + [1] * 3
    first, last = problems[0], problems[7]
    terms = first.prompt.removesuffix(" =").rsplit(": ")[1].split(" ")
    assert int(first.gold) == int(terms[0]) + {"+": 1, "-": -1}[terms[1]] * int(terms[2])
    texts = [f"#### {first.gold}", f"<answer> {first.gold}\n</answer>", f"#### {first.gold} {'x' * len(first.gold)}yz"]
    texts += [first.gold, f"#### {last.gold}", "#### 99"]
    tasks = [p.columns["task"] for p in (first, first, first, first, last, last)]
    config = [RewardConfig(name="reasoning_gym"), RewardConfig(name="reasoning_gym", label="whole", weight=0,
              options={"partial": False}), RewardConfig(name="reasoning_gym", label="tag", weight=0,
              options={"marker": "<answer>"})]  # fmt: skip
    scores = score(config, texts, task=tasks)
    n = len(first.gold)
    part = pytest.approx(n / (2 * n + 3))
    assert scores.by_name["reasoning_gym"].tolist() == [1, 1, part, 0, 1, 0]
    assert scores.by_name["whole"].tolist() == [1, 1, 0, 0, 1, 0]
    assert scores.by_name["tag"].tolist() == [0, 1, 0, 0, 0, 0]
    assert not scores.invalid


@pytest.mark.exhaustive("extensions/problems/test_reasoning_gym.py::test_a_mixture_of_families_is_loaded_and_scored")
def test_a_seed_says_which_problems():
    """Also of a family that goes through a set; and neighbouring seeds share none, as the package's own do."""
    same = [load(source("word_ladder", size=3, seed=seed), max_prompt_tokens=2000) for seed in (0, 0, 1)]
    assert same[0].fingerprint == same[1].fingerprint != same[2].fingerprint
    assert [p.gold for p in same[0]] == [p.gold for p in same[1]]
    assert not {p.prompt for p in same[0]} & {p.prompt for p in same[2]}


@pytest.mark.slow
def test_a_family_without_gold_answers():
    given = source("rush_hour", size=1)
    assert "has no column 'answer'" in refusal(given)
    (problem,) = load(given, answer=None, max_prompt_tokens=2000)
    assert problem.gold is None
    assert reasoning_gym.score([""], ["#### A+1"], [[]], task=[problem.columns["task"]]) == [0.01]  # for trying


@pytest.mark.parametrize(("family", "text"), [("prime_factorization", "7 8"), ("game_of_life", "{}")])
@pytest.mark.slow
def test_an_answer_that_its_family_cannot_parse_is_wrong(family, text):
    (problem,) = load(source(family, size=1), max_prompt_tokens=9000)
    task = problem.columns["task"]
    with pytest.raises((ValueError, AttributeError, TypeError, KeyError, IndexError)):
        reasoning_gym._dataset(task.family, task.options).score_answer(text, task.entry)
    assert reasoning_gym.score([""], [f"<answer>{text}</answer>"], [[]], task=[task]) == [0.0]


def test_memory_that_runs_out_is_no_wrong_answer(monkeypatch):
    class Full:
        def score_answer(self, answer, entry):
            raise MemoryError

    monkeypatch.setattr(reasoning_gym, "_dataset", lambda family, options: Full())
    with pytest.raises(MemoryError):
        reasoning_gym.score([""], ["<answer>1</answer>"], [[]], task=[reasoning_gym.Task("f", "{}", {})])


def test_a_child_that_dies_without_a_word(monkeypatch):
    died = subprocess.CompletedProcess([], -9, b"", b"")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: died)
    assert refusal(source("chain_sum")).endswith(
        "reasoning_gym:chain_sum: drawing its problems ended with exit status -9"
    )


def test_a_row_of_another_source_is_no_sample():
    assert reasoning_gym.score([""], ["#### 1"], [[]], task=[None]) == [None]


@pytest.mark.parametrize(("family", "options", "message"), [
    ("chain_sums", {}, "reasoning-gym has no such family; did you mean 'chain_sum'?"),
    ("chain_sum", {"min_term": 2}, "unknown option 'min_term'; it has "),
    ("chain_sum", {"min_terms": 9, "max_terms": 2}, "AssertionError: max_terms must be >= min_terms"),
    ("chain_sum", {"seed": -1}, "seed=-1: must be an integer from 0 to 4000"),
    ("chain_sum", {"size": 0}, "size=0: must be an integer from 1 to 1000000"),
    ("chain_sum", {"min_terms": datetime.date(2025, 1, 2)}, "an option is no plain value: "),
])  # fmt: skip
@pytest.mark.slow
def test_what_is_refused(family, options, message):
    assert f"reasoning_gym:{family}: {message}" in refusal(source(family, **options))


@pytest.mark.slow
def test_settings_of_other_sources():
    with pytest.raises(UserError, match="options=.* are for generated problems"):
        SourceConfig(path="train.jsonl", options={"size": 3})
    with pytest.raises(UserError, match="format='csv' is for files"):
        SourceConfig(path="reasoning_gym:chain_sum", format="csv")
    with pytest.raises(UserError, match="did you mean 'reasoning_gym'"):
        RewardConfig(name="reasoning_gm")
    with pytest.raises(UserError, match="occurs twice|takes no option|unknown"):
        score([RewardConfig(name="reasoning_gym", options={"partal": False})], [""], task=[None])


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal(source("chain_sum")).endswith("needs the package: pip install 'grpojax[reasoning-gym]'")
