"""What a step learns from: which samples weigh, in which update, against which log-probs."""

import dataclasses
import functools
import json
import logging
import weakref

import jax
import numpy as np
import pytest
import runs
import spies
from jax.extend.core import Primitive
from runs import add_step, numbers

from grpojax.host.errors import UserError
from grpojax.records.samples import read_samples
from grpojax.run import learn
from grpojax.run import recipe as config
from grpojax.run.alarms import Limits
from grpojax.run.store import Store
from grpojax.train import train
from grpojax.types import Rollout


def load(recipe, directory, *overrides):
    short = ("train.steps=2", "data.validation=null", "rewards.0.name=tiny_run:parity", "variant.kl_coef=0",
             "rollout.max_tokens=4")  # fmt: skip
    return config.load(recipe, [f"run.dir={directory}", *short, *overrides])


def opened(recipe, devices=1, eos_ids=()):
    """All samples of one length as a rule: an update compiles once."""
    return runs.opened(recipe, devices=devices, eos_ids=eos_ids)


def lines(directory):
    return [line for line in numbers(directory) if "reward" in line]


def watch(trainer, seen):
    """Has ``seen`` collect the packed minibatches of every update."""

    def train_step(state, frozen, packed):
        seen.append(jax.tree.map(np.asarray, packed))
        return plain(state, frozen, packed)

    plain = spies.update_by(trainer, train_step)


@pytest.mark.usefixtures("fakes")
def test_what_a_rollout_holds_is_let_go_before_its_samples_are_scored(recipe, tmp_path, monkeypatch):
    """Such as caches and weights on the devices."""
    trainer, held, alive = opened(load(recipe, tmp_path / "run", "train.steps=1")), [], []
    begin, score = trainer.source.begin, learn.score

    def holding(state):
        batch, weights = begin(state), np.zeros(1)
        held.append(weakref.ref(weights))
        return dataclasses.replace(batch, arrive=functools.partial(lambda weights, b: batch.arrive(b), weights))

    monkeypatch.setattr(trainer.source, "begin", holding)
    monkeypatch.setattr(learn, "score", lambda *given: alive.append(held[0]() is not None) or score(*given))
    assert train(trainer)
    assert alive == [False]


# --- what weighs


@pytest.mark.parametrize("name", ["rloo", "gpg", "opo", "gtpo"])
@pytest.mark.parametrize("several", ["train.ppo_epochs=2", "train.minibatches=2"])
def test_a_method_without_a_ratio_takes_one_update_a_rollout(recipe, tmp_path, name, several):
    with pytest.raises(UserError, match=f"variant '{name}' has no importance ratio.*not 2.*variant.ratio"):
        load(recipe, tmp_path / "run", f"variant={name}", several)
    assert load(recipe, tmp_path / "run", f"variant={{name: {name}, ratio: token}}", several)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    "truncated", ["mask", *(pytest.param(t, marks=pytest.mark.exhaustive) for t in ("train", "drop"))]
)
def test_samples_cut_at_the_limit(recipe, tmp_path, truncated):
    """Masked they weigh nothing; dropped, their group's mean does not know of them either."""
    trainer = opened(load(recipe, tmp_path / "run", f"train.truncated={truncated}", "train.steps=1",
                           "variant=dr_grpo", "rewards.0.name=tiny_run:length"), eos_ids=None)  # fmt: skip
    seen = []
    watch(trainer, seen)
    assert train(trainer)
    (line,) = lines(tmp_path / "run")
    assert 0 < line["completions/clipped_ratio"] < 1
    _, samples = read_samples(tmp_path / "run", 1)
    for i in range(0, len(samples), 4):
        group = samples[i : i + 4]
        rewards = np.array([s["reward"] for s in group])
        ended = np.array([s["stop"] == "eos" for s in group])
        counted = ended if truncated == "drop" else np.ones(4, bool)
        want = np.where(counted, rewards - rewards[counted].mean(), 0.0) if counted.any() else np.zeros(4)
        np.testing.assert_allclose([s["advantage"] for s in group], want, atol=1e-5)
    weights, ends = seen[0].arrays["weights"], seen[0].offsets == 3
    cut_tokens = sum(s["length"] for s in samples if s["stop"] == "length")
    weighing = (weights > 0).sum()
    assert weighing == sum(s["length"] for s in samples) - (0 if truncated == "train" else cut_tokens)
    assert ends.any()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("truncated", ["drop", "mask", "train"])
