"""Instances in workers: what a turn comes to, and what holds when tools misbehave."""

import logging
import math
import socket
from concurrent.futures import Future

import pytest
from environment_runs import all_replies, call

from grpojax.extensions.episodes import environment_worker, instances
from grpojax.extensions.episodes.environment_config import EnvironmentConfig
from grpojax.extensions.episodes.environment_types import Reply
from grpojax.host import isolation
from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards, pool


def answer(name, content):
    return {"role": "tool", "name": name, "content": content}


@pytest.mark.slow
def test_an_episode_from_its_reset_to_its_reward(start):
    workers = start("Counter")
    assert workers.open({(7, 0): {"start": 3, "question": "?"}, (7, 1): {"question": "?"}}) == {
        (7, 0): "at 3", (7, 1): "at 0"
    }  # fmt: skip
    assert workers.replies() == {}
    workers.play({(7, 0): call("add", a=4) + call("later", a=1)})
    assert all_replies(workers, 1) == {(7, 0): Reply(messages=(answer("add", "7"), answer("later", "8")), calls=2)}
    workers.play({(7, 0): "It is 8.", (7, 1): call("add", a=100)})
    assert all_replies(workers, 2) == {
        (7, 0): Reply(messages=()),
        (7, 1): Reply(messages=(answer("add", "100"),), calls=1, done=True),
    }
    assert workers.rewards([(7, 1), (7, 0)]) == [100.0, 8.0]
    workers.close([(7, 0)])
    with pytest.raises(ValueError, match="not open"):
        workers.play({(7, 0): "again"})
    assert workers.open({(7, 0): {"start": 5}}) == {(7, 0): "at 5"}


@pytest.mark.slow
def test_calls_that_cannot_be_made_are_answered_and_counted(start):
    workers = start("Counter")
    workers.open({(1, 0): {}})
    workers.play({(1, 0): call("add", a="x") + call("ad", a=1) + call("add", a=2) + "<tool_call>{</tool_call>"})
    reply = all_replies(workers, 1)[1, 0]
    assert [m["content"][:6] for m in reply.messages] == ["Error:", "Error:", "2", "Error:"]
    assert (reply.calls, reply.failures, reply.malformed, reply.invalid) == (4, 3, 3, None)


@pytest.mark.slow
def test_a_turn_makes_so_many_calls_and_answers_the_others(start):
    workers = start("Counter")
    workers.open({(1, 0): {}})
    workers.play({(1, 0): call("add", a=1) * (instances.MOST_CALLS + 2)})
    reply = all_replies(workers, 1)[1, 0]
    assert [m["content"] for m in reply.messages[:-2]] == [str(i + 1) for i in range(instances.MOST_CALLS)]
    assert all(f"at most {instances.MOST_CALLS} calls" in m["content"] for m in reply.messages[-2:])
    assert (reply.calls, reply.failures) == (instances.MOST_CALLS + 2, 2)
    assert workers.rewards([(1, 0)]) == [instances.MOST_CALLS]


@pytest.mark.slow
def test_answers_can_be_encoded_whatever_the_policy_wrote(start):
    workers = start("Counter")
    workers.open({(1, 0): {}})
    workers.play({(1, 0): call("a\ud800") + '<tool_call>{"a\ud800": }</tool_call>'})
    for message in all_replies(workers, 1)[1, 0].messages:
        assert f"{message['name']} {message['content']}".encode()


@pytest.mark.slow
def test_functions_are_tools_that_keep_nothing(start):
    workers = start(tools=("environment_classes:double",))
    assert workers.deterministic({})
    workers.open({(1, 0): {"question": "?"}})
    workers.play({(1, 0): call("double", x=2.5)})
    assert all_replies(workers, 1)[1, 0].messages[0]["content"] == "5.0"
    assert workers.rewards([(1, 0)]) == [None]


