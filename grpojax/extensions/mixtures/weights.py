"""The weights of a mixture of experts, as rows of the table of weights."""

from typing import Any

from grpojax.models.weight import Weight, WeightTable, matrix_row, normal, zeros


def _expert(rows: str, columns: str, name: str, *, residual: bool = False) -> Weight:
    init, name = normal(rows, residual=residual), f"model.layers.{{}}.mlp.experts.{{}}.{name}.weight"
    return Weight(("layers", "experts", rows, columns), init, name, transposed=True, mlp="mixture")


def _bias(axis: str, name: str) -> Weight:
    name = f"model.layers.{{}}.mlp.experts.{{}}.{name}.bias"
    return Weight(("layers", "experts", axis), zeros, name, when="biased", mlp="mixture")


def _choice(name: str, when: str) -> Weight:
    """A number of each expert that the choice among them takes."""
    name = f"model.layers.{{}}.mlp.gate.{name}"
    return Weight(("layers", "choices"), zeros, name, when=when, exact=True, mlp="mixture")


def _shared(rows: str, columns: str, name: str, when: str = "shared", **more: Any) -> Weight:
    return matrix_row(rows, columns, f"mlp.{name}", when=when, mlp="mixture", **more)


WEIGHTS: WeightTable = {
    "router": matrix_row("embed", "choices", "mlp.gate", exact=True, mlp="mixture"),
    "router_bias": _choice("bias", "biased"),
    "router_correction": _choice("e_score_correction_bias", "corrected"),
    "expert_gate": _expert("expert_embed", "expert_mlp", "gate_proj"),
    "expert_gate_bias": _bias("expert_mlp", "gate_proj"),
    "expert_up": _expert("expert_embed", "expert_mlp", "up_proj"),
    "expert_up_bias": _bias("expert_mlp", "up_proj"),
    "expert_down": _expert("expert_mlp", "expert_embed", "down_proj", residual=True),
    "expert_down_bias": _bias("hidden", "down_proj"),
    "shared_gate": _shared("embed", "shared_mlp", "shared_expert.gate_proj"),
    "shared_up": _shared("embed", "shared_mlp", "shared_expert.up_proj"),
    "shared_down": _shared("shared_mlp", "embed", "shared_expert.down_proj", residual=True),
    "shared_router": _shared("embed", "one", "shared_expert_gate", when="gated_shared", exact=True),
}
