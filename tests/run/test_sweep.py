"""Which runs a sweep makes, in which order, and what becomes of it when something goes wrong."""

import doctest
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

from grpojax.host.errors import UserError
from grpojax.run import jobs as jobs_module
from grpojax.run import sweep
from grpojax.run.jobs import Job, Outcome, Queue
from grpojax.tools import cli

FAKE = str(Path(__file__).parents[1] / "fake_train.py")
QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


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
    assert outcome == Outcome(done=[a, b]) and "b: done in" in said() and "(2/2, left 0m00s)" in said()
    assert float(starts(a)[1][0]) < float(starts(b)[0][0])  # one after the other
    assert Queue(tmp_path, os.environ).run([a, b, job(tmp_path, "c")]).done[:2] == [a, b]
    assert len(starts(a)) == 2 and "2 of 3 runs are done already" in said()
    other = job(tmp_path, "a", config={"name": "another"})
    Queue(tmp_path, os.environ).run([other])
    assert len(starts(a)) == 4  # another recipe: the trainer says what it makes of that


def test_a_run_that_fails_costs_itself_alone(tmp_path, said):
    outcome = Queue(tmp_path, os.environ).run([job(tmp_path, "a", how="fail"), job(tmp_path, "b")])
    assert [j.name for j in outcome.done] == ["b"] and not outcome.stopped
    assert outcome.failed == {"a": ["first line", "all is lost"]}
    assert "a: failed with status 1; its last lines:\n  first line\n  all is lost" in said()
    again = Queue(tmp_path, os.environ).run([job(tmp_path, "a"), job(tmp_path, "b")])
    assert len(again.done) == 2  # it was tried again


def test_a_killed_run_goes_on_at_the_next_start(tmp_path, said):
    one = job(tmp_path, "a", steps=4, how="die")
    assert Queue(tmp_path, os.environ).run([one]).failed == {"a": ["it said nothing"]}
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
    got = jobs_module.seen_alone("1", {name: "4, 6"})
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
    assert Queue(tmp_path, environment, ["0", "1"]).run([a, b, c]) == Outcome(stopped=True)
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
    assert Queue(tmp_path, environment, ["0", "1"]).run([a, b]) == Outcome(stopped=True)
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


def test_every_method_with_every_seed(tmp_path):
    jobs = made(tmp_path, overrides=("train.steps=7",)).jobs()
    assert [j.name for j in jobs] == ["grpo_0", "dapo-clip_high=0.3_0", "grpo_1", "dapo-clip_high=0.3_1"]
    last = jobs[-1]
    assert last.directory == tmp_path / "runs" / last.name and last.steps == 7
    assert last.config["variant"] == {"name": "dapo", "clip_high": 0.3} and last.config["train"]["seed"] == 1
    assert last.config["run"]["dir"] == str(last.directory)
    assert last.command[:5] == (sys.executable, "-m", "grpojax.tools.cli", "train", QUICKSTART)
    assert "train.steps=7" in last.command and "train.seed=1" in last.command


def test_a_critic_is_for_the_methods_that_have_one(tmp_path):
    asked = made(tmp_path, variants="ppo,grpo", overrides=("critic.warmup_steps=3",), rates=(1e-4,))
    jobs = asked.jobs()
    assert set(asked.rate_jobs()) == {"ppo", "grpo"}
    assert jobs[0].config["critic"]["warmup_steps"] == 3 and jobs[1].config["critic"] is None
    with pytest.raises(UserError, match="critic.warmup_stepz=3: none of the methods has a critic"):
        made(tmp_path, variants="grpo", overrides=("critic.warmup_stepz=3",)).jobs()


def test_shorter_runs_trace_nothing(tmp_path):
    asked = made(tmp_path, overrides=("train.steps=24", "profile.steps=[9, 12]"), rates=(1e-4,))
    assert asked.jobs()[0].config["profile"] == {"steps": [9, 12]}
    assert asked.rate_jobs()["grpo"][1e-4].config["profile"] == {"steps": None}