@pytest.mark.parametrize(("what", "content", "failures"), [
    ("exit", "Error: SystemExit: 3", 1),
    ("raise", "Error: ValueError: no such thing", 1),
    ("object", "Error: TypeError: __str__ returned non-string (type int)", 1),
    ("bytes", "\ufffd\0abc", 0),
    ("none", "None", 0),
])  # fmt: skip
@pytest.mark.slow
def test_what_a_tool_returns_or_raises_is_a_text(start, what, content, failures):
    workers = start("Misbehaves")
    workers.open({(1, 0): {}})
    workers.play({(1, 0): call("do", what=what)})
    assert all_replies(workers, 1)[1, 0] == Reply(messages=(answer("do", content),), calls=1, failures=failures)


@pytest.mark.slow
def test_a_long_answer_is_cut_at_a_whole_character(start):
    workers = start("Misbehaves", max_tool_bytes=101)
    workers.open({(1, 0): {}})
    workers.play({(1, 0): call("do", what="long")})
    content = all_replies(workers, 1)[1, 0].messages[0]["content"]
    assert len(content.encode()) <= 101 and content.startswith("éé") and content.endswith("longer]")


def misbehave(workers, what, neighbours=2):
    """Replies after one of several instances in a worker did something, and the others were asked once more."""
    episodes = [(1, i) for i in range(neighbours + 1)]
    workers.open({e: {"start": e[1]} for e in episodes})
    workers.play({e: call("add", a=10) for e in episodes[1:]})
    all_replies(workers, neighbours)
    workers.play({episodes[0]: call("do", what=what) if what else call("add", a=1)})
    first = all_replies(workers, 1)
    workers.play({e: call("add", a=10) for e in episodes[1:]})
    return first | all_replies(workers, neighbours)


@pytest.mark.parametrize(("what", "reason"), [
    ("sleep", "timeout"), ("crash", "crash"), ("segfault", "crash"), ("memory", "memory"), ("print", "flood"),
    ("leave", "crash"), ("spoil", "broken"), ("len", "broken"),
])  # fmt: skip
@pytest.mark.slow
def test_one_that_misbehaves_is_invalid_and_its_neighbours_go_on(start, what, reason, caplog):
    workers = start("Misbehaves", seconds=3 if what == "sleep" else 30)
    with caplog.at_level(logging.WARNING, "grpojax"):
        replies = misbehave(workers, what)
    assert replies[1, 0] == Reply(messages=(), calls=1, invalid=reason)
    assert [replies[1, i].messages[0]["content"] for i in (1, 2)] == ["21", "22"]
    rewards = workers.rewards([(1, 0), (1, 1), (1, 2)])
    assert math.isnan(rewards[0]) and rewards[1:] == [21.0, 22.0]
    assert workers.invalid == {reason: 1} and f"Misbehaves: {reason}" in caplog.text
    workers.play({(1, 0): call("add", a=1)})
    assert all_replies(workers, 1)[1, 0].invalid == reason


@pytest.mark.parametrize(
    ("what", "said"), [("text", "7"), ("parts", "Error: TypeError: the tool returned a generator")]
)
@pytest.mark.slow
def test_an_answer_reaches_the_run_as_plain_text(start, what, said):
    content = misbehave(start("Misbehaves"), what)[1, 0].messages[0]["content"]
    assert type(content) is str and content.startswith(said)


@pytest.mark.parametrize("what", ["loop", "alarm"])
@pytest.mark.slow
def test_what_a_tool_leaves_behind_hurts_no_later_call(start, what):
    workers = start("Misbehaves")
    workers.open({(1, 0): {}, (1, 1): {}})
    workers.play({(1, 0): call("do", what=what)})
    all_replies(workers, 1)
    workers.play({(1, 1): call("later", a=21)})
    assert all_replies(workers, 1)[1, 1].messages[0]["content"] == "42"
    assert not workers.invalid


@pytest.mark.slow
def test_one_that_ends_the_fork_server_each_time_is_invalid(start, monkeypatch):
    monkeypatch.setattr(isolation, "processes_can_be_contained", lambda: False)
    workers = start("Misbehaves")
    replies = misbehave(workers, "end_server")
    assert [replies[1, i].messages[0]["content"] for i in (1, 2)] == ["21", "22"]
    assert replies[1, 0].invalid == "broken"


