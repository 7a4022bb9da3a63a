"""Places in a bucket and claims on them, by a real storage server on loopback."""

import datetime
import json
import logging
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import bucket
import pytest

from grpojax.host import claims, files
from grpojax.host.errors import UserError

proxy, place = bucket.proxy, bucket.place


def test_files(place):
    assert files.listing(place) == [] and not place.exists()
    files.make_folder(place / "a")
    files.write(place / "a/1", b"one")
    files.write(place / "a/1", b"two")
    files.write_json(place / "a/b/2.json", {"x": 1})
    assert [p.name for p in files.listing(place / "a")] == ["1", "b"] and (place / "a").is_dir()
    assert files.read(place / "a/1") == b"two" and json.loads((place / "a/b/2.json").read_text()) == {"x": 1}
    files.write(place / "c/old", b"")
    files.move(place / "a", place / "c")
    assert bucket.objects(str(place)) == ["c/1", "c/b/2.json"]
    files.remove_all([place / "c/1", place / "c/b/2.json", place / "c/none"])
    assert not place.exists()


def test_what_another_process_wrote_is_seen(place, proxy):
    import urllib.request

    files.write(place / "a/old", b"")
    assert [p.name for p in files.listing(place / "a")] == ["old"]
    address = f"http://{proxy.address}/upload/storage/v1/b/{bucket.NAME}/o?uploadType=media&name={place.name}/a/new"
    urllib.request.urlopen(urllib.request.Request(address, data=b"there", method="POST")).close()
    assert [p.name for p in files.listing(place / "a")] == ["new", "old"] and files.read(place / "a/new") == b"there"


def test_no_such_thing(place):
    with pytest.raises(FileNotFoundError) as e:
        files.read(place / "none")
    assert e.value.filename == f"{place}/none"
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        files.make_folder("gs://other/x")


@pytest.mark.slow
def test_faults_that_pass_are_not_seen(place, proxy):
    proxy.latency = 0.01
    before = proxy.met
    proxy.every(2, 503, 429, "torn")
    many = {f"{i:02d}": f"content {i}".encode() * 100 for i in range(7)}
    for name, content in many.items():
        files.write(place / name, content)
    there = files.listing(place)
    assert dict(zip([p.name for p in there], files.read_all(there), strict=True)) == many
    assert proxy.met - before >= 10
    proxy.every(2, 429, 503)
    with (place / "large").open("wb") as f:  # in several requests
        for i in range(12):
            f.write(bytes([i]) * (1 << 20))
    assert files.read(place / "large") == b"".join(bytes([i]) * (1 << 20) for i in range(12))


def test_an_upload_whose_answer_was_lost_has_ended(place, proxy):
    import gcsfs.retry

    files.write(place / "old", b"there before")
    for name in ("old", "a new one"):
        proxy.faults, met = iter([None, "torn"]), proxy.met  # it begins, and ends
        (place / name).write_text("what came")
        assert files.read(place / name) == b"what came" and proxy.met == met + 1
    proxy.faults = iter([None, 404])
    with pytest.raises(FileNotFoundError) as e:
        (place / "none").write_text("what came")
    assert e.value.filename == f"{place}/none"
    proxy.faults = iter([None, 404])
    with pytest.raises(gcsfs.retry.ChecksumError):
        (place / "old").write_text("it did not")
    assert files.read(place / "old") == b"what came"


def test_what_arrives_otherwise_is_no_success(place, proxy):
    proxy.faults = iter(["changed"])
    with pytest.raises(OSError, match="arrived damaged") as e:
        files.write(place / "x", b"as it was sent")
    assert e.value.filename == f"{place}/x"
    files.write(place / "x", b"as it was sent")
    assert files.read(place / "x") == b"as it was sent"


def test_an_error_that_stays_names_the_object(place, proxy):
    proxy.always, before = 403, proxy.asked
    for do in (lambda: files.write(place / "x", b""), lambda: files.read(place / "x"), (place / "x").exists):
        with pytest.raises(OSError, match="Forbidden") as e:
            do()
        assert e.value.filename == f"{place}/x"
    assert proxy.asked - before <= 4  # it is not tried again
    proxy.always, before = 503, proxy.asked
    with pytest.raises(OSError, match="503"):
        files.read(place / "x")
    assert 6 <= proxy.asked - before <= 7  # a seventh was seen once, on a busy machine
    with pytest.raises(OSError, match="503"):
        place.is_dir()  # and no folder that is not there


def test_uploads(place, proxy, caplog):
    writes = files.Uploads(ahead=2)
    for i in range(5):
        writes.write(place / str(i % 2), str(i).encode())
    writes.wait()
    assert files.read(place / "0") == b"4" and files.read(place / "1") == b"3"
    proxy.always = 403
    with caplog.at_level(logging.WARNING, "grpojax"):
        writes.write(place / "lost", b"")
        writes.wait()
    assert f"{place}/lost could not be written" in caplog.text
    proxy.always = None
    writes.write(place / "2", b"5")
    writes.close()
    assert files.read(place / "2") == b"5"


def test_uploads_of_local_files_are_done_at_once(tmp_path):
    writes = files.Uploads()
    writes.write(files.path(tmp_path / "a"), b"x")
    assert (tmp_path / "a").read_bytes() == b"x" and writes._thread is None
    writes.close()


# ---------------------------------------------------------------------------------------------- claims


def claim(place, take_over):
    made = claims._Claim(place)
    made.take(take_over)
    return made


@pytest.fixture
def fine_clock(monkeypatch):
    """An answer's date has whole seconds only."""
    monkeypatch.setattr(claims, "_time_of", lambda error: datetime.datetime.now(datetime.UTC))


