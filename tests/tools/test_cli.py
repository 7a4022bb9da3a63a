"""Recipes parse, mistakes exit with status 2 in two lines, and help is quick."""

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import yaml
from hypothesis import given

from grpojax import data, rewards
from grpojax.advantages import Signals
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig
from grpojax.models.flops import forward_flops
from grpojax.run import recipe as config
from grpojax.tools import cli

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_parses_and_says_how_to_run_it(path):
    recipe = config.load(path)
    assert recipe.make_variant().name == "grpo"
    head = path.read_text().split("\n\n")[0]
    assert "grpojax " in head and path.name in head


@pytest.mark.parametrize(("override", "message"), [
    ("train.stepz=3", "train.stepz: unknown key; did you mean 'steps'"),
    ("train.steps=many", "train.steps='many' (from the command line): expected an integer"),
    ("train.steps=0", "steps=0: must be at least 1"),
    ("rollout.temperature=0", "temperature=0.0: greedy"),
    ("rollout.top_p=0.9", "top_k, top_p and min_p cut off tokens"),
    ("rollout.slots=99", "slots=99: must be between 0 (all) and group"),
    ("variant=grop", "'grop' is unknown; did you mean 'grpo'"),
    ("variant.clip_hihg=0.3", "variant.clip_hihg: unknown key; did you mean 'clip_high'"),
    ("variant={name: grpo, kl_coef: 0.1, kl_kind: k1}", "its expected gradient is 0"),
    ("variant={name: grpo, kl_coef: 0.1, kl_in: reward}", "only k1 belongs there"),
    ("variant={name: grpo, kl_in: rewards}", "did you mean 'reward'"),
    ("variant={name: grpo, kl_coef: 0.1, kl_kind: k1, kl_in: token_reward}", "has no token rewards"),
    ("variant={name: pass_at_k, k: 99}", "k=99): more than the group's 8 samples"),
    ("variant=llds", "raise train.iterations or train.minibatches"),
    ("variant={name: dapo, overlong_limit: 4000, overlong_buffer: 9}", "never reached: samples end at rollout.max_tokens=40"),
    ("variant={name: dapo, overlong_limit: 40}", "both or none"),
    ("filter={success: 0.5}", "filter.success=0.5: this variant has no filter of its own"),
    ("filter=some", "expected 'auto' or 'none'"),
    ("train.seed=2147483648", "seed=2147483648: must be under 2^31"),
    ('rewards=[{name: "m:f", options: {day: 2024-01-01}}]', "options must be plain numbers, texts, lists"),
    ("rewards=[{name: answer, weight: 0}]", "every weight is 0"),
    ("rewards={terms: [{name: answer}], memory_mb: 10000000000000}", "memory_mb=10000000000000"),
    ("data.eval=''", "eval: the name of a source is empty"),
    ("model.attention=flash", "model.attention='flash'"),
    ("model.attention=cudnn", "needs dtype: bfloat16"),
    ("rewards=[{name: anser}]", "reward 'anser' is unknown"),
    ("rewards=[]", "rewards: at least one"),
    ("rewards={terms: []}", "rewards: at least one"),
    ("rewards={terms: [{name: answer}], combine: normalise}", "did you mean 'normalize'"),
    ("rewards={terms: [{name: answer}], timeout_s: 0}", "timeout_s=0.0: must be over 0"),
    ("rewards={terms: [{name: answer}], timeout_s: soon}", "rewards.timeout_s='soon' (from the command line): expected a number"),
    ("rewards={terms: [{name: answer}], memory_mb: 5}", "memory_mb=5: must be 0 (no limit), or between 64 and"),
    ("rewards={terms: [{name: answer}], memory_mb: 1.5}", "rewards.memory_mb=1.5 (from the command line): expected an integer"),
    ("rewards={terms: [{name: answer}], workers: -1}", "workers=-1: must be between 0"),
    ("rewards={terms: [{name: answer}], workers: all}", "rewards.workers='all' (from the command line): expected an integer"),
    ("rewards={terms: [{name: answer}], worker: 1}", "rewards.worker: unknown key; did you mean 'workers'"),
    ("rewards=[{name: answer}, {name: answer}]", "reward 'answer' is there twice; give one of them a label"),
    ("rewards=[{name: answer, label: 3}]", "rewards.0.label=3"),
    ("rewards=[{name: answer, wieght: 3}]", "rewards.0.wieght: unknown key; did you mean 'weight'"),
    ("rewards=[{name: answer, options: {markr: x}}]", "rewards.0: options.markr: unknown key; did you mean 'marker'"),
    ("rewards=[{name: answer, options: {marker: 3}}]", "rewards.0: options.marker=3: expected a string"),
    ("rewards=[{name: answer, options: 3}]", "rewards.0.options=3 (from the command line): expected a mapping"),
    ("rewards=[{name: format}]", "rewards.0: options.pattern is required"),
    ("rewards=[{name: format, options: {pattern: '('}}]", "pattern='(': not a regular expression"),
    ("rewards=[{name: choice, options: {letters: A}}]", "letters='A': give two capital letters"),
    ("rewards=[{name: soft_overlong, options: {max_tokens: 9, buffer: 10}}]", "buffer=10: must be between 1 and max_tokens=9"),
    ("rewards=[{name: soft_overlong, options: {max_tokens: x, buffer: 1}}]", "options.max_tokens='x': expected an integer"),
    ("rewards=[{name: repetition, options: {ngram: 0}}]", "ngram=0: must be at least 1"),
    ("rewards=[{name: 'nowhere:f'}]", "reward 'nowhere:f' cannot be imported: ModuleNotFoundError"),
    ("rewards=[{name: 'json:nothing'}]", "reward 'json:nothing' cannot be imported: AttributeError"),
    ("rewards=[{name: 'json:decoder'}]", "reward 'json:decoder' is no function"),
    ("rewards=[{name: 'json:'}]", "reward 'json:' is unknown"),
    ("data.train=nowhere.jsonl", "data file 'nowhere.jsonl' does not exist"),
    ("model.path=/nowhere", "/nowhere"),
    ("mesh.tensor=3", "mesh"),
    ("optimizer.learning_rate=-1", "learning_rate=-1.0: must be over 0"),
    ("train.minibatches=3", "train.minibatches=3 does not divide rollout.prompts"),
])  # fmt: skip
def test_a_mistake_is_two_lines_and_status_two(override, message, tmp_path, capsys):
    assert cli.main(["train", QUICKSTART, f"run.dir={tmp_path / 'run'}", override]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") <= 2 and "Traceback" not in error


def test_dr_grpo_divides_by_the_longest_completion_allowed():
    recipe = config.load(QUICKSTART, ["variant=dr_grpo"])
    assert recipe.make_variant().objective.constant == recipe.rollout.max_tokens


def test_help_loads_nothing_heavy():
    code = "import sys, grpojax.tools.cli as c; c._parser().format_help(); print(sorted({'jax', 'numpy', 'flax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(("text", "marker", "answer"), [
    ("3 + 4 = 7\n## Answer: 7", None, "7"),
    ("so #### 1,234", None, "1,234"),
    ("## Answer: 5\n## Answer: 6\nmore", None, "6"),
    (r"thus \boxed{\frac{1}{2}} done", None, r"\frac{1}{2}"),
    (r"\boxed{", None, None),
    ("## Answer:", None, None),
    ("the answer is 7", None, None),
    ("Result: 8", "Result:", "8"),
    ("## Answer: 8", "Result:", None),
])  # fmt: skip
def test_answers_are_read_after_the_last_marker(text, marker, answer):
    assert rewards.extract_answer(text, marker) == answer


