"""Groups with unfinished samples that go on in the next rollout (``rollout.overlap``)."""

import json
import os
import signal
from collections import Counter, deque

import flat_batches
import jax
import numpy as np
import pytest
import spies
from flat_batches import Flat
from runs import numbers, opened, plain_source

from grpojax import data, variants
from grpojax.advantages import Signals
from grpojax.extensions.methods import partial
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models import score
from grpojax.programs import sampler
from grpojax.run import batch, checks, run_method, step_metrics
from grpojax.run import recipe as config
from grpojax.run.run_state import State
from grpojax.run.sections import RolloutConfig
from grpojax.train import train
from grpojax.types import Rollout

KINDS = {
    "plain": ("rollout.ahead=0",),
    "ahead": ("rollout.ahead=1", "train.minibatches=2"),
    "filter": ("filter={max_rollouts: 2}",),
    "culling": ("rollout.ahead=1", "variant=culling", "filter=none", "rollout.prompts=10"),
}


def load(recipe, directory, *overrides):
    return config.load(recipe, [
        f"run.dir={directory}", "data.validation=null", "train.steps=6", "train.checkpoint_every=2",
        "train.eval_every=0", "rollout.max_tokens=16", "rollout.overlap=0.2", "rewards.0.name=tiny_run:parity",
        *overrides,
    ])  # fmt: skip


def lines_of(directory):
    return [line for line in numbers(directory) if "reward" in line]


class Watched:
    """A run's rollouts as they come, weights by version, and what each step learns from; `note` is called after it."""

    def __init__(self, trainer):
        self.trainer, self.places = trainer, plain_source(trainer).places
        self.weights, self.learned, self.rest, self.versions = {0: self._weights(trainer.state)}, [], [], []
        plain = self.places.keep

        def keep(in_flight, rest):
            self.rest.append((in_flight.problems, rest))
            self.versions.append(in_flight.versions)
            plain(in_flight, rest)

        self.places.keep = keep
        policy = trainer.policy
        self._score = jax.jit(lambda params, rows: score(policy.graph, params, rows, policy.compute).logps)

    def note(self, updates):
        self.learned.append(updates.batch)
        self.weights[self.trainer.state.updates] = self._weights(self.trainer.state)

    def _weights(self, state):
        return jax.tree.map(lambda x: np.array(x), state.networks["policy"].params)

    def logps(self, step, version):
        """Of what a step learned from, under other weights."""
        rollout = self.learned[step].rollout
        prompts = data.to_prompts(self.learned[step].problems, 8)
        batch = Flat(prompts=prompts, tokens=rollout.tokens, lengths=rollout.lengths, arrays=dict())
        packed, layout = flat_batches.pack(batch, full=True)
        rows = jax.tree.map(lambda x: x[0], packed)
        return layout.unpack(np.asarray(self._score(self.weights[version], rows))[None])


@pytest.mark.in_ci("plain")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "ahead"])
def test_every_group_is_learned_from_once_by_the_log_probs_of_its_versions(recipe, tmp_path, kind):
    """In the order in which problems are drawn, with nothing drawn twice: tokens of a group that waits stay, and each
    has the log-prob that the weights of its own version give it, in what a later version went on with too."""
    trainer = opened(load(recipe, tmp_path / "run", *KINDS[kind]))
    watched, updates = Watched(trainer), trainer.config.train.updates_a_rollout
    assert train(trainer, watched.note)
    lines, uids, mixed, before = lines_of(tmp_path / "run"), [], 0, {}
    for step, (line, of_step) in enumerate(zip(lines, watched.learned, strict=True)):
        problems, rollout = of_step.problems, of_step.rollout
        whole, versions = rollout.lengths.all(1), watched.versions[step]
        assert whole.any() and (rollout.lengths.any(1) == whole).all()
        assert line["rollout/waiting"] == pytest.approx(1 - whole.mean())
        uids += [p.uid for p, there in zip(problems, whole, strict=True) if there]
        mask = np.arange(16) < rollout.lengths[..., None]
        used = sorted(set(versions[mask].tolist()))
        assert line["rollout/version"] == used[0]
        assert line["rollout/staleness"] == updates * step - used[0]
        for version in used:
            here = mask & (versions == version)
            assert np.abs(watched.logps(step, version) - rollout.logps)[here].max() < 1e-4
        if len(used) > 1:
            mixed += 1
            assert np.abs(watched.logps(step, used[0]) - rollout.logps)[mask].max() > 1e-3
        for p, problem in enumerate(problems):
            if whole[p] and problem.uid in before:
                tokens, lengths = before.pop(problem.uid)
                for g, n in enumerate(lengths):
                    np.testing.assert_array_equal(rollout.tokens[p, g, :n], tokens[g, :n])
        asked, rest = watched.rest[step]
        before |= {p.uid: (rest.tokens[i], rest.lengths[i]) for i, p in enumerate(asked) if rest.lengths[i].any()}
    assert mixed > 1 and set(before) == {p.uid for p, there in zip(asked, rest.lengths.any(1), strict=True) if there}
    counts = [line["sampled_tokens"] for line in lines]
    np.testing.assert_array_equal(counts, np.cumsum([batch.rollout.lengths.sum() for batch in watched.learned]))
    left = [*before, *(p.uid for p, _ in watched.places._queue)]
    order = plain_source(trainer).order
    drawn = [p.uid for n in range(watched.places._batches) for p in order.draw(n)[0]]
    assert Counter(uids + left) == Counter(drawn) and len(uids) > 20


