"""Which runs a sweep makes, in which order, and what becomes of it when something goes wrong."""

import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from grpojax.cli import main as cli
from grpojax.extensions.experiments import jobs as jobs_module
from grpojax.extensions.experiments import rate_search, sweep
from grpojax.extensions.experiments.jobs import Job, JobsOutcome, Queue
from grpojax.extensions.experiments.sweeps import Failure
from grpojax.host.errors import UserError
from grpojax.run import recipe

FAKE = str(Path(__file__).parents[2] / "fake_train.py")
RATES = (1e-4, 3e-4, 1e-3)
QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")


@pytest.fixture
def said(caplog):
    """What was logged, so far."""
    caplog.set_level(logging.INFO, logger="grpojax")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def job(folder, name, steps=3, how="", config=None):
    directory = folder / "runs" / name
    command = (sys.executable, FAKE, str(directory), str(steps), "0.5", how)
    return Job(name=name, directory=directory, command=command, steps=steps, config=config or {"name": name})


def starts(one):
    return [line.split() for line in (one.directory / "starts").read_text().splitlines()]


def test_runs_are_made_once_and_in_order(tmp_path, said):
    a, b = job(tmp_path, "a"), job(tmp_path, "b")
    outcome = Queue(tmp_path, os.environ).run([a, b])
    assert outcome == JobsOutcome(done=[a, b]) and "b: done in" in said() and "(2/2, left 0m00s)" in said()
    assert float(starts(a)[1][0]) < float(starts(b)[0][0])  # one after the other
    assert Queue(tmp_path, os.environ).run([a, b, job(tmp_path, "c")]).done[:2] == [a, b]
    assert len(starts(a)) == 2 and "2 of 3 runs are done already" in said()
    other = job(tmp_path, "a", config={"name": "another"})
    Queue(tmp_path, os.environ).run([other])
    assert len(starts(a)) == 4  # another recipe: the trainer says what it makes of that


def test_a_run_that_fails_costs_itself_alone(tmp_path, said):
    outcome = Queue(tmp_path, os.environ).run([job(tmp_path, "a", how="fail"), job(tmp_path, "b")])
    assert [j.name for j in outcome.done] == ["b"] and not outcome.stopped
    assert outcome.failed == {"a": Failure(status=1, step=0, lines=("first line", "all is lost"))}
    assert "a: failed with status 1; its last lines:\n  first line\n  all is lost" in said()
    again = Queue(tmp_path, os.environ).run([job(tmp_path, "a"), job(tmp_path, "b")])
    assert len(again.done) == 2  # it was tried again


def test_a_killed_run_goes_on_at_the_next_start(tmp_path, said):
    one = job(tmp_path, "a", steps=4, how="die")
    killed = Failure(status=-signal.SIGKILL, step=2, lines=("it printed nothing",))
    assert Queue(tmp_path, os.environ).run([one]).failed == {"a": killed}
    assert Queue(tmp_path, os.environ).run([one]).done == [one]
    assert "a: started again after step 2" in said() and one.done() == (4, 1.0)


def test_an_end_without_the_last_step_is_no_success(tmp_path):
    short = job(tmp_path, "a", steps=3)
    short = Job(name="a", directory=short.directory, command=short.command, steps=5, config={})
    assert list(Queue(tmp_path, os.environ).run([short]).failed) == ["a"]


