"""Files by name, by glob and from afar, datasets of the hub, and names that no file can have."""

import gzip

from data_files import ROWS, jsonl, load, refusal

from grpojax.data import SourceConfig


def test_globs_go_by_name(write, tmp_path):
    for i in (2, 0, 1):
        write(f"part{i}.jsonl", jsonl([{"question": f"q{i}", "answer": i}]))
    got = load(str(tmp_path / "part*.jsonl"))
    assert [(p.prompt, p.gold, p.uid) for p in got] == [("q0", "0", 0), ("q1", "1", 1), ("q2", "2", 2)]
    assert "no data file matches" in refusal(str(tmp_path / "none*.jsonl"))
    assert "is a folder; give its files, such as" in refusal(str(tmp_path))
    (tmp_path / "a[1].jsonl").write_text(jsonl(ROWS))
    assert len(load(str(tmp_path / "a[1].jsonl"))) == 3


def test_remote_files():
    import fsspec

    with fsspec.open("memory://bucket/d.jsonl.gz", "wb") as f:
        f.write(gzip.compress(jsonl(ROWS).encode()))
    assert len(load("memory://bucket/d.jsonl.gz")) == len(load("memory://bucket/*.gz")) == 3
    assert "'memory://bucket/e.jsonl' does not exist" in refusal("memory://bucket/e.jsonl")
    assert "no data file matches" in refusal("memory://bucket/*.csv")
    assert "cannot be read: ValueError: Protocol not known" in refusal("nowhere://bucket/d.jsonl")


def test_a_missing_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert refusal("gs://bucket/d.jsonl").endswith("reading gs:// needs more: pip install 'grpojax[gcs]'")


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
