"""Episodes of several turns, against rollouts that read everything again, and against the trainer's log-probs."""

import dataclasses

import flat_batches
import jax
import numpy as np
import pytest
from flat_batches import Flat
from plain_decoder import BASE, FAMILIES, random_decoder, some_prompts
from short_blocks import blocks_of

from grpojax import sharding
from grpojax.extensions.episodes import episode_sampler
from grpojax.extensions.episodes.episode_sampler import CHUNK
from grpojax.host.errors import UserError
from grpojax.models import Compute, score
from grpojax.models.weight_table import shardings
from grpojax.programs import state
from grpojax.programs.policy import on_shards
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.types import Rollout

EOS = (0, 1, 2, 3)
CONFIG = SamplerConfig(group=5, max_tokens=61)
TPU = Compute(platform="tpu", attention="xla")  # its program, run here
GPU = Compute(platform="gpu", attention="xla")  # the same, its kernel interpreted


class Sampler:
    """`EpisodeSampler` without a `Policy`."""

    def __init__(self, decoder, prompts, config=CONFIG, compute=Compute(), turn=7, place=lambda x: x):  # noqa: B008
        self.place, self.prompts = place, len(prompts.lengths)
        prompts, split = on_shards(prompts, config, sharding.shards(compute.mesh))
        self.group = split.group
        graph, self.params = decoder
        begins, self.goes_on = episode_sampler.programs(graph, episode_sampler.how_of(split, EOS, compute, turn))
        self.paused = begins(self.params, place(prompts), jax.random.key(0))

    def go_on(self, answers, counts):
        given = [self.place(x.reshape(-1, self.group, *x.shape[2:])) for x in (answers, counts)]
        self.paused = self.goes_on(self.params, self.paused, *given)

    @property
    def out(self):
        return jax.tree.map(lambda x: np.array(x).reshape(self.prompts, -1, *x.shape[2:]), self.paused.out)


def answers_of(rng, shape, most, among=None):
    """``(answers [P, G, T], counts [P, G])``: some tokens for the samples ``among [P, G]``."""
    counts = rng.integers(1, most + 1, shape[:2]).astype(np.int32)
    answers = np.where(np.arange(shape[2]) < counts[..., None], rng.integers(4, 53, shape), 0).astype(np.int32)
    return answers, counts if among is None else np.where(among, counts, 0).astype(np.int32)


def appended(out, answers, counts):
    """Oracle: the samples with the answers behind them, a loop over samples."""
    tokens, logps, lengths = out.tokens.copy(), out.logps.copy(), out.lengths.copy()
    for p, g in np.argwhere(counts > 0):
        n, at = counts[p, g], lengths[p, g]
        tokens[p, g, at : at + n] = answers[p, g, :n]
        logps[p, g, at : at + n] = 0
        lengths[p, g] += n
    return Rollout(tokens=tokens, logps=logps, lengths=lengths, stopped=out.stopped & (counts == 0))


def turns_after(decoder, prompts, begun, counts, turn, config=CONFIG):
    """Oracle: the next turns of the samples with answers, by rollouts that read a prompt and its samples again."""
    waits = dataclasses.replace(begun, stopped=begun.stopped | (counts == 0))
    how = {"eos_ids": EOS, "compute": Compute(), "left": config.group}
    groups = []
    for p in range(len(counts)):  # the rollout of a single prompt ends when the whole group has
        one, own = (jax.tree.map(lambda x, p=p: x[p : p + 1], x) for x in (prompts, waits))
        drawn = sample_groups(*decoder, one, jax.random.key(0), config, partial=own, **how)
        groups.append(drawn if counts[p].any() else own)
    want = jax.tree.map(lambda *xs: np.concatenate(xs), *groups)
    for p, g in np.argwhere(counts > 0):
        end = min(begun.lengths[p, g] + turn, config.max_tokens)
        if want.lengths[p, g] > end:
            want.lengths[p, g], want.stopped[p, g] = end, False
            want.tokens[p, g, end:], want.logps[p, g, end:] = 0, 0
    return want


def same(out, want, sampled, among):
    np.testing.assert_array_equal(out.lengths, want.lengths)
    np.testing.assert_array_equal(out.tokens, want.tokens)
    np.testing.assert_array_equal(out.stopped[among], want.stopped[among])
    np.testing.assert_allclose(out.logps, want.logps, atol=2e-5)
    np.testing.assert_array_equal(out.sampled, sampled)


def rounds(rng, decoder, prompts, sampler, turn, count, most):
    """Draws some rounds, in which half of the samples wait, and compares each with the oracle."""
    sampled = sampler.out.sampled.copy()
    for _ in range(count):
        before = sampler.out
        room = before.lengths + most < CONFIG.max_tokens
        answers, counts = answers_of(rng, before.tokens.shape, most, room & (rng.random(room.shape) < 0.6))
        begun = appended(before, answers, counts)
        sampler.go_on(answers, counts)
        out = sampler.out
        at = np.arange(CONFIG.max_tokens)
        sampled |= (at >= begun.lengths[..., None]) & (at < out.lengths[..., None])
        same(out, turns_after(decoder, prompts, begun, counts, turn), sampled, counts > 0)
    return out


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(BASE, seed=5)


