import http.server
import threading

import pytest

from grpojax.host import preemption


@pytest.fixture
def metadata(monkeypatch):
    """A metadata server, and what it answers by path."""
    answers = {"preempted": "FALSE", "maintenance-event": "NONE"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/")
            known = name in answers and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(answers[name].encode() if known else b"")

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(preemption, "POLL_S", 0.02)
    yield answers
    server.shutdown()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("preempted", "TRUE", "preempted TRUE"),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "maintenance-event TERMINATE_ON_HOST_MAINTENANCE"),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", None),  # the machine goes on elsewhere
    ],
)
def test_a_notice_comes_once(metadata, name, value, said):
    heard, told = [], threading.Event()
    with preemption.watched(lambda text: (heard.append(text), told.set())):
        assert not told.wait(0.1)
        metadata[name] = value
        assert told.wait(3 if said else 0.2) == (said is not None)
    assert heard == ([said] if said else [])


def test_a_server_that_is_gone_is_no_notice():
    assert preemption.said("127.0.0.1:1") is None


def test_off_such_machines_there_is_no_thread(monkeypatch, tmp_path):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    product = tmp_path / "product"
    monkeypatch.setattr(preemption, "_PRODUCT", product)
    before = threading.active_count()
    with preemption.watched(print):
        assert threading.active_count() == before and preemption.server() is None
    product.write_text("Google Compute Engine\n")
    assert preemption.server() == "metadata.google.internal"
