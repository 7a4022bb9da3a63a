"""Mistakes exit with status 2 in two lines, and help is quick."""

import subprocess
import sys

import pytest
from refusals import RECIPE, check_said

from grpojax import data, rewards
from grpojax.cli import main as cli
from grpojax.host.errors import UserError


@pytest.mark.parametrize(("override", "message"), [
    ("train.stepz=3", "train.stepz (from the command line): unknown key; did you mean 'steps'"),
    ("train.steps=many", "train.steps='many' (from the command line): expected an integer"),
    ("train.steps=0", "steps=0: must be at least 1"),
    ("rollout.temperature=0", "temperature=0.0: greedy"),
    ("rollout.top_p=0.9", "top_k, top_p and min_p cut off tokens"),
    ("rollout.decode_slots=99", "slots=99: must be between 0 (all) and group"),
    ("variant=grop", "'grop' is unknown; did you mean 'grpo'"),
    ("variant=GRPO", "'GRPO' is unknown; did you mean 'grpo'"),
    ("variant=Dr.GRPO", "'Dr.GRPO' is unknown; did you mean 'dr_grpo'"),
    ("beta=0.04", "beta (from the command line): this is TRL's and Tunix's name; set variant.kl_coef\n"),
    ("variant.epsilon=0.2", "this is TRL's and Tunix's name; set variant.clip_low and variant.clip_high\n"),
    ("variant.beta=0.04", "variant.beta: this is TRL's and Tunix's name; set variant.kl_coef\n"),
    ("optimizer.lr=1e-6", "optimizer.lr (from the command line): this is verl's name; set optimizer.learning_rate\n"),
    ("actor_rollout_ref.rollout={n: 8}", "actor_rollout_ref.rollout.n is verl's name; set rollout.group\n"),
    ("train.mask_truncated_completions=true", "this is TRL's name; set train.truncated: mask\n"),
    ("loss_type=dapo", "loss_type (from the command line): this is TRL's name; set variant\n"),
    ("max_steps=5", "this is TRL's and Tunix's name; set train.steps (another number"),
    ("use_vllm=true", "this is TRL's name; leave it out"),
    ("learning_rate=1e-6", "unknown key; did you mean 'optimizer.learning_rate'?"),
    ("variant.learning_rate=1e-6", "variant.learning_rate: unknown key; did you mean 'optimizer.learning_rate'?"),
    ("train.group=4", "train.group (from the command line): unknown key; did you mean 'rollout.group'?"),
    ("variant.clip_hihg=0.3", "variant.clip_hihg: unknown key; did you mean 'clip_high'"),
    ("variant={name: grpo, kl_coef: 0.1, kl_kind: k1}", "its expected gradient is 0"),
    ("variant={name: grpo, kl_coef: 0.1, kl_in: reward}", "only k1 belongs there"),
    ("variant={name: grpo, kl_in: rewards}", "did you mean 'reward'"),
    ("variant={name: grpo, kl_coef: 0.1, kl_kind: k1, kl_in: token_reward}", "has no token rewards"),
    ("variant={name: pass_at_k, k: 99}", "k=99): more than the group's 8 samples"),
    ("variant={name: dapo, overlong_limit: 4000, overlong_buffer: 9}",
     "never reached: samples end at rollout.max_tokens=40"),
    ("variant={name: dapo, overlong_limit: 40}", "both or none"),
    ("filter={success: 0.5}", "filter.success=0.5: this variant has no filter of its own"),
    ("filter=some", "expected 'auto' or 'none'"),
    ("train.seed=2147483648", "seed=2147483648: must be at least 0 and at most 2147483647"),
    ('rewards=[{name: "m:f", options: {day: !!timestamp 2024-01-01}}]', "options must be plain numbers, texts, lists"),
    ("rewards=[{name: answer, weight: 0}]", "every weight is 0"),
    ("rewards={terms: [{name: answer}], memory_mb: 10000000000000}", "memory_mb=10000000000000"),
    ("data.validation=''", "validation: the name of a source is empty"),
    ("model.attention=flash", "model.attention='flash'"),
    ("model.attention=cudnn", "needs dtype: bfloat16"),
    ("rewards=[{name: anser}]", "reward 'anser' is unknown"),
    ("rewards=[]", "rewards: at least one"),
    ("rewards={terms: []}", "rewards: at least one"),
    ("rewards={terms: [{name: answer}], combine: normalise}", "did you mean 'normalize'"),
    ("rewards={terms: [{name: answer}], timeout_s: 0}", "timeout_s=0.0: must be over 0"),
    ("rewards={terms: [{name: answer}], timeout_s: soon}",
     "rewards.timeout_s='soon' (from the command line): expected a number"),
    ("rewards={terms: [{name: answer}], memory_mb: 5}", "memory_mb=5: must be 0 (no limit), or between 64 and"),
    ("rewards={terms: [{name: answer}], memory_mb: 1.5}",
     "rewards.memory_mb=1.5 (from the command line): expected an integer"),
    ("rewards={terms: [{name: answer}], workers: -1}", "workers=-1: must be at least 0"),
    ("rewards={terms: [{name: answer}], workers: all}",
     "rewards.workers='all' (from the command line): expected an integer"),
    ("rewards={terms: [{name: answer}], worker: 1}",
     "rewards.worker (from the command line): unknown key; did you mean 'workers'"),
    ("rewards=[{name: answer}, {name: answer}]", "reward 'answer' occurs twice; give one of them a label"),
    ("rewards=[{name: answer, label: 3}]", "rewards.0.label=3"),
    ("rewards=[{name: answer, wieght: 3}]",
     "rewards.0.wieght (from the command line): unknown key; did you mean 'weight'"),
    ("rewards=[{name: answer, options: {markr: x}}]", "rewards.0: options.markr: unknown key; did you mean 'marker'"),
    ("rewards=[{name: answer, options: {marker: 3}}]", "rewards.0: options.marker=3: expected a string"),
    ("rewards=[{name: answer, options: 3}]", "rewards.0.options=3 (from the command line): expected a mapping"),
    ("rewards=[{name: format}]", "rewards.0: options.pattern is required"),
    ("rewards=[{name: format, options: {pattern: '('}}]", "pattern='(': not a regular expression"),
    ("rewards=[{name: choice, options: {letters: A}}]", "letters='A': give two capital letters"),
    ("rewards=[{name: soft_overlong, options: {max_tokens: 9, buffer: 10}}]",
     "buffer=10: must be between 1 and max_tokens=9"),
    ("rewards=[{name: soft_overlong, options: {max_tokens: x, buffer: 1}}]",
     "options.max_tokens='x': expected an integer"),
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
    assert cli.main(["train", RECIPE, f"run.dir={tmp_path / 'run'}", override]) == 2
    check_said(message, capsys)


def test_a_sample_longer_than_the_model_s_positions_is_refused(capsys):
    assert cli.main(["sample", "builtin:tiny", "--prompt", "1+1=", "--max-tokens", "1024"]) == 2
    check_said("--max-tokens 1024 after a prompt of", capsys)


def test_help_loads_nothing_heavy():
    code = """
import sys
from grpojax.cli import main as cli
cli.parser().format_help()
print(sorted({"jax", "numpy", "flax", "pydantic", "yaml"} & set(sys.modules)))
"""
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


COMPILES = """
import atexit, sys, threading, time, jax
from grpojax import device
from grpojax.cli import main
began, seconds = threading.Event(), float(sys.argv.pop(1))

def slow(x):
    began.set()
    time.sleep(seconds)
    return x

ahead = device.CompileAhead([(device.Program("slow", slow), (jax.ShapeDtypeStruct((2,), "float32"),), "")])
began.wait()
ahead.close()
if len(sys.argv) == 1:
    sys.modules["wandb"] = atexit
    atexit.register(print, "sent")
    sys.argv.append("recipes")
main.process()
"""


@pytest.mark.parametrize(
    ("argv", "status", "said"), [(["recipes"], 0, "quickstart"), (["train", "no.yaml"], 2, "no.yaml: No such")]
)
@pytest.mark.slow
def test_a_process_does_not_wait_for_a_compile_that_nobody_needs(argv, status, said):
    run = subprocess.run([sys.executable, "-c", COMPILES, "300", *argv], capture_output=True, text=True, timeout=100)
    assert run.returncode == status and said in run.stdout + run.stderr


@pytest.mark.slow
def test_what_wandb_sends_at_the_end_is_waited_for():
    run = subprocess.run([sys.executable, "-c", COMPILES, "3"], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0 and run.stdout.endswith("sent\n")