@pytest.mark.parametrize(
    ("compute", "block", "most"),
    [
        (Compute(), 16, 11),
        pytest.param(Compute(), 61, 35, marks=pytest.mark.exhaustive),
        pytest.param(TPU, 16, 5, marks=pytest.mark.slow),
        pytest.param(GPU, 16, 11, marks=pytest.mark.exhaustive),
    ],
    ids=["blocks", "one block, two chunks", "tpu", "gpu"],
)
def test_turns_are_those_of_a_rollout_that_reads_everything_again(decoder, compute, block, most):
    assert most < CHUNK or most > CHUNK + 1
    rng, prompts = np.random.default_rng(3), some_prompts()
    with blocks_of(block):
        sampler = Sampler(decoder, prompts, compute=compute)
        out = rounds(rng, decoder, prompts, sampler, 7, 4, most)
    assert (~out.sampled & (np.arange(CONFIG.max_tokens) < out.lengths[..., None])).sum() > 20


def episodes(decoder, prompts, waits, *, rounds=6, **how):
    """Episodes in which sample (p, g) gets its n-th answer in the round after ``waits(n, p, g)`` more rounds. A second
    answer may take two chunks."""
    sampler = Sampler(decoder, prompts, **how)
    shape = sampler.out.tokens.shape
    answers = [answers_of(np.random.default_rng(n), shape, CHUNK + 8 if n == 1 else 9) for n in range(rounds)]
    next_answer, due = np.zeros(shape[:2], int), np.zeros(shape[:2], int)
    for p, g in np.ndindex(due.shape):
        due[p, g] = waits(0, p, g)
    while (next_answer < rounds).any():
        out, counts, tokens = sampler.out, np.zeros(shape[:2], np.int32), np.zeros(shape, np.int32)
        for p, g in np.ndindex(due.shape):
            n = next_answer[p, g]
            if n == rounds or due[p, g]:
                due[p, g] -= 1
                continue
            more = answers[n][1][p, g]
            if out.lengths[p, g] + more >= shape[2]:
                next_answer[p, g] = rounds
                continue
            counts[p, g], tokens[p, g] = more, answers[n][0][p, g]
            next_answer[p, g] = n + 1
            due[p, g] = waits(n + 1, p, g)
        if counts.any():
            sampler.go_on(tokens, counts)
    return sampler.out


def test_when_an_answer_comes_makes_no_difference_bit_for_bit(decoder):
    rng, prompts = np.random.default_rng(0), some_prompts()
    late = rng.integers(0, 4, (7, 3, 5))
    with blocks_of(16):
        at_once = episodes(decoder, prompts, lambda *at: 0)
        sometime = episodes(decoder, prompts, lambda *at: late[at])
    assert (at_once.lengths > 40).all()
    jax.tree.map(np.testing.assert_array_equal, at_once, sometime)


@pytest.mark.slow
def test_a_first_turn_is_the_plain_sampler_s_bit_for_bit(decoder):
    prompts, config = some_prompts(), dataclasses.replace(CONFIG, decode_slots=5)
    want = sample_groups(*decoder, prompts, jax.random.key(0), config, eos_ids=EOS, compute=Compute())
    out = Sampler(decoder, prompts, turn=0).out
    np.testing.assert_array_equal(out.sampled, np.arange(CONFIG.max_tokens) < out.lengths[..., None])
    jax.tree.map(np.testing.assert_array_equal, dataclasses.replace(out, sampled=None), want)


def logps_of(decoder, prompts, out, compute=Compute()):  # noqa: B008
    """The trainer's log-probs ``[P, G, T]``."""
    batch = Flat(prompts=prompts, tokens=out.tokens, lengths=out.lengths, arrays=dict())
    packed, layout = flat_batches.pack(batch)
    rows = jax.tree.map(lambda x: x[0], packed)
    return layout.unpack(np.asarray(score(*decoder, rows, compute).logps)[None])


def longest_answer(out):
    """Of those that a turn came after."""
    return max(np.diff(np.flatnonzero(own)).max() - 1 for own in out.sampled.reshape(-1, CONFIG.max_tokens))


@pytest.mark.in_ci("smollm3")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["smollm3", "qwen2_moe"])
def test_log_probs_over_turns_are_the_trainer_s(family):
    decoder, prompts = random_decoder(FAMILIES[family], seed=5), some_prompts()
    out = episodes(decoder, prompts, lambda n, p, g: (n + p + g) % 2)
    assert (out.logps[~out.sampled] == 0).all() and out.sampled.sum(-1).mean() > 14 and longest_answer(out) > CHUNK
    assert np.abs(logps_of(decoder, prompts, out) - out.logps)[out.sampled].max() < 1e-4


