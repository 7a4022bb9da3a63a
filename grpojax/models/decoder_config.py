"""What distinguishes one decoder family from another."""

import dataclasses
from typing import Literal

from grpojax.host.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's stretching of the low rotary frequencies (``rope_type: llama3``).

    Frequencies with a wavelength over ``original_positions / low_freq_factor`` are divided by ``factor``,
    those under ``original_positions / high_freq_factor`` stay, the ones between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every rotary frequency divided by ``factor`` (``rope_type: linear``)."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (``rope_type: yarn``, arXiv:2309.00071).

    A frequency that turns less than ``slow`` times in ``original_positions`` is divided by ``factor``, one that turns
    more than ``fast`` times stays, and those between are interpolated by their place in a head. Where ``whole``, the
    two places at which that begins and ends are rounded outwards. Cosine and sine are multiplied by
    ``attention_factor``, so that logits of attention are by its square.
    """

    factor: float
    original_positions: int
    fast: float = 32.0
    slow: float = 1.0
    whole: bool = True
    attention_factor: float


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: in every layer many small SwiGLU MLPs stand in place of one, and a router sends each token
    to a few of them.

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


# What a layer mixes its tokens by. Where only the first layers have an MLP and all others experts, all layers attend,
# and are of the last two kinds.
Kind = Literal["attention", "delta", "dense", "mixture"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Gated delta nets (`grpojax.models.delta_net`), which most layers have in place of attention.

    Attributes:
      key_heads: heads of queries and keys; each serves as many heads of values as the next.
      value_heads: heads of values, each with a state ``[key_size, value_size]``.
      key_size: numbers of a query or a key.
      value_size: numbers of a value.
      taps: how many tokens the convolution reads, the newest included.
      attention_layers: the layers that attend.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    attention_layers: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "attention_layers", tuple(self.attention_layers))
        if self.value_heads % self.key_heads:
            raise UserError(
                f"linear_num_key_heads {self.key_heads} does not divide linear_num_value_heads {self.value_heads}"
            )
        if self.taps < 2:
            raise UserError(f"linear_conv_kernel_dim {self.taps}: must be at least 2")

    @property
    def shared(self) -> int:
        """Heads of values that one head of keys serves."""
        return self.value_heads // self.key_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and options of a decoder-only transformer with rotary positions, RMS norms and gated MLPs.

    ``vocab_size`` counts the rows of the embedding. Makers often round it up, so that some rows belong to no token:
    ``unused_rows`` has these, as half-open ranges ``(first, last + 1)`` in rising order. Their probability is 0
    wherever a token is drawn or scored. The tokenizer says which they are (`grpojax.models.hf.fit_tokenizer`), and no
    ``config.json`` has them.
    """

    family: str  # as config.json has it in "model_type": `grpojax.models.hf` lists them
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # of each head
    qk_norm_rotated: bool = False  # of each head, after its rotation
    wide_qk_norm: bool = False  # of all heads at once
    norms_before: bool = True  # norms of what attention and MLP read
    norms_after: bool = False  # norms of what attention and MLP give
    norms_add_one: bool = False  # a norm multiplies by 1 plus its weight
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of an MLP's gate
    max_positions: int = 32768
    unrotated_layers: tuple[int, ...] = ()  # whose queries and keys know no positions
    rotary_dim: int | None = None  # numbers of a head that rotate, the first ones; None is all
    rotary_neighbours: bool = False  # rotated pairs are neighbours, not one number of each half
    window: int = 0  # the newest tokens, itself included, that a query of a windowed layer attends to
    windowed_layers: tuple[int, ...] = ()  # all others attend to all tokens before
    window_theta: float | None = None  # rotary base of windowed layers, without scaling; None: as all other layers
    embedding_multiplier: float = 1.0  # of embedded tokens
    attention_multiplier: float | None = None  # of a query's products with keys; None is one over sqrt(head_dim)
    residual_multiplier: float = 1.0  # of what attention and MLP add
    logits_divisor: float = 1.0
    unused_rows: tuple[tuple[int, int], ...] = ()
    query_growth: float = 0.0  # b: queries grow by 1 + b log(1 + floor(position / original_positions of the scaling))
    attention_cap: float = 0.0  # c: a query's products with keys become c tanh(product / c); 0 has no cap
    logits_cap: float = 0.0  # the same for logits
    sinks: bool = False  # one more logit of each head in attention, which gives no value
    experts: Experts | None = None  # in place of an MLP of intermediate_size, but for the first layers:
    dense_layers: int = 0  # how many of the first layers have an MLP all the same
    output_gate: bool = False  # attention's output is multiplied by the sigmoid of a gate, which "q_gated" gives too
    delta: DeltaNet | None = None  # in some layers, in place of attention

    def __post_init__(self):
        # Lists, as JSON has them, have no hash, which a static argument of a program needs.
        # With fewer layers than its maker had, a model keeps those of each kind that are left.
        for name in ("unrotated_layers", "windowed_layers"):
            object.__setattr__(self, name, tuple(i for i in getattr(self, name) if i < self.num_layers))
        least = 2 if self.delta is None else max(2, 1 + min(self.delta.attention_layers, default=1))
        if self.delta is not None and any(i >= self.num_layers for i in self.delta.attention_layers):
            left = tuple(i for i in self.delta.attention_layers if i < self.num_layers)
            object.__setattr__(self, "delta", dataclasses.replace(self.delta, attention_layers=left))
        object.__setattr__(self, "unused_rows", tuple((start, stop) for start, stop in self.unused_rows))
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_key_value_heads {self.num_kv_heads} does not divide num_attention_heads {self.num_heads}"
            )
        if self.windowed_layers and self.window < 1:
            raise UserError(f"window {self.window}: layers {list(self.windowed_layers)} need one of at least 1 token")
        reordered = self.rotary_dim is not None or self.rotary_neighbours or self.attention_multiplier is not None
        if self.qk_norm_rotated and reordered:
            raise UserError(
                "norms of rotated heads exclude a partial rotation, one of neighbours and an attention multiplier"
            )
        if self.delta is not None and len(set(self.kinds)) < 2:
            raise UserError(
                f"{self.num_layers} layers of family {self.family!r}, with attention in "
                f"{list(self.delta.attention_layers)}: a model with delta nets needs both kinds\n"
                f"set the number of layers to at least {least}"
            )
        if self.query_growth and not isinstance(self.rope_scaling, Llama3Scaling | YarnScaling):
            raise UserError("queries that grow with positions need a scaling with original positions")
        if self.dense_layers and not (self.experts is not None and self.dense_layers < self.num_layers):
            raise UserError(
                f"{self.num_layers} layers of family {self.family!r}: the first {self.dense_layers} have no experts, "
                f"and others must have some\nset the number of layers to at least {self.dense_layers + 1}"
            )
        if self.dense_layers and (self.windowed_layers or self.unrotated_layers or self.mlp_bias):
            raise UserError(
                f"family {self.family!r}: first layers without experts beside windows, unrotated layers or biases of "
                "the MLP are not supported"
            )
        unlike = self.experts is not None or self.unrotated_layers or self.windowed_layers
        if self.delta is not None and unlike:
            raise UserError(
                f"family {self.family!r}: delta nets beside experts, windows or unrotated layers are not supported"
            )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer."""
        if self.delta is None:
            rest = self.num_layers - self.dense_layers
            return ("dense",) * self.dense_layers + ("mixture" if self.dense_layers else "attention",) * rest
        there = self.delta.attention_layers
        return tuple("attention" if i in there else "delta" for i in range(self.num_layers))

    def layers_of(self, kind: Kind) -> tuple[int, ...]:
        """The layers of one kind; "attention" are all that attend, and "mixture" all that have experts.

        Example:
          >>> delta = DeltaNet(key_heads=1, value_heads=2, key_size=4, value_size=4, taps=4, attention_layers=(3, 7))
          >>> config = DecoderConfig(family="qwen3_5_text", vocab_size=7, hidden_size=8, intermediate_size=3,
          ...                        num_layers=8, num_heads=1, num_kv_heads=1, head_dim=8, rope_theta=1e4, delta=delta)
          >>> config.layers_of("attention"), config.layers_of("delta"), config.period
          ((3, 7), (0, 1, 2, 4, 5, 6), ('delta', 'delta', 'delta', 'attention'))
        """
        if kind == "attention":
            return tuple(i for i, mine in enumerate(self.kinds) if mine != "delta")
        if kind == "mixture":
            return tuple(range(self.dense_layers, self.num_layers)) if self.mixture else ()
        return tuple(i for i, mine in enumerate(self.kinds) if mine == kind)

    @property
    def period(self) -> tuple[Kind, ...]:
        """The shortest run of kinds that gives those of all layers when it is repeated, without the first layers that
        have an MLP in place of experts."""
        kinds, n = self.kinds[self.dense_layers :], self.num_layers - self.dense_layers
        size = next(size for size in range(1, n + 1) if n % size == 0 and kinds == kinds[:size] * (n // size))
        return kinds[:size]

    @property
    def own_head(self) -> bool:
        """Whether the output projection is a weight of its own, not the embedding."""
        return not self.tie_embeddings

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same weights."""
        return not self.hybrid and not self.dense_layers

    @property
    def dense(self) -> bool:
        """Whether some layer's MLP is one for all tokens."""
        return self.experts is None or self.dense_layers > 0

    @property
    def mixture(self) -> bool:
        """Whether some layer has a mixture of experts."""
        return self.experts is not None

    @property
    def shared_expert(self) -> bool:
        """Whether a layer has an expert that every token goes to."""
        return self.experts is not None and self.experts.shared > 0

    @property
    def shared_gate(self) -> bool:
        """Whether a gate weighs what that expert gives."""
        return self.shared_expert and self.experts is not None and self.experts.shared_gate

    @property
    def corrected_choice(self) -> bool:
        """Whether a correction is added to the probabilities that experts are chosen by."""
        return self.experts is not None and self.experts.corrected

    @property
    def biased_experts(self) -> bool:
        """Whether router and experts have biases."""
        return self.experts is not None and self.experts.biased

    @property
    def plain_logits(self) -> bool:
        """Whether attention has neither sinks nor a cap."""
        return not self.sinks and not self.attention_cap

    @property
    def plain_queries(self) -> bool:
        """Whether a product makes queries and no gates."""
        return not self.output_gate

    @property
    def hybrid(self) -> bool:
        """Whether some layers have a delta net in place of attention."""
        return self.delta is not None
