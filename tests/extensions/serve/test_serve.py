"""``grpojax serve``: batches of requests, OpenAI's JSON, and a server on loopback."""

import concurrent.futures
import copy
import http.client
import itertools
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpojax.cli.engine import Engine
from grpojax.extensions.serve import openai_api
from grpojax.extensions.serve.batcher import Batcher, DrawnCompletion, Request, rows_of
from grpojax.extensions.serve.openai_api import Api, Refused
from grpojax.models import hf
from grpojax.types import Rollout

CHAT = [{"role": "user", "content": "What is 1 + 2?"}]
TEXT = "3 * 4 = 12"


class FakeEngine:
    """Answers every prompt with the same text; the lengths of the batches that it drew stand in ``drawn``."""

    max_positions = 100

    def __init__(self, tokenizer, text=TEXT):
        self.tokenizer, self.drawn, self.go, self.asked = tokenizer, [], None, 0
        self.ids = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.convert_tokens_to_ids("<|end|>")]

    def draw(self, prompts, key, config):
        self.asked += 1
        if self.go is not None:
            self.go.wait(60)
        self.drawn.append(len(np.unique(prompts.uids)))
        shape = (len(prompts.lengths), config.group, config.max_tokens)
        tokens = np.zeros(shape, np.int32)
        tokens[..., : len(self.ids)] = self.ids[: config.max_tokens]
        lengths = np.full(shape[:2], min(len(self.ids), config.max_tokens), np.int32)
        logps = np.broadcast_to(-np.arange(shape[2], dtype=np.float32), shape)
        return Rollout(tokens=tokens, logps=logps, lengths=lengths, stopped=lengths == len(self.ids))


@pytest.fixture(scope="module")
def tokenizer():
    from grpojax import data

    return hf.load_tokenizer(str(data.locate("builtin:tiny")))


@pytest.fixture
def engine(tokenizer):
    return FakeEngine(tokenizer)


@pytest.fixture
def api(engine):
    batcher = Batcher(engine, most=32)
    yield Api(engine, batcher.submit, name="tiny", max_tokens=64, most=32)
    batcher.close()


requests = st.builds(
    Request,
    ids=st.sampled_from([(1,), (2, 3), (4,)]),
    n=st.integers(1, 5),
    seed=st.none() | st.integers(0, 3),
)


@given(st.lists(requests, min_size=1, max_size=8))
def test_every_request_gets_its_completions_from_rows_of_its_prompt(batch):
    rows, group = rows_of(batch, itertools.count(100))
    owners = [owner for row in rows for owner in row.owners]
    assert [owners.count(i) for i in range(len(batch))] == [request.n for request in batch]
    for row in rows:
        assert len(row.owners) <= group and {batch[i].ids for i in row.owners} == {row.ids}
        assert {batch[i].seed for i in row.owners} == ({None} if row.number >= 100 else {row.number})
    samples = [(row.ids, row.number, row.first + j) for row in rows if row.number >= 100 for j in range(group)]
    assert len(set(samples)) == len(samples)  # no two draws have the same key


def test_requests_that_wait_are_drawn_together_and_others_are_not_lost(engine):
    engine.go = threading.Event()
    batcher = Batcher(engine, most=6)
    first = batcher.submit(Request(ids=(1,)))
    while not batcher._thread.is_alive() or batcher._waiting:
        time.sleep(0.001)
    later = [batcher.submit(Request(ids=(i,), max_tokens=t)) for i, t in enumerate([20, 20, 20, 500, 20, 20, 20, 20])]
    engine.go.set()
    assert [len(f.result(60)) for f in (first, *later)] == [1] * 9
    assert engine.drawn == [1, 6, 1, 1]  # the next six, the long one, and the one that was left
    batcher.close()


def test_an_error_is_its_batchs_own_and_closing_cancels_what_waits(engine):
    batcher = Batcher(engine, most=4)
    working, engine.draw = engine.draw, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        batcher.submit(Request(ids=(1,))).result(60)
    engine.draw, engine.go = working, threading.Event()
    under_way = batcher.submit(Request(ids=(1,)))
    while batcher._waiting:
        time.sleep(0.001)
    waiting = batcher.submit(Request(ids=(1,), max_tokens=3))
    threading.Timer(0.05, engine.go.set).start()
    batcher.close()
    assert len(under_way.result(60)) == 1 and waiting.cancelled() and batcher.submit(Request(ids=(1,))).cancelled()


