"""Made problems: their answers by another way, their parts, and that the tiny policy has something to learn."""

import doctest
import re

import numpy as np
import pytest
from data_files import load, refusal
from flax import nnx

from grpojax import data
from grpojax.data import SourceConfig
from grpojax.environments import reasoning
from grpojax.models import Compute, hf
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig

LEVELS = tuple(range(1, 10))
TALLIES = [
    ("Ben has 801 beads. He finds 43 more. He gives 48 to Mia. How many beads does Ben have now?", "796"),
    ("Tom has 494 coins. Anna gives him 84 more. He finds 30 more. How many coins does Tom have in the end?", "608"),
]


def read(question):
    """(answer, steps, asides, counts on the way) of a story, sentence by sentence as a reader takes it."""
    *told, asked = re.split(r"(?<=\.) ", question)
    thing, hero = re.fullmatch(r"How many (\w+) does (\w+) have (?:now|in the end)\?", asked).groups()
    he, him = ("She", "her") if hero in reasoning.SHE else ("He", "him")
    count, steps, asides, on_the_way, last = None, 0, 0, [], hero
    for sentence in told:
        who, verb, *rest = sentence[:-1].split()
        numbers = [int(word) for word in rest if word.isdecimal()]
        if verb == "gives" and rest[0] in (him, hero):  # somebody gives the hero
            count += numbers[0]
            assert rest[0] == hero or last == hero  # "him" is nobody else
        elif who not in (hero, he):
            asides += 1
            assert rest[-1] != thing
            last = who
            continue
        elif count is None:
            count = int(np.prod(numbers))
            steps += len(numbers) - 1
            assert rest[-2 if len(numbers) == 2 else -1] == thing
            on_the_way.append(count)
            continue
        else:
            assert who == hero or last == hero  # "he" is nobody else
            count += {"finds": 1, "buys": 1, "loses": -1, "sells": -1, "gives": -1}[verb] * numbers[0]
        steps, last = steps + 1, hero
        on_the_way.append(count)
    return count, steps, asides, on_the_way


def test_stories_say_what_their_answers_are():
    rows = reasoning.rows("stories", {"size": 400, "levels": LEVELS})
    assert [r["level"] for r in rows] == [*list(LEVELS) * 44, *LEVELS[:4]]
    for row in rows:
        count, steps, asides, on_the_way = read(row["question"])
        assert str(count) == row["answer"] and (steps, asides) == reasoning.LEVELS[row["level"] - 1], row
        assert 1 <= min(on_the_way) and max(on_the_way) <= 40


def test_tallies_say_what_their_answers_are():
    options = {"size": 240, "levels": [1, 3, 7], "most": 60, "operand": 20}
    rows, worked = (reasoning.rows("tallies", {**options, "worked": on}) for on in (False, True))
    assert [r["level"] for r in rows] == [1, 3, 7] * 80
    for row, long in zip(rows, worked, strict=True):
        count, steps, asides, on_the_way = read(row["question"])
        assert (str(count), steps, asides) == (row["answer"], row["level"], 0), row
        assert 1 <= min(on_the_way) and max(on_the_way) <= 60
        *lines, last = long["answer"].split("\n")
        assert long["question"] == row["question"] and last == f"## Answer: {count}"
        assert [eval(line.replace("=", "==")) for line in lines] == [True] * steps
        assert [int(line.split()[-1]) for line in lines] == on_the_way[1:]
        assert max(int(line.split()[2]) for line in lines) <= 20


def test_a_tally_in_other_words_or_another_order_is_the_same():
    told = "Mia has 30 nuts. Tom gives her 12 more. She sells 5. How many nuts does Mia have now?"
    again = "Leo starts with 30 eggs. He loses 5 of them. He buys 12 more. How many eggs does Leo have in the end?"
    other = "Leo starts with 30 eggs. He loses 12 of them. He buys 5 more. How many eggs does Leo have in the end?"
    first, second, third = (reasoning.content("tallies", question) for question in (told, again, other))
    assert first == second != third

    def contents(**options):
        drawn = reasoning.rows("tallies", {"size": 300, "levels": [1, 2], "most": 30, "operand": 9, **options})
        return [reasoning.content("tallies", r["question"]) for r in drawn]

    parts = [contents(part=part, seed=seed, size=60) for part in ("validation", "test") for seed in (0, 1)]
    train, *_ = found = [contents(), set(parts[0] + parts[1]), set(parts[2] + parts[3])]
    assert len(set(train)) == 300 and min(map(len, found)) > 60
    assert not set(train) & found[1] and not set(train) & found[2] and not found[1] & found[2]


def test_tallies_are_the_same_in_every_process():
    """The first of them in words and numbers: neither a hash of texts nor a set's order has a say."""
    rows = reasoning.rows("tallies", {"size": 2, "levels": [2]})
    assert [(r["question"], r["answer"]) for r in rows] == TALLIES


