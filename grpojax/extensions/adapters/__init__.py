"""Low-rank adapters on a frozen base (``model.adapter``), and the folders that peft keeps them in."""

from grpojax.extension import Names

NAMES = Names(
    sections={"model.adapter": "grpojax.extensions.adapters.adapter_config:AdapterConfig"},
    settings={"model.adapter": "grpojax.extensions.adapters.low_rank:LowRank"},
    exclusions="grpojax.extensions.adapters.exclusions:TABLE",
)