def test_a_chat_has_texts_token_ids_and_log_probs(api, engine):
    body = {"messages": CHAT, "n": 2, "logprobs": True, "return_token_ids": True, "model": "tiny"}
    answer = api.chat(body)
    assert [c["message"]["content"] for c in answer["choices"]] == [TEXT] * 2
    (choice, _), size = answer["choices"], len(engine.ids)
    assert choice["token_ids"] == engine.ids and choice["finish_reason"] == "stop"
    assert [x["logprob"] for x in choice["logprobs"]["content"]] == [-float(i) for i in range(size)]
    text = engine.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert answer["prompt_token_ids"] == engine.tokenizer.encode(text, add_special_tokens=False)
    prompt = len(answer["prompt_token_ids"])
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 2 * size,
        "total_tokens": prompt + 2 * size,
    }


def test_texts_end_at_stop_texts_and_at_max_tokens(api, engine):
    (choice,) = api.completions({"prompt": "1", "stop": ["12", " 4"], "logprobs": 1, "return_token_ids": True})[
        "choices"
    ]
    assert choice["text"] == TEXT[: TEXT.index(" 4")] and choice["finish_reason"] == "stop"
    assert engine.tokenizer.decode(choice["token_ids"]).startswith(choice["text"] + " 4")
    assert engine.tokenizer.decode(choice["token_ids"][:-1]).find(" 4") < 0
    assert "".join(choice["logprobs"]["tokens"]) == engine.tokenizer.decode(choice["token_ids"])
    short = api.completions({"prompt": [[5, 6], [7]], "max_tokens": 2})["choices"]
    assert [c["finish_reason"] for c in short] == ["length"] * 2 and [c["index"] for c in short] == [0, 1]
    assert short[0]["text"] == engine.tokenizer.decode(engine.ids[:2])


def test_bytes_of_tokens_are_those_of_the_text_and_characters_in_several_tokens_count_once(tokenizer):
    text = "1 😀é 2"
    engine = FakeEngine(tokenizer, text)
    batcher = Batcher(engine, most=1)
    api = Api(engine, batcher.submit, name="tiny", max_tokens=64, most=1)
    (choice,) = api.chat({"messages": CHAT, "logprobs": True})["choices"]
    (listed,) = api.completions({"prompt": "1", "logprobs": 1})["choices"]
    batcher.close()
    parts = [bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]]
    assert b"".join(parts) == f"{text}<|end|>".encode() and b"\xf0" in parts
    offsets = listed["logprobs"]["text_offset"]
    starts = [i for i, part in enumerate(parts) if part[0] < 0x80 or part[0] >= 0xC0]
    assert offsets == sorted(offsets) and [offsets[i] for i in starts] == [*range(len(text) + 1)]


