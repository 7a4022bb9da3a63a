"""Mixtures of experts: a router sends each token of a layer to a few of many small MLPs, and weights their outputs.

No expert has a capacity, and no token is dropped. A token's output depends only on the token, so that sampler and
trainer agree, however their batches are cut. The router computes in float32 whatever the compute dtype is, since a
rounded probability can choose another expert.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from grpojax.extensions.mixtures import dispatch
from grpojax.host.errors import UserError
from grpojax.models import matrix
from grpojax.models.compute import Compute
from grpojax.models.layer_kinds import LayerProducts, Mlp, Observe, Spread
from grpojax.models.layers import gated
from grpojax.models.matrix import Kernel, Times
from grpojax.models.weight_table import DECODER
from grpojax.sharding import ROLLOUT, TRAIN, spec
from grpojax.types import Array, Mean, Rows


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


def route(h: Array, router: Router, experts: "Experts", kept: Array | None = None) -> Routing:
    """Sends tokens ``h [n, D]`` to experts.

    ``kept [n, k]`` are choices of an earlier forward (`Experts.choices`), which replace the router's own. The weights
    are always the router's.

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


def _in_groups(scores: Array, experts: "Experts") -> Array:
    """Scores ``[n, E]`` with -inf outside of the groups that each token's experts are chosen from."""
    if experts.groups == experts.groups_chosen:
        return scores
    by_group = scores.reshape(len(scores), experts.groups, -1)
    of_group = jax.lax.top_k(by_group, 2)[0].sum(-1)
    groups = jax.lax.top_k(of_group, experts.groups_chosen)[1]
    there = (groups[..., None] == jnp.arange(experts.groups, dtype=groups.dtype)).any(1)
    return jnp.where(there[..., None], by_group, -jnp.inf).reshape(scores.shape)


