"""Mixtures of experts: a router sends each token of a layer to a few of many small MLPs, and weights their outputs.

No expert has a capacity, and no token is dropped. A token's output depends only on the token, so that sampler and
trainer agree, however their batches are cut. The router computes in float32 whatever the compute dtype is, since a
rounded probability can choose another expert.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from grpojax.models import dispatch, matrix
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig, Experts
from grpojax.models.layers import Layer, gated
from grpojax.models.matrix import Kernel, Times
from grpojax.models.weight_table import DECODER
from grpojax.sharding import ROLLOUT, TRAIN, spec
from grpojax.types import Array, Rows


class Routing(NamedTuple):
    """Where a router sends n tokens.

    Attributes:
      chosen: ``[n, k]`` int32, the experts of each token, the most probable first.
      weights: ``[n, k]`` float32, the weights of these experts' outputs.
      probabilities: ``[n, E]`` float32, the router's softmax, or its sigmoids over their sum.
    """

    chosen: Array
    weights: Array
    probabilities: Array


class Router(NamedTuple):
    """A router's weights, float32: its kernel ``[D, E]``; its bias and the correction of its choices, ``[E]``, each
    None if it has none."""

    kernel: Array
    bias: Array | None = None
    correction: Array | None = None


def route(h: Array, router: Router, experts: Experts, kept: Array | None = None) -> Routing:
    """Sends tokens ``h [n, D]`` to experts.

    ``kept [n, k]`` are choices of an earlier forward (`kept_choices`). They replace the router's own. The weights are
    always the router's.

    Example:
      >>> router = Router(jnp.log(jnp.array([[1.0, 6.0, 2.0]])))
      >>> routing = route(jnp.ones((1, 1)), router, Experts(count=3, chosen=2, size=7))
      >>> routing.chosen.tolist(), routing.weights.round(2).tolist()
      ([[1, 2]], [[0.75, 0.25]])
    """
    logits = jnp.matmul(h.astype(jnp.float32), router.kernel, precision="highest")
    logits = logits if router.bias is None else logits + router.bias
    scores = jax.nn.sigmoid(logits) if experts.sigmoid else jax.nn.softmax(logits)
    by = _in_groups(scores if router.correction is None else scores + router.correction, experts)
    weights, chosen = jax.lax.top_k(by, experts.chosen)
    if kept is not None:
        kept = kept.astype(chosen.dtype)
        chosen = jnp.where(kept < experts.count, kept, chosen)
    if kept is not None or by is not scores:
        weights = jnp.take_along_axis(scores, chosen, -1)
    if experts.renormalised:
        weights = weights / (weights.sum(-1, keepdims=True) + (_TINY if experts.sigmoid else 0.0))
    weights = weights if experts.scale == 1 else weights * experts.scale
    probabilities = scores / (scores.sum(-1, keepdims=True) + _TINY) if experts.sigmoid else scores
    return Routing(chosen, weights, probabilities)


_TINY = 1e-20  # as in DeepSeek-V3: all sigmoids may be 0


def _in_groups(scores: Array, experts: Experts) -> Array:
    """Scores ``[n, E]`` with -inf outside of the groups that each token's experts are chosen from."""
    if experts.groups == experts.groups_chosen:
        return scores
    by_group = scores.reshape(len(scores), experts.groups, -1)
    of_group = jax.lax.top_k(by_group, 2)[0].sum(-1)
    groups = jax.lax.top_k(of_group, experts.groups_chosen)[1]
    there = (groups[..., None] == jnp.arange(experts.groups, dtype=groups.dtype)).any(1)
    return jnp.where(there[..., None], by_group, -jnp.inf).reshape(scores.shape)


def kept_choices(routing: Routing) -> Array:
    """The choices ``[..., k]`` of a forward as a later forward takes them, in few bytes. With it bound it is an
    `Observe`."""
    return routing.chosen.astype(choice_dtype(routing.probabilities.shape[-1]))


def choice_dtype(count: int) -> Any:
    """The dtype of choices among ``count`` experts. Its largest number says that no choice was kept.

    Example:
      >>> [choice_dtype(count).__name__ for count in (128, 255, 256)]
      ['uint8', 'uint8', 'uint16']
    """
    return jnp.uint8 if count < 256 else jnp.uint16


