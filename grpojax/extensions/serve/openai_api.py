"""OpenAI's HTTP API for chats and completions, on a `grpojax.extensions.serve.batcher.Batcher`.

Answers have token ids and log-probs if a request asks for them, in the form that vLLM gave them: with
``return_token_ids`` an answer has ``prompt_token_ids`` and ``token_ids``. What is not supported is refused by name.

Tool calls are read as those of episodes are, so that a policy may be served as it was trained: that extension is
imported once a request has tools, and such requests are refused where it is not installed.
"""

import codecs
import concurrent.futures
import contextlib
import dataclasses
import functools
import http.server
import itertools
import json
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from grpojax.cli.engine import Engine
from grpojax.data.chat_template import ChatTemplate, special_texts, template_of
from grpojax.extensions.serve.batcher import DrawnCompletion, Request
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models.hf import token_bytes
from grpojax.programs.sampler_config import DrawConfig

MOST_BYTES = 64 * 2**20  # of a request
LOOK_SECONDS = 0.5  # so often a request that waits looks whether its client is still there
DRAIN_SECONDS = 30.0  # so long the rest of a body that is too long is read
MOST_SEED = 2**31  # seeds from here on are those of requests without one

# What is read of a request, and what names the caller or the way that a request goes, and changes nothing.
_READ = "model n max_tokens temperature top_p top_k min_p seed stop logprobs return_token_ids"
_CHANGES_NOTHING = "user metadata service_tier safety_identifier prompt_cache_key"
_BOTH = frozenset(f"{_READ} {_CHANGES_NOTHING}".split())
_OF_CHATS = _BOTH | frozenset("messages max_completion_tokens tools tool_choice chat_template_kwargs".split())
_OF_TEXTS = _BOTH | {"prompt"}
# Of parameters that are not supported, the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "store": (False,),
    "stream": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
}


Futures = Sequence[concurrent.futures.Future[list[DrawnCompletion]]]
Wait = Callable[[Futures], list[list[DrawnCompletion]]]


def _results(futures: Futures) -> list[list[DrawnCompletion]]:
    return [future.result() for future in futures]


class Refused(Exception):
    """A request that is not answered, with the parameter that is at fault and the HTTP status."""

    def __init__(self, text: str, param: str | None = None, status: int = 400):
        super().__init__(text)
        self.param, self.status = param, status


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """A request as it was read: what to draw, where the text ends, and what the answer has."""

    request: Request
    stop: tuple[str, ...]
    logprobs: bool
    token_ids: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Answer:
    """A completion as it is returned; ``logprobs`` has an entry for each token."""

    text: str
    tokens: list[int]
    reason: str
    logprobs: list[dict[str, Any]]


