import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from settings_examples import MODEL, RUN, Config, Linear, Model, Rare, Reward, Train

from grpojax.host import settings
from grpojax.host.errors import UserError


def build(**sections):
    return settings.build(Config, {"model": MODEL, **sections})


def train(**values):
    return build(train=values).train


def refusal(**sections):
    with pytest.raises(UserError) as error:
        build(**sections)
    return str(error.value)


def refused(**values):
    return refusal(train=values)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_load_reads_every_kind_of_field(write):
    got = settings.load(Config, str(write(RUN)))
    rewards = (Reward(name="math"), Reward(name="format", weight=0.5))
    assert got == Config(model=Model(path="Qwen/Qwen3-0.6B"), train=Train(steps=5, lr=1e-5), rewards=rewards)
    assert isinstance(got.train.lr, float)


def test_overrides(write):
    overrides = [
        "train.lr=2e-6",
        "train.clip=null",
        "train.schedule.end=0",
        "rewards.1.weight=2",
        "judges.strict={name: j, weight: 3}",
        "stops=[a, b]",
        "model.revision=a=b",
        " train.steps = 6",
        "train.steps=7",
    ]
    got = settings.load(Config, write(RUN), overrides)
    assert got.train == Train(steps=7, lr=2e-6, schedule=Linear(end=0.0))
    assert [r.weight for r in got.rewards] == [1.0, 2.0]
    assert got.judges == {"strict": Reward(name="j", weight=3.0)}
    assert (got.stops, got.model.revision) == (["a", "b"], "a=b")


def test_an_override_reaches_one_use_of_a_yaml_alias(write):
    path = write("model: {path: m}\nrewards: [&r {name: a}, *r]")
    got = settings.load(Config, path, ["rewards.0.weight=2"])
    assert [r.weight for r in got.rewards] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("1.5e3", 1500.0), (".5e1", 5.0), ("1_0", 10), ("010", 10), ("-010", -10), ("0x1f", 31),
     ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("1.2e3.4e5", "1.2e3.4e5"), ("1e", "1e"), ("1.2.3e4", "1.2.3e4"),
     ("1.e2", 100.0), ("2026-11-29", "2026-11-29"), ("2026-11-29 10:00:00", "2026-11-29 10:00:00")],
)  # fmt: skip
def test_numbers_are_those_of_yaml_1_2_and_dates_are_texts(text, value):
    got = settings.override({}, [f"x={text}"])[0]["x"]
    assert got == value and type(got) is type(value)


def test_an_override_is_not_cut_at_a_number_sign():
    for text in ("Think, then answer after ####", "####", "run #1/x.jsonl"):
        with pytest.raises(UserError, match="'#.*' would be a comment; .* needs quotes: x='\"...\"'"):
            settings.override({}, [f"x={text}"])
        assert settings.override({}, [f'x="{text}"'])[0] == {"x": text}
    assert settings.override({}, ["x=a#b"])[0] == {"x": "a#b"}


def test_a_mapping_of_an_override_is_merged_as_a_files_is(caplog):
    tree = {"train": {"steps": 2, "lr": 1.0}, "data": [{"name": "a", "options": {"k": 1, "n": 2}}], "variant": "grpo"}
    texts = ["train.steps=3", "train={lr: 2.0}", "data.0={options: {k: 3}}", "variant={name: dapo}"]
    got, origins = settings.override(tree, texts)
    assert got == {
        "train": {"steps": 3, "lr": 2.0},
        "data": [{"name": "a", "options": {"k": 3, "n": 2}}],
        "variant": {"name": "dapo"},
    }
    assert sorted(origins) == ["data.0.options.k", "train.lr", "train.steps", "variant"] and not caplog.text
    assert settings.override(got, ["variant={name: gspo, k: 1}"])[0]["variant"] == {"name": "gspo", "k": 1}
    assert settings.override(got, ["data.0={name: b}"])[0]["data"] == [{"name": "b"}]
    assert settings.override(got, ["data.0.options={}"])[0]["data"] == [{"name": "a", "options": {}}]