@pytest.fixture
def states_nothing(start, monkeypatch):
    """An environment that misbehaves, and does not state that it is deterministic."""
    monkeypatch.setattr(instances, "_kept", lambda probe: "unknown")
    return start("Misbehaves")


@pytest.mark.slow
def test_a_neighbour_that_cannot_be_played_again_begins_again(states_nothing):
    workers = states_nothing
    replies = misbehave(workers, "crash")
    again = Reply(messages=(), again=True)
    assert [replies[1, i].invalid for i in range(3)] == ["crash", None, None]
    assert replies[1, 1] == replies[1, 2] == again and workers.invalid == {"crash": 1}
    workers.play({(1, i): call("add", a=5) for i in (1, 2)})
    replies = all_replies(workers, 2)
    assert [replies[1, i].messages[0]["content"] for i in (1, 2)] == ["6", "7"]


@pytest.mark.slow
def test_one_that_spoils_its_worker_each_time_is_not_drawn_for_ever(states_nothing):
    workers = states_nothing
    workers.open({(1, 0): {}})
    found = []
    for what in ("none", "spoil") * (instances.MOST_LOSSES + 1):
        if not found or not found[-1].invalid:
            workers.play({(1, 0): call("do", what=what)})
            found += all_replies(workers, 1).values()
    assert [(reply.again, reply.invalid) for reply in found if reply.again or reply.invalid] == [
        *[(True, None)] * (instances.MOST_LOSSES - 1), (False, "broken")
    ]  # fmt: skip
    workers.close([(1, 0)])
    assert workers.open({(2, 0): {"start": 4}}) == {(2, 0): "at 4"}


@pytest.mark.slow
def test_one_that_has_made_no_call_yet_does_not_begin_again(states_nothing):
    workers = states_nothing
    workers.open({(1, i): {"start": i} for i in range(2)})
    workers.play({(1, 0): call("do", what="crash"), (1, 1): call("add", a=5)})
    assert all_replies(workers, 2)[1, 1].messages[0]["content"] == "6"


@pytest.mark.parametrize("ask", ["rewards", "snapshots"])
@pytest.mark.slow
def test_one_that_is_lost_before_its_end_is_known_has_a_reply_that_says_so(states_nothing, ask):
    workers = states_nothing
    workers.open({(1, i): {"start": i} for i in range(3)})
    workers.play({(1, i): call("add", a=5) for i in (1, 2)})
    all_replies(workers, 2)
    workers.play({(1, 0): call("do", what="crash"), (1, 2): "no call"})
    all_replies(workers, 2)
    found = getattr(workers, ask)([(1, 1), (1, 2)])
    assert all(x is None or math.isnan(x) for x in found)
    assert workers.replies(0.0) == dict.fromkeys([(1, 1), (1, 2)], Reply(messages=(), again=True))
    workers.play({(1, 1): call("add", a=7)})
    all_replies(workers, 1)
    assert workers.rewards([(1, 1), (1, 2)]) == [8.0, 2.0]


@pytest.mark.slow
def test_a_class_states_whether_it_is_deterministic(start):
    assert start("Counter").deterministic({}) and not start("Forgetful").deterministic({})
    assert not start("Counter", tools=("environment_classes:connects",)).deterministic({})


@pytest.mark.slow
def test_a_class_that_is_not_deterministic_but_says_so_is_found_out(start):
    workers = start("Liar")
    workers.open({(1, 0): {}, (1, 1): {}})
    workers.play({(1, 0): call("add", a=1), (1, 1): call("add", a=1)})
    all_replies(workers, 2)
    workers._workers[0].restart()
    workers.play({(1, 0): call("add", a=1)})
    assert all_replies(workers, 1)[1, 0].invalid == "replay"


@pytest.mark.slow
def test_calls_that_print_can_be_made_again(start):
    workers = start("Prints", max_tool_bytes=10_000)
    workers.open({(1, 0): {}})
    for last in range(4):
        if last == 3:
            workers._workers[0].restart()
        workers.play({(1, 0): call("add", a=1)})
        reply = all_replies(workers, 1)[1, 0]
    assert reply.invalid is None and reply.messages[0]["content"] == "4"