@pytest.mark.usefixtures("fakes")
@pytest.mark.in_ci("filter")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["filter", "culling"])
def test_a_run_that_is_stopped_or_killed_goes_on_with_the_groups_that_wait(recipe, tmp_path, kind):
    """Once by SIGTERM, once without a word after a save; in the end all numbers are the same."""
    whole = opened(load(recipe, tmp_path / "whole", *KINDS[kind]))
    assert train(whole) and sum(line["rollout/waiting"] > 0 for line in lines_of(tmp_path / "whole")) > 2
    stopped = opened(load(recipe, tmp_path / "parts", *KINDS[kind]))
    assert not train(stopped, lambda *_: stopped.state.step == 3 and os.kill(os.getpid(), signal.SIGTERM))
    killed = opened(load(recipe, tmp_path / "parts", *KINDS[kind]))
    in_flight = getattr(killed.source, "in_flight", None)
    waiting = plain_source(killed).places.carried.waiting
    if in_flight is not None:
        waiting = (in_flight.versions < in_flight.version).any((1, 2))
    assert killed.state.step == 3 and waiting.any()

    def die(*_):
        if killed.state.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(killed, die)
    again = opened(load(recipe, tmp_path / "parts", *KINDS[kind]))
    assert again.state.step == 4 and train(again)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@pytest.mark.usefixtures("fakes")
@pytest.mark.exhaustive(
    "extensions/methods/test_overlap.py::test_every_group_is_learned_from_once_by_the_log_probs_of_its_versions"
)
def test_a_filter_that_keeps_every_whole_group_draws_no_other_rollout(recipe, tmp_path):
    trainer = opened(load(recipe, tmp_path / "run", "filter={max_rollouts: 3}", "train.steps=4"))
    trainer.source.keeps = lambda judged: judged.rollout.lengths.any(1)
    assert train(trainer) and trainer.source.rollouts == 4
    lines = lines_of(tmp_path / "run")
    assert sum(line["rollout/waiting"] > 0 for line in lines) > 1
    assert [line["rollout/version"] for line in lines] == sorted(line["rollout/version"] for line in lines)


@pytest.mark.exhaustive(
    "extensions/methods/test_overlap.py::test_groups_keep_their_places_and_the_others_go_to_the_queue"
)
def test_shards_keep_their_groups_and_a_run_on_fewer_is_told_what_it_lacks(recipe, tmp_path):
    """Of four shards each leaves up to 2 of 8 samples; on one device more there would be room for 1 of 4 only."""
    given = ("rollout.overlap=0.25", "train.checkpoint_every=1")
    trainer = opened(load(recipe, tmp_path / "run", *given), devices=4)
    assert train(trainer)
    waiting = [line["rollout/waiting"] for line in lines_of(tmp_path / "run")]
    assert max(waiting) > 0
    with pytest.raises(UserError, match="a batch shard has .* samples under way, and rollout.overlap has room for 1"):
        policy, samples = trainer.policy, sampler.no_samples(8, 4, 16)
        samples.lengths[0, :2] = 3
        prompts = data.to_prompts(trainer.source.problems[:8], 8, 4)
        policy.sample(None, prompts, None, trainer.config.rollout, partial=samples, left=1)


