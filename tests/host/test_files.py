import doctest

import pytest

from grpojax.host import files
from grpojax.host.errors import UserError


def test_places():
    assert str(files.path("gs://b/runs/a").parent) == "gs://b/runs" and str(files.path("runs/a")) == "runs/a"
    for other in ("s3://b/x", "file:///x", "http://b/x"):
        with pytest.raises(UserError, match="not read or written here"):
            files.path(other)


def test_a_file_appears_whole(tmp_path):
    files.write_json(tmp_path / "a.json", {"a": "ü"})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "a": "\\u00fc"\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_examples():
    assert doctest.testmod(files).failed == 0