def test_a_filter_counts_cut_samples_where_the_statistics_do(recipe, tmp_path, truncated):
    """With "mask" the samples that ended learn from the difference to cut ones, and a group without them does not."""
    settings = "filter={max_rollouts: 1}", f"train.truncated={truncated}"
    trainer = opened(load(recipe, tmp_path / "run", *settings), eos_ids=None)
    batch = trainer.source.begin(trainer.state).arrived().with_rewards()
    ended = np.array(batch.rollout.stopped)
    (name,) = batch.by_name
    ended[0] = False
    values = ended.astype(np.float32)
    values[0, 0] = 1.0  # a group whose samples are all cut, and differ
    rollout = dataclasses.replace(batch.rollout, stopped=ended)
    keeps = trainer.source.keeps(dataclasses.replace(batch, rollout=rollout, by_name={name: values}))
    mixed = ended.any(1) & ~ended.all(1)
    assert mixed.any()
    differ = {"drop": np.zeros_like(mixed), "mask": mixed, "train": mixed | (np.arange(len(mixed)) == 0)}
    np.testing.assert_array_equal(keeps, differ[truncated])
    trainer.close()


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_an_update_in_which_nothing_weighs_is_not_taken(recipe, tmp_path, monkeypatch):
    """Adam would move by its momentum, and count the step."""
    trainer = opened(load(recipe, tmp_path / "run", "rewards.0.name=tiny_run:parity", "train.minibatches=2"))
    plain, judged = learn.weigh, []

    def weigh(run, networks, minis, batch, signals):
        if run.state.step == 1:  # a first update has given Adam its momentum
            batch = dataclasses.replace(batch, total=np.full_like(batch.total, np.nan))
            judged.append(jax.tree.map(np.asarray, networks["policy"]))
        return plain(run, networks, minis, batch, signals)

    monkeypatch.setattr(learn, "weigh", weigh)
    assert train(trainer)
    jax.tree.map(np.testing.assert_array_equal, trainer.state.networks["policy"], judged[0])
    assert int(judged[0].step) == 2
    first, second = lines(tmp_path / "run")
    assert first["empty_updates"] == 0 and second["empty_updates"] == 2 and "loss" not in second


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_dropped_groups_are_spread_over_the_minibatches(recipe, tmp_path, monkeypatch):
    overrides = ("train.minibatches=2", "filter={max_rollouts: 1}", "rollout.group=3", "train.steps=3")
    trainer = opened(load(recipe, tmp_path / "run", *overrides))
    seen = []
    plain = learn.weigh

    def weigh(run, networks, minis, batch, signals):
        seen.append([(~batch.dropped[m.prompts]).sum() for m in minis])
        return plain(run, networks, minis, batch, signals)

    monkeypatch.setattr(learn, "weigh", weigh)
    assert train(trainer)
    assert any(sum(live) < 8 for live in seen) and all(abs(a - b) <= 1 for a, b in seen)


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_minibatches_are_the_same_on_any_number_of_devices(recipe, tmp_path, monkeypatch):
    places, plain = [], learn.update

    def update(run, state, minis, **options):
        places.append([m.layout.batch_shape[0] * [*m.prompts] and m.prompts.tolist() for m in minis])
        return plain(run, state, minis, **options)

    monkeypatch.setattr(learn, "update", update)
    for devices in (1, 4):
        overrides = ("train.minibatches=2", "train.steps=1", f"mesh.fsdp={devices}")
        trainer = opened(load(recipe, tmp_path / str(devices), *overrides), devices=devices)
        assert train(trainer)
    assert places[0] == places[1] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --- against which log-probs