@pytest.mark.usefixtures("fakes")
@pytest.mark.exhaustive(
    "extensions/methods/test_overlap.py::test_every_group_is_learned_from_once_by_the_log_probs_of_its_versions"
)
def test_the_end_says_what_is_not_learned_from(recipe, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(log, "info", lambda text, *given: said.append(text % given))
    trainer = opened(load(recipe, tmp_path / "run", "train.steps=2"))
    assert train(trainer)
    left = int(trainer.source.places.carried.waiting.sum())
    assert left and f"{left} groups were under way when the run ended: their samples are not learned from" in said


@pytest.mark.exhaustive(
    "programs/test_partial_rollouts.py::test_a_rollout_that_nothing_goes_on_in_is_the_program_that_it_was"
)
def test_without_it_nothing_is_given_to_the_sampler(recipe, tmp_path, monkeypatch):
    trainer = opened(load(recipe, tmp_path / "run", "rollout.overlap=0", "train.steps=1"))
    seen = spies.record(monkeypatch)
    assert train(trainer) and {len(args) for name, args in seen if name == "rollout"} == {3}
    assert "partial" not in trainer.state.kept and not any("rollout/" in name for name in lines_of(tmp_path / "run")[0])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("variant={name: grpo, ratio_denominator: trainer}",),
            "rollout.overlap=0.2: variant 'grpo' with ratio_denominator=trainer ignores",
        ),
        (("variant=gpg",), "'gpg' has no ratio.*variant.importance=truncate, or rollout.overlap=0"),
        (("variant=xrpo",), "'xrpo' gives samples to prompts by earlier rewards; set rollout.overlap=0"),
        (("variant={name: remax, importance: truncate}",), "'remax' draws a greedy completion with each group"),
        (("variant={name: gt_likelihood, train_on: spliced}",), "'gt_likelihood' with train_on=spliced"),
        (("rollout.overlap=1.0",), "overlap=1"),
        (("rollout.decode_slots=2",), "overlap=0.2 with decode_slots=2"),
    ],
)
def test_what_cannot_go_on_or_be_corrected_is_refused(recipe, tmp_path, overrides, said):
    with pytest.raises(UserError, match=said):
        load(recipe, tmp_path / "run", *overrides)


def test_one_update_needs_no_pass_of_the_policy_before_it(recipe, tmp_path):
    sampler = load(recipe, tmp_path / "run").method
    assert sampler.variant.objective.ratio_denominator == "sampler" and not sampler.needs_old_logps(1)
    trainer = load(recipe, tmp_path / "run", "variant={name: grpo, importance: truncate}").method
    assert trainer.variant.objective.ratio_denominator == "trainer"
    assert trainer.needs_old_logps(2) and not trainer.needs_old_logps(1)
    assert load(recipe, tmp_path / "run", "variant=llds").method.variant.objective.ratio_denominator == "sampler"


def test_shares_that_are_none_or_do_not_divide_are_refused():
    def left(overlap, prompts, group, shards):
        return checks.most_left(RolloutConfig(overlap=overlap, prompts=prompts, group=group), shards)

    assert left(0.3, 10, 4, 2) == 6
    with pytest.raises(
        UserError, match="overlap=0.01 of the 20 samples of a batch shard is less than one: make it 1/20"
    ):
        left(0.01, 10, 4, 2)
    with pytest.raises(UserError, match="overlap=0.5 with rollout.prompts=2 over 4 batch shards"):
        left(0.5, 2, 4, 4)


@pytest.mark.usefixtures("fakes")
@pytest.mark.slow
def test_sizes_that_leave_nothing_and_another_share_on_resume_are_refused(recipe, tmp_path):
    with pytest.raises(UserError, match="overlap=0.02 of the 32 samples of a batch shard is less than one"):
        opened(load(recipe, tmp_path / "none", "rollout.overlap=0.02"))
    with pytest.raises(UserError, match="rollout.prompts=4 over 8 batch shards: a group that goes on stays"):
        opened(load(recipe, tmp_path / "cut", "rollout.prompts=4"), devices=8)
    trainer = opened(load(recipe, tmp_path / "run", "train.steps=1"))
    assert train(trainer)
    with pytest.raises(UserError, match="holds a run of another config: rollout.overlap"):
        opened(load(recipe, tmp_path / "run", "train.steps=1", "rollout.overlap=0.3"))


# ------------------------------------------------------------------------------------------------ places, by hand


def problems_of(*uids):
    return [data.Problem(uid, (1,), "", None, {}) for uid in uids]


def draw(number):
    """Three problems a batch: 0 to 2, 3 to 5, and so on; the pass is the batch."""
    return problems_of(*range(3 * number, 3 * number + 3)), [number] * 3


def in_flight_of(problems, passes, taken, version):
    given = {"problems": problems, "passes": passes, "versions": taken.continued(version)}
    return batch.Batch(number=0, version=version, **given)


