"""NTHR's scores group by group on the devices, against the pure functions on everything at once."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_compiler

from grpojax import credit, data, masked
from grpojax.extensions.methods import influence as influences
from grpojax.extensions.methods import regroup, token_influence
from grpojax.models import decoder as dec
from grpojax.models.compute import ModelConfig
from grpojax.programs.policy import Policy
from grpojax.sharding import MeshConfig
from grpojax.types import Rows

G, T, TEMPERATURE = 6, 11, 0.7


def groups(n, vocab=40):
    rng = np.random.default_rng(n)
    problems = [data.Problem(i, tuple(rng.integers(2, vocab, 1 + i % 5).tolist()), "", None, {}) for i in range(n)]
    lengths = rng.integers(1, T + 1, (n, G)).astype(np.int32)
    lengths[0, 1], lengths[-1, 2] = T, 0
    tokens = np.where(np.arange(T) < lengths[..., None], rng.integers(2, vocab, (n, G, T)), 0).astype(np.int32)
    sign = np.where(rng.random((n, G)) < 0.4, 1.0, -1.0)
    sign[:, 0], sign[:, 3] = 1.0, -1.0
    return problems, tokens, lengths, sign


def policy_of(recipe, mesh, devices):
    return Policy(ModelConfig(path=str(recipe.parent)), MeshConfig(**mesh), jax.devices()[:devices]).load()


@pytest.fixture(scope="module")
def one(recipe):
    return policy_of(recipe, {}, 1)


def expected(policy, problems, tokens, lengths, sign):
    """From hidden states and probabilities of the whole vocabulary, every sample a row of its own."""
    n = len(problems)
    longest = max(len(p.ids) for p in problems)
    prompts = data.to_prompts(problems, longest)
    mask = np.asarray(masked.from_lengths(lengths, T))
    rows = Rows(
        prompts=prompts.tokens[None], prompt_lengths=prompts.lengths[None], tokens=tokens.reshape(1, n * G, T),
        segments=mask.astype(np.int32).reshape(1, n * G, T),
        offsets=np.broadcast_to(np.arange(T, dtype=np.int32), (1, n * G, T)),
        token_prompt=np.broadcast_to(np.repeat(np.arange(n, dtype=np.int32), G)[None, :, None], (1, n * G, T)),
    )  # fmt: skip
    hidden = dec.score(policy.graph, policy.params, rows, policy.compute, hidden=True).hidden.reshape(n, G, T, -1)
    head = np.asarray(policy.params["embed"][...])
    probs = jax.nn.softmax(jnp.einsum("pgtd,vd->pgtv", hidden, head) / TEMPERATURE, -1)
    entries, columns, _ = credit.group_vocabulary(tokens, mask, G * T)
    probs = jnp.where(
        (entries >= 0)[:, None, None], jnp.take_along_axis(probs, jnp.maximum(entries, 0)[:, None, None], -1), 0.0
    )
    return [
        [np.asarray(x) for x in credit.nthr_scores(probs, hidden, columns, mask, jnp.asarray(sign), self_term=own)]
        for own in (True, False)
    ]


def computed(policy, params, problems, tokens, lengths, sign, *, most, own, at_once=24):
    mask = np.asarray(masked.from_lengths(lengths, T))
    right = (mask & (sign > 0)[..., None]).astype(np.float32)
    run = influences.Influences(policy, temperature=TEMPERATURE, longest_prompt=8)
    return run(params, problems, tokens, lengths, mask, right, most=most, tokens_at_once=at_once, own=own)


def check(got, want, lengths):
    """Scores, and the means with and without a sample's own share."""
    (scores, means), (_, means_of_others) = want
    mask = np.asarray(masked.from_lengths(lengths, T))
    scale = np.abs(scores[mask]).max()
    np.testing.assert_allclose(np.where(mask, got.scores, 0), np.where(mask, scores, 0), atol=2e-5 * scale)
    total, n = np.where(mask, got.scores, 0).sum(-1), np.maximum(lengths, 1)
    np.testing.assert_allclose(total / n, means, atol=2e-5 * scale)
    return total, n, means_of_others, scale


@pytest.mark.slow
def test_streamed_scores_are_the_pure_functions(one, monkeypatch):
    """Blocks of the vocabulary, parts of a group, groups that fill up, a sample without a token."""
    monkeypatch.setattr(token_influence, "_BLOCK", 8)
    influences.influence_program.cache_clear()
    batch = groups(3)
    want = expected(one, *batch)
    got = computed(one, one.params, *batch, most=7, own=True)
    total, n, others, scale = check(got, want, batch[2])
    right = batch[3] > 0
    np.testing.assert_allclose(((total - got.own) / n)[right], others[right], atol=2e-5 * scale)
    influences.influence_program.cache_clear()