@pytest.mark.slow
def test_what_resets_and_rewards_print_does_not_add_up(start):
    workers = start("PrintsAround", max_tool_bytes=10_000)
    episodes = [(1, i) for i in range(6)]
    workers.open({e: {"at_reset": 9000, "at_reward": 9000} for e in episodes})
    assert workers.rewards(episodes) == [1.0] * 6 and not workers.invalid


@pytest.mark.slow
def test_a_reset_or_a_reward_that_prints_without_end_makes_its_episode_invalid(start):
    workers = start("PrintsAround", max_tool_bytes=10_000)
    workers.open(
        {(1, 0): {"at_reset": 30_000}, (1, 1): {"at_reset": 11_000}, (1, 2): {"at_reward": 11_000}, (1, 3): {}}
    )
    assert workers.invalid == {"flood": 2}
    *gone, value = workers.rewards([(1, i) for i in range(4)])
    assert all(map(math.isnan, gone)) and value == 1.0 and workers.invalid == {"flood": 3}


@pytest.mark.parametrize("times", [1, instances.MOST_LOSSES])
@pytest.mark.slow
def test_what_a_worker_loses_is_done_again_a_few_times(start, monkeypatch, times):
    workers = start("Counter", seconds=20)
    workers.open({(1, 0): {"start": 3}})
    monkeypatch.setattr(instances, "IMPORT_TIMEOUT_S", 0)
    monkeypatch.setattr(pool, "GRACE", -19.5)  # seconds after the limit
    submit, lost = pool.WorkerPool.submit, []

    def losing(self, function, *args, **kwargs):
        if function is environment_worker.play and len(lost) < times:
            lost.append(function)
            return Future()
        return submit(self, function, *args, **kwargs)

    monkeypatch.setattr(pool.WorkerPool, "submit", losing)
    workers.play({(1, 0): call("add", a=4)})
    reply = all_replies(workers, 1)[1, 0]
    assert (reply.invalid, [m["content"] for m in reply.messages]) == ((None, ["7"]) if times == 1 else ("broken", []))


@pytest.mark.slow
def test_a_process_that_forks_stays_one(start):
    workers = start("Misbehaves")
    workers.open({(1, 0): {"start": 1}})
    workers.play({(1, 0): call("do", what="fork")})
    assert int(all_replies(workers, 1)[1, 0].messages[0]["content"]) > 0
    assert workers.rewards([(1, 0)]) == [1.0]


@pytest.mark.slow
def test_rewards_get_copies_of_the_instances(start):
    workers = start("Misbehaves")
    workers.open({(1, i): {"start": i} for i in range(3)})
    workers.play({(1, 0): call("do", what="crash"), (1, 1): call("add", a=4)})
    all_replies(workers, 2)
    none, *given = workers.snapshots([(1, 0), (1, 1), (1, 2)])
    assert none is None and [snapshot.__class__.__name__ for snapshot in given] == ["Snapshot"] * 2
    with Rewards([RewardConfig(name="environment_classes:totals")]) as rewards:
        scores = rewards([""] * 2, [""] * 2, [[0]] * 2, {"environments": given})
    assert scores.total.tolist() == [5.0, 2.0]


@pytest.mark.parametrize("name", ["Unpicklable", "Wraps"])
@pytest.mark.slow
def test_an_instance_that_cannot_be_copied_is_an_error_that_names_it(start, name):
    workers = start(name)
    workers.open({(1, 0): {}})
    with pytest.raises(UserError, match=f"{name}' cannot be given to rewards.*\n.*get_reward"):
        workers.snapshots([(1, 0)])


def connect(workers):
    with socket.create_server(("127.0.0.1", 0)) as server:
        workers.open({(1, 0): {}})
        workers.play({(1, 0): call("connects", port=server.getsockname()[1])})
        return all_replies(workers, 1)[1, 0].messages[0]["content"]