def noisy(trainer, size=0.1):
    """The sampler's log-probs as a coarser arithmetic would give them."""
    plain, rng = trainer.policy.fetch, np.random.default_rng(0)

    def fetch(rollout, n, **turn):
        got = plain(rollout, n, **turn)
        noise = size * rng.standard_normal(got.logps.shape).astype(np.float32)
        return Rollout(tokens=got.tokens, logps=got.logps + noise, lengths=got.lengths, stopped=got.stopped)

    trainer.policy.fetch = fetch


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_a_kl_in_the_reward_is_of_the_trainers_log_probs(recipe, tmp_path):
    """Policy and reference are equal and every reward is 0: the sampler's rounding alone gave advantages."""
    trainer = opened(load(recipe, tmp_path / "run", "variant={name: rloo, kl_coef: 1.0}", "train.steps=1",
                           "rewards.0.name=answer_format"))  # fmt: skip
    noisy(trainer)
    assert train(trainer)
    _, samples = read_samples(tmp_path / "run", 1)
    assert max(abs(s["advantage"]) for s in samples) < 1e-4
    (line,) = lines(tmp_path / "run")
    assert line["sampling/logp_difference_mean"] > 0.05


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_a_ratio_anchored_at_the_sampler_needs_no_old_pass(recipe, tmp_path, monkeypatch):
    overrides = ("train.minibatches=2", "train.steps=1")
    for ratio_denominator in ("sampler", "trainer"):
        ran = spies.record(monkeypatch)
        trainer = opened(
            load(
                recipe,
                tmp_path / ratio_denominator,
                *overrides,
                f"variant={{name: grpo, kl_coef: 0, ratio_denominator: {ratio_denominator}}}",
            )
        )
        noisy(trainer)
        seen = []
        watch(trainer, seen)
        assert train(trainer)
        assert len([name for name, _ in ran if name == "score"]) == (0 if ratio_denominator == "sampler" else 2)
        tokens = seen[0].arrays
        assert ("old_logps" in tokens) == (ratio_denominator == "trainer")
        if "old_logps" in tokens:
            assert np.abs(tokens["old_logps"] - tokens["sampler_logps"]).max() > 0.1
    with pytest.raises(UserError, match="ratio_denominator"):
        load(recipe, tmp_path / "no", "variant={name: grpo, ratio_denominator: sampler, importance: truncate}")


@pytest.mark.in_ci("clip_cov")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_picked_from_the_whole_minibatch(recipe, tmp_path, name):
    """Whatever the micro-batches; a share of each would round up to one token in every one of them."""
    picked = []
    for microbatches in (1, 4):
        options = {"clip_cov": "covariance_low: 0.0, covariance_high: 100.0, ", "kl_cov": ""}[name]
        trainer = opened(load(
            recipe, tmp_path / str(microbatches), "train.steps=1", f"train.microbatches={microbatches}",
            f"variant={{name: {name}, {options}covariance_fraction: 0.05}}",
        ))  # fmt: skip
        seen = []
        watch(trainer, seen)
        assert train(trainer)
        rows, mask = seen[0], seen[0].arrays["covariance_mask"]
        picked.append(sorted(zip(rows.tokens[mask].tolist(), rows.offsets[mask].tolist(), strict=True)))
        tokens = int((rows.segments > 0).sum())
        assert 1 <= mask.sum() <= max(int(0.05 * tokens + 1e-3), 1) + 2
    assert picked[0] == picked[1]


# --- between steps


@pytest.mark.slow
def test_the_reference_is_refreshed_and_resumed(recipe, tmp_path):
    overrides = ("variant.kl_coef=0.1", "train.reference_every=2", "train.reference_mix=0.25", "train.steps=4",
                 "train.checkpoint_every=1")  # fmt: skip
    trainer = opened(load(recipe, tmp_path / "whole", *overrides))
    start = jax.tree.map(np.asarray, trainer.state.networks["reference"])
    kept = {}

    def keep(updates):
        networks = trainer.state.networks
        kept[updates.number] = jax.tree.map(np.asarray, (networks["policy"].params, networks["reference"]))

    assert train(trainer, keep)
    jax.tree.map(np.testing.assert_array_equal, kept[1][1], start)
    mixed = jax.tree.map(lambda p, r: 0.25 * p + 0.75 * r, kept[2][0], start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), kept[2][1], mixed)
    jax.tree.map(np.testing.assert_array_equal, kept[3][1], kept[2][1])

    first = opened(load(recipe, tmp_path / "parts", *overrides))
    assert not train(first, lambda *_: first.state.step == 3 and first.control.ask("SIGTERM"))
    again = opened(load(recipe, tmp_path / "parts", *overrides))
    assert again.state.step == 3 and train(again)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    with pytest.raises(UserError, match="reference_every=2: there is no reference"):
        load(recipe, tmp_path / "no", "train.reference_every=2")


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_an_adaptive_entropy_bonus_moves_and_resumes(recipe, tmp_path):
    overrides = ("variant={name: grpo, kl_coef: 0, entropy_target: 100.0, entropy_step: 0.25}", "train.steps=3",
                 "train.checkpoint_every=1")  # fmt: skip
    assert train(opened(load(recipe, tmp_path / "whole", *overrides)))
    coefs = [line["entropy_coef"] for line in lines(tmp_path / "whole")]
    assert np.diff(coefs).tolist() == [0.25, 0.25]
    first = opened(load(recipe, tmp_path / "parts", *overrides))
    assert not train(first, lambda *_: first.state.step == 2 and first.control.ask("SIGTERM"))
    assert train(opened(load(recipe, tmp_path / "parts", *overrides)))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


