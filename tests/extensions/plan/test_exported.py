"""Every program that a run can have, as the planner calls it, exported for NVIDIA: what it multiplies in which dtype,
what a decoded token and an update copy."""

import dataclasses
import functools
from collections import Counter
from pathlib import Path

import jax
import pytest
from exported import MOVES, TRITON, decode_loop, factors, finer, in_kernels, made, stablehlo
from plain_decoder import BASE
from refusals import RECIPE

from grpojax import sharding
from grpojax.extensions.plan import plan_chips, plan_report, planner
from grpojax.extensions.plan.plan_calls import calls_of, of_other
from grpojax.run import recipe as recipes

pytestmark = pytest.mark.slow

CONFIG = dataclasses.replace(
    BASE, vocab_size=320, hidden_size=256, intermediate_size=384, num_layers=2, num_heads=6, head_dim=64
)  # fmt: skip
# A layer's matrices q, k, v, o, gate, up and down; and that of the vocabulary.
LAYER = [(256, 384), (256, 128), (256, 128), (384, 256), (256, 384), (256, 384), (384, 256)]
VOCABULARY = (320, 256)
SMALLEST = 256 * 128
CONFIGS = Path(__file__).parents[3] / "configs"
MODEL = ["model.path=qwen", "model.dtype=bfloat16", "model.attention=xla", "model.remat=layer"]
SIZES = ["rollout.prompts=3", "rollout.group=5", "rollout.max_tokens=71", "data.max_prompt_tokens=67"]
LITTLE = ["rollout.prompts=1", "rollout.group=2", "rollout.max_tokens=11", "data.max_prompt_tokens=7"]

# The settings of runs, and which of the programs that every run has are taken of each; what only some have, of all.
EVERY = {*plan_report.PROGRAMS, "score", "evaluation"}
RUNS = {
    "update": (["variant={name: grpo, kl_coef: 0.1}", "train.reference_every=3"], {"update", "score", "reshard"}),
    "rollout": (["variant=grpo"], {"rollout", "evaluation"}),
    "samples that go on": (["rollout.overlap=0.4"], {"rollout"}),
    "int8": (["rollout.weights=int8", "rollout.uncorrected=true"], {"rollout", "reshard"}),
    "xrpo": (["variant=xrpo", "rollout.sample_allocation={probe: 3, phases: 2, most: 7}"], set()),
    "remax": (["variant=remax"], set()),
    "clip_cov": (["variant=clip_cov", "train.ppo_epochs=2"], set()),
    "gtpo": (["variant=gtpo"], set()),
    "nthr": (["variant=nthr"], set()),
    "nthr, squares apart": (["variant={name: nthr, self_term: false}"], set()),
    "gt_likelihood": (["variant=gt_likelihood"], set()),
    "lp_reg": (["variant=lp_reg"], set()),
    "distill": (["variant={name: distill, teacher: qwen}"], set()),
    "critic": (["variant=token_critic"], {"update"}),
    "critic, trunk frozen": (["variant=ppo", "critic.trunk=frozen", "critic.warmup_steps=2"], set()),
    "sft": (["train.batch_size=3"], {"update"}),
    "dpo": (["train.batch_size=3"], {"update", "score"}),
}

# Products of anything but bfloat16 with bfloat16, and why.
MEANT = {
    # `M`, and its product with every token (`grpojax.extensions.methods.token_influence`): once a step and without
    # gradient, errors in float32, whose sums over a group's tokens largely cancel; a score is what is left of them.
    "influence": 2,
}


@functools.cache
def calls(name, *sizes):
    """The programs of one of `RUNS` by name, with their arguments, for one GPU."""
    chips = plan_chips.Chips(sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1]), platform="gpu")
    if name in ("sft", "dpo"):
        from grpojax.extensions.supervised import dry_supervised

        kind = {"sft": dry_supervised.SFT, "dpo": dry_supervised.DPO}[name]
        sizes = ["data.max_prompt_tokens=67", "data.max_tokens=71", "train.microbatches=1"]
        config = kind.load(CONFIGS / "supervised" / f"{name}.yaml", [*MODEL, *sizes, *RUNS[name][0]])
        return of_other(kind, config, planner.policy_shape(config.model, CONFIG, chips)).calls
    config = recipes.load(RECIPE, [*MODEL, *SIZES, "train.eval_limit=3", *sizes, *RUNS[name][0]])
    return calls_of(config, planner.policy_shape(config.model, CONFIG, chips), read_shape=lambda path: CONFIG).calls