@pytest.mark.skipif(not isolation.network_can_be_cut(), reason="the system has no user namespaces")
@pytest.mark.slow
def test_tools_have_no_network_unless_they_are_given_it(start):
    tools = ("environment_classes:connects",)
    assert "Network is unreachable" in connect(start(tools=tools))
    assert connect(start(tools=tools, network=True)) == "connected"


@pytest.mark.slow
def test_where_the_network_cannot_be_taken_away_it_must_be_allowed(start, monkeypatch):
    monkeypatch.setattr(isolation, "network_can_be_cut", lambda: False)
    with pytest.raises(UserError, match="network=false.*\n.*environment.network: true"):
        start("Counter")
    start("Counter", network=True)


@pytest.mark.slow
def test_rows_choose_among_several(start):
    workers = start(choices={
        "sums": instances.EnvironmentChoice(name="environment_classes:WithOptions", options={"factor": 3}),
        "numbers": instances.EnvironmentChoice(tools=("environment_classes:double",)),
    })  # fmt: skip
    rows = {(1, 0): {"environment": "sums", "start": 2}, (2, 0): {"environment": "numbers"}}
    names = {choice: [t["function"]["name"] for t in tools] for choice, tools in workers.tools.items()}
    assert names == {"sums": ["add", "later", "times"], "numbers": ["double"]}
    assert workers.open(rows) == {(1, 0): "at 2", (2, 0): None}
    workers.play({(1, 0): call("times", a=5), (2, 0): call("times", a=5)})
    replies = all_replies(workers, 2)
    assert replies[1, 0].messages[0]["content"] == "15" and replies[2, 0].failures == 1
    with pytest.raises(UserError, match="'nothing'.*it has 'sums', 'numbers'"):
        workers.open({(3, 0): {"environment": "nothing"}})


@pytest.mark.parametrize(("settings", "match"), [
    ({"name": "environment_classes:NoReset"}, "no method reset"),
    ({"name": "environment_classes:Nothing"}, "cannot be imported: AttributeError"),
    ({"name": "environment_classes:Renamed"}, "same name, 'wrapper'.*functools.wraps"),
    ({"tools": ("environment_classes:called",)}, "called is no function"),
    ({"name": "environment_classes:WithOptions", "options": {"fctor": 2}}, "cannot be made.*fctor"),
    ({"name": "environment_classes:Undescribed"}, "tool add: "),
    ({"tools": ("environment_classes:absent",)}, "cannot be imported: AttributeError"),
    ({"name": "environment_classes:Counter", "tools": ("environment_classes:double", "environment_classes_2:double")},
     "cannot be imported: ModuleNotFoundError"),
    ({"name": "environment_classes:Counter", "format": "environment_classes:absent"}, "format=.*cannot be imported"),
])  # fmt: skip
def test_an_environment_that_cannot_work_is_refused_at_once(start, settings, match):
    with pytest.raises(UserError, match=match):
        start(**settings)


@pytest.mark.slow
def test_rows_have_what_reset_needs(start):
    workers = start("NeedsBoard")
    with pytest.raises(UserError, match="asks for column 'board'; the data has question"):
        workers.open({(1, 0): {"question": "?"}})
    workers.open({(1, 0): {"question": "?", "board": "x"}})
    workers.play({(1, 0): call("look")})
    assert all_replies(workers, 1)[1, 0].messages[0]["content"] == "x"


def test_a_reset_that_always_fails_ends_the_run_with_its_last_line(start):
    with pytest.raises(UserError, match="reset failed for all 2 episodes: RuntimeError: no why"):
        start("FailsAtReset").open({(1, 0): {"question": "why"}, (1, 1): {"question": "why"}})


@pytest.mark.parametrize(("value", "added"), [
    ([{"type": "text", "text": "You are "}, {"type": "text", "text": "here."}], "You are here."),
    ([{"role": "user", "content": "Go!"}], [{"role": "user", "content": "Go!"}]),
    ("half \ud83d", "half ?"),
])  # fmt: skip
@pytest.mark.slow
def test_a_reset_gives_a_text_its_parts_or_messages(start, value, added):
    workers = start("Returns", options={"value": value})
    assert workers.open({(1, 0): {}}) == {(1, 0): added}


