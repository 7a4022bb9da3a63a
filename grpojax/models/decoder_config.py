"""What distinguishes one decoder family from another."""

import dataclasses
import itertools
from typing import Literal

from grpojax.host.errors import UserError
from grpojax.models.layer_kinds import Kind, Mixer, Mlp

Activation = Literal["silu", "gelu_tanh"]


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
    activation: Activation = "silu"  # of an MLP's gate
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
    mlp: Mlp | None = None  # in place of an MLP of intermediate_size, but for the first layers:
    dense_layers: int = 0  # how many of the first layers have that MLP all the same
    output_gate: bool = False  # attention's output is multiplied by the sigmoid of a gate, which "q_gated" gives too
    mixer: Mixer | None = None  # in place of attention, in these layers:
    mixer_layers: tuple[int, ...] = ()

    def __post_init__(self):
        # Lists, as JSON has them, have no hash, which a static argument of a program needs.
        # With fewer layers than its maker had, a model keeps those of each kind that are left.
        attends = next(i for i in itertools.count() if i not in self.mixer_layers)
        for name in ("unrotated_layers", "windowed_layers", "mixer_layers"):
            object.__setattr__(self, name, tuple(i for i in getattr(self, name) if i < self.num_layers))
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
        if self.mixer is not None and len(set(self.kinds)) < 2:
            attending = [i for i in range(self.num_layers) if i not in self.mixer_layers]
            raise UserError(
                f"{self.num_layers} layers of family {self.family!r}, with attention in {attending}: a model with "
                f"another mixer needs both kinds\nset the number of layers to at least {max(2, 1 + attends)}"
            )
        if self.query_growth and not isinstance(self.rope_scaling, Llama3Scaling | YarnScaling):
            raise UserError("queries that grow with positions need a scaling with original positions")
        if self.dense_layers and not (self.mlp is not None and self.dense_layers < self.num_layers):
            raise UserError(
                f"{self.num_layers} layers of family {self.family!r}: the first {self.dense_layers} have no experts, "
                f"and others must have some\nset the number of layers to at least {self.dense_layers + 1}"
            )
        if self.dense_layers and (self.windowed_layers or self.unrotated_layers or self.mlp_bias):
            raise UserError(
                f"family {self.family!r}: first layers without experts beside windows, unrotated layers or biases of "
                "the MLP are not supported"
            )
        unlike = self.mlp is not None or self.unrotated_layers or self.windowed_layers
        if self.mixer is not None and unlike:
            raise UserError(
                f"family {self.family!r}: {self.mixer.name} layers beside experts, windows or unrotated layers are not "
                "supported"
            )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer.

        Example:
          >>> config = DecoderConfig(family="llama", vocab_size=7, hidden_size=8, intermediate_size=3, num_layers=2,
          ...                        num_heads=1, num_kv_heads=1, head_dim=8, rope_theta=1e4)
          >>> config.kinds
          (Kind(mixer='attention', mlp='dense'), Kind(mixer='attention', mlp='dense'))
        """
        core = Kind()
        mixer = core.mixer if self.mixer is None else self.mixer.name
        mlp = core.mlp if self.mlp is None else self.mlp.name
        return tuple(
            Kind(mixer if i in self.mixer_layers else core.mixer, core.mlp if i < self.dense_layers else mlp)
            for i in range(self.num_layers)
        )

    @property
    def attending(self) -> tuple[int, ...]:
        """The layers that attend."""
        return tuple(i for i in range(self.num_layers) if i not in self.mixer_layers)

    @property
    def mlp_layers(self) -> tuple[int, ...]:
        """The layers with another MLP than the dense one."""
        return () if self.mlp is None else tuple(range(self.dense_layers, self.num_layers))

    @property
    def period(self) -> tuple[Kind, ...]:
        """The shortest run of kinds that gives those of all layers when it is repeated, without the first
        ``dense_layers``."""
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
        return len(set(self.kinds)) == 1

    @property
    def dense(self) -> bool:
        """Whether some layer has the dense MLP."""
        return len(self.mlp_layers) < self.num_layers

    @property
    def plain_logits(self) -> bool:
        """Whether attention has neither sinks nor a cap."""
        return not self.sinks and not self.attention_cap

    @property
    def plain_queries(self) -> bool:
        """Whether a product makes queries and no gates."""
        return not self.output_gate
