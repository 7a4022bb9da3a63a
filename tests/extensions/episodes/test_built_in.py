"""The environments that come with the package, by name in a run's workers.

What they are made of is imported inside of the tests: this file is collected without them.
"""

import json

import pytest
from environment_runs import all_replies, call

from grpojax.extensions.episodes import environment_worker
from grpojax.host import isolation
from grpojax.host.errors import UserError

EXTRA = "an extra is absent: pip install 'grpojax[test-all]'"
needs_namespaces = pytest.mark.skipif(not isolation.programs_can_be_closed_off(), reason="the system has no namespaces")


def said(workers, text, row=None):
    """The answers of one turn, by environments that are opened for it."""
    workers.open({(0, 0): row or {"question": "?"}})
    workers.play({(0, 0): text})
    return [message["content"] for message in all_replies(workers, 1)[0, 0].messages]


def built_in(name, **settings):
    return {"name": name, "format": "hermes", "workers": 1, **settings}


@pytest.mark.slow
def test_the_calculator_by_name(start):
    workers = start(**built_in("calculator"))
    assert workers.deterministic({}) and [t["function"]["name"] for t in workers.tools[None]] == ["calculate"]
    assert said(workers, call("calculate", expression="6*7") + call("calculate", expression="6*")) == [
        "42", "Error: ValueError: '6*' is no arithmetic expression",
    ]  # fmt: skip


@needs_namespaces
@pytest.mark.slow
def test_programs_by_name(start):
    workers = start(**built_in("python", options={"seconds": 30.0}, seconds=60))
    assert said(workers, call("python", code="6*7")) == ["42"]


@pytest.mark.slow
def test_the_lake_by_name(start):
    from grpojax.extensions.problems import frozen_lake

    workers = start(**built_in("frozen_lake"))
    row = frozen_lake.rows("frozen_lake", {"size": 1})[0]
    assert said(workers, call("move", direction="left") + call("move", direction="north"), row) == [
        "P" + row["board"].replace("/", "\n")[1:],
        "Error: direction: 'north' is none of 'left', 'down', 'right', 'up'",
    ]


@pytest.fixture
def corpus(tmp_path):
    rows = [
        {"title": "Paris", "text": "Paris is the capital of France."},
        {"title": "Rome", "text": "Rome is in Italy, and a capital too."},
        {"text": "Cats sleep " + "all day " * 400},
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow
def test_search_in_a_corpus(start, corpus):
    pytest.importorskip("bm25s", reason=EXTRA)
    workers = start(**built_in("search", options={"corpus": corpus, "top": 2, "most_characters": 20}))
    queries = ("the capital of France", "cats", "xyzzy", "the", "")
    assert said(workers, "".join(call("search", query=query) for query in queries)) == [
        "[1] Paris: Paris is the capital ...\n\n[2] Rome: Rome is in Italy, an ...",
        "[1] Cats sleep all day a ...",
        *["Nothing was found."] * 3,
    ]


@pytest.mark.parametrize(("options", "match"), [
    ({"text": "body"}, "no text in column 'body'; it has title, text"), ({"corpus": "absent.jsonl"}, "absent.jsonl"),
])  # fmt: skip
@pytest.mark.slow
def test_a_corpus_that_cannot_be_searched(start, corpus, options, match):
    pytest.importorskip("bm25s", reason=EXTRA)
    with pytest.raises(UserError, match=match):
        start(**built_in("search", options={"corpus": corpus, **options}))


@pytest.mark.slow
def test_a_game_of_textarena(start):
    pytest.importorskip("textarena", reason=EXTRA)
    workers = start(**built_in("textarena", options={"game": "GuessTheNumber-v0"}))
    answers = said(workers, call("play", move="[10]"), {"seed": 3})
    assert "The target number is" in answers[0] and "[10]" not in answers[0]


@pytest.mark.slow
def test_what_is_no_game_for_one_player(start):
    pytest.importorskip("textarena", reason=EXTRA)
    with pytest.raises(UserError, match="reset failed for all 1 episodes: .*players"):
        start("textarena", options={"game": "TicTacToe-v0"}).open({(0, 0): {}})


@pytest.mark.slow
def test_reasoning_gym_by_name(start):
    pytest.importorskip("reasoning_gym", reason=EXTRA)
    from grpojax.extensions.problems.reasoning_gym import rows

    row = rows("chain_sum", {"size": 1})[0]
    workers = start(**built_in("reasoning_gym"))
    assert said(workers, call("submit", answer=row["answer"]), row) == ["Right."]
    assert workers.rewards([(0, 0)]) == [1.0]


def test_the_schema_of_a_tool():
    """Golden: what the chat template gets."""
    probe = environment_worker.probe(
        environment_worker.InstanceRecipe(
            "grpojax.extensions.problems.frozen_lake:FrozenLake", {}, ("environment_classes:double",)
        )
    )
    assert probe.schemas == (
        {
            "type": "function",
            "function": {
                "name": "double",
                "description": "Doubles a number.",
                "parameters": {
                    "type": "object",
                    "properties": {"x": {"type": "number", "description": "the number"}},
                    "required": ["x"],
                },
                "return": {"type": "number"},
            },
        },
        {
            "type": "function",
            "function": {
                "name": "move",
                "description": "Moves by one field.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "direction": {
                            "type": "string",
                            "enum": ["left", "down", "right", "up"],
                            "description": "where to",
                        }
                    },
                    "required": ["direction"],
                },
                "return": {"type": "string"},
            },
        },
    )
    assert probe[2:] == (True, False, True, ("board",))