@pytest.mark.parametrize("value", [7, ["a"], [{"type": "image"}], [{"role": "assistant", "content": "I"}]])
@pytest.mark.slow
def test_what_is_no_observation_is_refused(start, value):
    with pytest.raises(UserError, match="reset returned .*: give a text"):
        start("Returns", options={"value": value}).open({(1, 0): {}})


@pytest.mark.slow
def test_properties_are_not_read_and_a_method_of_two_names_is_one_tool(start):
    workers = start("Returns")
    assert [tool["function"]["name"] for tool in workers.tools[None]] == ["look"]
    workers.open({(1, 0): {}})
    workers.play({(1, 0): call("look")})
    assert all_replies(workers, 1)[1, 0].messages[0]["content"] == "nothing"


@pytest.mark.slow
def test_a_first_instance_may_take_longer_than_a_call(start):
    workers = start("SlowAtFirst", seconds=1, options={"pause": 4})
    assert workers.open({(1, 0): {}}) == {(1, 0): "at 0"}


@pytest.mark.slow
def test_a_first_instance_that_never_comes_is_said_and_ends_the_run(start, monkeypatch, caplog):
    monkeypatch.setattr(instances, "IMPORT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(instances, "NOTICE_S", 0.2)
    never = pytest.raises(UserError, match=r"SlowAtFirst: .* over 1 s .*\n.*__init__")
    with caplog.at_level(logging.INFO, "grpojax"), never:
        start("SlowAtFirst", options={"pause": 1000})
    assert "waiting for environment environment_classes:SlowAtFirst" in caplog.text
    caplog.clear()
    monkeypatch.setattr(instances.Workers, "_probe_all", lambda self: {None: environment_worker.EnvironmentProbe("")})
    monkeypatch.setattr(pool, "GRACE", -10.0)  # seconds after the limit
    monkeypatch.setattr(pool, "START_S", 0.1)
    workers = start("SlowAtFirst", seconds=10, options={"pause": 1000})
    with caplog.at_level(logging.INFO, "grpojax"), never:
        workers.open({(1, 0): {}})
    assert "SlowAtFirst: reset, 1" in caplog.text
    workers.close()


@pytest.mark.slow
def test_resets_that_all_take_too_long_end_the_run(start):
    with pytest.raises(UserError, match="all 2 episodes: .*environment.seconds=0.5.*\n.*environment.seconds"):
        start("SlowAtReset", seconds=0.5).open({(1, 0): {}, (1, 1): {}})


def test_a_reset_that_fails_at_times_makes_its_episode_invalid(start):
    workers = start("FailsAtReset")
    assert workers.open({(1, 0): {}, (1, 1): {"question": "why"}}) == {(1, 0): "no question", (1, 1): None}
    assert workers.open({(1, 2): {"question": "why"}}) == {(1, 2): None}
    workers.play({(1, 1): "no call", (1, 2): "no call"})
    assert {reply.invalid for reply in all_replies(workers, 2).values()} == {"reset"}
    assert math.isnan(workers.rewards([(1, 2)])[0])


@pytest.mark.parametrize(("settings", "match"), [
    ({}, "name and tools are both missing"),
    ({"name": "calculater"}, "did you mean 'calculator'"),
    ({"name": "calculator", "tools": ("search",)}, "'search' is no function"),
    ({"tools": ("a:b",), "options": {"x": 1}}, "options: they are for the class"),
    ({"name": "calculator", "choices": {"a": instances.EnvironmentChoice(name="module:Class")}},
     "choices: it takes the place of name, options and tools; set name: null$"),
    ({"name": "calculator", "format": "xml"}, "format='xml'"),
    ({"name": "calculator", "seconds": 0}, "seconds=0"),
    ({"name": "calculator", "memory": 3}, "memory=3"),
    ({"name": "calculator", "max_turns": 0}, "max_turns=0"),
])  # fmt: skip
def test_settings_that_cannot_be(settings, match):
    with pytest.raises(UserError, match=match):
        EnvironmentConfig(**settings)