@pytest.mark.parametrize(
    ("mesh", "n", "most"),
    [
        pytest.param({"fsdp": 8}, 3, 16, id="shards", marks=pytest.mark.exhaustive),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, 2, 2, id="a group over two shards"),
    ],
)
def test_scores_are_the_same_on_eight_devices(recipe, one, mesh, n, most):
    policy, batch = policy_of(recipe, mesh, 8), groups(n)
    got = computed(policy, policy.params, *batch, most=most, own=True)
    want = computed(one, one.params, *batch, most=most, own=True)
    mask = np.asarray(masked.from_lengths(batch[2], T))
    scale = np.abs(want.scores[mask]).max()
    np.testing.assert_allclose(np.where(mask, got.scores, 0), np.where(mask, want.scores, 0), atol=2e-5 * scale)
    np.testing.assert_allclose(got.own, want.own, rtol=1e-4)


@pytest.mark.slow
def test_a_ragged_run_compiles_few_programs(one):
    """Twelve steps in which groups, lengths and distinct tokens differ: of three shapes all occur, and no other."""
    influences.influence_program.cache_clear()
    for step in range(12):
        problems, tokens, lengths, sign = groups(1 + 5 * step % 7, vocab=4 + 3 * step)
        lengths = np.minimum(lengths, 2 + step)
        computed(one, one.params, problems, tokens, lengths, sign, most=7, own=False, at_once=99)
    program = influences.influence_program(one.shape, TEMPERATURE, 1, 0)
    assert program.jitted()._cache_size() == 3


def test_vocabulary_is_a_groups_own_tokens():
    _, tokens, lengths, _ = groups(3)
    mask = np.array(masked.from_lengths(lengths, T))
    mask[:, :, 1] = False  # of an environment, for instance
    got = token_influence.vocabulary(tokens, mask, 40)
    for p in range(3):
        seen = {int(t) for g in range(G) for t in tokens[p, g][mask[p, g]]}
        assert [i for i in got[p].tolist() if i >= 0] == sorted(seen)


def test_a_group_is_cut_by_its_tokens():
    assert regroup._cut(6, 8, 16, 512, False) == (3, 1)
    assert regroup._cut(6, 8, 16, 512, True) == (1, 1)
    assert regroup._cut(6, 8, 16, 64, False) == (1, 2)
    assert regroup._cut(5, 7, 16, 1, False) == (1, 7)
    assert regroup._cut(5, 1, 16, 1, False) == (1, 1)


COMPILE = """
import functools
import jax
import numpy as np
from grpojax import sharding
from grpojax.models import Compute, DecoderConfig
from grpojax.sharding import MeshConfig
from grpojax.extensions.methods import token_influence
from grpojax.programs import packing
from grpojax.programs.state import abstract_state, decoder_network
from grpojax.extensions.plan import planner
from grpojax.types import Prompts, Rollout

config = DecoderConfig(
    family="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28,
    num_kv_heads=4, head_dim=128, rope_theta=1e6, qkv_bias=True,
)
prompts, samples, tokens, longest, width = 32, 8, 4096, 512, 32768
mesh = planner.topology_mesh("v5e:4x4", MeshConfig(fsdp=16))
compute = Compute(dtype="bfloat16", mesh=mesh, platform="tpu")
graph, network = decoder_network(config, None, mesh)
params = abstract_state({"policy": network}, mesh)["policy"]
zero = np.zeros(prompts, np.int32)
asked = Prompts(tokens=np.zeros((prompts, longest), np.int32), lengths=zero + longest,
                uids=zero.astype(np.uint32), first_sample=zero)
drawn = Rollout(
    tokens=np.zeros((prompts, samples, tokens), np.int32), lengths=np.full((prompts, samples), tokens, np.int32)
)
packed, _ = packing.pack_groups(asked, drawn, shards=16, microbatches=16)

def place(x):
    axes = None, "shard", *(None,) * (x.ndim - 2)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.named(mesh, axes))

rows = packed.tokens
args = rows.astype(np.int32), rows.astype(np.float32), np.zeros((2, 16, width), np.int32)
program = jax.jit(functools.partial(token_influence.make_influence(graph, compute), group=samples))
compiled = program.lower(params, jax.tree.map(place, packed), *map(place, args)).compile()
print(compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_temporaries_on_a_tpu_are_those_of_a_group():
    """Of a model of 7 B parameters: hidden states of eight samples of 4096 tokens are 224 MiB, a layer gathered 444;
    1.85 GiB were all layers' weights cast before the first, and MLPs run on a whole sample."""
    done = tpu_compiler.run(COMPILE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) < 2**30