# --- what is said of it


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_metrics_are_of_all_that_was_drawn(recipe, tmp_path):
    """The reward of the groups that a filter kept is always mixed; that of all drawn is the policy's."""
    plain, counted = [], {}
    trainer = opened(load(recipe, tmp_path / "run", "filter={max_rollouts: 4}", "rollout.group=2"))
    wait = trainer.source.submit

    def submit(problems, rollout):
        got = wait(problems, rollout)
        plain.append(
            (
                trainer.state.step + 1,
                got.with_rewards,
                sum(len(p.ids) for p in problems) * 2 + int(rollout.lengths.sum()),
            )
        )
        return got

    trainer.source.submit = submit
    assert train(trainer)
    tokens = 0
    for line in lines(tmp_path / "run"):
        drawn = [(rewarded(), n) for step, rewarded, n in plain if step == line["step"]]
        counted[line["step"]] = len(drawn)
        total = np.concatenate([judged.total for judged, _ in drawn])
        tokens += sum(n for _, n in drawn)
        assert line["reward"] == pytest.approx(total.mean()) and line["num_tokens"] == tokens
        same = (total == total[:, :1]).all(1)
        assert line["frac_reward_zero_std"] == pytest.approx(same.mean())
        assert line["kept/frac_reward_zero_std"] == 0 and line["kept/reward"] == pytest.approx(0.5)
    assert max(counted.values()) > 1


@pytest.mark.slow
def test_variants_that_are_the_same_at_one_update_say_so(recipe, tmp_path, caplog):
    caplog.set_level(logging.INFO, "grpojax")
    opened(load(recipe, tmp_path / "one", "variant=gspo")).close()
    assert "gspo has the gradient of GRPO's loss" in caplog.text
    caplog.clear()
    opened(load(recipe, tmp_path / "two", "variant=gspo", "train.minibatches=2")).close()
    assert "one update" not in caplog.text


# --- what goes wrong in the middle


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("place", ["evaluate", "draw", "keep", "weigh"])
@pytest.mark.slow
def test_a_mistake_that_shows_late_costs_nothing(recipe, tmp_path, monkeypatch, place):
    """A judge that is none, a data set that is used up: what was learned is saved, metrics and all."""
    held_out = (f"data.validation={recipe.parent / 'sums.jsonl'}", "train.eval_limit=8") if place == "evaluate" else ()
    trainer = opened(load(recipe, tmp_path / "run", "train.steps=5", "filter={max_rollouts: 1}", *held_out))
    owner, name = {
        "evaluate": (trainer.held_out, "evaluate"),
        "draw": (trainer.source, "next"),
        "keep": (trainer.source, "keeps"),
        "weigh": (learn, "weigh"),
    }[place]
    plain = getattr(owner, name)

    def mistaken(*args):
        if trainer.state.step == (5 if place == "evaluate" else 2):
            raise UserError("only now is it seen")
        return plain(*args)

    monkeypatch.setattr(owner, name, mistaken)
    with pytest.raises(UserError, match="only now"):
        train(trainer)
    done = 5 if place == "evaluate" else 2
    assert trainer.store.checkpoints.steps()[-1] == done and len(lines(tmp_path / "run")) == done