class Api:
    """Answers requests, as functions from JSON to JSON. They raise `Refused`.

    Args:
      engine: the model.
      submit: draws for a request (`grpojax.extensions.serve.batcher.Batcher.submit`).
      name: the model's name.
      given: what else requests may call it.
      max_tokens: the most tokens of a completion.
      most: the most completions of a prompt.
    """

    def __init__(
        self,
        engine: Engine,
        submit: Callable[[Request], "concurrent.futures.Future[list[DrawnCompletion]]"],
        *,
        name: str,
        max_tokens: int,
        most: int,
        given: str | None = None,
    ):
        self.engine, self.submit, self.name, self.max_tokens, self.most = engine, submit, name, max_tokens, most
        self._names = {name, given or name}
        self._started, self._numbers = int(time.time()), itertools.count()
        self._template = functools.lru_cache(maxsize=16)(self._make_template)

    def models(self) -> dict[str, Any]:
        """``GET /v1/models``: the one model."""
        return {"object": "list", "data": [self.model(self.name)]}

    def model(self, name: str) -> dict[str, Any]:
        """``GET /v1/models/NAME``."""
        if name not in self._names:
            raise Refused(f"model {name!r:.100} is not served; {self.name!r} is", "model", 404)
        model = {"id": self.name, "object": "model", "created": self._started, "owned_by": "grpojax"}
        return model | {"max_model_len": self.engine.max_positions}

    def chat(self, body: Mapping[str, Any], wait: Wait = _results) -> dict[str, Any]:
        """``POST /v1/chat/completions``: the assistant's next message. ``wait`` gives what futures will hold."""
        self._check(body, _OF_CHATS)
        asked = self._asked(body, self._ids_of_chat(body), logprobs=_typed(body, "logprobs", (bool,), False))
        (completions,) = wait([self.submit(asked.request)])
        answers = [self._finish(completion, asked) for completion in completions]
        choices = []
        for i, answer in enumerate(answers):
            content, calls = self._calls(answer, body)
            message: dict[str, Any] = {"role": "assistant", "content": content}
            choice = {
                "index": i,
                "message": message | ({"tool_calls": calls} if calls else {}),
                "finish_reason": "tool_calls" if calls else answer.reason,
                "logprobs": {"content": answer.logprobs} if asked.logprobs else None,
            }
            choices.append(choice | ({"token_ids": answer.tokens} if asked.token_ids else {}))
        whole = self._whole("chat.completion", choices, [asked], answers)
        return whole | ({"prompt_token_ids": list(asked.request.ids)} if asked.token_ids else {})

    def completions(self, body: Mapping[str, Any], wait: Wait = _results) -> dict[str, Any]:
        """``POST /v1/completions``: continuations of one prompt or of several, as texts or as token ids. ``wait`` as in
        `chat`."""
        self._check(body, _OF_TEXTS)
        logprobs = _typed(body, "logprobs", (int,), None)
        if logprobs not in (None, 0, 1):
            raise Refused("logprobs: only those of the sampled tokens are there; ask for 0 or 1", "logprobs")
        several = [
            self._asked(body, self._ids_of_text(prompt), logprobs=logprobs is not None)
            for prompt in _prompts(body.get("prompt"))
        ]
        drawn = wait([self.submit(asked.request) for asked in several])
        choices, answers = [], []
        for asked, completions in zip(several, drawn, strict=True):
            for completion in completions:
                answer = self._finish(completion, asked)
                choice: dict[str, Any] = {"index": len(choices), "text": answer.text, "finish_reason": answer.reason}
                choice["logprobs"] = _listed(answer.logprobs) if asked.logprobs else None
                if asked.token_ids:
                    choice |= {"token_ids": answer.tokens, "prompt_token_ids": list(asked.request.ids)}
                choices.append(choice)
                answers.append(answer)
        return self._whole("text_completion", choices, several, answers)

    # ------------------------------------------------------------------------------------------ a request

    def _check(self, body: Mapping[str, Any], read: frozenset[str]) -> None:
        """Refuses what is not supported, rather than to ignore it."""
        for name, value in body.items():
            if name in read or value is None or value in _NEUTRAL.get(name, ()):
                continue
            known = f"{name}={value!r:.60} is not supported" if name in _NEUTRAL else f"{name} is not supported"
            raise Refused(f"{known}; leave it out", name)
        if (name := _typed(body, "model", (str,), None)) is not None:
            self.model(name)

    def _asked(self, body: Mapping[str, Any], ids: Sequence[int], *, logprobs: bool) -> _Asked:
        room = self.engine.max_positions - len(ids)
        given = body.get("max_completion_tokens") is not None
        name = "max_completion_tokens" if given else "max_tokens"
        most = _typed(body, name, (int,), min(self.max_tokens, room))
        if room < 1:
            raise Refused(f"the prompt has {len(ids)} tokens; the model was made for {self.engine.max_positions}", None)
        if not 1 <= most <= min(self.max_tokens, room):
            raise Refused(f"{name}={most}: here it must be between 1 and {min(self.max_tokens, room)}", name)
        n, seed = _typed(body, "n", (int,), 1), _typed(body, "seed", (int,), None)
        if not 1 <= n <= self.most:
            raise Refused(f"n={n}: here it must be between 1 and {self.most}", "n")
        shares = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
        values = {key: _number(body, key, usual) for key, usual in shares.items()}
        try:
            top_k = max(0, _typed(body, "top_k", (int,), 0))  # -1 is "all", as in vLLM
            draw = DrawConfig(top_k=0 if top_k >= len(self.engine.tokenizer) else top_k, **values)
        except UserError as e:
            raise Refused(str(e), str(e).partition("=")[0]) from None
        stop = body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise Refused("stop must be a text or a list of texts", "stop")
        request = Request(
            ids=tuple(ids),
            n=n,
            max_tokens=most,
            draw=draw,
            seed=None if seed is None else seed % MOST_SEED,
        )
        return _Asked(
            request=request,
            stop=tuple(stop),
            logprobs=logprobs,
            token_ids=_typed(body, "return_token_ids", (bool,), False),
        )

    def _ids_of_chat(self, body: Mapping[str, Any]) -> list[int]:
        if not self.engine.tokenizer.chat_template:
            raise Refused(f"{self.name} has no chat template; use /v1/completions", "messages")
        messages = [_message(m) for m in _typed(body, "messages", (list,), [])]
        if not messages:
            raise Refused("messages: give at least one", "messages")
        if tools := _tools(body):
            self._form()
        try:
            template = self._template(_options(body))
            text = template.render(messages, tools=tools or None)
        except UserError as e:
            raise Refused(
                str(e).replace("data.template_options", "chat_template_kwargs"), "chat_template_kwargs"
            ) from None
        except Exception as e:  # whatever a template raises
            raise Refused(f"the chat template raised an error: {' '.join(str(e).split())[:200]}", "messages") from None
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A text's token ids. One that is much too long is refused by its beginning: to encode 60 MB takes minutes.

        The vocabulary does not say how many characters a token covers at most: some take all spaces beside them.
        """
        encode = functools.partial(self.engine.tokenizer.encode, add_special_tokens=add_special_tokens)
        most = self.engine.max_positions
        size = 16 * most
        while size < len(text):
            # Twice as many as fit: the end of a beginning may have some tokens that the whole text has not.
            if (begun := len(encode(text[:size]))) > 2 * most:
                raise Refused(f"the prompt has over {begun - most} tokens; the model was made for {most}", None)
            size *= 4
        return encode(text)

    def _form(self) -> str:
        """The form in which the model writes tool calls."""
        tool_calls, _ = _reader()
        try:
            return tool_calls.format_of(template_of(self.engine.tokenizer))
        except UserError:
            raise Refused(
                f"the chat template of {self.name} shows no form of tool calls that is known", "tools"
            ) from None

    def _make_template(self, options: str) -> ChatTemplate:
        return ChatTemplate(self.engine.tokenizer, json.loads(options), None)

    def _ids_of_text(self, prompt: str | Sequence[int]) -> Sequence[int]:
        ids = self._encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        size = len(self.engine.tokenizer)
        if not ids:
            raise Refused("the prompt is empty", "prompt")
        if wrong := [i for i in ids if not 0 <= i < size]:
            raise Refused(f"token id {wrong[0]}: the vocabulary has {size} tokens", "prompt")
        return ids

    # ------------------------------------------------------------------------------------------ an answer

    def _finish(self, completion: DrawnCompletion, asked: _Asked) -> _Answer:
        tokens, text = completion.tokens, self._text(completion.tokens)
        reason = "stop" if completion.stopped else "length"
        found = [at for s in asked.stop if (at := text.find(s)) >= 0]
        if found:
            # The shortest beginning whose text has the stop text: texts of beginnings only get longer.
            low, high = 1, len(tokens)
            while low < high:
                middle = (low + high) // 2
                done = any(s in self._text(tokens[:middle]) for s in asked.stop)
                low, high = (low, middle) if done else (middle + 1, high)
            tokens, text, reason = tokens[:low], text[: min(found)], "stop"
        logprobs = []
        if asked.logprobs:
            parts = token_bytes(self.engine.tokenizer, tokens)
            logprobs = [_logprob(part, logp) for part, logp in zip(parts, completion.logps, strict=False)]
        return _Answer(
            text=text,
            tokens=tokens,
            reason=reason,
            logprobs=logprobs,
        )

    def _calls(self, answer: _Answer, body: Mapping[str, Any]) -> tuple[str | None, list[dict[str, Any]]]:
        """The content of a message, and its tool calls, whose arguments have the schemas' types where they fit. If one
        cannot be read, all stays in the content as text."""
        functions = [tool["function"] for tool in _tools(body)]
        schemas = {
            function["name"]: {**function, "parameters": function.get("parameters") or {}} for function in functions
        }
        if not schemas:
            return answer.text, []
        tool_calls, check = _reader()
        tokenizer, begun = self.engine.tokenizer, self._template(_options(body)).tail  # such as <think>
        written = begun + tokenizer.decode(answer.tokens, skip_special_tokens=False)  # some are a call's markers
        found = tool_calls.read(written, tool_calls.FORMATS[self._form()])
        if not found or any(call.error is not None for call in found):
            return answer.text, []
        before = written[len(begun) : found[0].at]
        for special in special_texts(tokenizer):
            before = before.replace(special, "")
        # One that does not fit keeps its arguments as written: the agent's tool says what is wrong with them.
        found = [check(call, schemas) for call in found]
        return before.strip() or None, [
            {
                "id": f"call_{self._started}_{next(self._numbers)}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in found
        ]

    def _text(self, tokens: Sequence[int]) -> str:
        return self.engine.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _whole(
        self, kind: str, choices: list[dict[str, Any]], asked: Sequence[_Asked], answers: Sequence[_Answer]
    ) -> dict[str, Any]:
        prompt, completion = sum(len(a.request.ids) for a in asked), sum(len(a.tokens) for a in answers)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {
            "id": f"{kind.split('.')[0]}-{self._started}-{next(self._numbers)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "choices": choices,
            "usage": usage,
        }


def _logprob(part: bytes, logp: float) -> dict[str, Any]:
    return {"token": part.decode(errors="replace"), "logprob": logp, "bytes": list(part), "top_logprobs": []}


def _typed(body: Mapping[str, Any], name: str, types: tuple[type, ...], default: Any) -> Any:
    """A parameter, if it has one of the types; the default if it is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        takes = " or ".join(t.__name__ for t in types)
        raise Refused(f"{name}={value!r:.60} has the wrong type; it takes {takes}", name)
    return value


