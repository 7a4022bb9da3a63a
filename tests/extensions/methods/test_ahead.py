"""Rollouts that are drawn while the step before is judged and learned from (``rollout.ahead``)."""

import contextlib
import functools
import json
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest
import runs
import spies
from jax.extend.core import Primitive
from runs import numbers, opened, plain_source

from grpojax import data
from grpojax.host import on_host
from grpojax.host.errors import UserError
from grpojax.records import metrics as tracking
from grpojax.run import learn
from grpojax.run import recipe as config
from grpojax.train import train
from grpojax.types import Rollout

EVEN_TOO = (
    "rewards=[{name: 'tiny_run:length'}, {name: format, weight: 0, options: {pattern: '.*[02468].*'}, label: even}]"
)
KINDS = {
    "plain": ("train.minibatches=2",),
    "filter": (EVEN_TOO, "filter={metric: even, max_rollouts: 3}"),
    "greedy": ("variant={name: remax, importance: truncate}", "rollout.group=3", "rollout.prompts=5"),
    "culling": ("variant=culling", "filter=none", "rollout.retire={success: 5.0}", "rollout.prompts=10"),
}


WAITS = ("rollout", "score", "reward", "update")


def load(recipe, directory, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", "data.validation=null", "rollout.ahead=1", "train.steps=5", "train.checkpoint_every=2",
        "train.eval_every=0", *overrides,
    ])  # fmt: skip


def lines_of(directory):
    return [line for line in numbers(directory) if "reward" in line]


def copied(state):
    return jax.tree.map(lambda x: np.array(x), state.networks["policy"].params)


@pytest.mark.in_ci("plain")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "greedy"])
def test_samples_are_of_the_weights_before_the_step_that_they_were_drawn_beside(recipe, tmp_path, kind):
    """Drawn anew under those weights they are the same, bit for bit; so are their log-probs."""
    trainer = opened(load(recipe, tmp_path / "run", *KINDS[kind]))
    versions, seen = {0: copied(trainer.state)}, []

    def note(updates):
        seen.append(updates.batch)
        versions[trainer.state.updates] = copied(trainer.state)

    assert train(trainer, note)
    lines, updates = lines_of(tmp_path / "run"), trainer.config.train.updates_a_rollout
    assert updates == {"plain": 2, "greedy": 1}[kind]
    assert [line["rollout/version"] for line in lines] == [updates * n for n in (0, 0, 1, 2, 3)]
    assert [line["rollout/staleness"] for line in lines] == [updates * n for n in (0, 1, 1, 1, 1)]
    for number, (line, batch) in enumerate(zip(lines, seen, strict=True)):
        prompts = data.to_prompts(batch.problems, 8, trainer.config.rollout.group)
        params = jax.tree.map(jax.numpy.asarray, versions[int(line["rollout/version"])])
        key = jax.random.fold_in(jax.random.key(0), number)
        again = trainer.policy.sample(params, prompts, key, trainer.config.rollout)
        for got, want in zip(jax.tree.leaves(batch.rollout), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_the_ratio_is_that_to_the_policy_that_drew_them(recipe, tmp_path):
    """One update a step: with the samples' own weights it would be 1 throughout."""
    trainer = opened(load(recipe, tmp_path / "run"))
    assert trainer.method.variant.objective.ratio_denominator == "sampler" and not trainer.method.needs_old_logps(1)
    assert train(trainer)
    ratios = [line["ratio_mean"] for line in lines_of(tmp_path / "run")]
    assert ratios[0] == pytest.approx(1.0, abs=1e-6) and all(abs(r - 1) > 1e-4 for r in ratios[1:])


@pytest.mark.slow
def test_with_an_importance_the_policy_itself_is_corrected_to_the_sampler(recipe, tmp_path):
    trainer = opened(load(recipe, tmp_path / "run", "variant={name: grpo, importance: truncate}", "train.steps=3"))
    assert trainer.config.method.variant.objective.ratio_denominator == "trainer" and not trainer.scores_policy
    assert train(trainer)
    lines = lines_of(tmp_path / "run")
    assert [line["ratio_mean"] for line in lines] == pytest.approx([1.0] * 3, abs=1e-6)
    assert lines[0]["importance_mean"] == pytest.approx(1.0, abs=1e-6)
    assert all(abs(line["importance_mean"] - 1) > 1e-4 for line in lines[1:])


@pytest.mark.usefixtures("fakes")
@pytest.mark.in_ci("plain")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "culling"])
def test_a_run_that_is_stopped_or_killed_goes_on_with_the_rollout_in_flight(recipe, tmp_path, kind):
    """Once by SIGTERM while it waits for a rollout, once without a word after a save."""
    assert train(opened(load(recipe, tmp_path / "whole", *KINDS[kind])))
    stopped = opened(load(recipe, tmp_path / "parts", *KINDS[kind]))
    assert not train(stopped, lambda *_: stopped.state.step == 3 and os.kill(os.getpid(), signal.SIGTERM))
    killed = opened(load(recipe, tmp_path / "parts", *KINDS[kind]))
    assert (
        killed.state.step == 3
        and killed.source.in_flight.number == killed.state.rollouts - 1
        and killed.state.in_flight is None
    )
    drawn, plain = [], killed.policy.sample
    killed.policy.sample = lambda *given, **more: drawn.append(given) or plain(*given, **more)

    def die(*given):
        if killed.state.step == 4:
            raise KeyboardInterrupt
        return plain_update(*given)

    plain_update = spies.update_by(killed, die)
    with pytest.raises(KeyboardInterrupt):
        train(killed)
    again = opened(load(recipe, tmp_path / "parts", *KINDS[kind]))
    assert again.state.step == 4 and train(again)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@pytest.mark.usefixtures("fakes")