def test_batches_are_a_function_of_the_step_and_cover_an_epoch():
    problems = [data.Problem(i, (1,), "", None, {}) for i in range(12)]
    batches = data.Batches(problems, 4, seed=3)
    again = data.Batches(problems, 4, seed=3)
    assert [p.uid for p in again[7]] == [p.uid for p in batches[7]]
    epoch = [p.uid for step in range(3) for p in batches[step]]
    other = [p.uid for step in range(3, 6) for p in batches[step]]
    assert sorted(epoch) == sorted(other) == list(range(12)) and epoch != other
    assert epoch != [p.uid for step in range(3) for p in data.Batches(problems, 4, seed=4)[step]]
    with pytest.raises(UserError, match="more than the 12 problems"):
        data.Batches(problems, 13, 0)


@pytest.mark.parametrize(("text", "message"), [
    ('{"question": "a"}\n{"question"', ":2: invalid JSON"), ("[1]\n", ":1: a row must be a JSON object"), ("\n", "no rows"),
])  # fmt: skip
def test_bad_rows_are_named(text, message, tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        data.read_rows(str(file))


def test_flops_are_counted_on_tokens_in_use():
    c = DecoderConfig(
        family="llama", vocab_size=11, hidden_size=4, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=2, rope_theta=1e4,
    )  # fmt: skip
    # A prompt of 3 with completions of 1 and 2 tokens: 6 tokens, seen keys 6 + (1 + 3) + (3 + 6).
    weights = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8)
    want = 2 * (6 * weights + 2 * 19 * 4 * 2 + 3 * 11 * 4)
    assert forward_flops(c, [3], [[1, 2]]) == want


def test_bench_prints_a_table(recipe, tmp_path, capsys):
    out = tmp_path / "figures.json"
    arguments = [
        "bench",
        str(recipe),
        f"run.dir={tmp_path / 'run'}",
        "mesh.data=8",
        "--steps",
        "2",
        "--json",
        str(out),
    ]
    assert cli.main(arguments) == 0
    assert "of matmul rate" in capsys.readouterr().out and out.exists()


def leaves(cls, path=()):
    """Dotted paths of all settings of a config class."""
    for name, kind in typing.get_type_hints(cls).items():
        options = [kind, *typing.get_args(kind)] if typing.get_origin(kind) is not tuple else []
        inner = [k for k in options if dataclasses.is_dataclass(k)]
        if inner and name != "rewards" and (*path, name) not in [("data", "train"), ("data", "eval")]:
            yield from leaves(inner[0], (*path, name))
        else:
            yield ".".join((*path, name)), kind