Observe = Callable[[Routing], Any]  # of a layer's tokens, to any pytree of arrays


class Biased(NamedTuple):
    """A product of each expert with a bias: its kernel ``[E, in, out]`` and its bias ``[E, out]``."""

    kernel: Kernel
    bias: Array


class Inner(NamedTuple):
    """What an expert does between its products; see `Experts.limit`."""

    limit: float = 0.0
    alpha: float = 1.702

    def __call__(self, gate: Array, up: Array) -> Array:
        if not self.limit:
            return gated(gate, up)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(self.alpha * gate))


_SWIGLU = Inner()

Kernels = Kernel | Biased  # of all experts

# (tokens [n, D], routing, gate and up [E, D, F], down [E, F, D]) -> the experts' weighted outputs, [n, D] float32.
Apply = Callable[..., Array]


def _multiply(times: Times, bias: Callable[[Array], Array]) -> Callable[[Array, Kernels], Array]:
    """The product with kernels, as ``times`` says. If they have a bias ``[E, out]``, it adds what ``bias`` makes of
    that."""

    def product(x: Array, w: Kernels) -> Array:
        if isinstance(w, Biased):
            return matrix.stacked(x, w.kernel, times) + bias(w.bias)
        return matrix.stacked(x, w, times)

    return product


def grouped(h: Array, routing: Routing, gate: Kernels, up: Kernels, down: Kernels, inner: Inner = _SWIGLU) -> Array:
    """Runs each expert on its own tokens: sorts the tokens by expert, and multiplies them in a grouped matmul."""
    (n, k), expert = routing.chosen.shape, routing.chosen.reshape(-1)
    order = jnp.argsort(expert)
    back = jnp.argsort(order)
    count = jax.tree.leaves(gate)[0].shape[0]
    sizes = (expert[:, None] == jnp.arange(count, dtype=jnp.int32)).sum(0, dtype=jnp.int32)

    def array(x: Array, w: Array) -> Array:
        return jax.lax.ragged_dot(x, w, sizes)

    def scaled(x: Array, values: Array, scale: Array) -> Array:
        y = jax.lax.ragged_dot(x, values.astype(x.dtype), sizes, preferred_element_type=jnp.float32)
        return (y * scale[expert[order]]).astype(x.dtype)

    multiply = _multiply(Times(array, scaled), lambda bias: bias[expert[order]])
    x = _permuted(jnp.broadcast_to(h[:, None], (n, k, h.shape[-1])).reshape(n * k, -1), order, back)
    y = _permuted(multiply(inner(multiply(x, gate), multiply(x, up)), down), back, order)
    return (y.reshape(n, k, -1).astype(jnp.float32) * routing.weights[..., None]).sum(1)


@jax.custom_vjp
def _permuted(x, order, back):
    """``x[order]``, whose gradient is a gather too; ``back`` undoes ``order``."""
    return x[order]


_permuted.defvjp(lambda x, order, back: (x[order], back), lambda back, g: (g[back], None, None))


def every(h: Array, routing: Routing, gate: Kernels, up: Kernels, down: Kernels, inner: Inner = _SWIGLU) -> Array:
    """Runs each expert on every token. This does the work of all experts. `grouped` must give the same result."""

    def sums(x: Array) -> str:
        return "nd,edf->enf" if x.ndim == 2 else "end,edf->enf"

    def scaled(x: Array, values: Array, scale: Array) -> Array:
        return jnp.einsum(sums(x), x, values.astype(x.dtype), preferred_element_type=jnp.float32) * scale[:, None]

    each = Times(lambda x, w: jnp.einsum(sums(x), x, w), lambda x, *w: scaled(x, *w).astype(x.dtype))
    summed = Times(
        lambda x, w: jnp.einsum("enf,efd->nd", x, w, preferred_element_type=jnp.float32),
        lambda x, *w: scaled(x, *w).sum(0),
        first=each,
    )

    count = jax.tree.leaves(gate)[0].shape[0]
    chosen = routing.chosen[..., None] == jnp.arange(count, dtype=jnp.int32)  # [n, k, E]
    weights = jnp.where(chosen, routing.weights[..., None], 0.0).sum(1)
    multiply = _multiply(each, lambda bias: bias[:, None])
    mid = inner(multiply(h, gate), multiply(h, up))
    mid = (mid.astype(jnp.float32) * weights.T[..., None]).astype(h.dtype)

    def of_experts(bias: Array) -> Array:  # one for each token
        return jnp.einsum("ne,ed->nd", weights, bias.astype(jnp.float32), precision="highest")

    return _multiply(summed, of_experts)(mid, down)


