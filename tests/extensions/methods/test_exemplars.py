"""Which solved problems are shown before another: by the tokens they share, in an order that the state alone gives."""

import json

import numpy as np
import pytest

from grpojax.data import Example, Problem, Problems
from grpojax.extensions.methods.exemplars import TRIED, Exemplars
from grpojax.host.errors import UserError

SEPARATOR = 99


def tokenize(question, examples=()):
    """A letter a token; an exemplar ends with a separator."""
    if any(e.completion == "refused" for e in examples):
        raise UserError("the tokenizer's chat template raised an error")
    shown = [[*map(ord, e.prompt + e.completion), SEPARATOR] for e in examples]
    return tuple(sum(shown, []) + [*map(ord, question)])


def pool(questions, *, shown=2, size=9, longest=40, state=()):
    problems = [Problem(uid, tokenize(q), q, None, {}) for uid, q in enumerate(questions, 10)]
    made = Problems(tuple(problems), (1.0,), 0, (), "", tokenize)
    return Exemplars(made, shown=shown, size=size, longest=longest, state=state), problems


def jaccard(one, other):
    union = {*one, *other}
    return sum(1 for t in union if t in one and t in other) / len(union)


def test_the_nearest_are_shown_and_the_nearest_of_them_last():
    exemplars, problems = pool(["abcd", "abxy", "abcz", "pqrs", "abcd"])
    for p, completion in zip(problems, ("0", "1", "2", "3", "4"), strict=True):
        exemplars.add(p.uid, completion)
    # Its own question stands in the data twice, and is not shown; 2/6 tokens of the second, 3/5 of the third.
    seeded = exemplars.before(problems[0])
    assert seeded.ids == tokenize(
        "abcd", [Example(prompt="abxy", completion="1"), Example(prompt="abcz", completion="2")]
    )
    assert (seeded.uid, seeded.prompt) == (10, "abcd")


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_the_one_of_a_plain_sort(seed):
    rng = np.random.default_rng(seed)
    questions = ["".join(rng.choice(list("abcdefg"), rng.integers(1, 6))) for _ in range(13)]
    exemplars, problems = pool(questions, shown=3)
    solved = rng.permutation(13)[:7]
    for i in solved:
        exemplars.add(problems[i].uid, "!")
    for one in problems:
        others = [problems[i] for i in solved if questions[i] != one.prompt]
        ranked = sorted(others, key=lambda p: (-jaccard(p.ids, one.ids), p.uid))[:3]
        want = tokenize(one.prompt, [Example(prompt=p.prompt, completion="!") for p in ranked[::-1]])
        assert exemplars.before(one).ids == want


def test_what_does_not_fit_or_is_refused_is_passed_over():
    exemplars, problems = pool(["ab", "abc", "abd", "xyz"], longest=9)
    assert exemplars.before(problems[0]) is None
    exemplars.add(11, "too long")
    assert exemplars.before(problems[0]) is None
    exemplars.add(12, "refused")
    assert exemplars.before(problems[0]) is None
    exemplars.add(13, "!!!")
    assert exemplars.before(problems[0]).ids == tokenize("ab", [Example(prompt="xyz", completion="!!!")])
    exemplars.add(13, "!!!!")
    assert exemplars.before(problems[0]) is None


def test_only_the_nearest_few_are_tried():
    questions = ["a"] + ["a" + "b" * n for n in range(1, TRIED + 1)] + ["z"]
    exemplars, problems = pool(questions, shown=1, longest=4)
    for p in problems[1:-1]:
        exemplars.add(p.uid, "long")
    exemplars.add(problems[-1].uid, "!")
    assert exemplars.before(problems[0]) is None


def test_the_pool_keeps_the_newest_and_goes_on_from_its_state():
    exemplars, problems = pool(["ab", "abc", "abd", "abe"], size=2)
    for uid, completion in ((11, "1"), (12, "2"), (11, "3"), (10, " "), (13, "4")):
        exemplars.add(uid, completion)
    assert exemplars.state() == [(11, "3"), (13, "4")] and len(exemplars) == 2
    again, _ = pool(["ab", "abc", "abd", "abe"], size=2, state=json.loads(json.dumps(exemplars.state())))
    assert again.state() == exemplars.state() and again.before(problems[0]) == exemplars.before(problems[0])
    again.add(12, "5")
    assert again.state() == [(13, "4"), (12, "5")]


def test_a_later_turn_of_a_chat_is_shown_to_nobody():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    one, two = (Problem(uid, (1,), "c", None, {}, chat=chat) for uid, chat in enumerate((turns[2:], turns)))
    pool = Exemplars([one, two], shown=1, size=3, longest=9)
    pool.add(0, "right")
    pool.add(1, "right")
    assert [uid for uid, _ in pool.state()] == [0]