def test_an_override_that_erases_one_before_it_is_said(caplog):
    tree, origins = settings.override({"variant": "grpo"}, ["variant.kl_coef=0.1", "variant=dapo"])
    assert tree == {"variant": "dapo"} and origins == {"variant": "the command line"}
    assert "'variant=dapo' replaces all of variant, and so variant.kl_coef, which an override before it" in caplog.text
    caplog.clear()
    both, _ = settings.override({"variant": "grpo"}, ["variant=dapo", "variant.kl_coef=0.1", "variant.kl_coef=0.2"])
    assert both == {"variant": {"name": "dapo", "kl_coef": 0.2}} and not caplog.text


def test_a_key_beside_the_items_of_a_list_makes_them_its_terms():
    tree = {"rewards": [{"name": "a"}, {"name": "b"}]}
    got, _ = settings.override(tree, ["rewards.1.weight=2", "rewards.timeout_s=30", "rewards.0.weight=3"])
    assert got == {"rewards": {"terms": [{"name": "a", "weight": 3}, {"name": "b", "weight": 2}], "timeout_s": 30}}


@pytest.mark.parametrize("value", ["2026", "12e4", "true"])
def test_where_a_text_reads_as_something_else_the_message_says_how_to_quote_it(write, value):
    with pytest.raises(UserError, match="^model.path=.* in quotes it is one: ") as refused:
        settings.load(Config, write(RUN), [f"model.path={value}"])
    as_the_shell_gives_it = str(refused.value).rpartition(": ")[2].replace("...", value).replace("'", "")
    assert settings.load(Config, write(RUN), [as_the_shell_gives_it]).model.path == value
    with pytest.raises(UserError, match='in quotes it is one: path: "..."$'):
        settings.load(Config, write(f"model: {{path: {value}}}"))
    with pytest.raises(UserError, match="in quotes it is one$"):
        settings.load(Config, write(RUN), [f"stops=[{value}]"])


def test_none_is_written_null(write):
    with pytest.raises(UserError, match="model.revision='None' .*: write null"):
        settings.load(Config, write(RUN), ["model.revision=None"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps", "override 'train.steps': expected key=value"),
        ("=3", "override '=3': expected key=value"),
        ("train..steps=3", "override 'train..steps=3': expected key=value"),
        ("train.steps=[1", "override 'train.steps=[1', line 1: invalid YAML"),
        ("train.lr=!!timestamp 2024-13-41", "invalid YAML: month must be in 1..12"),
        ("train.lr=!!bool maybe", "invalid YAML: 'maybe'"),
        ("a\rb='", "needs quotes: a b='\"...\"'"),
        ("train.lr=" + "[" * 9999, "invalid YAML: maximum recursion depth"),
        ("rewards.2.weight=1", "no index '2' in a list of 2"),
        ("rewards.-1.weight=1", "no index '-1' in a list of 2"),
        ("train.steps.x=1", "no key 'x' in 5"),
        ("train.lr=0x" + "f" * 9999, "train.lr=... (from the command line): expected a finite number"),
    ],
)
@pytest.mark.slow
def test_refused_overrides(write, override, said):
    with pytest.raises(UserError) as error:
        settings.load(Config, write(RUN), [override])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": expected a mapping at the top level, got None"),
        ("- 1", ": expected a mapping at the top level, got [1]"),
        ("a: 1\nb: [2", ", line 2: invalid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\na b\n", ", line 3: invalid YAML: could not find expected ':'"),
        ("a: 1\nb: {c: 1, c: 2}", ", line 2: invalid YAML: key 'c' occurs twice"),
        (
            'a: "\\sqrt{2}"',
            ", line 1: invalid YAML: found unknown escape character 's'; a text with a backslash goes into",
        ),
        ("a: \x01", ": invalid YAML: unacceptable character #x0001"),
        ("model: !!python/name:os.system", ", line 1: invalid YAML: could not determine a constructor"),
    ],
)
def test_refused_files(write, text, said):
    path = write(text)
    with pytest.raises(UserError) as error:
        settings.load(Config, path)
    assert str(error.value).startswith(f"{path}{said}")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="none.yaml: No such file or directory"):
        settings.load(Config, tmp_path / "none.yaml")
    with pytest.raises(UserError, match=": Is a directory"):
        settings.load(Config, tmp_path)
    (tmp_path / "bin.yaml").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(UserError, match="bin.yaml: not a UTF-8 text file"):
        settings.load(Config, tmp_path / "bin.yaml")