@pytest.mark.exhaustive(
    "extensions/methods/test_ahead.py::test_a_run_that_is_stopped_or_killed_goes_on_with_the_rollout_in_flight"
)
def test_a_budget_that_is_raised_goes_on_with_the_rollout_that_was_drawn_for_the_next_step(recipe, tmp_path):
    """Of a budget of tokens it is not known before a step is judged whether it is the last."""
    given = "train.steps=null", "train.minibatches=2", "train.checkpoint_every=0"
    assert train(opened(load(recipe, tmp_path / "parts", *given, "train.tokens=300")))
    again = opened(load(recipe, tmp_path / "parts", *given, "train.tokens=700"))
    assert again.source.in_flight.number == again.state.step > 1 and train(again)
    assert train(opened(load(recipe, tmp_path / "whole", *given, "train.tokens=700")))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@pytest.mark.exhaustive(
    "extensions/methods/test_ahead.py::test_a_run_that_is_stopped_or_killed_goes_on_with_the_rollout_in_flight"
)
@pytest.mark.parametrize(
    ("more", "devices"),
    [((), 1), (("rollout.overlap=0.25", "rollout.max_tokens=16"), 1), (("mesh.rollout=1",), 2)],
    ids=["plain", "overlap", "apart"],
)
def test_kill_9_in_the_middle_of_a_step_goes_on_with_the_rollout_in_flight(recipe, tmp_path, more, devices):
    assert train(opened(load(recipe, tmp_path / "whole", "train.checkpoint_every=1", *more), devices))
    short = [
        "data.validation=null",
        "rollout.ahead=1",
        "train.steps=5",
        "train.checkpoint_every=1",
        "train.eval_every=0",
    ]
    short += more
    process = runs.start(recipe, tmp_path / "run", *short, devices=devices)
    for line in process.stdout:
        if "step 3/5" in line:
            process.kill()
            break
    process.wait()
    assert process.returncode == -signal.SIGKILL
    again = opened(load(recipe, tmp_path / "run", "train.checkpoint_every=1", *more), devices)
    assert 1 <= again.state.step < 5 and train(again)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def end_together(pair):
    """The statuses of the processes of a run, once all have ended."""
    said = [process.communicate(timeout=600)[0] for process in pair]
    statuses = [process.returncode for process in pair]
    assert set(statuses) <= {0, os.EX_TEMPFAIL}, said
    return statuses


