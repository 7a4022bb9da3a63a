"""Small random decoders, ragged batches, and a plain forward of one sequence at a time.

Decoders with layers that an extension brings are there if the extension is.
"""

import dataclasses
import functools
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
from flat_batches import Flat
from flax import nnx

from grpojax import losses, masked
from grpojax.models import Decoder, DecoderConfig, decoder
from grpojax.models.decoder_config import Llama3Scaling
from grpojax.models.weight_table import DECODER, layers_with
from grpojax.types import Prompts

BASE = DecoderConfig(
    family="qwen2", vocab_size=53, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, rope_theta=1e4, qkv_bias=True,
)  # fmt: skip
FAMILIES = {
    "qwen2": BASE,
    "qwen2_untied": dataclasses.replace(BASE, tie_embeddings=False),
    "qwen3": dataclasses.replace(BASE, family="qwen3", qkv_bias=False, qk_norm=True, head_dim=10),
    "llama": dataclasses.replace(
        BASE, family="llama", qkv_bias=True, out_bias=True, mlp_bias=True, num_kv_heads=1,
        rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=16),
    ),
    "smollm3": dataclasses.replace(BASE, family="smollm3", qkv_bias=False, unrotated_layers=(1,)),
    "granite": dataclasses.replace(
        BASE, family="granite", embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.4,
        logits_divisor=1.7,
    ),
    "olmo2": dataclasses.replace(
        BASE, family="olmo2", qkv_bias=False, wide_qk_norm=True, norms_before=False, norms_after=True
    ),
    "glm4": dataclasses.replace(BASE, family="glm4", norms_after=True, rotary_dim=4, rotary_neighbours=True),
    "hunyuan": dataclasses.replace(BASE, family="hunyuan_v1_dense", qkv_bias=False, qk_norm_rotated=True),
    "windows": dataclasses.replace(BASE, num_layers=3, window=5, windowed_layers=(0, 2)),
    "gemma3_text": dataclasses.replace(
        BASE, family="gemma3_text", num_layers=3, qkv_bias=False, qk_norm=True, head_dim=10, norms_after=True,
        norms_add_one=True, activation="gelu_tanh", attention_multiplier=0.4, embedding_multiplier=24**0.5, window=3,
        windowed_layers=(0, 1), window_theta=300.0,
    ),
    "gemma2": dataclasses.replace(
        BASE, family="gemma2", num_layers=3, qkv_bias=False, attention_cap=0.7, logits_cap=1.3, norms_after=True,
        norms_add_one=True, activation="gelu_tanh", attention_multiplier=0.4, window=3, windowed_layers=(0, 2),
    ),
    "ministral3": dataclasses.replace(
        BASE, family="ministral3", qkv_bias=False, query_growth=0.7,
        rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=3),
    ),
}  # fmt: skip

if find_spec("grpojax.extensions.mixtures"):
    from grpojax.extensions.mixtures.experts import Experts

    FAMILIES |= {
        "gpt_oss": dataclasses.replace(
            BASE, family="gpt_oss", out_bias=True, sinks=True, tie_embeddings=False, window=3, windowed_layers=(0,),
            mlp=Experts(count=5, chosen=2, size=14, biased=True, limit=0.6),
        ),
        "glm4_moe": dataclasses.replace(
            BASE, family="glm4_moe", num_layers=3, qk_norm=True, rotary_dim=4, dense_layers=1,
            mlp=Experts(
                count=6, chosen=2, size=14, shared=22, shared_gate=False, sigmoid=True, corrected=True, groups=3,
                groups_chosen=2, scale=1.7,
            ),
        ),
        "qwen2_moe": dataclasses.replace(
            BASE, family="qwen2_moe", mlp=Experts(count=5, chosen=2, size=14, renormalised=False, shared=22)
        ),
    }  # fmt: skip
    MIXTURE = dataclasses.replace(
        FAMILIES["qwen3"], family="qwen3_moe", vocab_size=56, mlp=Experts(count=5, chosen=2, size=14)
    )  # whose vocabulary divides

