"""Facts about a land that does not exist, for tasks of search: ``facts:passages`` and ``facts:questions``.

Each country has a capital and a ruler, each capital a river, and each ruler a horse. All names are invented, so that no
policy knows them. ``facts:passages`` is the corpus, a fact a row in the column ``text``: give it to the environment
``search`` as its ``corpus``. ``facts:questions`` has ``question``, ``answer`` and ``level``, the number of facts that
the answer takes.
"""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from grpojax.extensions.problems.reasoning import Made, rows_of
from grpojax.host.errors import UserError

COUNTRIES = 800
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
# What a country has, and what that has in turn.
RELATIONS = {"capital": "river", "ruler": "horse"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions(Made):
    """``What is the river of the capital of Vadon?``

    All questions about a country are in one part.

    Attributes:
      levels: facts that an answer takes: 1, 2 or both.
    """

    levels: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.levels or not {*self.levels} <= {1, 2}:
            raise UserError(f"levels={list(self.levels)}: give [1], [2] or [1, 2]")

    @staticmethod
    def content(question: str) -> str:
        """The question: there is one way to ask it."""
        return question

    def has(self, question: str) -> bool:
        """Whether a question is in this part: the country that it is about says so."""
        return super().has(question.rpartition(" ")[2])

    def rows(self) -> list[dict[str, Any]]:
        """The problems; raises `UserError` where there are fewer than ``size``."""
        known = facts()
        found = []
        for country in _names()[::5]:
            for first, second in RELATIONS.items():
                between = known[first, country]
                every = ((1, first, between), (2, f"{second} of the {first}", known[second, between]))
                for level, what, answer in every:
                    question = f"What is the {what} of {country}?"
                    if level in self.levels and self.has(question):
                        found.append({"question": question, "answer": answer, "level": level})
        if self.size is not None and self.size > len(found):
            raise UserError(f"size={self.size}: there are {len(found)} such questions for part={self.part}")
        random.Random(self.seed).shuffle(found)
        return found[: self.size]


def facts() -> dict[tuple[str, str], str]:
    """What there is to know: the object of each relation and subject, the same in every process.

    Example:
      >>> known = facts()
      >>> capital = known["capital", "Vodan"]
      >>> capital, known["river", capital]
      ('Pupos', 'Vabal')
    """
    names, known = _names(), {}
    for i in range(0, len(names), 5):
        country, capital, river, ruler, horse = names[i : i + 5]
        known |= {("capital", country): capital, ("river", capital): river}
        known |= {("ruler", country): ruler, ("horse", ruler): horse}
    return known


def _names() -> list[str]:
    """Five names for each country, no two the same: of itself, its capital, the river there, its ruler, the horse."""
    rng, names = random.Random("facts"), dict[str, None]()
    while len(names) < 5 * COUNTRIES:
        letters = (rng.choice(kind) for kind in (CONSONANTS, VOWELS) * 2 + (CONSONANTS,))
        names["".join(letters).capitalize()] = None
    return list(names)


def passages() -> list[dict[str, Any]]:
    """The corpus."""
    return [{"text": f"The {relation} of {subject} is {name}."} for (relation, subject), name in facts().items()]


def content(name: str, question: str) -> str:
    """What a question asks."""
    return Questions.content(question)


def rows(name: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Passages or questions, the same ones in every process.

    Args:
      name: "passages" or "questions".
      options: of questions, the fields of `Questions`; passages have none.

    Raises:
      UserError: there is no such name, option or value, or there are not so many questions.

    Example:
      >>> rows("questions", {"size": 1, "levels": [2]})
      [{'question': 'What is the river of the capital of Vivus?', 'answer': 'Sotot', 'level': 2}]
    """
    if name == "passages" and not options:
        return passages()
    if name != "questions":
        raise UserError(f"facts:{name}: there are facts:passages, without options, and facts:questions")
    return rows_of(Questions, options, source=f"facts:{name}")
