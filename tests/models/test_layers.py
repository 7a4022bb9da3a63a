"""Gradients that are written out, against those that jax derives from the formulas."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoder import BASE, FAMILIES

from grpojax.models import Compute, layers, matrix
from grpojax.models.layer_kinds import Kind


def _random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def _norm(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 0.1) * scale


def _turned(x, cos, sin):
    """Each pair as a complex number, times that of its angle."""
    turned = jax.lax.complex(x[..., :3], x[..., 3:]) * jax.lax.complex(cos, sin)
    return jnp.concatenate([turned.real, turned.imag], -1)


def _both(f, g, args, out):
    return (jax.jit(lambda args, out, h=h: jax.vjp(h, *args)[1](out))(args, out) for h in (f, g))


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 5, 7)])
def test_norm(shape):
    args, out = (_random(*shape), _random(7)), _random(*shape) * 1.3
    mine, wanted = (jax.jit(f)(*args) for f in (lambda x, s: layers.rms_norm(x, s, 0.1), _norm))
    np.testing.assert_allclose(mine, wanted, rtol=1e-6)
    for mine, wanted in zip(*_both(lambda x, s: layers.rms_norm(x, s, 0.1), _norm, args, out), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)


def test_rotation():
    angle = _random(2, 5, 1, 3)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    args, out = (_random(2, 5, 3, 6),), _random(2, 5, 3, 6) * 1.3
    mine, wanted = _both(lambda x: layers.rotate(x, (cos, sin)), lambda x: _turned(x, cos, sin), args, out)
    np.testing.assert_allclose(mine[0], wanted[0], rtol=1e-5, atol=1e-6)


def test_gate():
    args, out = (3 * _random(5, 7), _random(5, 7)), _random(7, 5).T
    mine, wanted = _both(layers.gated, lambda gate, up: gate / (1 + jnp.exp(-gate)) * up, args, out)
    for a, b in zip(mine, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_keep_their_dtypes():
    x, scale = _random(5, 6).astype(jnp.bfloat16), _random(6)
    cos = jnp.ones((5, 3))
    for f, args in (
        (lambda x, s: layers.rms_norm(x, s, 0.1), (x, scale)),
        (layers.gated, (x, x)),
        (lambda x: layers.rotate(x, (cos, 0 * cos)), (x,)),
    ):

        def both(*args, f=f):
            out, back = jax.vjp(f, *args)
            return out, back(out)

        out, gradients = jax.eval_shape(both, *args)
        assert out.dtype == jnp.bfloat16
        assert [g.dtype for g in gradients] == [a.dtype for a in args]


def test_fewer_layers_keep_those_of_each_kind_that_are_left():
    """As a critic's trunk or a plan of some layers has them."""
    windows = dataclasses.replace(FAMILIES["windows"], num_layers=2)
    assert (FAMILIES["windows"].windowed_layers, windows.windowed_layers) == ((0, 2), (0,))
    mixed = dataclasses.replace(BASE, num_layers=4, mixer=SimpleNamespace(name="another"), mixer_layers=(0, 2))
    assert mixed.attending == (1, 3) and mixed.period == (Kind(mixer="another"), Kind())
    fewer = dataclasses.replace(mixed, num_layers=3)
    assert fewer.attending == (1,) and fewer.mixer_layers == (0, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_joined_weights_are_those_of_each(dtype):
    """With the biases that there are. What cannot be joined stays: a weight of another form, and one without others."""
    x, compute = _random(5, 7), Compute(dtype=dtype)
    given = {
        name: _random(7, n) for name, n in zip(("q", "k", "v", "gate", "up", "down"), (6, 3, 2, 4, 4, 5), strict=True)
    }
    given |= {"q_bias": _random(6), "v_bias": _random(2), "up": matrix.Transposed.of(_random(7, 4))}
    made = layers.joined(given, compute)
    assert made.keys() == {"q+k+v", "gate", "up", "down"} and made["gate"] is given["gate"]
    layer = layers.Layer(Kind(), {"q+k+v": made["q+k+v"]}, BASE, compute)
    for name, got in zip("qkv", layer.linears(x.astype(dtype), "q", "k", "v"), strict=True):
        want = x @ given[name] + given.get(f"{name}_bias", 0)
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.1 if dtype == "bfloat16" else 1e-5)


def test_weights_that_are_cut_over_devices_are_not_joined():
    given = {name: _random(7, 4) for name in ("gate", "up")}
    for tensor, names in ((1, {"gate+up"}), (2, {"gate", "up"})):
        mesh = jax.make_mesh((tensor,), ("tensor",), devices=jax.devices()[:tensor])
        assert layers.joined(given, Compute(mesh=mesh)).keys() == names