def test_an_error_names_where_the_value_came_from(write):
    path = write("model: {path: m}\ntrain: {steps: abc, lr: def}")
    with pytest.raises(UserError) as error:
        settings.load(Config, path)
    assert str(error.value) == f"train.steps='abc' (from {path}): expected an integer (and 1 more)"
    with pytest.raises(UserError) as error:
        settings.load(Config, path, ["train.steps=0x"])
    assert str(error.value) == "train.steps='0x' (from the command line): expected an integer (and 1 more)"
    with pytest.raises(UserError) as error:
        settings.load(Config, path, ["train.steps = x"])
    assert str(error.value).startswith("train.steps='x' (from the command line): expected an integer")
    with pytest.raises(UserError) as error:
        settings.load(Config, path, ["train={steps: x, lr: 1.0}"])
    assert str(error.value) == "train.steps='x' (from the command line): expected an integer"


@pytest.fixture
def files(tmp_path):
    """Writes files by their name, ``a__b`` in the folder a; returns the path of the last."""

    def files(**texts):
        for name, text in texts.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return path

    return files


def test_a_file_changes_its_base_key_by_key(files):
    base = "model: {path: m, revision: r}\ntrain: {steps: 5, lr: 1e-5}\nrewards: [{name: a}, {name: b}]\nmix: {x: 1}\n"
    one = "base: ../base\ntrain: {lr: 2e-5}\nmix: {y: 2}\n"
    two = "base: one\ntrain: {clip: 0.5}\nrewards: [{name: c}]\nmodel: {revision: null}\n"
    path = files(base=base, deep__one=one, deep__two=two)
    got = settings.load(Config, path, ["train.steps=6"])
    assert got == Config(model=Model(path="m"), train=Train(steps=6, lr=2e-5, clip=0.5), rewards=(Reward(name="c"),),
                         mix={"x": 1.0, "y": 2.0})  # fmt: skip
    assert "base" not in settings.to_dict(got)


@pytest.mark.parametrize(
    ("under", "over", "want"),
    [
        ("constant", "{end: 1.0, steps: 4}", Linear(end=1.0, steps=4)),
        ("{end: 1.0, steps: 4}", "constant", "constant"),
        ("{end: 1.0, steps: 4}", "{end: 2.0}", Linear(end=2.0, steps=4)),
    ],
)
def test_a_name_and_a_mapping_replace_each_other(files, under, over, want):
    base = f"model: {{path: m}}\ntrain: {{schedule: {under}}}"
    path = files(base=base, top=f"base: base\ntrain: {{schedule: {over}}}")
    assert settings.load(Config, path).train.schedule == want


def test_a_mapping_of_another_name_leaves_nothing_of_the_old_one(files):
    base = "model: {path: m}\noptions: {method: {name: a, limit: 3}}"
    renamed = files(base=base, top="base: base\noptions: {method: {name: b}}")
    assert settings.load(Config, renamed).options == {"method": {"name": "b"}}
    named = files(low="options: {method: {limit: 3}}\nmodel: {path: m}", top="base: low\noptions: {method: {name: b}}")
    assert settings.load(Config, named).options == {"method": {"limit": 3, "name": "b"}}  # the base named none
    same = files(top="base: base\noptions: {method: {name: a, depth: 1}}")
    assert settings.load(Config, same).options == {"method": {"name": "a", "limit": 3, "depth": 1}}
    unnamed = files(top="base: base\noptions: {method: {depth: 1}}")
    assert settings.load(Config, unnamed).options == {"method": {"name": "a", "limit": 3, "depth": 1}}
    assert settings.load(Config, unnamed, ["options.method={name: c}"]).options == {"method": {"name": "c"}}