def taken(name):
    """The programs that are taken of a run."""
    return {what: call for what, call in calls(name).items() if what in RUNS[name][1] or what not in EVERY}


def test_the_programs_of_every_kind_are_exported():
    more = """critic, critic update, teacher, rollout phase, greedy, score with entropy, covariance mask, influence,
        true answers, reference refresh, evaluation reshard, proxy"""
    known = {*EVERY, *(name.strip() for name in more.split(","))}
    assert {what for name in RUNS for what in taken(name)} == known


@pytest.mark.in_ci("critic", "nthr", "rollout", "update")
@pytest.mark.parametrize("name", RUNS)
def test_a_bfloat16_run_multiplies_nothing_in_float32_but_what_is_meant(name):
    """And where it samples, a token copies nothing."""
    for what, call in taken(name).items():
        text = stablehlo(call.program, *call.args)
        odd, some = finer(text), bool(factors(text))
        assert len(odd) == MEANT.get(what, 0), (what, odd)
        assert some != what.endswith(("reshard", "refresh", "mask")), what
        if call.iterations:
            found = set(in_kernels(call.program, *call.args))
            assert found == {("bfloat16", "bfloat16")}, (what, found)
            check_loop(text, len(call.args[1].lengths), eight_bits=name == "int8" and what == "rollout")


def check_loop(text, prompts, *, eight_bits):
    """Of what is as large as the prompts' keys or a layer's smallest weight, a token makes nothing but caches with one
    column more, in place; where weights have eight bits, also what is multiplied with."""
    loop, large = decode_loop(text), Counter()
    least = min(SMALLEST, prompts * 67 * CONFIG.num_kv_heads * CONFIG.head_dim)
    for (operation, *_), n in made(text, least, loop).items():
        large[operation] += n
    want = {"dynamic_update_slice": 2 * CONFIG.num_layers}
    if eight_bits:
        want["convert"] = len(LAYER) * CONFIG.num_layers + 1
    operations = made(text, 1, loop).total()
    assert operations > 250 and text.count(TRITON) == 2
    assert large == want


@pytest.mark.in_ci("layer")
@pytest.mark.parametrize("remat", ["layer", "matmuls"])
def test_an_update_moves_weights_only_to_cast_them_and_to_write_their_gradients(remat):
    """Of a batch that is smaller than the smallest weight, so that all that is as large is of weights."""
    call = calls("update", *LITTLE, f"model.remat={remat}")["update"]
    found = made(stablehlo(call.program, *call.args), SMALLEST)
    want = Counter()
    for shape in LAYER:
        # Forward and backward read a weight out of the stack of all layers and cast it.
        want.update({("dynamic_slice", (1, *shape), "f32"): 2, ("convert", shape, "bf16"): 2})
        # Its gradient is made transposed, and written into a stack.
        want.update({("transpose", shape, "bf16"): 1, ("convert", shape, "f32"): 1})
        want.update({("dynamic_update_slice", (CONFIG.num_layers, *shape), "f32"): 1})
    # Forward and backward cast the vocabulary, fill it up to whole blocks (here there is nothing to fill), and take it
    # block by block.
    block = 1, *VOCABULARY
    want.update(
        {("convert", VOCABULARY, "bf16"): 2, ("pad", VOCABULARY, "bf16"): 2, ("dynamic_slice", block, "bf16"): 2}
    )
    # Its gradient, and that of the rows that were looked up.
    want.update({("dynamic_update_slice", block, "f32"): 1, ("scatter", VOCABULARY, "f32"): 1})
    moved = Counter({what: n for what, n in found.items() if what[0] in MOVES})
    assert moved == want, (moved - want, want - moved)
