import http.server
import os
import signal
import threading

import pytest

from grpojax import data
from grpojax.cli import main as cli
from grpojax.host import metadata, preemption


@pytest.fixture
def answers(monkeypatch):
    """A metadata server, and what it answers by path."""
    told = {"preempted": "FALSE", "maintenance-event": "NONE"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/")
            known = name in told and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(told[name].encode() if known else b"")

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(preemption, "POLL_S", 0.02)
    yield told
    server.shutdown()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("preempted", "TRUE", "preempted TRUE"),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "maintenance-event TERMINATE_ON_HOST_MAINTENANCE"),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", None),  # the machine goes on elsewhere
    ],
)
def test_a_notice_comes_once(answers, name, value, said):
    heard, told = [], threading.Event()
    with preemption.watched(lambda text: (heard.append(text), told.set())):
        assert not told.wait(0.1)
        answers[name] = value
        assert told.wait(3 if said else 0.2) == (said is not None)
    assert heard == ([said] if said else [])


def test_a_server_that_is_gone_is_no_notice(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    assert preemption.announced() is None


def test_off_such_machines_there_is_no_thread(monkeypatch, tmp_path):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    product = tmp_path / "product"
    monkeypatch.setattr(metadata, "_PRODUCT", product)
    before = threading.active_count()
    with preemption.watched(print):
        assert threading.active_count() == before and not metadata.likely()
    product.write_text("Google Compute Engine\n")
    assert metadata.likely() and metadata.server() == "metadata.google.internal"


def test_the_variables_of_google_and_of_jax_name_the_server(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_IP", "10.0.0.1")
    assert metadata.server() == "10.0.0.1" and metadata.likely()
    monkeypatch.setenv("GCE_METADATA_HOST", "other")
    assert metadata.server() == "other"


def send(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_while_a_run_loads_ends_it_with_75(recipe, tmp_path, monkeypatch, capsys):
    """Nothing is there yet; the folder is free again."""
    given = ["train", str(recipe), f"run.dir={tmp_path / 'run'}", "train.steps=1"]
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        monkeypatch.setattr(data, "load_problems", send)
        with pytest.raises(SystemExit) as ended:
            cli.main(given)
        assert ended.value.code == os.EX_TEMPFAIL and signal.getsignal(signal.SIGTERM) is before
        assert "SIGTERM: stopping" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sigterm_that_came_where_nothing_can_be_raised_is_heard_by_the_loop():
    class Fragile:
        def __del__(self):
            send()

    heard = []
    with preemption.ending():
        Fragile()
        with preemption.notices(heard.append):
            assert heard == ["SIGTERM"]
    with preemption.ending(), preemption.notices(heard.append):
        assert heard == ["SIGTERM"]


def test_a_terminal_that_closes_is_a_notice_and_never_breaks_the_save_off():
    """Both the kernel and the shell may send SIGHUP, and SIGTERM may follow."""
    heard = []
    with preemption.notices(heard.append):
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            send()
    assert heard == ["SIGHUP", "SIGHUP", "SIGTERM", "SIGTERM"]
    with pytest.raises(preemption.StopRequested), preemption.ending():
        os.kill(os.getpid(), signal.SIGHUP)


def test_nohup_is_heeded():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with preemption.notices(print), preemption.ending():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_there_are_no_handlers():
    entered = []

    def use():
        with preemption.notices(print), preemption.ending():
            entered.append(True)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert entered