def _options(body: Mapping[str, Any]) -> str:
    """What a request sets in the chat template, as JSON."""
    return json.dumps(_typed(body, "chat_template_kwargs", (dict,), {}), sort_keys=True)


def _prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a request: a text, token ids, or a list of either."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(p, str) or _is_ids(p) for p in value):
        return value
    raise Refused("prompt must be a text, a list of token ids, or a list of these", "prompt")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _message(message: Any) -> dict[str, Any]:
    """A message as chat templates read it: text as content, and arguments of tool calls as a dict."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"messages: {message!r:.60} has no role", "messages")
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused("messages: only parts of text are read", "messages")
        message["content"] = "".join(part["text"] for part in content)
    elif content is None and message.get("tool_calls"):
        message["content"] = ""
    elif not isinstance(content, str):
        raise Refused(f"messages: content={content!r:.60} is no text", "messages")
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise Refused(f"messages: tool_calls={message['tool_calls']!r:.60} is no list", "messages")
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    try:
        return float(_typed(body, name, (int, float), default))
    except OverflowError:
        raise Refused(f"{name}={str(body[name])[:20]}... is too large", name) from None


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that a chat may call."""
    tools, choice = _typed(body, "tools", (list,), []), body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise Refused(f"tool_choice={choice!r:.60} is not supported; take 'auto' or 'none'", "tool_choice")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(f"tools: {tool!r:.60} is no function with a name", "tools")
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
        if not isinstance(properties, dict) or not all(isinstance(schema, dict) for schema in properties.values()):
            raise Refused(f"tools: the parameters of {function['name']!r:.60} are no JSON schema", "tools")
    return [] if choice == "none" else tools