@pytest.mark.exhaustive("run/test_train.py::test_several_processes_train_as_one_stop_as_one_and_go_on")
def test_two_processes_that_are_stopped_go_on_with_the_rollout_in_flight(recipe, tmp_path):
    """SIGTERM to the second; both save what is in flight, groups that wait among it, and are bit-equal to two that
    were left alone."""
    given = ["data.validation=null", "rollout.ahead=1", "train.steps=5", "train.eval_every=0", "mesh.fsdp=2",
             "rollout.overlap=0.25", "rollout.max_tokens=16"]  # fmt: skip

    def begin(name):
        return runs.start_together(recipe, tmp_path / name, *given, processes=2, devices=1)

    assert end_together(begin("whole")) == [0, 0]
    pair = begin("parts")
    for line in pair[0].stdout:
        if "step 2/5" in line:
            pair[1].send_signal(signal.SIGTERM)
            break
    assert end_together(pair) == [os.EX_TEMPFAIL] * 2
    (record,) = (tmp_path / "parts" / "checkpoints").glob("*/meta/metadata")
    assert '"in_flight"' in record.read_text()
    assert end_together(begin("parts")) == [0, 0]
    lines = lines_of(tmp_path / "parts")
    assert len(lines) == 5 and lines == lines_of(tmp_path / "whole")
    assert max(line["rollout/waiting"] for line in lines) > 0


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_what_is_drawn_for_a_filter_is_of_the_newest_weights(recipe, tmp_path):
    trainer = opened(load(recipe, tmp_path / "run", *KINDS["filter"]))
    made, plain = [], trainer.source.source.start
    trainer.source.source.start = lambda state: made.append((state.step, plain(state))) or made[-1][1]
    assert train(trainer)
    assert [in_flight.number for _, in_flight in made] == list(range(len(made))) and len(made) > 5
    assert {in_flight.version - step for step, in_flight in made} == {0}  # each at the weights of its moment
    assert {line["rollout/staleness"] for line in lines_of(tmp_path / "run")[1:]} == {1.0}


@pytest.mark.usefixtures("fakes")
@pytest.mark.exhaustive("run/test_rollouts.py::test_solved_prompts_are_not_drawn_in_later_passes")
def test_what_is_solved_is_left_out_one_rollout_later(recipe, tmp_path):
    """All thirty are solved in the first pass of three rollouts; the fourth is chosen before the third is judged."""
    rows = [json.loads(line) for line in (recipe.parent / "sums.jsonl").read_text().splitlines()]
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps(r | {"level": float(i % 3 == 0)}) for i, r in enumerate(rows))
    )
    given = (f"data.train={tmp_path / 'data.jsonl'}", "rewards.0.name=tiny_run:level", "filter=none", "variant=culling",
             "rollout.prompts=10", "rollout.max_tokens=4", "train.steps=4", "rollout.group=2")  # fmt: skip
    known = {}
    for ahead in (0, 1):
        trainer = opened(load(recipe, tmp_path / str(ahead), *given, f"rollout.ahead={ahead}"))
        order = plain_source(trainer).order
        asked, plain = known.setdefault(ahead, []), order.draw
        order.draw = lambda n, c=order, p=plain, a=asked: a.append(len(c._solved)) or p(n)
        assert train(trainer)
    assert known == {0: [0, known[0][1], known[0][2], 10], 1: [0, 0, known[0][1], known[0][2]]} and known[0][1] > 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("variant={name: grpo, ratio_denominator: trainer}",),
            "'grpo' with ratio_denominator=trainer ignores.*variant.ratio_denominator",
        ),
        (("variant=gpg",), "'gpg' has no ratio.*variant.importance=truncate"),
        (("variant=xrpo",), "'xrpo' gives samples to prompts by earlier rewards; set rollout.ahead=0"),
        (("variant={name: gt_likelihood, train_on: spliced}",), "'gt_likelihood' with train_on=spliced"),
        (("rollout.ahead=2",), "ahead=2"),
    ],
)
def test_what_cannot_be_corrected_is_refused(recipe, tmp_path, overrides, said):
    with pytest.raises(UserError, match=said):
        load(recipe, tmp_path / "run", *overrides)


def test_an_update_a_step_moves_the_ratio_so_that_llds_acts(recipe, tmp_path):
    with pytest.raises(UserError, match="llds_coef acts from the second update"):
        load(recipe, tmp_path / "run", "variant=llds", "rollout.ahead=0")
    with pytest.raises(UserError, match="llds_coef acts from the second update"):
        load(recipe, tmp_path / "run", "variant={name: llds, importance: truncate}")
    assert load(recipe, tmp_path / "run", "variant=llds").method.variant.objective.ratio_denominator == "sampler"


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_the_last_step_draws_nothing_ahead(recipe, tmp_path):
    trainer = opened(load(recipe, tmp_path / "run", "train.steps=2"))
    assert train(trainer)
    assert trainer.source.in_flight is None and trainer.source.source.rollouts == 2
    assert "time/rollout_s" in tracking.read_metrics(tmp_path / "run")[-1]
    source = trainer.source.source
    assert isinstance(source.start(trainer.state).arrived().rollout, Rollout)