if find_spec("grpojax.extensions.delta"):
    from grpojax.extensions.delta.delta_net import DeltaNet

    FAMILIES["qwen3_5"] = dataclasses.replace(
        BASE, family="qwen3_5_text", qkv_bias=False, qk_norm=True, head_dim=12, rotary_dim=6, output_gate=True,
        norms_add_one=True, num_layers=4, norm_eps=1e-2,  # norms of what a delta net gives, which may be near 0
        mixer=DeltaNet(key_heads=2, value_heads=6, key_size=5, value_size=7, taps=3), mixer_layers=(0, 2),
    )  # fmt: skip

FORMATS = ("compute", *(["int8"] if find_spec("grpojax.extensions.int8") else []))  # of a rollout's numbers


def there(*names):
    """Those of these parameters of a test whose first is the name of a decoder that is there."""
    return [x for x in names if (x if isinstance(x, str) else getattr(x, "values", x)[0]) in FAMILIES]


# By itself the forward would compile each of its operations.
score = jax.jit(decoder.score, static_argnums=(0, 3), static_argnames=("temperature", "entropy"))


def random_decoder(config, seed=0):
    """Every weight random, biases and norms too, so that none of them can be left out unseen."""
    graph, params = _random_weights(config, seed)
    return graph, jax.tree.map(jnp.array, params)  # of their own: an update takes them over


