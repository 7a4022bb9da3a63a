"""Gated delta nets in place of attention: a mixer of layers, and the families of models that have it."""

from grpojax.extension import Names

NAMES = Names(
    families={"qwen3_5_text": "grpojax.extensions.delta.families:QWEN3_5"},
    weights={"delta": "grpojax.extensions.delta.weights:WEIGHTS"},
    axes={
        "delta_keys": ("tensor",),
        "delta_values": ("tensor",),
        "delta_heads": ("tensor",),
        "value_size": (),
        "taps": (),
    },
)