_FEW = 128  # tokens of a device: up to this many, an accelerator needs more time to read all experts than to multiply


def pick(compute: Compute, tokens: int) -> Apply:
    """How to run ``tokens`` tokens: as ``compute.experts`` says. "auto" is `every` for few tokens, as in a decode step,
    and on a CPU, where XLA computes a grouped matmul in the same way; otherwise `grouped`."""
    if compute.experts == "auto":
        few = tokens <= _FEW or (compute.platform or jax.default_backend()) == "cpu"
        return every if few else grouped
    return {"every": every, "grouped": grouped}[compute.experts]


def sharded(apply: Apply, mesh: Mesh | None) -> Apply:
    """``apply`` where each shard of ``expert`` has its own part of the experts (`grpojax.models.dispatch`)."""
    if mesh is None or mesh.shape[dispatch.AXIS] == 1:
        return apply
    send = dispatch.everywhere if apply is every else dispatch.exchanged

    def run(h: Array, routing: Routing, gate: Kernels, up: Kernels, down: Kernels, inner: Inner = _SWIGLU) -> Array:
        def own(h: Array, chosen: Array, weights: Array, kernels: tuple[Kernels, ...]) -> Array:
            return apply(h, routing._replace(chosen=chosen, weights=weights), *kernels, inner)

        return send(own, h, routing.chosen, routing.weights, (gate, up, down))

    return run


class Load(NamedTuple):
    """How the routers of all layers distributed completion tokens. All values are sums that add up over micro-batches.

    Attributes:
      counts: ``[layers, E]`` float32, number of tokens that each expert got.
      entropy: ``[layers]`` float32, entropy of `Routing.probabilities` in nats, summed over tokens.
      balance: ``[layers]`` float32, the load-balance loss, or None.
    """

    counts: Array
    entropy: Array
    balance: Array | None


def load(routing: Routing, rows: Rows, weights: Array | None = None) -> Load:
    """The `Load` of one layer. With ``rows`` and ``weights`` bound it is an `Observe`.

    ``weights [B, R, S]`` are weights of the tokens that add up to 1 over all micro-batches. If given, the load-balance
    loss is computed too: ``Σ_t w_t E Σ_e f_e(t) p_e(t)``, with ``p`` the `Routing.probabilities`, and ``f_e(t)`` the
    share of the tokens of t's completion that e got, which has no gradient. This is the loss of the Switch Transformer
    (arXiv:2101.03961). For k experts a token it follows the transformers library: it is k if all experts get the same
    share. It is computed for each completion separately, as in DeepSeek-V2 (arXiv:2405.04434). So it adds up over
    micro-batches, and its gradient does not depend on how a batch is cut.

    Example:
      >>> rows = Rows(prompts=jnp.zeros((1, 1, 1), int), prompt_lengths=jnp.ones((1, 1), int),
      ...             tokens=jnp.zeros((1, 1, 3), int), segments=jnp.array([[[1, 1, 0]]]),
      ...             offsets=jnp.array([[[0, 1, 0]]]), token_prompt=jnp.zeros((1, 1, 3), int))
      >>> probabilities = jnp.array([[[[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]]]])
      >>> routing = Routing(jnp.array([[[[0], [0], [0]]]]), probabilities[..., :1], probabilities)
      >>> found = load(routing, rows, jnp.array([[[0.5, 0.5, 0.0]]]))
      >>> found.counts.tolist(), float(found.balance)  # all to one: 2 (0.5 0.75 + 0.5 0.5)
      ([2.0, 0.0], 1.25)
    """
    there, p = rows.segments > 0, routing.probabilities
    count = p.shape[-1]
    sent = (routing.chosen[..., None] == jnp.arange(count, dtype=routing.chosen.dtype)).any(-2) & there[..., None]
    sent = sent.astype(jnp.float32)
    entropy = jax.scipy.special.entr(jax.lax.stop_gradient(p)).sum(-1).sum(where=there)
    balance = None
    if weights is not None:
        share = _of_completion(sent, rows)
        balance = (weights * count * (share * p).sum(-1)).sum(where=there)
    return Load(sent.sum((0, 1, 2)), entropy, balance)


