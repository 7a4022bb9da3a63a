"""OpenAI's HTTP API for chats and completions, on a `grpojax.tools.batcher.Batcher`.

Answers have token ids and log-probs if a request asks for them, in the form that vLLM gave them: with
``return_token_ids`` an answer has ``prompt_token_ids`` and ``token_ids``. What is not supported is refused by name.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import http.server
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from grpojax.data.chat_template import ChatTemplate, special_texts
from grpojax.environments import calls as tool_calls
from grpojax.environments.arguments import check
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.programs.token_sampling import DrawConfig
from grpojax.tools.batcher import Completion, Request
from grpojax.tools.engine import Engine

MOST_BYTES = 64 * 2**20  # of a request
MOST_SEED = 2**31  # seeds from here on are those of requests without one

# What is read of a request. ``user`` names the caller and changes nothing.
_BOTH = frozenset("model n max_tokens temperature top_p top_k min_p seed stop logprobs return_token_ids user".split())
_OF_CHATS = _BOTH | frozenset("messages max_completion_tokens tools tool_choice chat_template_kwargs".split())
_OF_TEXTS = _BOTH | {"prompt"}
# Of parameters that are not supported, the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stream": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
}


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
      submit: draws for a request (`grpojax.tools.batcher.Batcher.submit`).
      name: the model's name.
      max_tokens: the most tokens of a completion.
      most: the most completions of a prompt.
    """

    def __init__(
        self,
        engine: Engine,
        submit: Callable[[Request], "concurrent.futures.Future[list[Completion]]"],
        *,
        name: str,
        max_tokens: int,
        most: int,
    ):
        self.engine, self.submit, self.name, self.max_tokens, self.most = engine, submit, name, max_tokens, most
        self._started, self._numbers = int(time.time()), itertools.count()
        self._template = functools.lru_cache(maxsize=16)(self._make_template)

    def models(self) -> dict[str, Any]:
        """``GET /v1/models``: the one model."""
        model = {"id": self.name, "object": "model", "created": self._started, "owned_by": "grpojax"}
        return {"object": "list", "data": [model | {"max_model_len": self.engine.max_positions}]}

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /v1/chat/completions``: the assistant's next message."""
        self._check(body, _OF_CHATS)
        asked = self._asked(body, self._ids_of_chat(body), logprobs=_typed(body, "logprobs", (bool,), False))
        answers = [self._finish(completion, asked) for completion in self.submit(asked.request).result()]
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

    def completions(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """``POST /v1/completions``: continuations of one prompt or of several, as texts or as token ids."""
        self._check(body, _OF_TEXTS)
        logprobs = _typed(body, "logprobs", (int,), None)
        if logprobs not in (None, 0, 1):
            raise Refused("logprobs: only those of the sampled tokens are there; ask for 0 or 1", "logprobs")
        several = [
            self._asked(body, self._ids_of_text(prompt), logprobs=logprobs is not None)
            for prompt in _prompts(body.get("prompt"))
        ]
        pending = [(asked, self.submit(asked.request)) for asked in several]
        choices, answers = [], []
        for asked, future in pending:
            for completion in future.result():
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
        if (name := body.get("model")) not in (None, self.name):
            raise Refused(f"model {name!r:.100} is not served; {self.name!r} is", "model", 404)

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
        return self.engine.tokenizer.encode(text, add_special_tokens=False)

    def _form(self) -> str:
        """The form in which the model writes tool calls."""
        try:
            return tool_calls.format_of(self.engine.tokenizer.get_chat_template())
        except UserError:
            raise Refused(
                f"the chat template of {self.name} shows no form of tool calls that is known", "tools"
            ) from None

    def _make_template(self, options: str) -> ChatTemplate:
        return ChatTemplate(self.engine.tokenizer, json.loads(options), None)

    def _ids_of_text(self, prompt: str | Sequence[int]) -> Sequence[int]:
        ids = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        size = len(self.engine.tokenizer)
        if not ids:
            raise Refused("the prompt is empty", "prompt")
        if wrong := [i for i in ids if not 0 <= i < size]:
            raise Refused(f"token id {wrong[0]}: the vocabulary has {size} tokens", "prompt")
        return ids

    # ------------------------------------------------------------------------------------------ an answer

    def _finish(self, completion: Completion, asked: _Asked) -> _Answer:
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
        logps = completion.logps[: len(tokens)] if asked.logprobs else []
        return _Answer(
            text=text,
            tokens=tokens,
            reason=reason,
            logprobs=[self._logprob(token, logp) for token, logp in zip(tokens, logps, strict=False)],
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

    def _logprob(self, token: int, logp: float) -> dict[str, Any]:
        text = self.engine.tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}

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
    tokens = [entry["token"] for entry in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in logprobs],
        "text_offset": [0, *itertools.accumulate(len(token) for token in tokens[:-1])] if tokens else [],
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

    def wait_for_answers(self, seconds: float) -> None:
        """Waits until no request is being answered, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._answering, seconds)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Reads a request, and writes its answer as JSON."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes; an answer would wait 40 ms between them
    timeout = 600.0  # seconds for a request's next bytes

    @property
    def _api(self) -> Api:
        return cast(Server, self.server).api

    def do_GET(self) -> None:
        """Health and the list of models."""
        path = self.path.partition("?")[0].rstrip("/")
        if path == "/health":
            self._send(200, {})
        elif path == "/v1/models":
            self._send(200, self._api.models())
        else:
            self._fail(Refused(f"there is no GET {path}", status=404))

    def do_POST(self) -> None:
        """Chats and completions."""
        api, path = self._api, self.path.partition("?")[0].rstrip("/")
        answers = {"/v1/chat/completions": api.chat, "/v1/completions": api.completions}
        with cast(Server, self.server).answering():
            self._answer(path, answers)

    def _answer(self, path: str, answers: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]) -> None:
        try:
            body = self._body()
            if path not in answers:
                raise Refused(f"there is no POST {path}", status=404)
            self._send(200, answers[path](body))
        except Refused as e:
            self._fail(e)
        except concurrent.futures.CancelledError:
            self._fail(Refused("the server is stopping", status=503))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):  # nobody waits for the answer any more
            self.close_connection = True
        except Exception as e:
            log.exception("a request failed")
            self._fail(Refused(f"{type(e).__name__}: {e}", status=500))

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > MOST_BYTES:
            self.close_connection = True  # the body is not read
            raise Refused(f"Content-Length must be given and at most {MOST_BYTES}", status=411 if not length else 413)
        try:
            body = json.loads(self.rfile.read(int(length)))
            json.dumps(body, ensure_ascii=False).encode()  # lone surrogates, which no tokenizer takes, are no UTF-8
        except (ValueError, RecursionError) as e:
            raise Refused(f"the body is no JSON: {str(e)[:100]}") from None
        if not isinstance(body, dict):
            raise Refused("the body is no JSON object")
        return body

    def _fail(self, e: Refused) -> None:
        kind = "invalid_request_error" if e.status < 500 else "server_error"
        self._send(e.status, {"error": {"message": str(e), "type": kind, "param": e.param, "code": e.status}})

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the batcher reports batches."""