@pytest.mark.slow
def test_a_slow_reward_is_waited_for_beside_the_next_rollout(recipe, tmp_path):
    """The reward takes 0.2 s, which the host waits for either way; no second of it is counted twice."""
    for ahead in (0, 1):
        trainer = opened(load(recipe, tmp_path / str(ahead), f"rollout.ahead={ahead}", "train.steps=4"))
        plain, began = plain_source(trainer).rewards.combine, []

        def combine(*given, trainer=trainer, plain=plain, began=began):
            began.append(plain_source(trainer).rollouts - len(began))
            time.sleep(0.2)
            return plain(*given)

        plain_source(trainer).rewards.combine = combine
        started = time.perf_counter()
        assert train(trainer)
        seconds = time.perf_counter() - started
        lines = [line for line in tracking.read_metrics(tmp_path / str(ahead)) if "reward" in line]
        assert all(line["time/reward_s"] >= 0.2 for line in lines)
        total = {name: sum(line[f"time/{name}_s"] for line in lines) for name in ("data", "step", *WAITS)}
        assert sum(total[name] for name in WAITS) <= total["step"] <= seconds
        assert 0 < total["data"] < total["step"]
        assert began == ([1, 1, 1, 1], [2, 2, 2, 1])[ahead]


def asked_beside(load_trainer, stray, monkeypatch):
    """What jax is asked for while the first step is judged and learned from: names, by the device that it is asked of.

    That is ``stray`` where nobody says another; what is compiled for it already would not be seen. What the
    run's programs do is left out, and so is what only brings arrays to the device: both are put behind what the device
    has to do, and nobody waits for them.
    """
    asked, bind = {}, Primitive.bind

    def note(self, *given, **options):
        if threading.current_thread() is not threading.main_thread():  # it compiles ahead
            return bind(self, *given, **options)
        place = jax.config.values["jax_default_device"]
        asked.setdefault(place, set()).add(options.get("name", str(self)))
        return bind(self, *given, **options)

    def program(_, call, *given):
        with monkeypatch.context() as inside, jax.default_device(None):
            inside.setattr(Primitive, "bind", bind)
            return call(*given)

    spies.watch(monkeypatch, program)
    trainer = load_trainer()
    first, last, elsewhere = learn.replaced, learn.end_step, contextlib.ExitStack()

    def begins(*given):  # the samples are there
        if not trainer.state.step:
            elsewhere.enter_context(jax.default_device(stray))
            monkeypatch.setattr(Primitive, "bind", note)
        return first(*given)

    def ends(*given):  # the updates are under way
        elsewhere.close()
        monkeypatch.setattr(Primitive, "bind", bind)
        return last(*given)

    monkeypatch.setattr(learn, "replaced", begins)
    monkeypatch.setattr(learn, "end_step", ends)
    assert train(trainer)
    for names in asked.values():
        names.discard("device_put")
    return {place: names for place, names in asked.items() if names}


SHORT = "rewards=[{name: soft_overlong, options: {max_tokens: 8, buffer: 2}}, {name: 'tiny_run:parity'}]"
BESIDE = {
    "ppo": ("variant=ppo",),
    "nthr": ("variant=nthr", SHORT),
}


@pytest.mark.in_ci("ppo")
@pytest.mark.slow
@pytest.mark.parametrize("kind", BESIDE)
def test_between_a_rollout_and_its_updates_the_device_is_asked_for_programs_alone(recipe, tmp_path, monkeypatch, kind):
    """Anything else would be answered after the next rollout, and the updates wait for it; another CPU does it here."""
    host, *others = jax.devices()[:2:-1]
    monkeypatch.setattr(on_host, "device", lambda: host)
    run = functools.partial(opened, load(recipe, tmp_path / "run", *BESIDE[kind], "train.steps=2"))
    asked = asked_beside(run, others[[*BESIDE].index(kind)], monkeypatch)
    assert set(asked) == {host} and len(asked[host]) > 3, asked
