"""Files by name, by glob and from afar, datasets of the hub, and names that no file can have."""

import gzip

import loopback_bucket
import pytest
from data_files import ROWS, jsonl, load, refusal

from grpojax.data import SourceConfig, locate
from grpojax.host.errors import UserError


def test_globs_go_by_name(write, tmp_path):
    for i in (2, 0, 1):
        write(f"part{i}.jsonl", jsonl([{"question": f"q{i}", "answer": i}]))
    got = load(str(tmp_path / "part*.jsonl"))
    assert [(p.prompt, p.gold, p.uid) for p in got] == [("q0", "0", 0), ("q1", "1", 1), ("q2", "2", 2)]
    assert "no data file matches" in refusal(str(tmp_path / "none*.jsonl"))
    assert "is a folder; give its files, such as" in refusal(str(tmp_path))
    (tmp_path / "a[1].jsonl").write_text(jsonl(ROWS))
    assert len(load(str(tmp_path / "a[1].jsonl"))) == 3


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    with loopback_bucket.serving(tmp_path_factory.mktemp("server") / "data") as server:
        yield server


def test_files_in_a_bucket(bucket):
    bucket.put("data/d.jsonl.gz", gzip.compress(jsonl(ROWS).encode()))
    bucket.put("data/e.jsonl", jsonl(ROWS[:1]).encode())
    assert len(load("gs://models/data/d.jsonl.gz")) == len(load("gs://models/data/*.gz")) == 3
    assert len(load("gs://models/data/*")) == 4
    bucket.faults[:] = [503]
    assert len(load("gs://models/data/e.jsonl")) == 1 and not bucket.faults
    assert "gs://models/data/f.jsonl does not exist" in refusal("gs://models/data/f.jsonl")
    assert "no data file matches" in refusal("gs://models/data/*.csv")
    bucket.faults[:] = [403] * 3
    assert "gs://models/data/e.jsonl cannot be read: " in refusal("gs://models/data/e.jsonl")
    del bucket.faults[:]


@pytest.mark.parametrize("scheme", ["memory", "s3", "nowhere", "http"])
def test_other_places_are_refused(scheme):
    assert f"{scheme}:// is not read or written here" in refusal(f"{scheme}://bucket/d.jsonl")


def test_models_of_the_hub_are_taken_from_its_cache(tmp_path, monkeypatch):
    import huggingface_hub

    snapshot = tmp_path / "models--me--small/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--me--small/refs").mkdir()
    (tmp_path / "models--me--small/refs/main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub._snapshot_download.constants, "HF_HUB_CACHE", str(tmp_path))
    assert str(locate("hub:me/small")) == str(snapshot)
    with pytest.raises(UserError, match="hub:me/other: the hub's cache does not have it; hf download me/other"):
        locate("hub:me/other")


def test_a_missing_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert refusal("gs://bucket/d.jsonl").endswith("pip install 'grpojax[gcs]'")


def test_hub_datasets(write, tmp_path):
    write("train.jsonl", jsonl(ROWS))
    got = load(SourceConfig(path=f"hub:{tmp_path}", split="train"))
    assert [p.prompt for p in got] == [r["question"] for r in ROWS]
    message = refusal(SourceConfig(path=f"hub:{tmp_path}", split="test"))
    assert message.startswith(f"hub:{tmp_path}: cannot be loaded:") and "test" in message
    assert "write hub:openai/gsm8k" in refusal("openai/gsm8k")


def test_names_that_no_file_can_have():
    for name in ("a\0b", "~nobody-of-that-name/d.jsonl", "x" * 5000, "[", " "):
        assert "data file" in refusal(name)
