"""Made problems: their answers by another way, their parts, and that the tiny policy has something to learn."""

import doctest
import re

import numpy as np
import pytest
from data_files import load, refusal
from flax import nnx

from grpojax import data
from grpojax.data import SourceConfig
from grpojax.extensions.problems import reasoning
from grpojax.models import Compute, hf
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.rewards.builtin import Follows

LEVELS = tuple(range(1, 10))
TALLIES = [
    (
        "Emma has 15 cards. She buys 6 more. She gives 2 to Tom. She gives 11 to Tom.",
        "How many cards does Emma have each time?",
        "21, 19, 8",
    ),
    (
        "Omar has 14 beads. Paul gives him 10 more. He finds 15 more. He gives 6 to Paul.",
        "How many beads does Omar have each time?",
        "24, 39, 33",
    ),
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
    options = {"size": 240, "levels": [1, 3, 6]}
    rows, worked = (reasoning.rows("tallies", {**options, "worked": on}) for on in (False, True))
    assert [r["level"] for r in rows] == [1, 3, 6] * 80
    for row, long in zip(rows, worked, strict=True):
        question = row["question"]
        _, steps, asides, counts = read(question.replace("each time?", "now?"))
        assert (steps, asides, question.count(" give")) == (row["level"] + 1, 0, row["level"]), row
        assert row["answer"] == ", ".join(map(str, counts[1:])) and 1 <= min(counts) and max(counts) <= 40
        *lines, last = long["answer"].split("\n")
        assert long["question"] == question and last == f"## Answer: {row['answer']}"
        assert [eval(line.replace("=", "==")) for line in lines] == [True] * steps
        assert [line.split()[-1] for line in lines] == row["answer"].split(", ")
        numbers = [line.split()[2] for line in lines]
        assert numbers == re.findall(r"\d+", question)[1:] and all(2 <= int(n) <= 15 for n in numbers)


def test_only_gifts_are_misread():
    """The steps of such a solution are sums that are right, and lead to its answer."""
    options = {"size": 300, "levels": [1, 3], "worked": True}
    right = reasoning.rows("tallies", options)
    some, every = (reasoning.rows("tallies", {**options, "misread": share}) for share in (0.5, 1.0))
    texts = [r["answer"] for r in every]
    assert [r["question"] for r in every] == [r["question"] for r in right]
    assert Follows(arithmetic=True)([""] * 300, texts, [[]] * 300) == [1.0] * 300
    other = [a["answer"] != b["answer"] for a, b in zip(right, every, strict=True)]
    assert 0.8 < np.mean(other) < 1 and 0.4 < np.mean([a != b for a, b in zip(right, some, strict=True)]) < 0.8
    for row, wrong in zip(right, other, strict=True):
        assert wrong or row["level"] < 3


def test_a_tally_in_other_words_or_another_order_is_the_same():
    told = "Mia has 20 nuts. Tom gives her 12 more. She sells 5. How many nuts does Mia have each time?"
    again = "Leo starts with 20 eggs. He gives 5 to Ben. He buys 12 more. How many eggs does Leo have each time?"
    other = "Leo starts with 20 eggs. He loses 12 of them. Ben gives him 5 more. How many eggs does Leo have each time?"
    first, second, third = (reasoning.content("tallies", question) for question in (told, again, other))
    assert first == second != third

    def contents(**options):
        drawn = reasoning.rows("tallies", {"size": 300, "levels": [0, 2], **options})
        return [reasoning.content("tallies", r["question"]) for r in drawn]

    parts = [contents(part=part, seed=seed, size=60) for part in ("validation", "test") for seed in (0, 1)]
    train, *_ = found = [contents(), set(parts[0] + parts[1]), set(parts[2] + parts[3])]
    assert len(set(train)) == 300 and min(map(len, found)) > 60
    assert not set(train) & found[1] and not set(train) & found[2] and not found[1] & found[2]


def test_tallies_are_the_same_in_every_process():
    """The first of them in words and numbers: neither a hash of texts nor a set's order has a say."""
    rows = reasoning.rows("tallies", {"size": 2, "levels": [2]})
    assert [(r["question"], r["answer"]) for r in rows] == [
        (f"{told} {asked}", answer) for told, asked, answer in TALLIES
    ]


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
    ("reasoning:story", {}, "reasoning:story: no such family; there are sums, products, stories, tallies"),
    ("reasoning:sums", {"mots": 3}, "unknown key; did you mean 'most'"),
    ("reasoning:sums", {"most": 3, "size": 16}, "size=16: there are "),
    ("reasoning:sums", {"most": 99, "terms": 4}, "most=99: with terms=4 there are over a million sums"),
    ("reasoning:stories", {"levels": [0]}, "levels: there is no level 0; there are 1 to 9"),
    ("reasoning:stories", {"levels": []}, "levels: the list is empty"),
    ("reasoning:tallies", {"levels": [2, -1]}, "levels=[2, -1]: give numbers of gifts"),
    ("reasoning:tallies", {"levels": []}, "levels=[]: give numbers of gifts"),
    ("reasoning:tallies", {"levels": [0], "size": 999}, "size=999: only "),
    ("reasoning:tallies", {"misread": 0.5}, "misread=0.5: only for worked answers; give worked: true too"),
    ("reasoning:tallies", {"misread": 1.5, "worked": True}, "misread=1.5: must be "),
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
