"""Whatever a file holds, nothing but a `UserError` comes out."""

import json

import pytest
from data_files import KINDS, jsonl, load
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from hypothesis import strategies as st

from grpojax import data
from grpojax.host.errors import UserError

NAMES = [
    "d.jsonl",
    "d.json",
    "d.csv",
    "d.tsv",
    "d.parquet",
    "d.txt",
    "d.jsonl.gz",
    "d.csv.zst",
    "d.json.xz",
    "d.bz2",
    "d",
]


ANSWERS = st.sampled_from(["####", "#### 1", "\\frac{"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), ANSWERS)


CELLS = st.recursive(
    SCALARS,
    lambda t: st.one_of(st.lists(t, max_size=2), st.dictionaries(st.text(max_size=3), t, max_size=2)),
    max_leaves=4,
)


COLUMNS = st.sampled_from(["question", "answer", "text", "tokens", "", "gold", "x"])


FUZZED = st.dictionaries(COLUMNS, CELLS, max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def check_load(path, **options):
    """It gives problems that can be batched, or one `UserError` of a line."""
    try:
        got = load(path, max_prompt_tokens=5, **options)
    except UserError as error:
        assert str(error) and len(str(error).splitlines()) == 1
    else:
        assert all(p.prompt.strip() and 0 < len(p.ids) <= 5 for p in got)
        data.to_prompts(got, 5)


OPTIONS = st.fixed_dictionaries({}, optional={
    "on_bad_row": st.sampled_from(["error", "skip"]), "answer": st.sampled_from([None, "answer", "x"]),
    "prompt": st.sampled_from(["question", "text", "x"]), "columns": st.sampled_from([None, {}, {"a": "x"}]),
    "too_long": st.sampled_from(["drop", "refuse"]),
})  # fmt: skip


QUICK = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@limits(max_examples=200, **QUICK)
@given(st.sampled_from(NAMES), st.binary(max_size=200), OPTIONS)
def test_fuzz_bytes(folder, name, content, options):
    (folder / name).write_bytes(content)
    check_load(str(folder / name), **options)


@limits(max_examples=150, **QUICK)
@given(st.sampled_from(sorted(KINDS)), st.data(), OPTIONS)
def test_fuzz_damaged_files(folder, name, draw, options):
    """A file of each kind with some bytes changed, or cut off."""
    content = bytearray(KINDS[name])
    for _ in range(draw.draw(st.integers(0, 3))):
        content[draw.draw(st.integers(0, len(content) - 1))] = draw.draw(st.integers(0, 255))
    (folder / name).write_bytes(content[: draw.draw(st.integers(0, len(content)))])
    check_load(str(folder / name), **options)


@limits(max_examples=200, **QUICK)
@given(st.sampled_from(["d.jsonl", "d.json"]), st.lists(FUZZED, max_size=3), OPTIONS)
@pytest.mark.slow
def test_fuzz_rows(folder, name, rows, options):
    text = jsonl(rows) if name == "d.jsonl" else json.dumps(rows)
    (folder / name).write_bytes(text.encode(errors="surrogatepass"))
    check_load(str(folder / name), **options)


@limits(max_examples=200, **QUICK)
@given(st.text(max_size=20), st.sampled_from(["", "builtin:", "~", "*", "memory://", "/"]))
def test_fuzz_paths(name, prefix):
    if "hub:" not in name and "://" not in name:
        check_load(prefix + name)
