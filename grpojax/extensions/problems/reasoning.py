"""Made problems with a dial for their difficulty.

They are sums, products, stories in the words that ``builtin:tiny`` knows, and tallies.

No question is in two of the parts train, validation and test, whatever the seeds, nor a sum or a product in another
order, nor a tally of the same numbers in other words. The rows have ``question``, ``answer`` and ``level``.
"""

import dataclasses
import hashlib
import itertools
import random
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Literal, cast

from grpojax.host import settings
from grpojax.host.errors import UserError, require

# One question in so many is for tests, and as many are for validation.
HELD_OUT_SHARE = 8
# A sum or difference of numbers in a text.
CHAIN = re.compile(r"-?\d+(?:\.\d+)?(?: [+-] -?\d+(?:\.\d+)?)+")
# Questions drawn in vain before we give up: there are no more.
TRIES = 1000

# Level of a story, from 1 -> steps to its answer, and sentences of somebody else's things among them.
LEVELS = ((1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2))
MOST, OPERAND = 40, 15  # no count in a story is larger, nor any number that is added or taken away

SHE = ("Mia", "Anna", "Lena", "Sara", "Nora", "Emma", "Ruth", "Zoe")
HE = ("Tom", "Ben", "Max", "Leo", "Sam", "Paul", "Omar", "Finn")
THINGS = tuple("apples pears plums nuts eggs shells stamps cards coins beads marbles stickers buttons books".split())
HOLDERS = ("boxes", "bags", "baskets", "jars", "trays", "bowls")
GAINS = ("{who} finds {n} more.", "{who} buys {n} more.", "{other} gives {him} {n} more.")
LOSSES = ("{who} loses {n} of them.", "{who} sells {n}.", "{who} gives {n} to {other}.")
ASIDES = ("{other} has {n} {others}.", "{other} buys {n} {others}.", "{other} sells {n} {others}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """The options that all families have.

    Attributes:
      size: problems; None gives all sums that there are, and 1000 stories or tallies.
      seed: which problems, and in what order.
      part: train, validation or test problems.
    """

    size: int | None = None
    seed: int = 0
    part: Literal["train", "validation", "test"] = "train"

    def __post_init__(self):
        require(self, size="[1, inf)")

    @staticmethod
    def content(question: str) -> str:
        """What a question asks: the same text for all ways to write it."""
        return without_order(question)

    def has(self, question: str) -> bool:
        """Whether a question is in this part: what it asks says so, not how it is written."""
        drawn = hashlib.sha256(self.content(question).encode()).digest()[0] % HELD_OUT_SHARE
        return self.part == {0: "test", 1: "validation"}.get(drawn, "train")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums(Made):
    """``What is 7 + 12?``

    Attributes:
      most: the largest term; the least is 0.
      terms: in a sum.
    """

    most: int = 30
    terms: int = 2

    def __post_init__(self):
        super().__post_init__()
        require(self, most="[1, inf)", terms="[2, inf)")
        if (self.most + 1) ** self.terms > 1_000_000:
            raise UserError(f"most={self.most}: with terms={self.terms} there are over a million sums")

    def rows(self) -> list[dict[str, Any]]:
        """The problems; raises `UserError` where there are fewer than ``size``."""
        found = []
        for terms in itertools.product(range(self.most + 1), repeat=self.terms):
            question = f"What is {' + '.join(map(str, terms))}?"
            if self.has(question):
                found.append({"question": question, "answer": str(sum(terms)), "level": self.terms})
        if self.size is not None and self.size > len(found):
            raise UserError(f"size={self.size}: there are {len(found)} such sums for part={self.part}")
        random.Random(self.seed).shuffle(found)
        return found[: self.size]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products(Made):
    """``What is 37 * 48?``

    Attributes:
      least, most: the smallest and the largest factor.
    """

    least: int = 10
    most: int = 99

    def __post_init__(self):
        super().__post_init__()
        require(self, least="[0, inf)", most="[1, inf)")
        if not 0 <= self.most - self.least < 1000:
            raise UserError(f"most={self.most}: must be between least={self.least} and {self.least + 999}")

    @staticmethod
    def content(question: str) -> str:
        """A product's factors in order."""
        return " * ".join(sorted(re.findall(r"\d+", question), key=int)) or question

    def rows(self) -> list[dict[str, Any]]:
        """The problems; raises `UserError` where there are fewer than ``size``."""
        found = []
        for a, b in itertools.product(range(self.least, self.most + 1), repeat=2):
            question = f"What is {a} * {b}?"
            if self.has(question):
                found.append({"question": question, "answer": str(a * b), "level": len(f"{a}{b}") // 2})
        if self.size is not None and self.size > len(found):
            raise UserError(f"size={self.size}: there are {len(found)} such products for part={self.part}")
        random.Random(self.seed).shuffle(found)
        return found[: self.size]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stories(Made):
    """``Mia has 4 boxes with 3 eggs each. Tom buys 9 coins. Mia sells 5. How many eggs does Mia have now?``

    Attributes:
      levels: of the problems, in turn: numbers of `LEVELS`, counted from 1. ``builtin:tiny`` knows stories like those
        up to 3; those with asides are new to it.
    """

    levels: tuple[int, ...] = (2, 4, 5, 6, 7)

    def __post_init__(self):
        super().__post_init__()
        if wrong := [level for level in self.levels if not 1 <= level <= len(LEVELS)]:
            raise UserError(f"levels: there is no level {wrong[0]}; there are 1 to {len(LEVELS)}")
        if not self.levels:
            raise UserError("levels: the list is empty")

    def rows(self) -> list[dict[str, Any]]:
        """The problems; raises `UserError` where there are fewer than ``size``."""
        rng, seen = random.Random(f"stories {self.seed}"), set()
        found: list[dict[str, Any]] = []
        for level in itertools.islice(itertools.cycle(self.levels), 1000 if self.size is None else self.size):
            drawn = (_story(rng, *LEVELS[level - 1]) for _ in range(TRIES))
            new = next((d for d in drawn if d[0] not in seen and self.has(d[0])), None)
            if new is None:
                raise UserError(f"size={self.size}: only {len(found)} stories were found")
            seen.add(new[0])
            found.append({"question": new[0], "answer": str(new[1]), "level": level})
        return found


def _story(rng: random.Random, steps: int, asides: int) -> tuple[str, int]:
    """A question and its answer. The count stays within 1 and `MOST`."""
    name, other, third = rng.sample(SHE + HE, 3)
    he, him = ("she", "her") if name in SHE else ("he", "him")
    thing, another = rng.sample(THINGS, 2)
    if packed := rng.random() < 0.3:
        a, b = rng.randint(2, 6), rng.randint(2, 6)
        count, sentences = a * b, [f"{name} has {a} {rng.choice(HOLDERS)} with {b} {thing} each."]
    else:
        count = rng.randint(4, MOST - 10)
        sentences = [f"{name} {rng.choice(('has', 'starts with'))} {count} {thing}."]
    moves = [True] * (steps - packed) + [False] * asides
    rng.shuffle(moves)
    who = he
    for counts in moves:
        if not counts:
            sentence, n, who = rng.choice(ASIDES), rng.randint(2, OPERAND), name  # "he" would be the other one now
        elif rng.random() < 0.5 and count <= MOST - 2 or count <= 2:
            sentence, n = rng.choice(GAINS), rng.randint(2, min(OPERAND, MOST - count))
            count += n
        else:
            sentence, n = rng.choice(LOSSES), rng.randint(2, min(OPERAND, count - 1))
            count -= n
        line = sentence.format(
            who=who, him=him if who == he else name, other=third if counts else other, n=n, others=another
        )
        sentences.append(line[0].upper() + line[1:])
        who = he if counts else name
    sentences.append(f"How many {thing} does {name} have {rng.choice(('now', 'in the end'))}?")
    return " ".join(sentences), count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tallies(Made):
    """``Mia has 17 eggs. Tom gives her 8 more. She sells 9. How many eggs does Mia have each time?`` 25, 16.

    The answer lists the count after each sentence, so it is hardly right by luck: n steps are right where each of them
    is. The pass rate of a policy that misreads gifts falls with their number as a power.

    Attributes:
      levels: of the problems, in turn: how many gifts there are, to the person or from her. Each has one more step, in
        which something is found, bought, lost or sold.
      worked: whether ``answer`` is a whole completion, a line for each step and the answer's line: for ``grpojax sft``.
      misread: share of the gifts that a worked answer takes for gifts the other way, where the count allows that.
    """

    levels: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)
    worked: bool = False
    misread: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        require(self, misread="[0, 1]")
        if self.misread and not self.worked:
            raise UserError(f"misread={self.misread}: only for worked answers; give worked: true too")
        if not self.levels or min(self.levels) < 0:
            raise UserError(f"levels={list(self.levels)}: give numbers of gifts, such as [0, 1, 2, 4]")

    @staticmethod
    def content(question: str) -> str:
        """The first count and what is added to it or taken away, in order of size: neither names nor things."""
        start, *changes = re.findall(r"(\d+)( more)?", question)
        return without_order(start[0] + "".join(f" {'+' if more else '-'} {n}" for n, more in changes))

    def rows(self) -> list[dict[str, Any]]:
        """The problems, no two of the same content; raises `UserError` where there are fewer than ``size``."""
        rng, seen = random.Random(f"tallies {self.seed}"), set()
        found: list[dict[str, Any]] = []
        for level in itertools.islice(itertools.cycle(self.levels), 1000 if self.size is None else self.size):
            for _ in range(TRIES):
                question, changes = _tally(rng, level)
                if self.has(question) and (content := self.content(question)) not in seen:
                    break
            else:
                raise UserError(f"size={self.size}: only {len(found)} tallies were found")
            seen.add(content)
            misread = random.Random(f"{question} {self.seed}") if self.misread else None
            lines, answer = _work(changes, misread, self.misread)
            worked = "\n".join((*lines, f"## Answer: {answer}"))
            found.append({"question": question, "answer": worked if self.worked else answer, "level": level})
        return found


def _tally(rng: random.Random, gifts: int) -> tuple[str, list[tuple[int, bool]]]:
    """A question, and the first count with what changes it, each with whether it is a gift."""
    name, other = rng.sample(SHE + HE, 2)
    he, him = ("she", "her") if name in SHE else ("he", "him")
    thing, count = rng.choice(THINGS), rng.randint(4, MOST - 10)
    sentences, changes = [f"{name} {rng.choice(('has', 'starts with'))} {count} {thing}."], [(count, False)]
    kinds = [True] * gifts + [False]
    rng.shuffle(kinds)
    for gift in kinds:
        gain = count <= 2 or (count <= MOST - 2 and rng.random() < 0.5)
        n = rng.randint(2, min(OPERAND, MOST - count if gain else count - 1))
        choices = [s for s in (GAINS if gain else LOSSES) if ("gives" in s) == gift]
        sentence = rng.choice(choices).format(who=he, him=him, other=other, n=n)
        sentences.append(sentence[0].upper() + sentence[1:])
        changes.append((n if gain else -n, gift))
        count += changes[-1][0]
    sentences.append(f"How many {thing} does {name} have each time?")
    return " ".join(sentences), changes


def _work(changes: list[tuple[int, bool]], rng: random.Random | None, misread: float) -> tuple[list[str], str]:
    """The lines of a solution and its answer; ``rng`` says which gifts are misread, None for none."""
    (count, _), *rest = changes
    lines, counts = [], []
    for change, gift in rest:
        if rng and gift and rng.random() < misread and 1 <= count - change <= MOST or not 1 <= count + change <= MOST:
            change = -change
        lines.append(f"{count} {'+' if change > 0 else '-'} {abs(change)} = {count + change}")
        count += change
        counts.append(str(count))
    return lines, ", ".join(counts)


FAMILIES = {"sums": Sums, "products": Products, "stories": Stories, "tallies": Tallies}


def without_order(question: str) -> str:
    """A question in which every sum or difference has its terms in order: the same text for all orders of the terms.

    Example:
      >>> without_order("What is 12 + 7?"), without_order("12 - 7 + 3 =") == without_order("3 + 12 - 7 =")
      ('What is 7 + 12?', True)
    """

    def ordered(chain: re.Match[str]) -> str:
        sign, terms = 1, []
        for word in chain.group().split():
            if word in "+-":
                sign = 1 if word == "+" else -1
            else:
                terms.append(sign * Decimal(word))
        return " + ".join(map(str, sorted(terms)))

    return CHAIN.sub(ordered, question)


def content(family: str, question: str) -> str:
    """What a question of a family asks: the same text for all ways to write it."""
    return FAMILIES[family].content(question)


def rows_of(kind: type[Made], options: Mapping[str, Any], *, source: str) -> list[dict[str, Any]]:
    """The problems that a class makes with ``options``, its fields; errors name the ``source``."""
    root = dataclasses.make_dataclass("Options", [("options", kind)], frozen=True)
    try:
        return settings.build(cast(Any, root), {"options": dict(options)}).options.rows()
    except UserError as e:
        raise UserError(f"{source}: {e}") from None


def rows(family: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Problems of a family, the same ones in every process.

    Args:
      family: one of `FAMILIES`.
      options: the fields of its class.

    Raises:
      UserError: there is no such family, option or value, or there are not so many problems.

    Example:
      >>> rows("sums", {"size": 2, "most": 9})[1]
      {'question': 'What is 6 + 5?', 'answer': '11', 'level': 2}
    """
    if family not in FAMILIES:
        raise UserError(f"reasoning:{family}: no such family; there are {', '.join(FAMILIES)}")
    return rows_of(FAMILIES[family], options, source=f"reasoning:{family}")