def test_sums():
    rows = reasoning.rows("sums", {"most": 12, "terms": 3})
    for row in rows:
        terms = re.fullmatch(r"What is (\d+) \+ (\d+) \+ (\d+)\?", row["question"]).groups()
        assert row["answer"] == str(sum(map(int, terms))) and max(map(int, terms)) <= 12
    held = [reasoning.rows("sums", {"most": 12, "terms": 3, "part": part}) for part in ("validation", "test")]
    every = [*rows, *held[0], *held[1]]
    assert len({r["question"] for r in every}) == len(every) == 13**3
    assert all(0.09 < len(part) / 13**3 < 0.16 for part in held)  # an eighth
    assert doctest.testmod(reasoning).failed == 0


@pytest.mark.parametrize("family", ["sums", "stories", "tallies"])
def test_no_question_is_in_both_parts_and_a_seed_says_which(family):
    def questions(**options):
        return [r["question"] for r in reasoning.rows(family, {"size": 100, **options})]

    train = questions()
    assert train == questions() != questions(seed=1)
    assert len(set(train)) == 100
    assert not set(train) & {*questions(part="test"), *questions(part="test", seed=1)}


def test_every_word_is_a_token_of_the_tiny_policy():
    tokenizer = hf.load_tokenizer(data.locate("builtin:tiny"))
    words = {
        w for r in reasoning.rows("stories", {"levels": LEVELS}) for w in re.findall(r" ?[A-Za-z]+", r["question"])
    }
    assert len(words) > 60
    assert not [word for word in words if len(tokenizer.tokenize(word)) > 1]


def test_they_are_sources():
    stories = SourceConfig(path="reasoning:stories", weight=2.0, options={"size": 7, "levels": [1, 8]})
    problems = load([stories, "reasoning:sums"], max_prompt_tokens=400)
    assert problems.weights == (2.0, 1.0)
    assert [p.columns["level"] for p in problems[:7]] == [1, 8, 1, 8, 1, 8, 1]
    assert problems[7].prompt.startswith("What is ") and problems[7].gold.isdecimal()


@pytest.mark.parametrize(("path", "options", "message"), [
    ("reasoning:story", {}, "reasoning:story: no such family; there are sums, stories, tallies"),
    ("reasoning:sums", {"mots": 3}, "unknown key; did you mean 'most'"),
    ("reasoning:sums", {"most": 3, "size": 16}, "size=16: there are "),
    ("reasoning:sums", {"most": 99, "terms": 4}, "most=99: with terms=4 there are over a million sums"),
    ("reasoning:stories", {"levels": [0]}, "levels: there is no level 0; there are 1 to 9"),
    ("reasoning:stories", {"levels": []}, "levels: the list is empty"),
    ("reasoning:tallies", {"levels": [2, 0]}, "levels=[2, 0]: give numbers of steps"),
    ("reasoning:tallies", {"levels": []}, "levels=[]: give numbers of steps"),
    ("reasoning:tallies", {"most": 40, "operand": 20}, "most=40: must be over twice operand=20"),
    ("reasoning:tallies", {"most": 9, "operand": 3, "levels": [1], "size": 99}, "size=99: no more than "),
    ("reasoning:stories", {"part": "eval"}, "expected 'train', 'validation' or 'test'"),
])  # fmt: skip
def test_what_is_refused(path, options, message):
    assert message in refusal(SourceConfig(path=path, options=options))


@pytest.mark.slow
def test_the_tiny_policy_starts_low_but_not_at_nothing():
    """By level, 24 stories with 16 samples each: right ones thin out, and groups without one come in."""
    import jax

    folder = data.locate("builtin:tiny")
    tokenizer = hf.load_tokenizer(folder)
    ask = data.Tokenize(tokenizer, data.DataConfig(train=""))
    right = {}
    for level in (2, 3, 4, 5, 6):
        rows = reasoning.rows("stories", {"size": 24, "levels": [level]})
        problems = [data.Problem(i, ask(r["question"]), "", r["answer"], {}) for i, r in enumerate(rows)]
        rollout = sample_groups(
            *nnx.split(hf.load(folder)), data.to_prompts(problems, 96), jax.random.key(0),
            SamplerConfig(group=16, max_tokens=64), eos_ids=hf.eos_ids(folder, tokenizer), compute=Compute(),
        )  # fmt: skip
        texts = [tokenizer.batch_decode(np.asarray(group), skip_special_tokens=True) for group in rollout.tokens]
        right[level] = np.array(
            [[t.endswith(f"## Answer: {p.gold}") for t in group] for group, p in zip(texts, problems, strict=True)]
        )
    assert 0.05 < np.mean([r.mean() for r in right.values()]) < 0.5
    assert right[2].mean() > 0.3 > 0.15 > right[4].mean() > 0
    assert right[2].any(1).all() and (~right[6].any(1)).mean() > 0.3