def choice_dtype(count: int) -> Any:
    """The dtype of choices among ``count`` experts. Its largest number says that no choice was kept.

    Example:
      >>> [choice_dtype(count).__name__ for count in (128, 255, 256)]
      ['uint8', 'uint8', 'uint16']
    """
    return jnp.uint8 if count < 256 else jnp.uint16


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
    """``apply`` where each shard of ``expert`` has its own part of the experts (`dispatch`)."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts(Mlp):
    """A mixture of experts: many small SwiGLU MLPs in place of one; a router sends each token to a few of them.

    A mesh shares out the experts over ``expert``, and cuts each over ``tensor``, like the dense MLP.

    Attributes:
      count: experts of a layer.
      chosen: how many of them a token goes to: those of highest probability under the router's softmax over all.
      size: width of one expert.
      renormalised: whether the probabilities of the chosen, which weigh what they give, are scaled to add up to 1.
      shared: width of one more expert that every token goes to; 0 without one.
      shared_gate: whether the sigmoid of a gate weighs what that expert gives.
      sigmoid: whether an expert's probability is the sigmoid of its logit, not a share of a softmax.
      corrected: whether the choice is by probabilities plus a correction, a weight that no gradient changes.
      groups, groups_chosen: experts are chosen among those of a few groups of neighbours: the groups whose two highest
        corrected probabilities have the highest sum.
      scale: factor of what all chosen experts give.
      biased: whether the router's and the experts' products have biases.
      limit: 0, or the limit of an expert's SwiGLU ``(up + 1) gate sigmoid(alpha gate)``, with ``gate`` at most that
        and ``up`` at most that from 0.
      alpha: see ``limit``.
    """

    count: int
    chosen: int
    size: int
    renormalised: bool = True
    shared: int = 0
    shared_gate: bool = True
    sigmoid: bool = False
    corrected: bool = False
    groups: int = 1
    groups_chosen: int = 1
    scale: float = 1.0
    biased: bool = False
    limit: float = 0.0
    alpha: float = 1.702

    name = "mixture"
    loops = {dispatch.LOOP: dispatch.EVEN_ROUNDS + 1}  # of tokens to experts, if these get about as many each

    def __post_init__(self):
        if not 1 <= self.chosen <= self.count:
            raise UserError(f"num_experts_per_tok {self.chosen}: must be from 1 to num_experts {self.count}")
        if self.count % self.groups or not 1 <= self.groups_chosen <= self.groups:
            raise UserError(
                f"n_group {self.groups}, topk_group {self.groups_chosen}: groups must divide {self.count} experts, and "
                "no more can be chosen than there are"
            )
        if self.groups > 1 and (
            self.count // self.groups < 2 or self.chosen > self.groups_chosen * (self.count // self.groups)
        ):
            raise UserError(
                f"n_group {self.groups}: groups need two experts, and those chosen all {self.chosen} of a token's"
            )

    @property
    def gated_shared(self) -> bool:
        """Whether there is an expert that every token goes to, and a gate weighs what it gives."""
        return self.shared > 0 and self.shared_gate

    @property
    def width(self) -> int:
        """Of an expert; an expert that every token goes to may be wider."""
        return max(self.size, self.shared)

    def sizes(self, hidden: int) -> dict[str, int]:
        """As of an `Mlp`."""
        return {
            "experts": self.count,
            "choices": self.count,
            "expert_embed": hidden,
            "expert_mlp": self.size,
            "shared_mlp": self.shared,
        }

    def cut(self) -> dict[str, tuple[int, str]]:
        """As of an `Mlp`."""
        return {
            "moe_intermediate_size": (self.size, "expert_mlp"),
            "shared_expert_intermediate_size": (self.shared, "shared_mlp"),
        }

    def check_axis(self, shards: int) -> None:
        """As of an `Mlp`."""
        if shards > 1 and self.count % shards:
            fit = ", ".join(str(n) for n in range(1, self.count + 1) if self.count % n == 0)
            raise UserError(
                f"mesh.expert={shards} does not divide the {self.count} experts of this model\n"
                f"set mesh.expert to one of: {fit}"
            )

    def choices(self, seen: Routing) -> Array:
        """The experts of each token, in few bytes."""
        return seen.chosen.astype(choice_dtype(self.count))

    def choice(self) -> tuple[int, Any]:
        """As of an `Mlp`."""
        return self.chosen, choice_dtype(self.count)

    def observe(self, rows: Rows, weights: Array | None) -> Observe:
        """The `load` of each layer."""
        return functools.partial(load, rows=rows, weights=weights)

    def measured(self, observed: Load, rows: Rows, coef: float) -> tuple[Array, dict[str, Any]]:
        """The load-balance loss as a mean over layers, and what the routers did."""
        seen = (rows.segments > 0).sum().astype(jnp.float32) * observed.entropy.shape[0]
        metrics: dict[str, Any] = {
            "router_entropy": Mean(total=observed.entropy.sum(), count=seen),
            "router_counts": observed.counts,
        }
        if observed.balance is None:
            return jnp.float32(0.0), metrics
        balance = observed.balance.mean()
        return coef * balance, metrics | {"balance_loss": balance}

    def matrices(self, hidden: int) -> int:
        """As of an `Mlp`."""
        return self._matrices(hidden, self.count)

    def of_token(self, hidden: int) -> int:
        """As of an `Mlp`."""
        return self._matrices(hidden, self.chosen)

    def _matrices(self, hidden: int, experts: int) -> int:
        return hidden * (3 * (experts * self.size + self.shared) + self.count + self.gated_shared)

    def in_vain(self, hidden: int, compute: Compute, tokens: int) -> int:
        """Those of the experts that a token does not go to, where all run on all tokens, as in a decode step."""
        return (self.count - self.chosen) * 3 * hidden * self.size if pick(compute, tokens) is every else 0

    def spread(self, hidden: int, shards: int, tensor: int) -> Spread:
        """As of an `Mlp`. An even load is assumed, with a round of `dispatch` that is not full."""
        even, weights = dispatch.EVEN_ROUNDS, self.count * 3 * hidden * self.size
        rounds = 1 if shards == 1 else even
        inside = (self.chosen / rounds * self.size + self.shared) / tensor + self.chosen * hidden / 2
        return Spread(
            weights=weights,
            laid_out=weights * 2 // 3,
            inside=inside,
            reads=0 if shards == 1 else even,
            rows=(even + 1) / even * self.chosen * (shards - 1) / shards,
        )

    def run(self, layer: LayerProducts, h: Array, kept: Array | None) -> tuple[Array, Routing]:
        """As of an `Mlp`; the second result is the tokens' `Routing`, ``[..., k]`` and ``[..., E]``."""
        with jax.named_scope("experts"):
            y, routing = self._routed(layer, h, kept)
        if self.shared:
            with jax.named_scope("shared_expert"):
                if not self.shared_gate:
                    shared = layer.linear(gated(*layer.linears(h, "shared_gate", "shared_up")), "shared_down")
                    return y + shared, routing
                gate = jnp.matmul(h.astype(jnp.float32), cast(Array, layer.w["shared_router"]), precision="highest")
                shared = layer.linear(gated(*layer.linears(h, "shared_gate", "shared_up")), "shared_down")
                y = y + (jax.nn.sigmoid(gate) * shared.astype(jnp.float32)).astype(h.dtype)
        return y, routing

    def _routed(self, layer: LayerProducts, h: Array, kept: Array | None) -> tuple[Array, Routing]:
        """The experts' output for ``h [..., D]``. No token leaves its shard but over ``expert``."""
        mesh, inner, names = layer.compute.mesh, Inner(self.limit, self.alpha), [n for n in _ROUTED if n in layer.w]

        def run(h: Array, kept: Array | None, *weights: Any, first: Any = 1) -> tuple[Array, Routing]:
            rows = h.reshape(-1, h.shape[-1])
            router, kernels = _joined(dict(zip(names, weights, strict=True)), first=first)
            routing = route(rows, router, self, None if kept is None else kept.reshape(len(rows), -1))
            given = routing
            if mesh is not None:  # so that gradients are summed over ``tensor`` by token, not by choice
                rows, scale = (jax.lax.pcast(x, "tensor", to="varying") for x in (rows, routing.weights))
                given = routing._replace(weights=scale)
            y = sharded(pick(layer.compute, len(rows)), mesh)(rows, given, *kernels, inner).astype(h.dtype)
            return y.reshape(h.shape), jax.tree.map(lambda x: x.reshape(*h.shape[:-1], -1), routing)

        def whole(h: Array, kept: Array | None, *weights: Any) -> tuple[Array, Routing]:
            here = jax.lax.axis_index("tensor") == 0 if self.biased else 1
            y, routing = run(h, kept, *jax.tree.map(lambda w: w[0], weights), first=here)
            return jax.lax.psum(y, "tensor"), routing

        weights = [layer.w[name] for name in names]
        if mesh is None:
            return run(h, kept, *weights)
        shards, axes = spec(("shard",), ROLLOUT), [DECODER[name].axes[1:] for name in names]
        of_axes = [*zip(weights, axes, strict=True)]
        copies = [matrix.each(w, lambda x, axes, _: _copies(x, mesh, axes), of) for w, of in of_axes]
        cuts = [matrix.each(w, lambda _, axes, __: _cut_copies(axes), of) for w, of in of_axes]
        run_shards = jax.shard_map(whole, mesh=mesh, in_specs=(shards, shards, *cuts), out_specs=shards)
        return run_shards(h, kept, *copies)


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
