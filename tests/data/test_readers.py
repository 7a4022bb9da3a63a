"""Files by name, by glob and from afar, datasets of the hub, and names that no file can have."""

import gzip
import re
import sys

import bucket
import pytest
from data_files import ROWS, jsonl, load, read_rows, refusal

from grpojax.data import SourceConfig, locate
from grpojax.host import files
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


@pytest.mark.slow
def test_files_in_a_bucket(tmp_path):
    folder = f"{bucket.URL}/data"
    with bucket.clients(tmp_path) as proxy:
        files.write(f"{folder}/d.jsonl.gz", gzip.compress(jsonl(ROWS).encode()))
        files.write(f"{folder}/e.jsonl", jsonl(ROWS[:1]).encode())
        assert len(load(f"{folder}/d.jsonl.gz")) == len(load(f"{folder}/*.gz")) == 3
        assert len(load(f"{folder}/*")) == 4
        proxy.faults = iter([503])
        assert len(load(f"{folder}/e.jsonl")) == 1 and proxy.met == 1
        assert f"{folder}/f.jsonl does not exist" in refusal(f"{folder}/f.jsonl")
        assert f"no data file matches '{folder}/*.csv'" in refusal(f"{folder}/*.csv")
        proxy.always = 403
        assert f"{folder}/e.jsonl cannot be read: " in refusal(f"{folder}/e.jsonl")


@pytest.mark.parametrize("scheme", ["memory", "s3", "nowhere", "http"])
def test_other_places_are_refused(scheme):
    assert f"{scheme}:// is not supported" in refusal(f"{scheme}://bucket/d.jsonl")


def test_models_of_the_hub_are_taken_from_its_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants  # loaded by name: the package loads it only when something else does

    snapshot = tmp_path / "models--me--small/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--me--small/refs").mkdir()
    (tmp_path / "models--me--small/refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert str(locate("hub:me/small")) == str(snapshot)
    with pytest.raises(UserError, match="hub:me/other: the hub's cache does not have it; hf download me/other"):
        locate("hub:me/other")
    with pytest.raises(UserError, match="hub:./models/small: './models/small' is no name of a model"):
        locate("hub:./models/small")


def test_a_missing_extra_is_named(monkeypatch):
    """Also where nothing of it is there, as without the extra."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "grpojax.host.buckets", raising=False)
    monkeypatch.delattr("grpojax.host.buckets", raising=False)
    files._know_buckets.cache_clear()
    assert re.search(
        r"d.jsonl: a bucket needs (gcsfs|google).*: pip install 'grpojax\[gcs\]'$", refusal("gs://bucket/d.jsonl")
    )


def test_hub_datasets(write, tmp_path):
    write("train.jsonl", jsonl(ROWS))
    got = load(SourceConfig(path=f"hub:{tmp_path}", split="train"))
    assert [p.prompt for p in got] == [r["question"] for r in ROWS]
    message = refusal(SourceConfig(path=f"hub:{tmp_path}", split="test"))
    assert message.startswith(f"hub:{tmp_path}: cannot be loaded:") and "test" in message
    assert "write hub:openai/gsm8k" in refusal("openai/gsm8k")


def test_folders_that_datasets_saved_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"question": "a", "answer": 0.1}, {"question": "b", "answer": 2.5}]
    columns = datasets.Features(question=datasets.Value("string"), answer=datasets.Value("float32"))
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows, columns)).save_to_disk(tmp_path / "saved")
    assert read_rows(str(tmp_path / "saved/train")) == rows
    said = refusal(str(tmp_path / "saved"))
    assert f"is a datasets.DatasetDict; give one of its splits: {tmp_path}/saved/train" in said
    (tmp_path / "saved/train/dataset_info.json").unlink()
    assert "train has a state.json, and is no whole folder of save_to_disk" in refusal(str(tmp_path / "saved/train"))


def test_names_that_no_file_can_have():
    for name in ("a\0b", "~nobody-of-that-name/d.jsonl", "x" * 5000, "[", " "):
        assert "data file" in refusal(name)