def test_groups_keep_their_places_and_the_others_go_to_the_queue():
    """Three places of two samples of up to four tokens. Also from a record of each state, through JSON's types."""
    rows = partial.Places((3, 2, 4), problems_of(*range(12)), State())
    seen = []
    for version, lengths in enumerate([[(0, 0), (4, 2), (0, 0)], [(0, 0), (4, 3), (1, 1)], [(0, 0)] * 3, [(0, 0)] * 3]):
        record = json.loads(json.dumps(rows.saved()))
        again = partial.Places((3, 2, 4), problems_of(*range(12)), State(kept={"partial": record}))
        assert json.loads(json.dumps(again.saved())) == record
        problems, passes, taken = again.fill(draw)
        other = rows.fill(draw)
        assert jax.tree.all(jax.tree.map(np.array_equal, taken.samples, other[2].samples))
        np.testing.assert_array_equal(taken.versions, other[2].versions)
        seen.append(([p.uid for p in problems], passes, taken.waiting.tolist()))
        rest = sampler.no_samples(3, 2, 4)
        rest.lengths[:] = lengths
        rows = again
        in_flight = in_flight_of(problems, passes, taken, version)
        rows.keep(in_flight, rest)
        if version == 1:  # its first tokens are of version 0, those that came since of version 1
            assert rows.carried.versions[1].tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]
            assert rows.carried.versions[2].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
            assert partial.oldest(in_flight, rest).tolist() == [1, 0, 1]
    assert seen == [
        ([0, 1, 2], [0, 0, 0], [False] * 3),
        ([3, 1, 4], [1, 0, 1], [False, True, False]),
        ([5, 1, 4], [1, 0, 1], [False, True, True]),
        ([6, 7, 8], [2, 2, 2], [False] * 3),
    ]
    assert rows._batches == 3 and rows._queue == deque()


# --------------------------------------------------------------------- what waits is in no metric and no advantage


def some_groups():
    """Two whole groups of three samples, and the same as the first and third of three."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, (2, 3)).astype(np.int32)
    tokens = np.where(np.arange(5) < lengths[..., None], rng.integers(1, 9, (2, 3, 5)), 0).astype(np.int32)
    rollout = Rollout(tokens=tokens, logps=-tokens / np.float32(9), lengths=lengths, stopped=lengths < 5)
    total = np.float32([[1, 0, 1], [0, 0, 0]])
    of_two = batch.Batch(
        problems=problems_of(0, 2), rollout=rollout, total=total, reward=total, by_name={"acc": total}, invalid={},
        signals={"step_rewards": np.full((2, 3, 5), np.nan, np.float32)},
    )  # fmt: skip
    which = np.array([True, False, True])
    wide = jax.tree.map(lambda x: np.insert(x, 1, 7, 0), rollout)
    of_three = batch.Batch(problems=problems_of(0, 1, 2), rollout=partial.only(wide, which))
    return of_two, partial.among(of_two, which, of_three), which


@pytest.mark.slow
def test_metrics_are_those_of_the_whole_groups():
    of_two, of_three, _ = some_groups()
    want, got = step_metrics.of_drawn([of_two], "acc"), step_metrics.of_drawn([of_three], "acc")
    assert want["frac_reward_zero_std"] == 0.5
    assert got == pytest.approx(want, nan_ok=True) and got.keys() == want.keys()
    assert step_metrics.tokens([of_two]) == step_metrics.tokens([of_three])


# Those that take statistics over the batch, where a group that is not there could count.
OF_THE_BATCH = ("gdpo", "gpg", "grpo_lambda_length", "high_entropy_tokens", "lite_ppo", "magistral", "ppo",
                "reinforce_pp", "reinforce_pp_baseline", "scale_rl")  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        name if name in (*OF_THE_BATCH, "grpo") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in variants.names()
    ],
)
def test_advantages_of_the_others_are_as_if_it_were_not_there(name):
    of_two, of_three, which = some_groups()
    given = {"distill": {"teacher": "another"}, "pass_at_k": {"k": 2}}.get(name, {})
    made = run_method._variant(run_method._options({"name": name, **given}, 5))
    compiled = jax.jit(made.advantage)

    def advantages(of):
        lengths, rng = of.rollout.lengths, np.random.default_rng(1)
        mask = np.arange(5) < lengths[..., None]
        floats = rng.random((2, 3, 5), np.float32)
        floats = floats if len(lengths) == 2 else np.insert(floats, 1, 0.5, 0)
        counted = np.where(lengths.any(1)[:, None], of.total, np.nan)
        known = {"lengths": lengths, "mask": mask, "tokens": of.rollout.tokens, "behavior_logps": of.rollout.logps}
        of_tokens = dict.fromkeys(("entropy", "influence", "draws", "token_bias", "values"), floats)
        of_samples = {"outcome": counted, "likelihood": floats[:, :, 0], "influence_means": floats[:, :, 1]}
        steps, greedy = np.where(mask, floats, np.nan), floats[:, 0, 0]
        signals = Signals(
            **known, **of_tokens, **of_samples, ref_logps=-floats, greedy_rewards=greedy, step_rewards=steps
        )
        found = np.asarray(compiled(counted, signals))
        return np.where(mask, found if found.ndim == 3 else found[..., None], 0)

    want, got = advantages(of_two), advantages(of_three)
    np.testing.assert_allclose(got[which], want, atol=1e-6)