def _of_completion(x: Array, rows: Rows) -> Array:
    """The mean of ``x [B, R, S, E]`` over the tokens of each completion, at every token of that completion."""
    size = x.shape[2]
    place = jnp.arange(size, dtype=jnp.int32)
    following = jnp.pad(rows.segments[..., 1:], ((0, 0), (0, 0), (0, 1)))
    last = jax.lax.cummin(jnp.where(rows.segments != following, place, size - 1), axis=2, reverse=True)
    first = jnp.maximum(place - rows.offsets, 0)
    sums = jnp.cumsum(x, 2)
    total = jnp.take_along_axis(sums, last[..., None], 2) - jnp.take_along_axis(sums - x, first[..., None], 2)
    return total / (last - first + 1).astype(jnp.float32)[..., None]


_ROUTED = (
    *("router", "router_bias", "router_correction", "expert_gate", "expert_gate_bias"),
    *("expert_up", "expert_up_bias", "expert_down", "expert_down_bias"),
)


def _joined(w: Mapping[str, Any], *, first: Any = 1) -> tuple[Router, list[Kernels]]:
    """The router, and the kernels of gate, up and down, out of the weights by name. The last bias is multiplied by
    ``first``, which is 0 where another device adds it."""
    kernels: list[Kernels] = []
    for name in ("expert_gate", "expert_up", "expert_down"):
        bias = w.get(f"{name}_bias")
        if bias is not None and name == "expert_down":
            bias = bias * jnp.asarray(first, bias.dtype)
        kernels.append(w[name] if bias is None else Biased(w[name], bias))
    return Router(w["router"], w.get("router_bias"), w.get("router_correction")), kernels


