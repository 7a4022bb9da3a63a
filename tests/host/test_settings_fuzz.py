"""Whatever is set gives a config or one readable error."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from settings_examples import MODEL, RUN, Config, Linear, Model, Reward, Train

from grpojax.host import settings
from grpojax.host.errors import UserError

NAMES = sorted({f.name for c in (Config, Model, Train, Reward, Linear) for f in dataclasses.fields(c)})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["adam", "1e-5", "a"]),
)
KEYS = st.one_of(st.sampled_from(NAMES), st.text(max_size=3), st.integers(0, 3))
TREES = st.recursive(
    SCALARS, lambda t: st.one_of(st.lists(t, max_size=3), st.dictionaries(KEYS, t, max_size=4)), max_leaves=12
)
SECTIONS = {
    "train": st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(Train)]), SCALARS, max_size=3),
    "rewards": st.lists(st.fixed_dictionaries({"name": st.text()}, optional={"weight": SCALARS}), max_size=3),
    "judges": TREES,
    "options": st.dictionaries(st.text(max_size=3), TREES, max_size=2),
}
PROPER = st.fixed_dictionaries({"model": st.just(MODEL)}, optional=SECTIONS)


def check_attempt(attempt):
    """It gives a Config that survives `to_dict` and `build`, or one `UserError` of a line."""
    try:
        got = attempt()
    except UserError as error:
        assert str(error) and len(str(error).splitlines()) == 1
    else:
        assert settings.build(Config, json.loads(json.dumps(settings.to_dict(got)))) == got


@limits(max_examples=200)
@given(st.one_of(PROPER, st.dictionaries(KEYS, TREES, max_size=4)))
@pytest.mark.slow
def test_fuzz_mappings(tree):
    check_attempt(lambda: settings.build(Config, tree, {"": "here"}))


@pytest.fixture(scope="module")
def run_yaml(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "run.yaml"
    path.write_text(RUN)
    return path


PATHS = st.lists(st.one_of(st.sampled_from(NAMES), st.sampled_from(["0", "1", "-1"]), st.text(max_size=2)), max_size=4)
VALUES = st.one_of(st.text(max_size=12), TREES.map(str), st.text(alphabet="[]{}:,!&*|>'\"-?#%@ \n01ea", max_size=12))
OVERRIDES = st.one_of(st.text(max_size=20), st.builds(lambda path, value: f"{'.'.join(path)}={value}", PATHS, VALUES))


@limits(max_examples=200)
@given(st.lists(OVERRIDES, max_size=3))
def test_fuzz_overrides(run_yaml, overrides):
    check_attempt(lambda: settings.load(Config, run_yaml, overrides))