def test_a_run_on_each_device(tmp_path):
    names = [job(tmp_path, name, how="wait") for name in "ab"]
    queue = Queue(tmp_path, os.environ | {"CUDA_VISIBLE_DEVICES": "4,6,7"}, ["0", "2"])

    def stop_once_both_run():
        while not all((j.directory / "metrics.jsonl").exists() for j in names):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop_once_both_run).start()
    assert queue.run(names).stopped  # it would wait for ever if one ran after the other
    assert {starts(j)[0][1] for j in names} == {"4", "7"}


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"])
def test_a_device_is_one_of_those_that_can_be_seen(name, tmp_path):
    names = {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"}
    got = jobs_module.visible_device("1", {name: "4, 6"})
    assert got[name] == "6" and {got[other] for other in names - {name}} == {"1"}
    with pytest.raises(UserError, match=f"--devices 2: {name}=4,6 has 2, counted from 0"):
        Queue(tmp_path, {name: "4,6"}, ["0", "2"])


def test_an_interrupt_stops_what_runs_and_starts_nothing_more(tmp_path, said):
    a, b = job(tmp_path, "a", how="wait"), job(tmp_path, "b")

    def interrupt():
        while not (a.directory / "metrics.jsonl").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    outcome = Queue(tmp_path, os.environ).run([a, b])
    assert outcome.stopped and not outcome.done and not outcome.failed and not b.directory.exists()
    assert starts(a)[-1][1] == "end" and "a: stopped at step 1" in said()  # in an orderly way
    assert starts(a)[0][2] == "True"  # a terminal's Ctrl-C does not reach it a second time
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert Queue(tmp_path, os.environ).run([job(tmp_path, "a"), b]).done[1] == b


def test_a_run_that_is_told_to_stop_by_itself_stops_the_sweep(tmp_path, said):
    """As by a cloud's notice: it has not failed, and what would be started next would be stopped as well."""
    a, b, c = job(tmp_path, "a", how="preempted"), job(tmp_path, "b", how="wait"), job(tmp_path, "c")
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    assert Queue(tmp_path, environment, ["0", "1"]).run([a, b, c]) == JobsOutcome(stopped=True)
    assert "a: stopped at step 1" in said() and not c.directory.exists()
    again = Queue(tmp_path, os.environ).run([a, job(tmp_path, "b"), c])
    assert len(again.done) == 3 and not again.stopped


def test_an_interrupt_while_a_process_is_made_reaches_it(tmp_path, monkeypatch):
    a, b = job(tmp_path, "a", how="wait"), job(tmp_path, "b", how="wait")
    real = jobs_module.subprocess.Popen

    def popen(*given, **options):
        process = real(*given, **options)
        while not (a.directory / "metrics.jsonl").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(jobs_module.subprocess, "Popen", popen)
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    assert Queue(tmp_path, environment, ["0", "1"]).run([a, b]) == JobsOutcome(stopped=True)
    assert starts(a)[-1][1] == "end" and not b.directory.exists()  # the other device stays free


def test_a_run_that_another_process_is_at_is_waited_for(tmp_path, said):
    a, b = job(tmp_path, "a"), job(tmp_path, "b")
    a.directory.mkdir(parents=True)
    with (a.directory / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def let_go():
            while "a is in use by another process; waiting" not in said():
                time.sleep(0.01)
            fcntl.flock(lock, fcntl.LOCK_UN)

        threading.Thread(target=let_go).start()
        assert Queue(tmp_path, os.environ).run([a, b]).done == [b, a]  # b in the meantime


def test_progress_is_told(tmp_path, said):
    a = job(tmp_path, "a", how="wait")

    def interrupt():
        while "a 33%  1 waiting, left " not in said():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert Queue(tmp_path, os.environ, tell_s=0.1).run([a, job(tmp_path, "b")]).stopped


# ---------------------------------------------------------------------------------------------- what is run


def made(tmp_path, **given):
    text = given.pop("variants", "grpo,{name: dapo, clip_high: 0.3}")
    return sweep.Sweep(config=QUICKSTART, variants=sweep.read_variants(text), folder=tmp_path,
                       **{"seeds": (0, 1), **given})  # fmt: skip


def rows(asked, **given):
    return list(asked.jobs(**given).values())


def test_every_method_with_every_seed(tmp_path):
    jobs = rows(made(tmp_path, overrides=("train.steps=7",)))
    assert [j.name for j in jobs] == ["grpo_0", "dapo-clip_high=0.3_0", "grpo_1", "dapo-clip_high=0.3_1"]
    last = jobs[-1]
    assert last.directory == tmp_path / "runs" / last.name and last.steps == 7
    # The KL of the recipe's own variant is every method's.
    assert last.config["variant"] == {"name": "dapo", "clip_high": 0.3, "kl_coef": 0.0}
    assert last.config["run"]["dir"] == str(last.directory) and last.config["train"]["seed"] == 1
    assert last.command[:5] == (sys.executable, "-m", "grpojax.cli.main", "train", QUICKSTART)
    assert "train.steps=7" in last.command and "train.seed=1" in last.command


@pytest.mark.parametrize("kind", ["runs", "rates"])
def test_the_command_makes_the_recipe_that_is_recorded(tmp_path, kind):
    given = ("train.steps=24", "profile.steps=[9, 12]", "critic.warmup_steps=3", "variant.kl_coef=1e-3")
    asked = made(tmp_path, variants="ppo,negative_advantage", overrides=given, controls=True, seeds=(3,))
    jobs = rows(asked, rates=dict.fromkeys(asked.methods, 3e-5))
    if kind == "rates":
        jobs = [asked.rate_job(name, 3e-5, 1001) for name in asked.methods]
    for one in jobs:
        assert recipe.load(one.command[4], one.command[5:]).resolved() == one.config
    assert len(jobs) == 3 and {j.config["optimizer"]["learning_rate"] for j in jobs} == {3e-5}


def test_a_critic_is_for_the_methods_that_have_one(tmp_path):
    asked = made(tmp_path, variants="ppo,grpo", overrides=("critic.warmup_steps=3",), seeds=(0,))
    ppo, grpo = rows(asked)
    assert ppo.config["critic"]["warmup_steps"] == 3 and grpo.config["critic"] is None
    assert asked.rate_job("ppo", 1e-4, 7).config["critic"]["warmup_steps"] == 3
    asked = made(tmp_path, variants="ppo,grpo", overrides=("critic={warmup_steps: 3}",), seeds=(0,))
    ppo, grpo = rows(asked)
    assert ppo.config["critic"]["warmup_steps"] == 3 and grpo.config["critic"] is None
    assert not any("critic={" in text for text in asked.methods["grpo"].overrides)
    with pytest.raises(UserError, match="critic.warmup_stepz=3: none of the methods has a critic"):
        made(tmp_path, variants="grpo", overrides=("critic.warmup_stepz=3",)).jobs()


def test_runs_of_equal_tokens(tmp_path):
    asked = made(tmp_path, overrides=("train.steps=null", "train.tokens=1000"))
    one = rows(asked, rates={"grpo": 1e-4})[0]
    assert (one.steps, one.tokens) == (None, 1000) == (asked.rate_job("grpo", 1e-3, 7).steps, 1000)
    one.directory.mkdir(parents=True)
    lines = [
        {"step": 1, "sampled_tokens": 600.0},
        {"step": 1, "eval/reward": 0.5},
        {"step": 2, "sampled_tokens": 999.0},
    ]
    (one.directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert one.done() == (2, 0.999)


# -------------------------------------------------------------------------------- options of the recipe's variant


def recipe_with(tmp_path, variant):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"base: {QUICKSTART}\nvariant: {variant}\n")
    return str(file)


@pytest.mark.parametrize(("variant", "overrides", "method", "wanted"), [
    # The recipe's option, the command line's over it, and the method's own over both.
    ("{name: grpo, kl_coef: 1.0e-3}", (), "grpo", {"kl_coef": 1e-3}),
    ("{name: grpo, kl_coef: 1.0e-3}", (), "dr_grpo", {"kl_coef": 1e-3}),
    ("{name: grpo, kl_coef: 1.0e-3}", ("variant.kl_coef=0.5",), "dr_grpo", {"kl_coef": 0.5}),
    ("{name: grpo, kl_coef: 1.0e-3}", ("variant.kl_coef=0.5",), "{name: dr_grpo, kl_coef: 0.2}", {"kl_coef": 0.2}),
    ("grpo", ("variant.kl_coef=0.5", "variant.eps=0.1"), "grpo", {"kl_coef": 0.5, "eps": 0.1}),
    # What a method does not have is left out of it.
    ("{name: grpo, clip_high: 0.25, kl_coef: 0.1}", (), "cispo", {"kl_coef": 0.1}),
    ("{name: negative_advantage, c: 0.1, ddof: 0}", (), "rare_token", {"ddof": 0}),
    # Another variant's name on top is no option.
    ("dapo", (), "grpo", {}),
])  # fmt: skip
def test_options_of_the_recipe_go_to_every_method_that_has_them(tmp_path, variant, overrides, method, wanted):
    asked = sweep.Sweep(config=recipe_with(tmp_path, variant), variants=sweep.read_variants(method), seeds=(0,),
                        folder=tmp_path / "s", overrides=overrides)  # fmt: skip
    (job,) = rows(asked)
    given = job.config["variant"]
    assert {k: x for k, x in given.items() if k != "name"} == wanted
    assert given["name"] == sweep.read_variants(method)[0] or given["name"] in method
    # The command gives what was resolved here.
    given_to_it = [json.loads(text.partition("=")[2]) for text in job.command if text.startswith("variant=")]
    assert given_to_it == [given] and not any(text.startswith("variant.") for text in job.command)


def test_what_a_method_does_not_have_is_printed_once(tmp_path):
    asked = made(tmp_path, variants="grpo,cispo,dapo", overrides=("variant.clip_high=0.25", "variant.ddof=0"))
    lines = [line for line in sweep.introduction(asked, asked.jobs()) if "has no option" in line]
    assert lines == ["cispo: has no option clip_high; it runs without"]
    with pytest.raises(UserError, match="variant.clip_high: none of the methods has this option; leave it out"):
        made(tmp_path, variants="cispo", overrides=("variant.clip_high=0.25",)).jobs()


# ------------------------------------------------------------------------------------------------- controls


def links(asked):
    return {name: (m.control, m.baseline) for name, m in asked.methods.items()}


def test_controls_are_added_once(tmp_path):
    asked = made(tmp_path, variants="culling,grpo,token_critic,negative_advantage,cispo", controls=True)
    sums, off = "grpo-aggregate=sequence_sum", "negative_advantage-c=0.0"
    assert links(asked) == {
        "culling": (sums, "grpo"), "grpo": (None, None), "token_critic": (sums, "grpo"),
        "negative_advantage": (off, "grpo"), "cispo": (None, "grpo"), sums: (None, None), off: (None, None),
    }  # fmt: skip
    assert asked.methods[sums].config["variant"] == {"name": "grpo", "aggregate": "sequence_sum", "kl_coef": 0.0}
    assert [j.name for j in rows(asked)[5::7]] == [f"{sums}_0", f"{sums}_1"]
    # The recipe's options are the control's too, and in no label.
    other = made(tmp_path, variants="culling", controls=True, overrides=("variant.kl_coef=0.1", "variant.ddof=0"))
    assert other.methods[sums].config["variant"] == {
        "name": "grpo", "aggregate": "sequence_sum", "kl_coef": 0.1, "ddof": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["llds", "nthr", "pass_at_k", "rare_token", "gt_likelihood", "grpo_lambda_traces", "ngrpo", "gspo"]
)
def test_a_method_and_its_control_differ_in_nothing_else(tmp_path, name):
    asked = made(tmp_path, variants=name, controls=True, overrides=("train.ppo_epochs=2",))
    assert asked.methods[name].control in asked.methods
    assert not [x for x in sweep.introduction(asked, asked.jobs()) if "differ in more" in x]


def test_a_recipe_that_gives_the_control_the_mechanism_is_warned_of(tmp_path):
    asked = made(tmp_path, variants="culling", controls=True, overrides=("rollout.retire.share=0.5",), seeds=(0, 1))
    first, _ = sweep.introduction(asked, asked.jobs())
    assert first == (
        "warning: culling and grpo-aggregate=sequence_sum are the same under this recipe, whose settings give both "
        "the mechanism"
    )


def test_a_control_that_is_given_is_found(tmp_path):
    given = "culling,{name: grpo, aggregate: sequence_sum, clip_low: 0.2}"
    label = "grpo-aggregate=sequence_sum-clip_low=0.2"
    for controls in (False, True):
        asked = made(tmp_path, variants=given, controls=controls)
        assert links(asked) == {"culling": (label, label), label: (None, None)}
    off = made(tmp_path, variants="{name: negative_advantage, c: 0}", controls=True)
    assert links(off) == {"negative_advantage-c=0": (None, None)}  # it is its own control
    without = made(tmp_path, variants="grpo,negative_advantage")
    assert links(without) == {"grpo": (None, None), "negative_advantage": (None, "grpo")}
    line, warning, _ = sweep.introduction(without, without.jobs())
    assert line.startswith("negative_advantage, compared with grpo: advantage.penalize_all_fail: none -> ")
    assert warning == (
        "warning: negative_advantage and grpo also differ in other settings: aggregation (sequence_sum; grpo "
        "sequence_mean); --controls adds a control with the same settings"
    )


# -------------------------------------------------------------------------------------------- equal recipes


def test_equal_recipes_are_run_once(tmp_path):
    asked = made(tmp_path, variants="grpo,{name: grpo, kl_coef: 0.0},{name: grpo, ddof: 1, eps: 1e-4},gspo")
    jobs = asked.jobs()
    assert [job.name for job in sweep.unique(jobs).values()] == ["grpo_0", "gspo_0", "grpo_1", "gspo_1"]
    runs = sweep.record(asked, jobs).runs
    assert runs["grpo"] == runs["grpo-kl_coef=0.0"] == runs["grpo-ddof=1-eps=0.0001"] == {0: "grpo_0", 1: "grpo_1"}
    lines = sweep.introduction(asked, jobs)
    assert "grpo-kl_coef=0.0: the same resolved recipe as grpo_0, run once for both" in lines
    assert sweep.record(asked, jobs).comparisons == [("gspo", "grpo")]  # nothing is compared with itself
    # A run that is there is taken, whichever of them it was made for.
    (tmp_path / "runs" / "grpo-kl_coef=0.0_1").mkdir(parents=True)
    again = sweep.record(asked, asked.jobs()).runs
    assert again["grpo"] == again["grpo-kl_coef=0.0"] == {0: "grpo_0", 1: "grpo-kl_coef=0.0_1"}


def test_what_is_recorded_and_how_it_is_executed_makes_no_other_recipe(tmp_path):
    config = rows(made(tmp_path))[0].config
    same = {**config, "run": {"dir": "x"}, "variant": {"name": "grpo", "ddof": 1},
            "train": {**config["train"], "keep": 7, "eval_every": 3}, "compile_cache": None}  # fmt: skip
    assert sweep.identity(same) == sweep.identity(config)
    others = [
        {**config, "train": {**config["train"], "seed": 9}},
        {**config, "variant": {"name": "grpo", "source": "digest"}},
        {**config, "method": {**config["method"], "filter": {"max_rollouts": 2}}},
        {**config, "optimizer": {**config["optimizer"], "learning_rate": 1.0}},
    ]
    assert len({sweep.identity(x) for x in [config, *others]}) == 5


def test_cores_and_memory_are_shared_evenly(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 6, 8, 9}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", given.__setitem__, raising=False)
    for pid, slot, slots in ((1, 0, 2), (2, 1, 2), (3, 0, 1), (4, 6, 7)):
        jobs_module._share_cores(pid, slot, slots)
    assert given == {1: [3, 5], 2: [6, 8, 9], 4: [9]}  # alone, a run has all there are
    alone = Queue(tmp_path, {}, ["0", "1"], at_once=3)._alone
    assert {seen["XLA_PYTHON_CLIENT_MEM_FRACTION"] for seen in alone.values()} == {"0.300"}
    kept = Queue(tmp_path, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}, at_once=3)._alone
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in kept[None]


def test_several_at_once_on_a_device_share_what_there_is(tmp_path):
    names = [job(tmp_path, name, how="wait") for name in "abc"]
    queue = Queue(tmp_path, os.environ, at_once=2)

    def interrupt():
        while not all((j.directory / "metrics.jsonl").exists() for j in names[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert queue.run(names).stopped and not names[2].directory.exists()


@pytest.mark.parametrize(("given", "message"), [
    ({"variants": "grpo,grop"}, "'grop' is unknown"),
    ({"variants": "grpo,grpo"}, "grpo occurs twice"),
    ({"variants": "grpo,{clip_high: 3}"}, "neither a name nor a mapping"),
    ({"variants": "{name: dapo"}, "invalid YAML"),
    ({"variants": ""}, "give one at least"),
    ({"seeds": (2**31,)}, "seed=2147483648: must be at least 0 and at most 2147483647"),
    ({"overrides": ("train.seed=3",)}, "train.seed=3: the sweep sets train.seed itself"),
    ({"overrides": ("variant=dapo",)}, "the sweep sets the variant itself; give its options"),
    ({"overrides": ("variant.name=dapo",)}, "the sweep sets variant.name itself"),
    ({"overrides": ("variant.clip_hihg=3",)}, "variant.clip_hihg: none of the methods has this option"),
    ({"overrides": ("variant.clip_high=high",)}, "variant.clip_high='high'"),
    ({"overrides": ("filter.max_rollouts=0",), "controls": True}, "max_rollouts=0: must be at least 1"),
    ({"overrides": ("optimizer.learning_rate=1",), "rates": RATES}, "sets optimizer.learning_rate itself"),
    ({"rates": (1e-4, 1e-3, 1e-4)}, "give numbers over 0, each a tenth larger"),
    ({"rates": (1e-4, 1.05e-4, 1e-3)}, "give numbers over 0, each a tenth larger"),
    ({"rates": (-1.0, 1e-4, 1e-3)}, "give numbers over 0"),
    ({"rates": (1e-4, float("inf"), 1e-3)}, "give numbers over 0"),
    ({"rates": (1e-4, 1e-3)}, "--rates 0.0001,0.001: give at least 3"),
    ({"rates": RATES, "rate_count": 2}, "--rate-seeds 2: give at least 3"),
    ({"rate_count": 5}, "--rate-seeds 5: goes with --rates"),
    ({"margin": 0.0}, "--margin 0: give a difference over 0"),
    ({"margin": float("nan")}, "--margin nan: give a difference over 0"),
    ({"rates": RATES, "overrides": ("data.validation=null",)}, "give the recipe data.validation"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_starts(tmp_path, given, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        rate_search.run(made(tmp_path, **given), Queue(tmp_path, {}))
    assert not list(tmp_path.iterdir())


def test_fresh_seeds_are_the_ones_that_are_asked_for(tmp_path):
    asked = made(tmp_path, seeds=sweep.read_seeds("5-7"))
    assert [job.name for job in rows(asked)] == [f"{name}_{seed}" for seed in (5, 6, 7) for name in asked.methods]
    assert [job.config["train"]["seed"] for job in rows(asked)] == [5, 5, 6, 6, 7, 7]
    assert asked.rate_seeds == (1000, 1001, 1002)
    assert made(tmp_path, seeds=(1001, 1003), rates=RATES, rate_count=4).rate_seeds == (1000, 1002, 1004, 1005)
    for text in ("0", "7-5"):
        with pytest.raises(UserError, match=f"--seeds {text}: there are none"):
            sweep.read_seeds(text)
    for text in ("", "x", "-3", "3-", "1-2-3"):
        with pytest.raises(UserError, match="give how many, such as 5, or the first and the last, such as 5-9"):
            sweep.read_seeds(text)


# ------------------------------------------------------------------------------------------ command line


@pytest.mark.parametrize(("arguments", "message"), [
    (["--devices", "0,0"], "--devices 0,0: give different numbers"),
    (["--devices", "a"], "--devices a"),
    (["--rates", "low,high"], "--rates low,high: give numbers"),
    (["--pilot", "nowhere"], "nowhere is no directory"),
    (["train.stepz=3"], "did you mean 'steps'"),
])  # fmt: skip
def test_mistakes_of_the_command_line(arguments, message, tmp_path, capsys):
    given = ["sweep", QUICKSTART, "--variants", "grpo", "--to", str(tmp_path / "new"), *arguments]
    assert cli.main(given) == 2 and message in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_what_failed_is_told(tmp_path, capsys, monkeypatch):
    left_out = Failure(status=None, step=0, lines=("no learning rate gave a held-out reward",))
    failed = {"grpo": left_out, "grpo_1": Failure(status=1, step=3, lines=("all is lost",))}
    monkeypatch.setattr(rate_search, "run", lambda *_: JobsOutcome(failed=failed))
    assert cli.main(["sweep", QUICKSTART, "--variants", "grpo", "--to", str(tmp_path)]) == 1
    assert capsys.readouterr().out == (
        "grpo: no learning rate gave a held-out reward\ngrpo_1 failed; the same command tries it again\n"
    )


def test_several_processes_of_one_run_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    assert cli.main(["sweep", QUICKSTART, "--variants", "grpo", "--to", str(tmp_path)]) == 2
    assert "a sweep starts runs of one process; unset it" in capsys.readouterr().err


def test_the_command_starts_trainers_that_share_a_cache_and_says_what_comes_next(tmp_path, capsys, monkeypatch):
    seen = []

    def popen(command, env, stdout, **options):
        seen.append((command, env))
        given = next(x for x in command if x.startswith("run.dir="))
        return real([sys.executable, FAKE, json.loads(given.partition("=")[2]), "2", "0.5"], env=env, stdout=stdout,
                    **options)  # fmt: skip

    real = jobs_module.subprocess.Popen
    monkeypatch.setattr(jobs_module.subprocess, "Popen", popen)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    given = ["sweep", QUICKSTART, "--variants", "grpo", "--seeds", "1", "--to", "new", "train.steps=2"]
    assert cli.main([*given, "train.eval_every=1"]) == 0
    (command, env), = seen  # fmt: skip
    assert command[1:4] == ("-m", "grpojax.cli.main", "train")
    assert {"train.steps=2", "train.eval_every=1"} <= set(command)
    assert env["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "new" / "cache")
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"grpojax report {tmp_path}/new --to {tmp_path}/new/report.html"
    )


@pytest.mark.exhaustive(
    "extensions/experiments/test_sweep.py::test_the_command_starts_trainers_that_share_a_cache_and_says_what_comes_next"
)
def test_a_real_sweep_and_its_report(tmp_path, capsys, monkeypatch):
    """Two methods of the built-in model, to the page."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    small = ["train.steps=2", "train.eval_limit=16", "rollout.prompts=4", "rollout.group=4", "rollout.max_tokens=16"]
    given = ["sweep", QUICKSTART, "--variants", "grpo,gspo", "--seeds", "1", "--to", str(tmp_path / "s"), *small]
    assert cli.main(given) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert cli.main(line.split()[1:]) == 0
    text = (tmp_path / "s" / "report.html").read_text()
    assert "grpo and gspo" in text and "2 of 2 steps" in text and list((tmp_path / "s" / "cache").iterdir())