def test_runs_of_equal_tokens(tmp_path):
    given = ("train.steps=null", "train.tokens=1000")
    asked = made(tmp_path, overrides=given, rates=(1e-4, 3e-4), rate_share=0.3)
    one = asked.jobs({"grpo": 1e-4})[0]
    assert (one.steps, one.tokens) == (None, 1000)
    assert {j.tokens for jobs in asked.rate_jobs().values() for j in jobs.values()} == {300}
    one.directory.mkdir(parents=True)
    lines = [
        {"step": 1, "sampled_tokens": 600.0},
        {"step": 1, "eval/reward": 0.5},
        {"step": 2, "sampled_tokens": 999.0},
    ]
    (one.directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert one.done() == (2, 0.999)


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
    ({"variants": "grpo,grpo"}, "grpo is there twice"),
    ({"variants": "grpo,{clip_high: 3}"}, "neither a name nor a mapping"),
    ({"variants": "{name: dapo"}, "invalid YAML"),
    ({"variants": ""}, "give one at least"),
    ({"overrides": ("train.seed=3",)}, "train.seed=3: the sweep sets train.seed itself"),
    ({"overrides": ("variant.clip_high=3",)}, "the sweep sets variant itself"),
    ({"overrides": ("optimizer.learning_rate=1",), "rates": (1e-4,)}, "sets optimizer.learning_rate itself"),
    ({"rates": (1e-4, 1e-4)}, "give different numbers over 0"),
    ({"rates": (-1.0,)}, "give different numbers over 0"),
    ({"rate_share": 0.5}, "goes with --rates"),
    ({"rates": (1e-4,), "rate_share": 5 / 60}, "5 steps end before optimizer.warmup_steps=5"),
    ({"rates": (1e-4,), "overrides": ("data.validation=null",)}, "give the recipe data.validation"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_starts(tmp_path, given, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        sweep.run(made(tmp_path, **given), Queue(tmp_path, {}))
    assert not list(tmp_path.iterdir())


def test_fresh_seeds_are_the_ones_that_are_asked_for(tmp_path):
    asked = made(tmp_path, seeds=sweep.read_seeds("5-7"))
    assert [job.name for job in asked.jobs()] == [f"{name}_{seed}" for seed in (5, 6, 7) for name in asked.methods()]
    assert [job.config["train"]["seed"] for job in asked.jobs()] == [5, 5, 6, 6, 7, 7]
    assert asked.rates_seed == 8
    for text in ("0", "7-5"):
        with pytest.raises(UserError, match=f"--seeds {text}: there are none"):
            sweep.read_seeds(text)
    for text in ("", "x", "-3", "3-", "1-2-3"):
        with pytest.raises(UserError, match="give how many, such as 5, or the first and the last, such as 5-9"):
            sweep.read_seeds(text)


class FakeQueue:
    """Makes each run in no time; its held-out reward is what the rate and the method give."""

    def __init__(self, reward, fails=()):
        self.reward, self.fails, self.ran = reward, fails, []

    def run(self, jobs):
        for one in jobs:
            self.ran.append(one)
            one.directory.mkdir(parents=True, exist_ok=True)
            value = self.reward(one.config["variant"]["name"], one.config["optimizer"]["learning_rate"])
            lines = [{"step": 1, "eval/reward": 9.0}, {"step": one.steps, "eval/reward": value}]
            (one.directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        failed = {one.name: ["all is lost"] for one in jobs if one.name in self.fails}
        return Outcome(done=[one for one in jobs if one.name not in failed], failed=failed)


def test_rates_are_chosen_by_the_last_held_out_reward_at_equal_cost(tmp_path, said):
    best = {"grpo": {1e-4: 0.2, 3e-4: 0.5, 1e-3: 0.5}, "dapo": {1e-4: 0.9, 3e-4: 0.5, 1e-3: None}}
    queue = FakeQueue(lambda name, rate: best[name][rate])
    asked = made(tmp_path, rates=(1e-3, 3e-4, 1e-4), rate_share=11 / 60)
    outcome = sweep.run(asked, queue)
    search, runs = queue.ran[:6], queue.ran[6:]
    assert {(j.directory.parent.name, j.steps, j.config["train"]["seed"]) for j in search} == {("rates", 11, 2)}
    rates = {(j.config["variant"]["name"], j.config["optimizer"]["learning_rate"]) for j in runs}
    assert rates == {("grpo", 3e-4), ("dapo", 1e-4)}  # of equal ones the smaller
    assert len(runs) == 4 and outcome.done == runs and {j.steps for j in runs} == {60}
    assert (
        "grpo: learning rate 0.0003, by held-out reward after 18 % of a run, seed 2: 0.001 0.500, 0.0003 0.500"
        in said()
    )
    assert "dapo-clip_high=0.3: learning rate 0.0001" in said() and said().count("at the end of the range") == 1
    again = FakeQueue(lambda name, rate: 1.0)
    sweep.run(asked, again)
    assert [j.name for j in again.ran] == [j.name for j in runs]  # the choice is kept
    sweep.run(made(tmp_path, rates=(1e-3, 3e-4), rate_share=11 / 60), again)
    assert {j.directory.parent.name for j in again.ran[4:8]} == {"rates"}  # asked anew


def test_a_choice_without_a_rate_that_failed_is_not_kept(tmp_path):
    asked = made(tmp_path, rates=(1e-4, 3e-4))
    first = FakeQueue(lambda name, rate: rate, fails=("grpo_0.0003",))
    assert list(sweep.run(asked, first).failed) == ["grpo_0.0003"]
    assert {j.config["optimizer"]["learning_rate"] for j in first.ran[4:] if j.name.startswith("grpo")} == {1e-4}
    assert list(json.loads((tmp_path / "rates.json").read_text())) == ["dapo-clip_high=0.3"]
    again = FakeQueue(lambda name, rate: rate)
    assert not sweep.run(asked, again).failed
    assert [j.name for j in again.ran[:2]] == ["grpo_0.0001", "grpo_0.0003"]  # tried again, and chosen
    assert {j.config["optimizer"]["learning_rate"] for j in again.ran[2:]} == {3e-4}


def test_a_method_without_any_held_out_reward_is_left_out(tmp_path, said):
    queue = FakeQueue(lambda name, rate: 0.5 if name == "grpo" else None)
    outcome = sweep.run(made(tmp_path, rates=(1e-4, 3e-4)), queue)
    assert outcome.failed == {"dapo-clip_high=0.3": ["no learning rate gave a held-out reward"]}
    assert {j.config["variant"]["name"] for j in queue.ran[4:]} == {"grpo"}
    assert "dapo-clip_high=0.3: no learning rate gave a held-out reward; its runs are left out" in said()
    assert {j.steps for j in queue.ran[:4]} == {15}  # a quarter


# ------------------------------------------------------------------------------------------ command line


@pytest.mark.parametrize(("arguments", "message"), [
    (["--devices", "0,0"], "--devices 0,0: give different numbers"),
    (["--devices", "a"], "--devices a"),
    (["--rates", "low,high"], "--rates low,high: give numbers"),
    (["train.stepz=3"], "did you mean 'steps'"),
])  # fmt: skip
def test_mistakes_of_the_command_line(arguments, message, tmp_path, capsys):
    given = ["sweep", QUICKSTART, "--variants", "grpo", "--to", str(tmp_path / "new"), *arguments]
    assert cli.main(given) == 2 and message in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_what_failed_is_told(tmp_path, capsys, monkeypatch):
    failed = {"grpo": ["no learning rate gave a held-out reward"], "grpo_1": ["all is lost"]}
    monkeypatch.setattr(sweep, "run", lambda *_: Outcome(failed=failed))
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
    assert command[1:4] == ("-m", "grpojax.tools.cli", "train")
    assert {"train.steps=2", "train.eval_every=1"} <= set(command)
    assert env["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "new" / "cache")
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"grpojax report {tmp_path}/new/runs --to {tmp_path}/new/report.html"
    )


@pytest.mark.parametrize("module", [sweep, jobs_module])
def test_examples(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.exhaustive(
    "run/test_sweep.py::test_the_command_starts_trainers_that_share_a_cache_and_says_what_comes_next"
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