def test_a_text_that_is_much_too_long_is_refused_by_its_beginning(api, engine, monkeypatch):
    encoded, encode = [], engine.tokenizer.encode

    def note(text, **how):
        encoded.append(len(text))
        return encode(text, **how)

    monkeypatch.setattr(engine.tokenizer, "encode", note)
    text = "1 " * 10**6
    for ask, body in ((api.completions, {"prompt": text}), (api.chat, {"messages": [CHAT[0] | {"content": text}]})):
        with pytest.raises(Refused, match="over .* tokens; the model was made for 100"):
            ask(body)
    assert encoded == [16 * engine.max_positions] * 2
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, **_: [5] * (len(text) // 10**5))
    assert api.completions({"prompt": " " * 10**6})["usage"]["prompt_tokens"] == 10  # a token of very many characters


def test_what_changes_nothing_is_accepted_and_the_model_has_the_name_that_it_was_given(api, engine):
    api = Api(engine, api.submit, name="tiny", max_tokens=64, most=32, given="builtin:tiny")
    nothing = {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"], "min_tokens": 0}
    for more in (nothing, {"model": "tiny"}, {"model": "builtin:tiny"}):
        assert api.chat({"messages": CHAT} | more)["model"] == "tiny"
    assert api.model("builtin:tiny") == api.model("tiny") == api.models()["data"][0]


def test_templates_get_tool_calls_with_arguments_as_values_and_contents_as_text():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = openai_api._message({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["content"] == "" and message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert openai_api._message({"role": "user", "content": parts})["content"] == "ab"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}  # fmt: skip
HERMES = """{% for t in tools or [] %}{{ t.function.name }} {% endfor %}
{%- for m in messages %}{{ m.content }}{% endfor %}
{%- if false %}<tool_call>{% endif %}"""


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "Well.", [{"a": 1}]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 2, None, [{"a": 1}] * 2),
        ('<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>', None, [{"a": "x"}]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', "as it is", None),
        ('<tool_call>{"name": "add", "arguments": {"a": "</think>"}}</tool_call>', None, [{"a": "</think>"}]),
        ("1 + 2 = 3", "as it is", None),
    ],
)
def test_tool_calls_are_read_from_the_text(tokenizer, text, content, arguments, template=None):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template or HERMES
    engine = FakeEngine(tokenizer, text)
    engine.max_positions = 400
    batcher = Batcher(engine, most=1)
    api = Api(engine, batcher.submit, name="tiny", max_tokens=200, most=1)
    answer = api.chat({"messages": CHAT, "tools": [TOOL], "return_token_ids": True})
    plain = api.chat({"messages": CHAT, "tools": [TOOL], "tool_choice": "none"})["choices"][0]
    batcher.close()
    (choice,) = answer["choices"]
    calls = choice["message"].get("tool_calls")
    assert tokenizer.decode(answer["prompt_token_ids"]).startswith("add ")
    assert choice["message"]["content"] == (text if content == "as it is" else content)
    assert (calls and [json.loads(call["function"]["arguments"]) for call in calls]) == arguments
    assert choice["finish_reason"] == ("tool_calls" if arguments else "stop")
    assert plain["message"] == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("I use <tool_call> {}.</think>Well.\n{}", "I use <tool_call> {}.</think>Well.", [{"a": 1}]),
        ("I could {}", "as it is", None),
    ],
)
def test_a_call_in_reasoning_that_the_template_began_is_none(tokenizer, text, content, arguments):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    opens = HERMES + "{% if add_generation_prompt %}<think>{% endif %}"
    text, content = (each.replace("{}", call) for each in (text, content))
    test_tool_calls_are_read_from_the_text(tokenizer, text, content, arguments, opens)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"stream": True}, "stream"),
        ({"made_up": 1}, "made_up"),
        ({"model": "other"}, "model"),
        ({"max_tokens": 65}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 33}, "n"),
        ({"stop": [1]}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"name": "add"}]}, "tools"),
        ({"tools": [{"function": {"name": 5}}]}, "tools"),
        ({"tools": [{"function": {"name": "a", "parameters": 5}}]}, "tools"),
        ({"tools": [{"function": {"name": "a", "parameters": {"properties": {"b": 5}}}}]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"chat_template_kwargs": {"made_up": 1}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "1 " * 200}]}, None),
    ],
)
def test_what_is_not_supported_is_refused_by_name(api, engine, change, param):
    with pytest.raises(Refused) as refused:
        api.chat({"messages": CHAT} | change)
    assert refused.value.param == param and not engine.drawn


def post(port, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, body if isinstance(body, str) else json.dumps(body))
    response = connection.getresponse()
    return response.status, json.loads(response.read())


