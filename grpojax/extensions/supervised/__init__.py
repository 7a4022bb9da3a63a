"""Supervised runs: answers to imitate (SFT), and pairs of which one is better (DPO)."""

from grpojax.extension import Names

NAMES = Names(
    commands={"finetune": "grpojax.extensions.supervised.cli.finetune"},
    recipes={
        "sft": "grpojax.extensions.supervised.dry_supervised:SFT",
        "dpo": "grpojax.extensions.supervised.dry_supervised:DPO",
    },
)