def _tool_call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {**call, "function": {"name": function["name"], "arguments": arguments}}
    except (TypeError, KeyError, AttributeError, ValueError):
        raise Refused(f"messages: {call!r:.60} is no tool call", "messages") from None


def _listed(logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Log-probs in the form that completions have."""
    read = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be in several tokens
    sizes = [len(read.decode(bytes(entry["bytes"]))) for entry in logprobs]
    return {
        "tokens": [entry["token"] for entry in logprobs],
        "token_logprobs": [entry["logprob"] for entry in logprobs],
        "text_offset": [0, *itertools.accumulate(sizes[:-1])] if sizes else [],
        "top_logprobs": None,
    }


# ------------------------------------------------------------------------------------------------- HTTP


class Server(http.server.ThreadingHTTPServer):
    """An HTTP server with a thread for each connection."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], api: Api):
        self.api = api
        self._answering, self._changed = 0, threading.Condition()
        super().__init__(address, _Handler)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Inside, a request is answered."""
        with self._changed:
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints a traceback, unless the client only hung up."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def wait_for_answers(self, seconds: float) -> None:
        """Waits until no request is being answered, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._answering, seconds)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Reads a request, and writes its answer as JSON."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes; an answer would wait 40 ms between them
    timeout = 600.0  # seconds for a request's next bytes
    unread = False  # whether a body was refused unread

    @property
    def _api(self) -> Api:
        return cast(Server, self.server).api

    @property
    def _place(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def do_GET(self) -> None:
        """Health, the list of models, and the model."""
        path, models = self._place, "/v1/models"
        try:
            if path == "/health":
                self._send(200, {})
            elif path == models:
                self._send(200, self._api.models())
            elif path.startswith(f"{models}/"):
                self._send(200, self._api.model(urllib.parse.unquote(path.removeprefix(f"{models}/"))))
            else:
                raise Refused(f"there is no GET {path}", status=404)
        except Refused as e:
            self._fail(e)

    do_HEAD = do_GET  # `_send` leaves out the body

    def do_OPTIONS(self) -> None:
        """The methods of a path."""
        self.send_response(204)
        self.send_header("Allow", "POST, OPTIONS" if self._place in self._answers() else "GET, HEAD, OPTIONS")
        self.end_headers()

    def do_POST(self) -> None:
        """Chats and completions."""
        with cast(Server, self.server).answering():
            self._answer()
        if self.unread:
            self._drain()

    def _answers(self) -> dict[str, Callable[[Mapping[str, Any], Wait], dict[str, Any]]]:
        return {"/v1/chat/completions": self._api.chat, "/v1/completions": self._api.completions}

    def _answer(self) -> None:
        try:
            body = self._body()
            if (answer := self._answers().get(self._place)) is None:
                raise Refused(f"there is no POST {self._place}", status=404)
            self._send(200, answer(body, self._wait))
        except Refused as e:
            self._fail(e)
        except concurrent.futures.CancelledError:
            self._fail(Refused("the server is stopping", status=503))
        except (ConnectionError, TimeoutError):  # nobody waits for the answer any more
            raise
        except Exception as e:
            log.exception("a request failed")
            self._fail(Refused(f"{type(e).__name__}: {e}", status=500))

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > MOST_BYTES:
            self.close_connection = self.unread = True
            raise Refused(f"Content-Length must be given and at most {MOST_BYTES}", status=411 if not length else 413)
        try:
            body = json.loads(self.rfile.read(int(length)))
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as e:
            half = f"\\u{ord(e.object[e.start]):x}"
            raise Refused(f"the body has half of a character, {half} alone, which no tokenizer takes") from None
        except (ValueError, RecursionError) as e:
            raise Refused(f"the body is no JSON: {str(e)[:100]}") from None
        if not isinstance(body, dict):
            raise Refused("the body is no JSON object")
        return body

    def _wait(self, futures: Futures) -> list[list[DrawnCompletion]]:
        """What futures will hold. If the client hangs up before, those that wait are not drawn."""
        while concurrent.futures.wait(futures, LOOK_SECONDS).not_done:
            if self._hung_up():
                for future in futures:
                    future.cancel()
                raise ConnectionAbortedError
        return _results(futures)

    def _hung_up(self) -> bool:
        self.connection.setblocking(False)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        finally:
            self.connection.settimeout(self.timeout)

    def _drain(self) -> None:
        """Reads what the client still sends: if the connection closed before, the client would not get the answer."""
        until = time.monotonic() + DRAIN_SECONDS
        with contextlib.suppress(OSError):  # it hung up, or sends nothing
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(DRAIN_SECONDS / 6)
            while time.monotonic() < until and self.rfile.read1(2**20):
                pass

    def _fail(self, e: Refused) -> None:
        kind = "invalid_request_error" if e.status < 500 else "server_error"
        self._send(e.status, {"error": {"message": str(e), "type": kind, "param": e.param, "code": e.status}})

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the batcher reports batches."""


def _reader() -> tuple[Any, Any]:
    """The module that reads tool calls, and the function that fits their arguments to the schemas."""
    try:
        from grpojax.extensions.episodes import calls
        from grpojax.extensions.episodes.arguments import check
    except ImportError:
        raise Refused("tool calls are read by the extension of episodes, which is not installed", "tools") from None
    return calls, check
