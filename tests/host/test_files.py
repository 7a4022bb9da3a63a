import json
import re

import pytest

from grpojax import data
from grpojax.data.readers import open_source
from grpojax.host import files, settings
from grpojax.host.errors import UserError


def test_places():
    pytest.importorskip("google.cloud.storage", reason="cloud clients are absent: pip install 'grpojax[test-all]'")
    assert str(files.path("gs://b/runs/a").parent) == "gs://b/runs" and str(files.path("runs/a")) == "runs/a"
    for other in ("s3://b/x", "file:///x", "http://b/x"):
        with pytest.raises(UserError, match="is not supported"):
            files.path(other)
    for other in ("gs:/b/x", "gs://", "gs:///x"):
        with pytest.raises(UserError, match="give gs://bucket/folder"):
            files.path(other)
    assert files.absolute("gs://b/x") == files.path("gs://b/x") and str(files.absolute("x")).startswith("/")
    assert str(files.local("a/b", "--to")) == "a/b"
    with pytest.raises(UserError, match="--to='gs://b/x': give a local path"):
        files.local("gs://b/x", "--to")


def test_the_home_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    files.write("~/a b=c.txt", b"x")
    assert (tmp_path / "a b=c.txt").read_bytes() == files.read("~/a b=c.txt") == b"x"
    assert files.local("~/a", "--to") == tmp_path / "a"
    said = {
        "$SCRATCH/run": "$SCRATCH",
        "/a/$x/b": "$x",
        "runs/${train.seed}": "${train.seed}",
        "runs/exp_$SEED": "$SEED",
    }
    for place, name in said.items():
        with pytest.raises(UserError, match=re.escape(f"{place}: variables such as {name} are not read here")):
            files.path(place)
    assert str(files.path("a$b/c")) == "a$b/c"


def test_what_a_bucket_needs_is_named(monkeypatch):
    files._know_buckets.cache_clear()
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"gs://b/x: a bucket needs gcsfs and google.*pip install 'grpojax\[gcs\]'"):
        files.path("gs://b/x")
    files.path("runs/x")


def test_folders(tmp_path):
    files.make_folder(tmp_path / "a/b")
    for name in ("2", "1"):
        files.write(tmp_path / "a/b" / name, name.encode())
    assert files.read_all(files.listing(tmp_path / "a/b")) == [b"1", b"2"] and files.listing(tmp_path / "none") == []
    files.make_folder(tmp_path / "c/d/old")
    files.move(tmp_path / "a/b", tmp_path / "c/d")
    assert [p.name for p in files.listing(tmp_path / "c/d")] == ["1", "2"] and files.listing(tmp_path / "a") == []
    files.remove_all([*files.listing(tmp_path / "c/d"), files.path(tmp_path / "none")])
    assert files.listing(tmp_path / "c/d") == []


def test_a_file_appears_whole(tmp_path):
    files.write_json(tmp_path / "a.json", {"a": "ü"})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "a": "\\u00fc"\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(("text", "shown"), [
    ("a\0b", r"'a\x00b' cannot be a path: embedded null byte"),
    ("\ud800", r"'\ud800' cannot be a path: surrogates not allowed"),
    ("x" * 5000, f"'{'x' * 37}...{'x' * 38}' cannot be a path: File name too long"),
])  # fmt: skip
def test_what_no_file_can_be_named_is_refused_wherever_a_path_is_given(text, shown, tmp_path):
    """Also as the base of a recipe, and as a source of problems."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"base: {json.dumps(text)}")
    with pytest.raises(UserError, match=" cannot be a path: ") as refused:
        settings.read(recipe)
    assert len(str(refused.value)) < 200
    for use in (files.path, data.locate, lambda x: list(open_source(data.SourceConfig(path=x)))):
        with pytest.raises(UserError) as refused:
            use(text)
        assert str(refused.value).removeprefix("data file ") == shown