def test_one_holder(place):
    with claims.hold(place):
        with pytest.raises(UserError, match=r"in use by \S+:\d+; it was last seen 0 s ago(.|\n)*--take-over"):
            with claims.hold(place):
                pass
    assert files.listing(place) == []
    with claims.hold(place):
        pass


@pytest.mark.parametrize("where", ["bucket", "disk"])
def test_who_would_be_refused_learns_it_at_once(place, tmp_path, where):
    folder = place if where == "bucket" else tmp_path
    claims.check(folder)
    with claims.hold(folder):
        with pytest.raises(UserError, match=re.escape(f"{folder} is in use by")):
            claims.check(folder)
        if where == "bucket":
            claims.check(folder, take_over=True)
    claims.check(folder)
    with claims.hold(folder):
        pass


def test_a_lock_that_cannot_be_opened(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(UserError, match="lock cannot be opened: Is a directory"):
        with claims.hold(tmp_path):
            pass


def test_of_those_who_race_one_wins(place):
    together, won, refused = threading.Barrier(6), [], []

    def race():
        together.wait()
        try:
            won.append(claim(place / "lock", False))
        except UserError as e:
            refused.append(str(e))

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(refused) == 5, refused


def test_of_those_who_take_over_at_once_one_wins(place, monkeypatch):
    claim(place / "lock", False)
    together, read = threading.Barrier(3), claims._Claim._read

    def all_read_then_write(self, now):
        found = read(self, now)
        if found[0].get("nonce") == first:
            together.wait()
        return found

    first = json.loads(files.read(place / "lock"))["nonce"]
    monkeypatch.setattr(claims._Claim, "_read", all_read_then_write)
    won, refused = [], []

    def race():
        try:
            won.append(claim(place / "lock", True))
        except UserError as e:
            refused.append(str(e))

    threads = [threading.Thread(target=race) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(refused) == 2 and all("was quicker" in x for x in refused), refused
    assert json.loads(files.read(place / "lock"))["nonce"] == won[0]._nonce


def test_a_silent_holder_is_taken_for_dead(place, monkeypatch, fine_clock):
    claim(place / "lock", False)
    monkeypatch.setattr(claims, "SILENT_S", 0.3)
    with pytest.raises(UserError, match="in use"):
        claim(place / "lock", False)
    threading.Event().wait(0.4)
    claim(place / "lock", False)


def test_a_holder_lives_while_it_renews(place, monkeypatch, fine_clock):
    monkeypatch.setattr(claims, "RENEW_S", 0.05)
    lost = []
    with claims.hold(place, lost=lost.append):
        monkeypatch.setattr(claims, "SILENT_S", 0.4)
        threading.Event().wait(0.6)
        with pytest.raises(UserError, match="in use"):
            claim(place / "lock", False)
    assert not lost


def test_a_clock_that_is_wrong_breaks_no_claim(place, monkeypatch):
    class Late(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(hours=1)

    claim(place / "lock", False)
    monkeypatch.setattr(claims, "datetime", types.SimpleNamespace(datetime=Late, UTC=datetime.UTC))
    with pytest.raises(UserError, match="in use by .*; it was last seen [0-5] s ago"):
        claim(place / "lock", False)


def test_a_holder_finds_its_claim_taken(place, monkeypatch):
    monkeypatch.setattr(claims, "RENEW_S", 0.3)
    told = threading.Event()
    lost = []
    with claims.hold(place, lost=lambda said: (lost.append(said), told.set())):
        with claims.hold(place, take_over=True, lost=lost.append):
            assert told.wait(30) and (place / "lock").exists()
    assert len(lost) == 1 and f"{place} was taken over by" in lost[0]


def test_letting_go_leaves_anothers_claim(place):
    first = claim(place / "lock", False)
    claim(place / "lock", True)
    first.release()
    assert first.renew() is not None and (place / "lock").exists()


def test_lost_answers_are_no_other_holder(place, proxy):
    """The write was done, and its second attempt finds the first one's object."""
    proxy.only, proxy.faults = "POST", iter(["torn"])
    mine = claim(place / "lock", False)
    proxy.faults = iter([503, "torn", "torn"])
    assert mine.renew() is None and mine.renew() is None
    proxy.only, proxy.faults = "DELETE", iter(["torn"])
    mine.release()
    assert not (place / "lock").exists() and proxy.met >= 5


def test_a_claim_that_cannot_be_made(place, proxy):
    with pytest.raises(UserError, match="gs://other/x cannot be claimed"):
        claim(files.path("gs://other/x/lock"), False)
    proxy.always = 403
    with pytest.raises(UserError, match="cannot be claimed"):
        claim(place / "lock", False)


@pytest.mark.slow
def test_who_loses_its_claim_ends(place):
    code = f"""if True:
        import threading
        from grpojax.host import claims
        claims.RENEW_S = 0.5
        with claims.hold({str(place)!r}):
            print("held", flush=True)
            threading.Event().wait(60)"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert holder.stdout and holder.stdout.readline() == "held\n"
    with claims.hold(place, take_over=True):
        said = holder.communicate(timeout=60)[1]
        assert holder.returncode == 2 and "was taken over by" in said and "this process ends" in said
        assert (place / "lock").exists()


def test_local_places_load_nothing_of_a_bucket():
    code = """if True:
        import sys, tempfile
        from grpojax.host import claims, files
        with tempfile.TemporaryDirectory() as folder, claims.hold(folder):
            files.write_json(files.path(folder) / "a.json", 1)
        print(*(name for name in sys.modules if name.split(".")[0] in ("google", "gcsfs", "fsspec", "aiohttp")))"""
    root = Path(files.__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