@functools.cache
def _random_weights(config, seed):
    """On the host; made by one program, not by one for each weight."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(seed))))
    params = jax.jit(lambda: nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))[1])()
    leaves, treedef = jax.tree.flatten(jax.device_get(params))
    rng = np.random.default_rng(seed)
    leaves = [x + np.float32(0.1 * rng.standard_normal(x.shape)) for x in leaves]
    return graph, jax.tree.unflatten(treedef, leaves)


def ragged_batch(rng, p=3, g=5, length=7, most=11, vocab=53, pad=0):
    prompt_lengths = rng.integers(1, length + 1, p).astype(np.int32)
    lengths = rng.integers(1, most + 1, (p, g)).astype(np.int32)
    tokens = rng.integers(0, vocab, (p, g, most)).astype(np.int32)
    tokens[np.arange(most) >= lengths[..., None]] = pad
    prompts = rng.integers(0, vocab, (p, length)).astype(np.int32)
    prompts[np.arange(length) >= prompt_lengths[:, None]] = pad
    zeros = np.zeros(tokens.shape, np.float32)
    return Flat(
        prompts=Prompts(
            tokens=prompts, lengths=prompt_lengths, uids=np.arange(p, dtype=np.uint32),
            first_sample=np.zeros(p, np.int32),
        ),
        tokens=tokens, lengths=lengths, arrays=dict(advantages=zeros, weights=zeros),
    )  # fmt: skip


def plain_states(model, sequences, prompt=None, read=None):
    """The oracle: whole sequences ``[n, N]``, full causal attention, loops over layers and heads; no group, no rows.

    Normed hidden states ``[n, N, D]``. Right padding cannot reach back through a causal mask. With ``read``, tokens
    from ``prompt [n]`` on attend to keys and values as ``read`` gives them back.
    """
    c = model.config
    n = sequences.shape[1]
    x = model.embed[...][sequences] * c.embedding_multiplier
    scale = c.attention_multiplier or c.head_dim**-0.5
    usual = _angles(c, n, c.rope_theta, c.rope_scaling)
    windowed = usual if c.window_theta is None else _angles(c, n, c.window_theta, None)

    def norm(x, w):
        w = 1 + w if c.norms_add_one else w
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps) * w

    def turn(x, angle):
        half, cos, sin = angle.shape[1], np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        for i in range(half):
            one, two = (2 * i, 2 * i + 1) if c.rotary_neighbours else (i, half + i)
            a, b = x[..., one], x[..., two]
            x = x.at[..., one].set(a * cos[:, i] - b * sin[:, i]).at[..., two].set(b * cos[:, i] + a * sin[:, i])
        return x

    def cut(x, heads):
        return jnp.concatenate([x[..., head * c.head_dim : (head + 1) * c.head_dim] for head in heads], -1)

    weights = nnx.to_pure_dict(nnx.state(model.layers))
    for i in range(c.num_layers):
        w = {k: v[layers_with(DECODER[k], c).index(i)] for k, v in weights.items() if has(c, k, i)}

        def linear(h, name, w=w):
            return h @ w[name] + w.get(f"{name}_bias", 0.0)

        if c.kinds[i].mixer == "delta":
            x = x + plain_delta_net(norm(x, w["attn_norm"]), w, c)
            x = x + linear(swish(linear(h := norm(x, w["mlp_norm"]), "gate")) * linear(h, "up"), "down")
            continue
        h = norm(x, w["attn_norm"]) if c.norms_before else x
        q, k, v = linear(h, "q_gated" if c.output_gate else "q"), linear(h, "k"), linear(h, "v")
        if c.output_gate:
            q, gate = (cut(q, range(first, 2 * c.num_heads, 2)) for first in (0, 1))
        if c.wide_qk_norm:
            q, k = norm(q, w["q_wide_norm"]), norm(k, w["k_wide_norm"])
        heads = []
        for head in range(c.num_heads):
            kv = head // (c.num_heads // c.num_kv_heads)
            qh, kh, vh = cut(q, [head]), cut(k, [kv]), cut(v, [kv])
            if c.qk_norm:
                qh, kh = norm(qh, w["q_norm"]), norm(kh, w["k_norm"])

            def attend(qh, kh, vh, i=i, head=head, w=w):
                s = qh @ kh.swapaxes(1, 2) / np.float32(1 / scale)
                if c.attention_cap:
                    s = c.attention_cap * jnp.tanh(s / c.attention_cap)
                seen = np.tri(n, dtype=bool)
                if i in c.windowed_layers:
                    seen &= ~np.tri(n, k=-c.window, dtype=bool)
                s = jnp.where(seen, s, -jnp.inf)
                if c.sinks:
                    s = jnp.concatenate([s, jnp.broadcast_to(w["sinks"][head], (*s.shape[:-1], 1))], -1)
                return jax.nn.softmax(s, -1)[..., :n] @ vh

            if i not in c.unrotated_layers:
                angle = windowed if i in c.windowed_layers else usual
                qh, kh = turn(qh, angle), turn(kh, angle)
            if c.query_growth:
                times = np.arange(n) // c.rope_scaling.original_positions
                qh = qh * (1 + c.query_growth * np.log(1 + times)).astype(np.float32)[:, None]
            if c.qk_norm_rotated:
                qh, kh = norm(qh, w["q_rotated_norm"]), norm(kh, w["k_rotated_norm"])
            heads.append(attend(qh, kh, vh))
            if read is not None:
                late = (np.arange(n) >= np.asarray(prompt)[:, None])[..., None]
                heads[-1] = jnp.where(late, attend(qh, read(kh), read(vh)), heads[-1])
        y = jnp.concatenate(heads, -1)
        y = linear(y / (1 + jnp.exp(-gate)) if c.output_gate else y, "o")
        x = x + c.residual_multiplier * (norm(y, w["attn_after_norm"]) if c.norms_after else y)
        h = norm(x, w["mlp_norm"]) if c.norms_before else x
        gate = swish if c.activation == "silu" else gelu
        y = plain_mixture(h, w, c) if "router" in w else linear(gate(linear(h, "gate")) * linear(h, "up"), "down")
        x = x + c.residual_multiplier * (norm(y, w["mlp_after_norm"]) if c.norms_after else y)
    return norm(x, model.norm[...]) / c.logits_divisor


def plain_logits(model, states):
    """Logits of normed states."""
    made, cap = states @ model.unembed.T, model.config.logits_cap
    return cap * jnp.tanh(made / cap) if cap else made


def _angles(c, n, theta, r):
    """Rotary angles of n positions, ``[n, rotated / 2]``."""
    freq, rotated = [], c.rotary_dim or c.head_dim
    for j in range(rotated // 2):
        f = theta ** (-2 * j / rotated)
        if r is not None:
            turns = r.original_positions * f / (2 * np.pi)
            if turns < r.low_freq_factor:
                f = f / r.factor
            elif turns < r.high_freq_factor:
                share = (turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor)
                f = (1 - share) * f / r.factor + share * f
        freq.append(f)
    return np.arange(n)[:, None] * np.array(freq)


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * x**3)))


def has(c, name, i):
    """Whether layer ``i`` has the weight."""
    return i in layers_with(DECODER[name], c)


def plain_delta_net(h, w, c):
    """A loop over tokens and heads of ``h [n, N, D]``."""
    d, size = c.mixer, h.shape[1]
    inputs = []
    for name in "qkv":
        x, y = h @ w[f"delta_{name}"], 0.0
        for back in range(d.taps):
            y = y + jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :size] * w[f"delta_{name}_taps"][:, 0, -1 - back]
        inputs.append(swish(y))
    rate = 1 / (1 + jnp.exp(-h @ w["delta_rate"]))
    decay = jnp.exp(-jnp.exp(w["delta_decay_log"]) * jnp.log1p(jnp.exp(h @ w["delta_decay"] + w["delta_decay_start"])))
    out = []
    for head in range(d.value_heads):
        at = head // (d.value_heads // d.key_heads) * d.key_size
        q, k = (x[..., at : at + d.key_size] for x in inputs[:2])
        q, k = (x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        v = inputs[2][..., head * d.value_size : (head + 1) * d.value_size]
        out.append(plain_rule(q * d.key_size**-0.5, k, v, decay[..., head], rate[..., head]))
        z = (h @ w["delta_gate"])[..., head * d.value_size : (head + 1) * d.value_size]
        mean = (out[-1] * out[-1]).mean(-1, keepdims=True)
        out[-1] = out[-1] / jnp.sqrt(mean + c.norm_eps) * w["delta_norm"] * swish(z)
    return jnp.concatenate(out, -1) @ w["delta_out"]


def plain_rule(q, k, v, decay, rate, state=None):
    """The gated delta rule of one head, token by token: q and k ``[n, N, dk]``, v ``[n, N, dv]``, others ``[n, N]``."""
    n, size, dk = q.shape
    state = jnp.zeros((n, dk, v.shape[-1])) if state is None else state

    def one(state, x):
        q, k, v, decay, rate = x
        state = state * decay[:, None, None]
        wrong = v - (state * k[:, :, None]).sum(1)
        state = state + k[:, :, None] * (rate[:, None] * wrong)[:, None]
        return state, (state * q[:, :, None]).sum(1)

    return jax.lax.scan(one, state, [x.swapaxes(0, 1) for x in (q, k, v, decay, rate)])[1].swapaxes(0, 1)


def swish(x):
    return x / (1 + jnp.exp(-x))


def plain_mixture(h, w, c):
    """A loop over experts: each works on every token, and counts where it is among those of the highest logits."""
    logits = h @ w["router"] + w.get("router_bias", 0.0)
    score = 1 / (1 + jnp.exp(-logits)) if c.mlp.sigmoid else jnp.exp(logits)
    by = score + w["router_correction"] if c.mlp.corrected else score
    size = c.mlp.count // c.mlp.groups
    if c.mlp.groups > 1:
        groups = [by[..., i * size : (i + 1) * size] for i in range(c.mlp.groups)]
        best = [jnp.sort(x, -1)[..., -2:].sum(-1) for x in groups]
        for i in range(c.mlp.groups):
            better = sum((x > best[i]).astype(int) for x in best)[..., None]
            groups[i] = jnp.where(better >= c.mlp.groups_chosen, -jnp.inf, groups[i])
        by = jnp.concatenate(groups, -1)
    least = jnp.sort(by, -1)[..., -c.mlp.chosen, None]
    share = jnp.where(by >= least, score, 0.0)
    if c.mlp.renormalised or not c.mlp.sigmoid:
        share = share / (share if c.mlp.renormalised else score).sum(-1, keepdims=True)
    y = jnp.zeros_like(h)

    def product(x, name, e):
        return x @ w[name][e] + (w[f"{name}_bias"][e] if c.mlp.biased else 0.0)

    for e in range(c.mlp.count):
        gate, up = product(h, "expert_gate", e), product(h, "expert_up", e)
        if c.mlp.limit:
            gate, up = jnp.minimum(gate, c.mlp.limit), jnp.clip(up, -c.mlp.limit, c.mlp.limit)
            mid = (up + 1) * gate / (1 + jnp.exp(-c.mlp.alpha * gate))
        else:
            mid = swish(gate) * up
        y = y + c.mlp.scale * share[..., e, None] * product(mid, "expert_down", e)
    if c.mlp.shared:
        mid = swish(h @ w["shared_gate"]) * (h @ w["shared_up"])
        weight = 1 / (1 + jnp.exp(-h @ w["shared_router"])) if c.mlp.shared_gate else 1.0
        y = y + weight * (mid @ w["shared_down"])
    return y


def plain_scores(graph, params, sequences, temperature=1.0):
    """Log-prob and entropy of position t + 1 at index t."""
    model = nnx.merge(graph, params)
    logps = jax.nn.log_softmax(plain_logits(model, plain_states(model, sequences)) / temperature, -1)[:, :-1]
    return jnp.take_along_axis(logps, sequences[:, 1:, None], -1)[..., 0], -(jnp.exp(logps) * logps).sum(-1)


def plain_batch(graph, params, batch, temperature=1.0):
    """The oracle's log-probs and entropies of the completions, ``[P, G, T]``, 0 on padding."""
    (p, g, most), sequences = batch.tokens.shape, whole_sequences(batch)
    out = plain_scores(graph, params, sequences.reshape(p * g, -1), temperature)
    at = (batch.prompts.lengths - 1)[:, None, None] + np.arange(most)
    mask = np.arange(most) < batch.lengths[..., None]
    at = np.broadcast_to(at, batch.tokens.shape)
    return tuple(jnp.where(mask, jnp.take_along_axis(x.reshape(p, g, -1), at, -1), 0.0) for x in out)