class MixtureLayer(Layer):
    """A `Layer` whose MLP is a mixture of experts. A mesh shares out the experts over ``expert``, and cuts each over
    ``tensor``, like an MLP.

    Attributes:
      kept: ``[..., k]``, choices of an earlier forward of the tokens ``[...]``; None if the router chooses.
      routing: the routing of the last tokens ``[...]`` that it ran, ``[..., k]`` and ``[..., E]``.
    """

    kept: Array | None = None
    routing: Routing | None = None

    @property
    def experts(self) -> Experts:
        """The config's experts, which a mixture has."""
        return cast(Experts, self.config.experts)

    def _mlp(self, x: Array) -> Array:
        h = self._read(x, "mlp_norm")
        with jax.named_scope("experts"):
            y, self.routing = self._routed(h)
        if self.experts.shared:
            with jax.named_scope("shared_expert"):
                if not self.experts.shared_gate:
                    y = y + self._linear(gated(*self._linears(h, "shared_gate", "shared_up")), "shared_down")
                    return self._add(x, y, "mlp_after_norm")
                gate = jnp.matmul(h.astype(jnp.float32), cast(Array, self.w["shared_router"]), precision="highest")
                shared = self._linear(gated(*self._linears(h, "shared_gate", "shared_up")), "shared_down")
                y = y + (jax.nn.sigmoid(gate) * shared.astype(jnp.float32)).astype(x.dtype)
        return self._add(x, y, "mlp_after_norm")

    def _routed(self, h: Array) -> tuple[Array, Routing]:
        """The experts' output for ``h [..., D]``. No token leaves its shard but over ``expert``."""

        inner, names = Inner(self.experts.limit, self.experts.alpha), [n for n in _ROUTED if n in self.w]

        def run(h: Array, kept: Array | None, *weights: Any, first: Any = 1) -> tuple[Array, Routing]:
            rows = h.reshape(-1, h.shape[-1])
            router, kernels = _joined(dict(zip(names, weights, strict=True)), first=first)
            routing = route(rows, router, self.experts, None if kept is None else kept.reshape(len(rows), -1))
            given = routing
            if self.mesh is not None:  # so that gradients are summed over ``tensor`` by token, not by choice
                rows, scale = (jax.lax.pcast(x, "tensor", to="varying") for x in (rows, routing.weights))
                given = routing._replace(weights=scale)
            y = sharded(pick(self.compute, len(rows)), self.mesh)(rows, given, *kernels, inner).astype(h.dtype)
            return y.reshape(h.shape), jax.tree.map(lambda x: x.reshape(*h.shape[:-1], -1), routing)

        def whole(h: Array, kept: Array | None, *weights: Any) -> tuple[Array, Routing]:
            here = jax.lax.axis_index("tensor") == 0 if self.experts.biased else 1
            y, routing = run(h, kept, *jax.tree.map(lambda w: w[0], weights), first=here)
            return jax.lax.psum(y, "tensor"), routing

        weights, mesh = [self.w[name] for name in names], self.mesh
        if mesh is None:
            return run(h, self.kept, *weights)
        shards, axes = spec(("shard",), ROLLOUT), [DECODER[name].axes[1:] for name in names]
        of_axes = [*zip(weights, axes, strict=True)]
        copies = [matrix.each(w, lambda x, axes, _: _copies(x, mesh, axes), of) for w, of in of_axes]
        cuts = [matrix.each(w, lambda _, axes, __: _cut_copies(axes), of) for w, of in of_axes]
        run_shards = jax.shard_map(whole, mesh=mesh, in_specs=(shards, shards, *cuts), out_specs=shards)
        return run_shards(h, self.kept, *copies)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copies(w: Array, mesh: Mesh, axes: tuple[str, ...]) -> Array:
    """A gathered weight as each batch shard has it, ``[shards, ...]``. Nothing moves.

    The gradient of an array that all shards have is summed over the shards, and each shard would get the whole sum. The
    copies have gradients of their own, so that their sum can be scattered over ``fsdp``. Experts have no copies over
    ``expert``: each of its shards has its own experts.
    """
    cut = spec(axes, ROLLOUT)
    return jax.shard_map(lambda x: x[None], mesh=mesh, in_specs=cut, out_specs=_cut_copies(axes))(w)


def _sum_of_copies(mesh: Mesh, axes: tuple[str, ...], _: None, g: Array) -> tuple[Array]:
    over = {i: tuple(axis for axis in TRAIN[a] if axis not in ROLLOUT[a]) for i, a in enumerate(axes)}
    rest = tuple(axis for axis in _copied_over(axes) if axis not in itertools.chain(*over.values()))

    def own_part(g: Array) -> Array:
        part = g[0]
        for i, scattered in over.items():
            if scattered:
                part = jax.lax.psum_scatter(part, scattered, scatter_dimension=i, tiled=True)
        return jax.lax.psum(part, rest)

    return (jax.shard_map(own_part, mesh=mesh, in_specs=_cut_copies(axes), out_specs=spec(axes, TRAIN))(g),)


_copies.defvjp(lambda w, mesh, axes: (_copies(w, mesh, axes), None), _sum_of_copies)


def _copied_over(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a mesh whose devices all have the same part of an array while it multiplies."""
    own = [axis for a in axes for axis in ROLLOUT[a]]
    return tuple(axis for axis in ROLLOUT["shard"] if axis not in own)


def _cut_copies(axes: tuple[str, ...]) -> PartitionSpec:
    """How the `_copies` of an array are sharded."""
    return PartitionSpec(_copied_over(axes), *spec(axes, ROLLOUT))


def layer(
    weights: Mapping[str, Any],
    config: DecoderConfig,
    compute: Compute,
    one: Array | None = None,
    *,
    separately: bool = False,
    kept: Array | None = None,
) -> Layer:
    """A layer's weights, gathered and cast: a `Layer`, or a `MixtureLayer` if they have a router.

    Raises:
      ValueError: there are choices of experts (`MixtureLayer.kept`), but no experts.
    """
    if "router" not in weights:
        return Layer(weights, config, compute, one, separately=separately)
    made = MixtureLayer(weights, config, compute, one, separately=separately)
    made.kept = kept
    return made
