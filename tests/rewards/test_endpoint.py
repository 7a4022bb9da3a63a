"""Rewards from a server, which here is one on this machine."""

import http.server
import json
import threading

import pytest

from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, Rewards, RewardsConfig, endpoint


@pytest.fixture
def server():
    """Answers by `answers`, a function of a request's body; keeps what it was asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body, self.headers.get("Authorization")))
            status, answer = served.answers(body)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", answer)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def do_GET(self):
            asked.append((self.path, None, self.headers.get("Authorization")))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[1.0]")

        def log_message(self, *_):
            pass

    asked = []
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.asked, served.url = asked, f"http://127.0.0.1:{served.server_port}"
    served.answers = lambda body: (200, {"rewards": [float(len(c)) for c in body["completions"]]})
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield served
    served.shutdown(), thread.join(), served.server_close()


def http_rewards(server, completions, **options):
    n = len(completions)
    return endpoint.http(["?"] * n, completions, [[]] * n, url=server.url, gold=["g"] * n, other=[1] * n, **options)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    pauses = []
    monkeypatch.setattr(endpoint, "sleep", pauses.append)
    return pauses


def test_samples_are_sent_in_batches(server, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    assert http_rewards(server, ["a", "bb", "ccc"], batch=2, key_variable="A_KEY") == [1.0, 2.0, 3.0]
    (_, first, key), (_, second, _) = server.asked
    assert first == {"prompts": ["?"] * 2, "completions": ["a", "bb"], "gold": ["g"] * 2} and key == "Bearer secret"
    assert second["completions"] == ["ccc"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_key_does_not_go_to_another_server(server, monkeypatch, host):
    monkeypatch.setenv("A_KEY", "secret")
    server.answers = lambda body: (302, server.url.replace("127.0.0.1", host) + "/new")
    assert http_rewards(server, ["a"], key_variable="A_KEY") == [1.0]
    assert server.asked[1][0] == "/new" and server.asked[1][2] == ("Bearer secret" if host == "127.0.0.1" else None)


def test_a_busy_server_is_asked_again(server, no_pauses):
    statuses = iter([503, 429, 200])
    server.answers = lambda body: (next(statuses), [1.0])
    assert http_rewards(server, ["a"]) == [1.0]
    assert len(server.asked) == 3 and no_pauses == [0.25, 0.5]


@pytest.mark.parametrize(("status", "tries"), [(503, 3), (400, 1)])
def test_a_server_that_cannot_answer_is_an_error(server, status, tries):
    server.answers = lambda body: (status, "no")
    with pytest.raises(OSError, match=f"{status} after {tries} tries"):
        http_rewards(server, ["a"], retries=2)
    assert len(server.asked) == tries


def test_a_server_that_is_away_is_an_error(server, no_pauses):
    with pytest.raises(OSError, match="after 2 tries"):
        endpoint.http([""], ["a"], [[]], url="http://127.0.0.1:9", retries=1)


@pytest.mark.parametrize("answer", [[1.0, 2.0], {"scores": [1.0]}, 3])
def test_an_answer_of_another_form_is_an_error(server, answer):
    server.answers = lambda body: (200, answer)
    with pytest.raises(ValueError, match="for 1 samples"):
        http_rewards(server, ["a"])


def test_requests_keep_to_a_rate(server, no_pauses, monkeypatch, tmp_path):
    monkeypatch.setattr(endpoint.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(endpoint, "time", lambda: 100.0)
    http_rewards(server, ["a"] * 3, batch=1, per_second=4.0)
    assert no_pauses == [0.0, 0.25, 0.5]


def test_a_model_scores_by_the_chat_api(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    def answers(body):
        asked = body["messages"][0]["content"]
        return 200, {"choices": [{"message": {"content": "None" if "bad" in asked else "Score: 2\nScore: 8"}}]}

    server.answers = answers
    values = endpoint.model(
        ["1+1?", "2+2?"], ["two", "bad"], [[], []], gold=["2", "4"], url=f"{server.url}/v1/", name="m", most=10,
        ask="Is {completion} for {prompt} the same as {gold}? {unknown}",
    )  # fmt: skip
    assert values == [0.8, None]
    assert {(path, body["model"], key) for path, body, key in server.asked} == {("/v1/chat/completions", "m", None)}
    assert sorted(body["messages"][0]["content"] for _, body, _ in server.asked) == [
        "Is bad for 2+2? the same as 4? {unknown}",
        "Is two for 1+1? the same as 2? {unknown}",
    ]


def test_a_model_is_asked_about_several_samples_at_a_time(server):
    """No request is answered before the two others of its batch are there; scores are in the samples' order."""
    there = threading.Barrier(3, timeout=20)

    def answers(body):
        there.wait()
        return 200, {"choices": [{"message": {"content": f"Score: 0.{body['messages'][0]['content']}"}}]}

    server.answers = answers
    how = {"url": server.url, "name": "m", "ask": "{completion}", "batch": 3}
    assert endpoint.model(["?"] * 6, list("123456"), [[]] * 6, **how) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def test_a_model_that_cannot_answer_is_an_error(server):
    server.answers = lambda body: (400, "no")
    with pytest.raises(OSError, match="400 after 1 tries"):
        endpoint.model(["?"] * 9, ["a"] * 9, [[]] * 9, url=server.url, name="m", batch=2)
    assert len(server.asked) <= 2  # each thread ends with its first failure


def test_as_a_reward_of_a_recipe(server):
    term = RewardConfig(name="http", options={"url": server.url})
    with Rewards(RewardsConfig(terms=(term,), workers=1)) as rewards:
        assert rewards(["?"] * 2, ["a", "bb"], [[1]] * 2, {}).by_name["http"].tolist() == [1.0, 2.0]
    with Rewards([RewardConfig(name="model")]) as rewards, pytest.raises(UserError, match="'url'"):
        rewards.check_columns([])