LEAVES = dict(leaves(config.Config))


def test_the_settings_are_found():
    assert {
        "train.steps",
        "filter.metric",
        "tracking.samples",
        "optimizer.b1",
        "data.train",
        "rewards",
    } <= LEAVES.keys()
    assert len(LEAVES) > 50


@pytest.mark.parametrize("path", LEAVES)
def test_a_wrong_type_and_a_typo_are_told_with_their_path(path):
    with pytest.raises(UserError) as wrong:
        config.load(QUICKSTART, [f"{path}={{oops: [1]}}"])
    assert path.split(".")[-1] in str(wrong.value) and str(wrong.value).count("\n") <= 1
    with pytest.raises(UserError) as typo:
        config.load(QUICKSTART, [f"{path}q=1"])
    assert f"{path.split('.')[-1]}q" in str(typo.value) and str(typo.value).count("\n") <= 1


@pytest.mark.parametrize("path", [p for p, kind in LEAVES.items() if {int, float} & {kind, *typing.get_args(kind)}])
def test_a_number_far_out_of_range_is_refused(path):
    with pytest.raises(UserError) as wrong:
        config.load(QUICKSTART, [f"{path}=-1000000"])
    assert path.split(".")[-1] in str(wrong.value)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["grpo", "dapo", "math_answer", "adamw", "builtin:tiny", "{prompt}", "1e-6", "os:system"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
)
PATHS = st.sampled_from([*LEAVES, "rewards.0", "rewards.0.options", "variant", "variant.name", "variant.kl_coef",
                         "variant.clip_high", "variant.aggregate", "filter", "data", "train", ""])  # fmt: skip


@hypothesis.settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(PATHS, VALUES), min_size=1, max_size=3))
def test_a_recipe_with_anything_in_it_loads_or_is_refused_in_two_lines(changes):
    tree = yaml.safe_load(Path(QUICKSTART).read_text())
    for path, value in changes:
        *sections, name = path.split(".")
        node = tree
        for key in sections:
            node = node[int(key)] if isinstance(node, list) else node.get(key)
            if not isinstance(node, dict | list):
                break
        else:
            if isinstance(node, dict):
                node[name] = value
    try:
        settings.build(config.Config, tree)
    except UserError as e:
        assert 0 < len(str(e)) < 2000 and str(e).count("\n") <= 1


def test_a_variant_takes_what_it_lacks_from_the_run():
    def load(*overrides):
        return config.load(QUICKSTART, overrides)

    dapo = load("variant=dapo")
    assert dapo.make_filter() and dapo.make_filter().max_rollouts == 3
    lengths, rewards = np.array([[40, 32, 10, 10]]), np.array([[1, 1, 0, 0]], np.float32)
    signals = Signals(lengths=lengths, mask=np.ones((1, 4, 1), bool))
    punished = np.asarray(dapo.make_variant().advantage(rewards, signals))[0, :, 0]
    assert punished[0] < punished[1]  # from 32 to 40 tokens a reward is lost
    free = load("variant={name: dapo, overlong_limit: null, overlong_buffer: null}").make_variant()
    assert free.advantage(rewards, signals)[0, 0, 0] == free.advantage(rewards, signals)[0, 1, 0]
    assert load("variant=dapo", "filter=none").make_filter() is None
    assert load("variant=dr_grpo").make_variant().objective.constant == 40.0
    assert load("variant={name: dr_grpo, aggregate: sequence_mean}").make_variant().objective.constant is None
    twice = "rewards=[{name: answer}, {name: soft_overlong, options: {max_tokens: 40, buffer: 8}}]"
    with pytest.raises(UserError, match="and so does the reward soft_overlong"):
        load("variant=dapo", twice)


@pytest.mark.parametrize("arguments", [
    ["eval", "x", "--samples", "abc"], ["eval", "x", "--best", "--step", "3"], ["train"], ["fly"],
    ["show", "x", "--nonsense"],
])  # fmt: skip
def test_wrong_arguments_are_told_in_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(arguments)
    assert e.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--debug", "train", "none.yaml"], ["train", "none.yaml", "--debug"]])
def test_debug_shows_the_traceback(arguments):
    with pytest.raises(UserError, match="none.yaml"):
        cli.main(arguments)


def test_a_closed_pipe_ends_it_quietly(recipe, tmp_path):
    """As with `grpojax show RUN | head -1`."""
    from grpojax.records import metrics as tracking

    metrics = tracking.Metrics(tmp_path, 0)
    row = {"uid": 0, "sample": 0, "prompt": "p" * 5000, "completion": "\x1b[2Jc" * 1000, "reward": 1.0, "rewards": {},
           "advantage": 0.0, "length": 3, "stop": "eos", "gold": "1", "answer": None}  # fmt: skip
    metrics.write_samples(1, [row] * 50)
    metrics.close()
    show = [sys.executable, "-m", "grpojax", "show", str(tmp_path), "-n", "50"]
    process = subprocess.Popen(show, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait()
    process.stderr.close()
    out = subprocess.run([*show[:-1], "1"], capture_output=True, text=True).stdout
    assert "\x1b" not in out and "\\x1b[2Jc" in out
