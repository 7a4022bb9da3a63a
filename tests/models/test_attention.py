"""Every implementation of attention against the plain one, values and gradients."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax import sharding
from grpojax.host.errors import UserError
from grpojax.models import attention as att
from grpojax.models import blocked_attention


def ragged(*, b=1, k=1, r=2, s=5, l=0, heads=2, kv_heads=1, dim=8, dtype=jnp.float32, seed=0):
    """Random ``(arrays, segments, lengths, row_prompt)``: rows of one completion each, of all lengths from 0 to s."""
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape).astype(dtype))

    arrays = {
        "q": array(b, r, s, heads, dim),
        "k": array(b, r, s, kv_heads, dim),
        "v": array(b, r, s, kv_heads, dim),
    }
    if l:
        arrays |= {"pk": array(b, k, l, kv_heads, dim), "pv": array(b, k, l, kv_heads, dim)}
    lengths = np.resize([s, s // 2, 1, 0], (b, r))
    segments = (np.arange(s) < lengths[..., None]).astype(np.int32)
    prompts = jnp.asarray(np.resize([l, l - 2, 1], (b, k)), jnp.int32)
    return arrays, segments, prompts, jnp.asarray(np.resize(np.arange(k)[::-1], (b, r)), jnp.int32)


def value_and_grads(attend, arrays, segments, lengths, row_prompt, window=None, *, cap=0.0):
    """Outputs where there are tokens, and the gradients of a random weighting of them."""
    there = np.asarray(segments)[..., None, None] > 0
    weight = np.where(there, np.random.default_rng(1).standard_normal(arrays["q"].shape), 0).astype(np.float32)

    def run(arrays):
        prefix = att.Prefix(arrays["pk"], arrays["pv"], lengths, row_prompt) if "pk" in arrays else None
        logits = att.Logits(cap, arrays.get("sinks")) if cap or "sinks" in arrays else None
        out = attend(arrays["q"], arrays["k"], arrays["v"], segments, prefix, window, logits).astype(jnp.float32)
        return (weight * out).sum(), jnp.where(there, out, 0.0)

    (_, out), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(arrays)
    return {"out": out} | grads


def window_of(segments, size, here=True):
    """The `Window` of rows: each completion is in one piece."""
    segments, s = np.asarray(segments), segments.shape[-1]
    first = (segments[..., :, None] == segments[..., None, :]).argmax(-1)
    return att.Window(size, jnp.asarray(here), jnp.asarray(np.arange(s) - first, jnp.int32))


WINDOWS = [(3, True), (9, True), (3, False)]  # sizes, and whether the layer has one


@pytest.mark.parametrize(("size", "here"), WINDOWS)
@pytest.mark.parametrize("prompt", [0, 5])
def test_a_window_hides_all_but_the_newest_tokens(size, here, prompt):
    """Against a loop over queries; completions share rows, and a prompt is shorter than the others."""
    arrays, segments, lengths, row_prompt = packed(b=2, r=3, s=7, l=prompt, k=2, heads=2, kv_heads=2)
    window = window_of(segments, size, here)
    prefix = att.Prefix(arrays["pk"], arrays["pv"], lengths, row_prompt) if prompt else None
    got = jax.jit(att.xla)(arrays["q"], arrays["k"], arrays["v"], segments, prefix, window)
    for b, r, s, h in np.ndindex(2, 3, 7, 2):
        if not segments[b, r, s]:
            continue
        own = [t for t in range(s + 1) if segments[b, r, t] == segments[b, r, s]]
        k, v = ([arrays[name][b, r, t, h] for t in own] for name in "kv")
        if prompt:
            at, n = row_prompt[b, r], lengths[b, row_prompt[b, r]]
            k = [*arrays["pk"][b, at, :n, h], *k]
            v = [*arrays["pv"][b, at, :n, h], *v]
        k, v = (np.stack(x[-size:] if here else x) for x in (k, v))
        w = np.exp(k @ np.asarray(arrays["q"][b, r, s, h]) * 8**-0.5)
        np.testing.assert_allclose(got[b, r, s, h], w / w.sum() @ v, atol=2e-6)


def assert_same(got, want, atol):
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=atol, err_msg=name)


def splash(**kw):
    return att.pick("splash", dtype="float32", platform="cpu", **kw)


@pytest.mark.parametrize(
    "shape",
    [
        dict(r=4, s=7, heads=4, kv_heads=2),
        dict(r=4, s=7, l=5, heads=4, kv_heads=2),
        pytest.param(dict(r=3, s=130, l=140, k=2, heads=2, kv_heads=2), marks=pytest.mark.slow),
        dict(b=2, r=2, s=128, l=129, k=2, heads=3, kv_heads=1),
    ],
    ids=["no prompt", "prompt", "more than a block", "two shards"],
)
def test_splash_equals_xla(shape):
    case = ragged(**shape)
    assert_same(value_and_grads(splash(), *case), value_and_grads(att.xla, *case), 2e-5)


@pytest.mark.parametrize(
    ("prompt", "window"),
    [(3, 4), *(pytest.param(*given, marks=pytest.mark.exhaustive) for given in ((0, None), (0, 4), (3, None)))],
)
def test_splash_on_a_mesh_equals_xla(prompt, window):
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
    case = ragged(b=4, r=2, s=6, l=prompt, heads=4, kv_heads=2)
    case = *case, window and window_of(case[1], window)
    assert_same(value_and_grads(splash(mesh=mesh), *case), value_and_grads(att.xla, *case), 2e-5)


def with_sinks(case):
    """The case with a sink for each head, and a window."""
    arrays, segments, *rest = case
    sinks = jnp.asarray(np.random.default_rng(4).standard_normal(arrays["q"].shape[3]), jnp.float32)
    return arrays | {"sinks": sinks}, segments, *rest, window_of(segments, 4)


@pytest.mark.parametrize(
    ("prompt", "cap"),
    [(0, 0.0), (5, 0.8), *(pytest.param(*given, marks=pytest.mark.exhaustive) for given in ((0, 0.8), (5, 0.0)))],
)
def test_splash_has_sinks_and_caps(prompt, cap):
    case = with_sinks(ragged(r=4, s=7, l=prompt, k=2, heads=4, kv_heads=2))
    assert_same(value_and_grads(splash(), *case, cap=cap), value_and_grads(att.xla, *case, cap=cap), 2e-5)


@pytest.mark.slow
def test_splash_has_sinks_and_caps_on_a_mesh():
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
    case = with_sinks(ragged(b=4, r=2, s=6, l=3, heads=4, kv_heads=2))
    assert_same(value_and_grads(splash(mesh=mesh), *case, cap=0.8), value_and_grads(att.xla, *case, cap=0.8), 2e-5)


@pytest.mark.parametrize(
    ("shape", "size", "here"),
    [
        (dict(r=4, s=7, heads=4, kv_heads=2), 3, True),
        (dict(r=4, s=7, l=5, k=2, heads=4, kv_heads=2), 4, True),
        (dict(r=4, s=7, l=5, k=2, heads=4, kv_heads=2), 4, False),
        pytest.param(dict(r=3, s=530, l=300, k=2, heads=2, kv_heads=2), 40, True, marks=pytest.mark.slow),
    ],
    ids=["no prompt", "prompt", "none here", "more than a block"],
)
def test_splash_sees_as_far_as_xla(shape, size, here):
    case = ragged(**shape)
    case = *case, window_of(case[1], size, here)
    assert_same(value_and_grads(splash(), *case), value_and_grads(att.xla, *case), 3e-5)


def test_splash_refuses_two_completions_in_a_row():
    arrays, segments, *_ = ragged(r=2, s=6)
    segments[0, 1] = [1, 1, 1, 2, 2, 0]
    out = jax.jit(splash())(*arrays.values(), segments)
    assert np.isfinite(out[0, 0]).all() and np.isnan(out[0, 1]).all()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("attend", [splash(), att.xla], ids=["splash", "xla"])
@pytest.mark.slow
def test_completions_taken_apart_equal_packed_rows(attend, window):
    """Two prompts in a shard; rows of 3 + 2, 1 + 4 and 5 tokens; a completion without tokens; padding; windows."""
    arrays, _, lengths, _ = ragged(b=2, k=2, r=3, s=6, l=5, heads=4, kv_heads=2)
    row = [[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0]]
    segments, row_prompt = np.array([row, row[::-1]], np.int32), np.array([[0, 1, 1], [1, 0, 0]], np.int32)
    gather = np.full((2, 6, 6), -1, np.int32)
    for b in range(2):
        wholes = [(r, n) for r in range(3) for n in (1, 2) if (segments[b, r] == n).any()]
        for c, (r, n) in enumerate(wholes):
            at = np.flatnonzero(segments[b, r] == n)
            gather[b, c, : len(at)] = 6 * r + at
    case = arrays, segments, lengths, row_prompt, window and window_of(segments, window)
    prompts = np.broadcast_to(row_prompt[..., None], segments.shape)
    expected = value_and_grads(att.xla, *case)
    assert_same(value_and_grads(att.by_completion(attend, [jnp.asarray(gather)], prompts), *case), expected, 2e-5)
    longest_first = np.take_along_axis(gather, np.argsort(-(gather >= 0).sum(2), 1, stable=True)[..., None], 1)
    classes = [jnp.asarray(x) for x in (longest_first[:, :2], longest_first[:, 2:, :3])]
    assert_same(value_and_grads(att.by_completion(attend, classes, prompts), *case), expected, 2e-5)

    prompts = np.where(segments == 1, prompts, 1 - prompts)  # the second completion of a row after another prompt

    def of_either(q, k, v, segments, prefix, window, logits):
        zero, one = (
            att.xla(q, k, v, segments, prefix._replace(row_prompt=np.full_like(row_prompt, n)), window, logits)
            for n in (0, 1)
        )
        return jnp.where(prompts[..., None, None] == 0, zero, one)

    expected = value_and_grads(of_either, *case)
    assert_same(value_and_grads(att.by_completion(attend, classes, prompts), *case), expected, 2e-5)


def packed(**kw):
    """`ragged` with rows of 3 + 2 and 1 + 4 tokens among those of one completion."""
    arrays, segments, *rest = ragged(**kw)
    s = segments.shape[2]
    rows = [[1] * 3 + [2] * 2 + [0] * (s - 5), [1] + [2] * 4 + [0] * (s - 5)]
    segments[:, :2] = rows
    return arrays, segments, *rest


CUTS = {
    "queries": (dict(r=4, s=7, heads=4, kv_heads=2), 3, (1, 3)),
    "all at once": (dict(b=2, r=5, s=7, l=5, k=3, heads=4, kv_heads=2), 1000, (5, 7)),
    "two rows": (dict(r=6, s=7, l=5, heads=3, kv_heads=1), 15, (2, 7)),
}


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("queries", None),
        ("all at once", 4),
        ("two rows", 4),
        *(
            pytest.param(*given, marks=pytest.mark.exhaustive)
            for given in (("queries", 4), ("all at once", None), ("two rows", None))
        ),
    ],
)
def test_blocked_equals_xla(name, window, monkeypatch):
    """Some queries of a row, whole rows, all there are: completions share rows, and rows share prompts."""
    shape, room, cut = CUTS[name]
    keys = shape["s"] + shape.get("l", 0)
    monkeypatch.setattr(blocked_attention, "_SCORES_BYTES", room * 4 * shape["heads"] * keys)
    assert blocked_attention._cut(shape["r"], shape["s"], shape["heads"], keys) == cut
    case = packed(**shape)
    case = *case, window and window_of(case[1], window)
    assert_same(value_and_grads(att.blocked, *case), value_and_grads(att.xla, *case), 2e-5)


@pytest.mark.parametrize("prompt", [0, 5])
def test_blocked_has_sinks_and_caps(prompt, monkeypatch):
    monkeypatch.setattr(blocked_attention, "_SCORES_BYTES", 15 * 4 * 4 * (7 + prompt))
    case = with_sinks(packed(r=6, s=7, l=prompt, k=2, heads=4, kv_heads=2))
    assert_same(value_and_grads(att.blocked, *case, cap=0.8), value_and_grads(att.xla, *case, cap=0.8), 2e-5)


def test_blocked_on_a_mesh_equals_xla():
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
    arrays, *rest = packed(b=4, r=3, s=6, l=5, k=2, heads=4, kv_heads=2)
    placed = {
        name: jax.device_put(x, jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, None, "tensor")))
        for name, x in arrays.items()
    }
    assert_same(value_and_grads(att.blocked, placed, *rest), value_and_grads(att.xla, arrays, *rest), 2e-5)


def test_blocked_never_holds_the_scores(monkeypatch):
    """Neither forward nor backward has an array larger than the inputs or a block; plain attention has."""
    monkeypatch.setattr(blocked_attention, "_SCORES_BYTES", 4 * 2 * 16 * 96)
    arrays, *rest = ragged(r=11, s=64, l=32, k=2)

    def largest(attend):
        text = str(jax.make_jaxpr(lambda arrays: value_and_grads(attend, arrays, *rest))(arrays))
        return max(math.prod(map(int, x.split(","))) for x in re.findall(r"\w\[([\d,]+)\]", text))

    assert largest(att.blocked) <= 11 * 64 * 2 * 8
    assert largest(att.xla) >= 11 * 2 * 64 * 64


@pytest.mark.parametrize("n", [1, 128, 129, 512, 640, 1408, 1536])
def test_splash_blocks_waste_at_most_a_quarter(n):
    block = att._block(n)
    assert block % 128 == 0
    assert -(-n // block) * block <= max(128, 1.25 * (-(-n // 128) * 128))


@pytest.mark.parametrize(("s", "prompt"), [(16, 0), (16, 24), (15, 24), (15, 22)])
def test_cudnn_lowers_for_cuda(s, prompt, monkeypatch):
    """Odd lengths too, which its backward pass does not take with a bias. The library's presence is only looked up."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    case = ragged(b=2, r=2, s=s, l=prompt, heads=4, kv_heads=2, dim=64, dtype=jnp.bfloat16)
    attend = att.pick("cudnn", dtype="bfloat16", platform="gpu")
    traced = jax.jit(lambda arrays: value_and_grads(attend, arrays, *case[1:])).trace(case[0])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmax(" in text and "__cudnn$fmhaScaleBiasSoftmaxBackward(" in text


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("prompt", [0, 5])
def test_cudnn_is_given_the_mask_of_xla(prompt, window, monkeypatch):
    """The same call with the kernel exchanged for plain jax, on rows that hold several completions."""
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation, **kw: plain(*a, **kw))
    arrays, segments, *rest = ragged(r=4, s=7, l=prompt, k=2, heads=4, kv_heads=2)
    segments[0, 0] = [1, 1, 2, 2, 2, 3, 0]
    case = arrays, segments, *rest, window and window_of(segments, window)
    assert_same(value_and_grads(att.cudnn, *case), value_and_grads(att.xla, *case), 2e-5)


def test_cudnn_needs_16_bits():
    with pytest.raises(ValueError, match="'cudnn'.*float32"):
        att.pick("cudnn", dtype="float32", platform="gpu")


def test_cudnn_is_not_chosen_for_sinks_and_caps():
    assert att.pick("auto", dtype="bfloat16", platform="gpu", plain=False) is att.xla
    with pytest.raises(UserError, match="model.attention=cudnn: .* take auto"):
        att.pick("cudnn", dtype="bfloat16", platform="gpu", plain=False)


@pytest.mark.parametrize(("name", "platform"), [("cudnn", "cpu"), ("cudnn", "tpu"), ("splash", "gpu")])
def test_a_kernel_of_another_platform_is_refused(name, platform):
    with pytest.raises(UserError, match=f"model.attention={name} .* {platform}: take auto, or xla"):
        att.pick(name, dtype="bfloat16", platform=platform)


@pytest.mark.parametrize(
    ("platform", "dtype", "apart"),
    [("cpu", "float32", False), ("gpu", "bfloat16", False), ("tpu", "bfloat16", True)],
)
def test_auto_picks_by_platform(platform, dtype, apart):
    name = {"cpu": "blocked", "gpu": "cudnn", "tpu": "splash"}[platform]
    picked = att.pick("auto", dtype=dtype, platform=platform)
    assert getattr(picked, "func", picked) is getattr(att, name)
    assert att.needs_gather("auto", platform) == apart


def test_xla_is_blocked_on_cpu_alone():
    assert att.pick("xla", dtype="float32", platform="cpu") is att.blocked
    for platform in ("gpu", "tpu"):
        assert att.pick("xla", dtype="float32", platform=platform) is att.xla