def test_a_source_of_another_path_leaves_nothing_of_the_old_one_but_a_section_does(files):
    base = "model: {path: m, revision: r}\noptions: {train: {path: a, answer: x}}"
    other = files(base=base, top="base: base\noptions: {train: {path: b}}\nmodel: {path: n}")
    assert settings.load(Config, other).options == {"train": {"path": "b"}}
    assert settings.load(Config, other).model == Model(path="n", revision="r")
    same = files(top="base: base\noptions: {train: {path: a, limit: 3}}")
    assert settings.load(Config, same).options == {"train": {"path": "a", "answer": "x", "limit": 3}}
    assert settings.load(Config, files(top="base: base\noptions: {train: null}")).options == {"train": None}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"top": "base: none"}, "{0}/top: base: {0}/none: No such file or directory"),
        ({"top": "base: ."}, "{0}/top: base: {0}: Is a directory"),
        ({"top": "base: 3"}, "{0}/top: base=3: expected the path of a file, from this one's folder"),
        ({"top": "base:"}, "{0}/top: base=None: expected the path"),
        ({"top": "base: top"}, "{0}/top: base: a recipe cannot be its own base: {0}/top -> {0}/top"),
        ({"low": "base: top", "top": "base: low"}, "{0}/top: base: a recipe cannot be its own base: "),
        ({"d__low": "base: ../top", "top": "base: d/low"}, "{0}/d/../top: base: a recipe cannot be its own base"),
        ({"low": "- 1", "top": "base: low"}, "{0}/low: expected a mapping at the top level"),
        ({"low": "a: [", "top": "base: low"}, "{0}/low, line 1: invalid YAML"),
        ({"low": "model: {path: m}\ntrain: {lr: x}", "top": "base: low\ntrain: {steps: 3}"},
         "train.lr='x' (from {0}/low): expected a number"),
        ({"low": "model: {path: m}\ntrain: {lr: 1}", "top": "base: low\ntrain: {steps: x}"},
         "train.steps='x' (from {0}/top): expected an integer"),
        ({"low": "model: {path: m}\ntrain: {stepz: 1}", "top": "base: low\ntrain: {steps: 3}"},
         "train.stepz (from {0}/low): unknown key; did you mean 'steps'?"),
        ({"low": "model: {path: m}", "mid": "base: low\nrewards: [{name: 3}]",
          "top": "base: mid\nrewards: [{name: a, weight: x}]"}, "rewards.0.weight='x' (from {0}/top)"),
        ({"low": "model: {path: m}\njudges: {a: {name: x}}", "mid": "base: low\njudges: {a: {weight: 2}}",
          "top": "base: mid\njudges: {a: {name: y, weight: x}}"}, "judges.a.weight='x' (from {0}/top)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_base_names_the_file(files, tmp_path, texts, said):
    with pytest.raises(UserError) as error:
        settings.load(Config, files(**texts))
    assert str(error.value).startswith(said.format(tmp_path))


def test_the_command_line_is_named_where_it_replaced_what_a_file_said(files):
    path = files(low="model: {path: m}\njudges: {a: {name: x}}", top="base: low\njudges: {a: {weight: 2}}")
    with pytest.raises(UserError, match=r"^judges.a.weight='x' \(from the command line\): expected a number$"):
        settings.load(Config, path, ["judges={a: {name: y, weight: x}}"])


def test_unknown_keys_come_first_and_are_corrected():
    assert refused(stepz=1, lr="x") == "train.stepz: unknown key; did you mean 'steps'? (and 1 more)"
    assert refusal(model={"pth": "m"}) == "model.pth: unknown key; did you mean 'path'? (and 1 more)"
    assert refusal(rewards=[{"top": 1}]).startswith("rewards.0.top: unknown key; known keys: name, weight (and 1")
    assert refused(**{"a\nb": 1}).startswith("train.a b: unknown key; known keys: steps, lr, ")
    assert settings.build(Reward, {"name": "a"}) == Reward(name="a")
    with pytest.raises(UserError, match="^3: unknown key; known keys: name, weight"):
        settings.build(Reward, {3: 4})


def test_a_key_of_another_section_is_named():
    """Those nearest to the top; no key of a list or a mapping of sections."""
    assert refusal(lr=1) == "lr: unknown key; did you mean 'train.lr'?"
    assert refusal(path="m") == "path: unknown key; did you mean 'model.path'?"
    assert refused(path="m") == "train.path: unknown key; did you mean 'model.path'?"
    assert refused(end=1.0) == "train.end: unknown key; did you mean 'train.schedule.end' or 'train.seed.end'?"
    assert refusal(weight=1.0).startswith("weight: unknown key; did you mean 'train.seed.weight'?")


def test_rarer_types():
    def refusal(values):
        with pytest.raises(UserError) as error:
            settings.build(Rare, values)
        return str(error.value)

    assert settings.build(Rare, {"panel": ({"name": "a"},), "size": "auto"}).panel == (Reward(name="a"),)
    assert refusal({"size": True}) == "size=True: expected a number"
    assert refusal({"size": "aut"}) == "size='aut': expected 1, 2 or 'auto'; did you mean 'auto'?"
    assert refusal({"panel": [{"name": "a", "x": 1}]}).endswith(": Unexpected keyword argument")
    assert refusal({"derived": 1}) == "derived: unknown key; known keys: size, panel"
    assert refusal({16**5000: 1}) == "...: unknown key; known keys: size, panel"
    assert refusal([1]) == "[1]: expected a mapping"


def test_missing_keys():
    with pytest.raises(UserError, match="^model is required$"):
        settings.build(Config, {})
    assert refusal(model={}) == "model.path is required"
    assert refusal(rewards=[{"name": "a"}, {}]) == "rewards.1.name is required"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": 0}, "train: steps=0: must be at least 1"),
        ({"steps": 1.5}, "steps=1.5: expected an integer"),
        ({"steps": True}, "steps=True: expected an integer"),
        ({"steps": None}, "steps=None: expected an integer"),
        ({"steps": [1]}, "steps=[1]: expected an integer"),
        ({"lr": True}, "lr=True: expected a number"),
        ({"lr": "fast"}, "lr='fast': expected a number"),
        ({"lr": float("nan")}, "lr=nan: expected a finite number"),
        ({"lr": "-inf"}, "lr='-inf': expected a finite number"),
        ({"lr": 10**400}, "expected a finite number"),
        ({"steps": 16**5000}, "steps=...: expected a finite number"),
        ({"clip": 1.5}, "train: clip=1.5: must be over 0 and at most 1"),
        ({"clip": 0}, "train: clip=0.0: must be over 0 and at most 1"),
        ({"resume": "yes"}, "resume='yes': expected true or false"),
        ({"resume": 1}, "resume=1: expected true or false"),
        ({"optimizer": "adm"}, "optimizer='adm': expected 'adam' or 'sgd'; did you mean 'adam'?"),
        ({"optimizer": True}, "optimizer=True: expected 'adam' or 'sgd'"),
        ({"schedule": 3}, "schedule=3: expected a string or a mapping"),
        ({"schedule": {"end": "x"}}, "schedule.end='x': expected a number"),
        ({"schedule": {"start": 1}}, "schedule.start: unknown key; known keys: end, steps (and 1 more)"),
        ({"seed": "x"}, "seed='x': expected an integer or a mapping"),
        ({"seed": {"end": 1, "steps": "x"}}, "seed.steps='x': expected an integer"),
        ({"betas": [1]}, "betas=[1]: expected a list of 2"),
        ({"betas": [1, "x"]}, "betas.1='x': expected a number"),
        ({"group": 3}, "train: group=3: an even number, please"),
    ],
)
def test_refused_values(values, said):
    message = refused(**values)
    assert message.startswith("train") and message.endswith(said)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"path": 3}}, "model.path=3: expected a string"),
        ({"model": {"path": "m", "revision": 3}}, "model.revision=3: expected a string"),
        ({"model": {"path": "m", "dtype": "float16"}}, "'bfloat16'; did you mean 'bfloat16'?"),
        ({"train": None}, "train=None: expected a mapping"),
        ({"rewards": {"name": "a"}}, "rewards={'name': 'a'}: expected a list"),
        ({"rewards": ["a"]}, "rewards.0='a': expected a mapping"),
        ({"rewards": [{"name": "a"}, {"name": True}]}, "rewards.1.name=True: expected a string"),
        ({"extra_rewards": [{"name": "a"}, 3, 4]}, "extra_rewards.1=3: expected a mapping (and 1 more)"),
        ({"stops": "abc"}, "stops='abc': expected a list"),
        ({"mix": {"a": "x"}}, "mix.a='x': expected a number"),
        ({"mix": {3: 1}}, "mix.<key>=3: expected a string"),
        ({"judges": {"a": {}}}, "judges.a.name is required"),
        ({"judges": 3}, "judges=3: expected None or a mapping"),
        ({"options": {"a": [{"b": float("inf")}]}}, "options.a.0.b=inf: expected a finite number"),
        ({"options": {"a": {1: 2}}}, "options.a.<key>=1: expected a string"),
        ({"stops": ["x" * 9999, 1], "mix": "y" * 9999}, "stops.1=1: expected a string (and 1 more)"),
    ],
)
def test_refused_sections(sections, said):
    assert refusal(**sections).endswith(said)