@pytest.mark.usefixtures("fakes")
def test_a_filter_that_cannot_judge_is_the_users_to_mend(recipe, tmp_path):
    trainer = opened(load(recipe, tmp_path / "run", "variant=ngrpo", "rewards.0.name=tiny_run:length"), eos_ids=None)
    with pytest.raises(UserError, match="filter of variant 'ngrpo'"):
        train(trainer)


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_nothing_of_a_finished_step_asks_the_device(recipe, tmp_path, monkeypatch):
    """The next rollout is under way by then: whatever is computed there waits for it, and its time is lost."""
    options = "variant={name: grpo, kl_coef: 0, entropy_target: 1.0}"
    trainer = opened(load(recipe, tmp_path / "run", options, "train.steps=4", "rollout.group=8"))
    trainer.journal.watch.limits = Limits(jump=0.0, jump_nats=-100.0)  # rings at the second step
    plain, asked, bind = trainer.journal._record, [], Primitive.bind

    def record(updates):
        monkeypatch.setattr(Primitive, "bind", lambda self, *a, **k: asked.append(self) or bind(self, *a, **k))
        plain(updates)
        monkeypatch.setattr(Primitive, "bind", bind)

    trainer.journal._record = record
    assert train(trainer) and not asked
    assert "watch/entropy_jump" in lines(tmp_path / "run")[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.minibatches=4", "mesh.fsdp=8"], "2 prompts of a batch with rollout.group=3 do not divide over 8"),
        (["train.microbatches=3"], "train.microbatches=3 splits neither 8 prompts"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_at_the_start(recipe, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        opened(
            load(recipe, tmp_path / "run", "rollout.group=3", *overrides),
            devices=8 if "mesh.fsdp=8" in overrides else 1,
        )


def test_samples_longer_than_the_models_positions_are_refused(recipe, tmp_path):
    with pytest.raises(UserError, match="rollout.max_tokens=32768 after a prompt of 4 tokens .*=32768"):
        opened(load(recipe, tmp_path / "run", "rollout.max_tokens=32768"))


# --- going on with other settings


def test_an_evaluation_without_problems_is_said_to_do_nothing(recipe, tmp_path, caplog):
    caplog.set_level(logging.INFO, "grpojax")
    opened(load(recipe, tmp_path / "run", "train.eval_every=1")).close()
    assert "train.eval_every=1 does nothing: there is no data.validation" in caplog.text


@pytest.mark.slow
def test_a_recipe_spelt_in_another_way_is_the_same_run(recipe, tmp_path):
    opened(load(recipe, tmp_path / "run", "variant=grpo")).close()
    spelt = ("variant={name: grpo}", "rewards={terms: [{name: 'tiny_run:parity'}]}")
    opened(load(recipe, tmp_path / "run", *spelt)).close()
    add_step(tmp_path / "run")
    with pytest.raises(UserError, match="rewards.combine: 'sum' -> 'normalize'"):
        opened(load(recipe, tmp_path / "run", "rewards={terms: [{name: 'tiny_run:parity'}], combine: normalize}"))


def test_a_run_goes_on_under_a_version_with_a_new_setting(recipe, tmp_path):
    config = load(recipe, tmp_path / "run")
    record = Store(config).run_directory
    add_step(tmp_path / "run")
    record.write()
    file = tmp_path / "run" / "config.json"
    stored = json.loads(file.read_text())

    def begin_as(*overrides, **changed):
        file.write_text(json.dumps(stored | changed))
        return Store(load(recipe, tmp_path / "run", *overrides)).run_directory

    before = {key: value for key, value in stored["rollout"].items() if key not in ("no_end", "weights")}
    begin_as(rollout=before).write()
    assert json.loads(file.read_text()) == stored
    with pytest.raises(UserError, match="rollout.no_end: False -> True"):
        begin_as("rollout.no_end=true", rollout=before)
    with pytest.raises(UserError, match="train.seed: 0 -> 1"):
        begin_as("train.seed=1", rollout=before)
    with pytest.raises(UserError, match=r"train.of_old: 3 -> \(absent\)"):
        begin_as(train=stored["train"] | {"of_old": 3})


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_settings_of_execution_may_differ_in_a_resumed_run(recipe, tmp_path, caplog):
    first = opened(load(recipe, tmp_path / "run", "train.steps=1"))
    assert train(first)
    caplog.set_level(logging.INFO, "grpojax")
    changed = ("train.steps=2", "train.microbatches=2", "model.remat=none", "rollout.decode_slots=2",
               "train.checkpoint_every=1", "tracking.samples=false")  # fmt: skip
    again = opened(load(recipe, tmp_path / "run", *changed))
    assert again.state.step == 1
    again.close()
    for name in ("train.steps: 1 -> 2", "train.microbatches: 1 -> 2", "model.remat: 'layer' -> 'none'"):
        assert f"resumed with a change: {name}" in caplog.text
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["microbatches"] == 2
    for refused in ("train.seed=1", "rollout.temperature=0.9", "train.minibatches=2", "variant.clip_high=0.3"):
        with pytest.raises(UserError, match="holds a run of another config"):
            opened(load(recipe, tmp_path / "run", *changed, refused))
    assert train(opened(load(recipe, tmp_path / "run", *changed, "model.remat=layer", "rollout.decode_slots=0")))
    with pytest.raises(UserError, match="train.steps=1: .* is at step 2 already"):
        opened(load(recipe, tmp_path / "run", *changed[1:], "train.steps=1"))
    with pytest.raises(UserError, match="train.steps: 2 -> 5"):  # the rate of every step depends on it
        load_as = ("optimizer.schedule=linear",)
        assert train(opened(load(recipe, tmp_path / "linear", *load_as)))
        opened(load(recipe, tmp_path / "linear", *load_as, "train.steps=5"))