@pytest.mark.in_ci("cpu")
@pytest.mark.slow
@pytest.mark.parametrize("of", [Compute(), TPU, GPU], ids=["cpu", "tpu", "gpu"])
def test_eight_devices_draw_the_same(of):
    """Two prompts over four batch shards, so that groups are split; heads are cut over the other axis."""
    config, sizes = dataclasses.replace(BASE, vocab_size=56), (2, 2, 2) if not of.on_gpu else (4, 2, 1)
    decoder = graph, params = random_decoder(config, seed=5)
    mesh = sharding.make_mesh(sharding.MeshConfig(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))))
    compute = dataclasses.replace(of, mesh=mesh)
    whole = state.make_reshard(config, compute)(jax.device_put(params, shardings(params, mesh)))

    def place(tree):
        def put(x):
            return jax.device_put(x, sharding.named(mesh, ("shard",) + (None,) * (x.ndim - 1)))

        return jax.tree.map(put, tree)

    prompts, four = jax.tree.map(lambda x: x[:2], some_prompts()), dataclasses.replace(CONFIG, group=4)
    want = episodes(decoder, prompts, lambda *at: sum(at) % 2, config=four)
    how = {"compute": compute, "place": place, "config": four}
    out = episodes((graph, whole), prompts, lambda *at: sum(at) % 2, **how)
    for name in ("tokens", "lengths", "stopped", "sampled"):
        np.testing.assert_array_equal(getattr(out, name), getattr(want, name))
    assert longest_answer(out) > CHUNK
    assert np.abs(logps_of(decoder, prompts, out) - out.logps)[out.sampled].max() < 1e-4


def arrays_of(jaxpr):
    """The shapes of all that a program computes, in its loops and calls too."""
    for eqn in jaxpr.eqns:
        yield from (x.aval.shape for x in eqn.outvars)
        for inner in jax.core.jaxprs_in_params(eqn.params):
            yield from arrays_of(inner)


@pytest.mark.parametrize("compute", [Compute(), TPU], ids=["cpu", "tpu"])
@pytest.mark.slow
def test_scores_of_answers_are_of_one_prompt_at_a_time(decoder, compute):
    answers, counts = np.full((3, 5, CONFIG.max_tokens), 4, np.int32), np.full((3, 5), 2, np.int32)
    graph, params = decoder
    with blocks_of(16):
        sampler = Sampler(decoder, some_prompts(), compute=compute)
        traced = jax.make_jaxpr(sampler.goes_on.fn)
        shapes = set(arrays_of(traced(params, sampler.paused, answers, counts).jaxpr))
    scores = CONFIG.group * CHUNK * BASE.num_heads * CONFIG.max_tokens
    assert max(np.prod(shape) for shape in shapes if CHUNK in shape) < 2 * scores


@pytest.mark.slow
def test_caches_are_rewritten_in_place():
    """What a round holds besides its arguments is less than the caches: they are not laid out anew in whole."""
    graph, params = random_decoder(dataclasses.replace(BASE, num_layers=6), seed=5)
    config, prompts = SamplerConfig(group=8, max_tokens=1024), some_prompts()
    how = episode_sampler.how_of(config, EOS, TPU, 64)
    begin, go_on = episode_sampler.programs(graph, how)
    paused = jax.eval_shape(begin.fn, params, prompts, jax.random.key(0))
    given = [jax.ShapeDtypeStruct(shape, np.int32) for shape in ((3, 8, 1024), (3, 8))]
    caches = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((paused.keys, paused.values)))
    assert go_on.lower(params, paused, *given).compile().memory_analysis().temp_size_in_bytes < caches


@pytest.mark.parametrize(
    ("given", "remedy"),
    [({"decode_slots": 2}, "set 0"), ({"cache_dtype": "int8"}, "compute"), ({"router_replay": True}, "false")],
)
def test_what_episodes_cannot_do_is_refused(given, remedy):
    with pytest.raises(UserError, match=f"{next(iter(given))}=.*{remedy}"):
        episode_sampler.check(dataclasses.replace(CONFIG, **given), BASE)


@pytest.mark.slow
def test_answers_reach_no_further_back_than_a_window():
    """What is read on top of the cache, and decoded after it, sees the tokens that the scorer's layers see."""
    windowed, prompts, rng = random_decoder(FAMILIES["windows"], seed=5), some_prompts(), np.random.default_rng(3)
    with blocks_of(16):
        sampler = Sampler(windowed, prompts)
        out = rounds(rng, windowed, prompts, sampler, 7, 3, 11)
    assert (out.lengths > FAMILIES["windows"].window + 8).any()
    assert np.abs(logps_of(windowed, prompts, out) - out.logps)[out.sampled].max() < 1e-4


def test_delta_nets_are_refused():
    with pytest.raises(UserError, match="delta layers"):
        episode_sampler.check(CONFIG, FAMILIES["qwen3_5"])