def test_a_long_value_is_cut():
    assert len(refused(lr="x" * 9999)) < 150


def test_accepted_values():
    assert train(steps="7", lr=2, clip=1, betas=[0, "1e-1"], seed={"end": 1}) == Train(
        steps=7, lr=2.0, clip=1.0, betas=(0.0, 0.1), seed=Linear(end=1.0)
    )
    assert train(steps=1e3).steps == 1000 and isinstance(train(steps=1e3).steps, int)
    assert train(resume=True).resume is True
    assert train(clip=None).clip is None
    assert train(seed={"name": "r"}).seed == Reward(name="r")
    assert build(judges=None).judges is None
    assert build(options={"a": [1, {"b": None}, "1e-5", True]}).options == {"a": [1, {"b": None}, "1e-5", True]}
    assert build(rewards=({"name": "a"},)).rewards == (Reward(name="a"),)
    assert build(rewards=[]).rewards == ()


def test_post_init_errors_name_the_section():
    assert refused(steps=13) == "train: steps 13 brings bad luck\nuse 12"
    assert refusal(model={"path": "a", "revision": "a"}) == "path and revision are the same"


def test_a_range_in_a_type_is_refused():
    """There is one way to say it."""
    ranged = dataclasses.make_dataclass("Ranged", [("steps", Annotated[int, "at least 1"])], frozen=True)
    with pytest.raises(TypeError, match="belongs into __post_init__"):
        settings.build(ranged, {"steps": 3})