@pytest.fixture
def port(api):
    """The port of a server."""
    with openai_api.Server(("127.0.0.1", 0), api) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_server_answers_many_at_once_and_reports_mistakes(port, engine):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        body = {"messages": CHAT, "max_tokens": 20}
        found = list(pool.map(lambda _: post(port, "/v1/chat/completions", body), range(16)))
    assert [status for status, _ in found] == [200] * 16
    assert {answer["choices"][0]["message"]["content"] for _, answer in found} == {TEXT}
    assert post(port, "/v1/chat/completions", "[" * 10**5)[0] == 400
    lone = {"messages": [{"role": "user", "content": "half of a character: \ud83d"}]}
    status, answer = post(port, "/v1/chat/completions", lone)
    assert status == 400 and r"half of a character, \ud83d alone" in answer["error"]["message"]
    assert post(port, "/v1/chat/completions", "{")[0] == 400 and post(port, "/v1/embeddings", {})[0] == 404
    status, answer = post(port, "/v1/chat/completions", {"messages": CHAT, "stream": True})
    assert status == 400 and answer["error"]["param"] == "stream"
    engine.draw = lambda *_: 1 / 0
    assert post(port, "/v1/completions", {"prompt": "1"})[0] == 500


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/models", 200, ["data", "object"]),
        ("GET", "/v1/models/tiny", 200, ["created", "id", "max_model_len", "object", "owned_by"]),
        ("GET", "/v1/models/t%69ny", 200, ["created", "id", "max_model_len", "object", "owned_by"]),
        ("GET", "/v1/models/other", 404, ["error"]),
        ("HEAD", "/v1/models", 200, None),
        ("OPTIONS", "/v1/models", 204, "GET, HEAD, OPTIONS"),
        ("OPTIONS", "/v1/completions", 204, "POST, OPTIONS"),
    ],
)
def test_other_methods_on_one_connection(port, method, path, status, said):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(2):  # the second answer is found only if the first ended where it says
        connection.request(method, path)
        response = connection.getresponse()
        text = response.read()
        assert response.status == status and (bool(text) == isinstance(said, list))
        assert said == (sorted(json.loads(text)) if text else response.getheader("Allow"))
    connection.close()


def test_a_client_that_goes_on_sending_gets_the_answer_to_a_body_that_is_too_long(port, monkeypatch):
    monkeypatch.setattr(openai_api, "MOST_BYTES", 100)
    status, answer = post(port, "/v1/completions", "x" * 2**25)
    assert status == 413 and "at most 100" in answer["error"]["message"]


@pytest.mark.parametrize("reset", [False, True])
def test_requests_of_clients_that_hung_up_are_not_drawn(api, port, engine, monkeypatch, reset):
    monkeypatch.setattr(openai_api, "LOOK_SECONDS", 0.01)
    engine.go, batcher = threading.Event(), api.submit.__self__

    def until(there):
        for _ in range(10**4):
            if there():
                return
            time.sleep(0.001)
        pytest.fail("it never came")

    def ask(prompt):
        body = json.dumps({"prompt": prompt, "max_tokens": 20}).encode()
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        return connection

    first = ask("1")
    until(lambda: engine.asked)
    gone, stays = ask("2"), ask("3")
    until(lambda: len(batcher._waiting) == 2)
    if reset:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.close()
    until(lambda: any(future.cancelled() for _, future in batcher._waiting))
    engine.go.set()
    assert all(connection.recv(20).startswith(b"HTTP/1.1 200") for connection in (first, stays))
    assert engine.drawn == [1, 1]
    first.close()
    stays.close()


@pytest.mark.slow
def test_completions_do_not_depend_on_the_batch():
    engine = Engine("builtin:tiny", step=None, base=None, dtype="float32", no_end=False).load()
    batcher, ids = Batcher(engine, most=32), tuple(engine.tokenizer.encode("Mia has 3 eggs"))
    seeded = Request(ids=ids, max_tokens=16, seed=5)
    (single,) = batcher.submit(seeded).result()
    many = [batcher.submit(r) for r in (Request(ids=ids[:2], max_tokens=9), seeded, Request(ids=ids, max_tokens=16))]
    (_,), (again,), (other,) = (f.result() for f in many)
    batcher.close()
    assert isinstance(again, DrawnCompletion) and again.tokens == single.tokens != other.tokens
    np.testing.assert_allclose(again.logps, single.logps, atol=1e-5)


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop():
    command = [sys.executable, "-m", "grpojax.cli.main", "serve", "builtin:tiny", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "serving" in line)
        assert "serving tiny at" in line
        port = int(line.split(":")[-1].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
