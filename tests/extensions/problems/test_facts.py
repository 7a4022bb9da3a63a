"""Facts about a land that does not exist."""

import re

import pytest

from grpojax.data.readers import SourceConfig, open_source
from grpojax.extensions.problems import facts
from grpojax.host.errors import UserError

PARTS = ("train", "validation", "test")


def test_each_answer_follows_from_as_many_passages_as_the_level_says():
    known = dict(re.fullmatch(r"The (\w+ of \w+) is (\w+)\.", row["text"]).groups() for row in facts.passages())
    assert len(known) == 4 * facts.COUNTRIES and len({*known.values()}) == len(known)
    for row in facts.rows("questions", {"size": 200}):
        *relations, country = row["question"].removeprefix("What is the ").rstrip("?").replace("the ", "").split(" of ")
        assert len(relations) == row["level"]
        for relation in reversed(relations):
            country = known[f"{relation} of {country}"]
        assert country == row["answer"]


def test_a_country_is_in_one_part():
    countries = {}
    for part in PARTS:
        source = SourceConfig(path="facts:questions", options={"part": part})
        rows = [row for _, row in open_source(source)]
        countries[part] = {row["question"].rpartition(" ")[2] for row in rows}
        assert len(rows) == 4 * len(countries[part])
    assert sum(map(len, countries.values())) == len(set.union(*countries.values())) == facts.COUNTRIES


def test_options_choose_questions():
    rows = facts.rows("questions", {"size": 20, "levels": [2], "part": "test"})
    assert len(rows) == 20 and {row["level"] for row in rows} == {2}
    assert rows != facts.rows("questions", {"size": 20, "levels": [2], "part": "test", "seed": 1})


@pytest.mark.parametrize(("name", "options", "match"), [
    ("answers", {}, "facts:passages"),
    ("passages", {"size": 3}, "without options"),
    ("questions", {"levels": [3]}, r"levels=\[3\]"),
    ("questions", {"levels": []}, r"levels=\[\]"),
    ("questions", {"size": 10**6}, "size=1000000: there are"),
    ("questions", {"sizes": 3}, "sizes"),
])  # fmt: skip
def test_facts_that_there_are_not(name, options, match):
    with pytest.raises(UserError, match=match):
        facts.rows(name, options)