def test_to_dict_is_json_and_builds_the_same_config():
    got = build(
        train={"schedule": {"end": 0}},
        rewards=[{"name": "a"}],
        judges={"j": {"name": "b"}},
        options={"a": [1]},
    )
    plain = settings.to_dict(got)
    assert plain["train"]["betas"] == [0.9, 0.99] and plain["rewards"] == [{"name": "a", "weight": 1.0}]
    assert json.loads(json.dumps(plain)) == plain
    assert settings.build(Config, plain) == got


def test_diff():
    a = {"train": {"steps": 10, "lr": 1.0, "resume": True, "to": "b"}, "rewards": [{"w": 1}], "old": None}
    b = {"train": {"steps": 20, "lr": 1, "resume": 1, "to": "c"}, "rewards": [{"w": 2}, {}], "new": {"x": 1}}
    assert settings.diff(a, b) == [
        "new: (absent) -> {'x': 1}",
        "old: None -> (absent)",
        "rewards.0.w: 1 -> 2",
        "rewards.1: (absent) -> {}",
        "train.resume: True -> 1",
        "train.steps: 10 -> 20",
        "train.to: 'b' -> 'c'",
    ]
    assert settings.diff(a, a) == []


def test_the_import_is_light():
    code = "import sys, grpojax.host.settings; assert not {'jax', 'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
