"""Rewards from elsewhere: an HTTP endpoint of your own, or a model behind OpenAI's chat API.

Requests are tried again where the server is busy or away, and kept to a rate over all workers of this machine.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import sleep, time
from typing import Any

# Statuses after which the same request may succeed.
BUSY = (408, 425, 429, 500, 502, 503, 504)
LONGEST_PAUSE_S = 30.0
PROMPT = """Judge an answer to a question.

Question: {prompt}

Answer: {completion}

Say how good the answer is as a number from 0 to 1, where 1 is right and complete. End with a line "Score: <number>"."""


def http(
    prompts: Sequence[str],
    completions: Sequence[str],
    tokens: Sequence[Sequence[int]],
    *,
    url: str,
    batch: int = 16,
    send: Sequence[str] = ("gold",),
    key_variable: str = "",
    retries: int = 3,
    seconds: float = 5.0,
    per_second: float = 0.0,
    **columns: Any,
) -> list[float | None]:
    """What an endpoint gives for samples: a POST of JSON with ``prompts``, ``completions`` and the columns as lists.

    It answers with a list of numbers, one for each sample, or with a mapping that has it as ``rewards``; null makes a
    sample invalid.

    Args:
      url: of the endpoint.
      batch: most samples of a request.
      send: names of the columns that are sent, where the data has them.
      key_variable: an environment variable whose value is sent as a bearer token, such as ``OPENAI_API_KEY``; ""
        sends none. It does not follow a redirect to another server.
      retries: how often a request is tried again.
      seconds: time of a request. Set ``rewards.timeout_s`` over that of all its tries.
      per_second: most requests a second of this machine; 0 sets no limit.
    """
    found: list[float | None] = []
    for i in range(0, len(completions), batch):
        part = slice(i, i + batch)
        body = {name: list(columns[name][part]) for name in send if name in columns}
        body |= {"prompts": list(prompts[part]), "completions": list(completions[part])}
        given = _post(url, body, key_variable, retries, seconds, per_second)
        values = given.get("rewards") if isinstance(given, dict) else given
        if not isinstance(values, list) or len(values) != len(body["completions"]):
            raise ValueError(f"{url} gave {given!r:.200} for {len(body['completions'])} samples")
        found += [None if value is None else float(value) for value in values]
    return found


def model(
    prompts: Sequence[str],
    completions: Sequence[str],
    tokens: Sequence[Sequence[int]],
    *,
    url: str,
    name: str,
    ask: str = PROMPT,
    pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)",
    most: float = 1.0,
    batch: int = 8,
    key_variable: str = "",
    retries: int = 3,
    seconds: float = 60.0,
    per_second: float = 0.0,
    **columns: Any,
) -> list[float | None]:
    """The score that a model gives a sample, by a server with OpenAI's chat API. Without a score it is invalid.

    Args:
      url: of the API, such as ``http://localhost:8000/v1``.
      name: the model's.
      ask: the question to the model; ``{prompt}``, ``{completion}`` and the names of columns stand for their values.
      pattern: a regular expression whose first group is the score; its last match counts.
      most: the score that is worth 1.
      batch: most requests of a worker at a time, so that the server can run them in one batch. With `rewards.workers`
        workers there are so many times as many.
      key_variable, retries, seconds, per_second: as in `http`.
    """

    def score(i: int) -> float | None:
        values = {key: column[i] for key, column in columns.items()}
        values |= {"prompt": prompts[i], "completion": completions[i]}
        body = {"model": name, "messages": [{"role": "user", "content": _filled(ask, values)}], "temperature": 0}
        given = _post(f"{url.rstrip('/')}/chat/completions", body, key_variable, retries, seconds, per_second)
        try:
            text = given["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{url} gave {given!r:.200}, not an answer of the chat API") from None
        scores = re.findall(pattern, text or "")
        return float(scores[-1]) / most if scores else None

    failed = threading.Event()

    def ask_for(i: int) -> float | None:
        """A sample's score; no request once another one has failed, as the whole call raises then."""
        if failed.is_set():
            return None
        try:
            return score(i)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(batch) as threads:
        return list(threads.map(ask_for, range(len(completions))))


def _filled(text: str, values: Mapping[str, Any]) -> str:
    """A text with values in place of the names in braces; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]) if m[1] in values else m[0], text)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; to another server without the key."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and (new.type, new.host) != (req.type, req.host):
            new.remove_header("Authorization")
        return new


_OPENER = urllib.request.build_opener(_Redirects)


def _post(url: str, body: Any, key_variable: str, retries: int, seconds: float, per_second: float) -> Any:
    """The JSON that a server answers; tries again where it may help. Raises `OSError` or `ValueError` where not."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(key_variable):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body, default=str).encode(), headers)
    for tried in range(retries + 1):
        _keep_rate(url, per_second)
        pause = min(0.25 * 2.0**tried, LONGEST_PAUSE_S)
        try:
            with _OPENER.open(request, timeout=seconds) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as e:
            with e:
                said = e.read(500).decode(errors="replace")
            if e.code not in BUSY or tried == retries:
                raise OSError(f"{url} answered {e.code} after {tried + 1} tries: {said}") from None
            with contextlib.suppress(TypeError, ValueError):
                pause = min(max(pause, float(e.headers["Retry-After"])), LONGEST_PAUSE_S)
        except OSError as e:
            if tried == retries:
                raise OSError(f"{url} did not answer after {tried + 1} tries: {e}") from None
        sleep(pause)
    raise AssertionError("unreachable")


def _keep_rate(url: str, per_second: float) -> None:
    """Waits for this request's time: a file that all processes of this user share has that of the next one."""
    if not per_second:
        return
    import fcntl

    name = hashlib.sha256(f"{os.getuid()} {url}".encode()).hexdigest()[:16]
    with open(f"{tempfile.gettempdir()}/grpojax-rate-{name}", "a+", encoding="ascii") as file:
        with contextlib.suppress(OSError):  # without locks two processes may take the same time
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        now, text = time(), file.read()
        at = now
        with contextlib.suppress(ValueError):
            at = min(max(now, float(text)), now + 3600)
        file.truncate(0)
        file.write(repr(at + 1 / per_second))
    sleep(max(0.0, at - now))