def whole_sequences(batch):
    """Each prompt with each of its completions behind it, ``[P, G, L + T]``."""
    (p, g, most), length = batch.tokens.shape, batch.prompts.tokens.shape[1]
    sequences = np.zeros((p, g, length + most), np.int32)
    for i, n in enumerate(batch.prompts.lengths):
        sequences[i, :, :n] = batch.prompts.tokens[i, :n]
        sequences[i, :, n : n + most] = batch.tokens[i]
    return sequences


def with_tokens(batch, **fields):
    """The batch with other arrays of tokens; None takes one away."""
    arrays = {name: x for name, x in {**batch.arrays, **fields}.items() if x is not None}
    return dataclasses.replace(batch, arrays=arrays)


def learning_batch(seed=0):
    """A `ragged_batch` of 8 groups of 4 with the advantages and weights of an update."""
    rng = np.random.default_rng(seed)
    batch = ragged_batch(rng, p=8, g=4, vocab=56)
    mask = np.asarray(masked.from_lengths(batch.lengths, batch.tokens.shape[2]))
    advantages = np.where(mask, rng.normal(size=(8, 4, 1)), 0).astype(np.float32)
    return with_tokens(batch, advantages=advantages, weights=np.asarray(losses.loss_weights(mask, "token_mean")))


def some_prompts(p=3, length=7, seed=0):
    """Random ones of different lengths."""
    rng = np.random.default_rng(seed)
    return Prompts(
        tokens=rng.integers(0, 53, (p, length)).astype(np.int32),
        lengths=rng.integers(1, length + 1, p).astype(np.int32),
        uids=np.arange(10, 10 + p, dtype=np.uint32),
        first_sample=np.zeros(p, np.int32),
    )
