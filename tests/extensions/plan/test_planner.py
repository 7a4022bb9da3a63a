"""The real TPU compiler takes every program of a run, and what it makes of them moves no more than it must."""

import dataclasses
import importlib.util
import json
import types
from pathlib import Path

import flat_batches
import jax
import numpy as np
import pytest
import tpu_compiler
import tpu_plans
from flat_batches import Flat

from grpojax import extension, sharding
from grpojax.cli import main as cli
from grpojax.extensions.mixtures import dispatch
from grpojax.extensions.mixtures.experts import Experts
from grpojax.extensions.plan import plan_chips, plan_compile, plan_report, planner
from grpojax.extensions.plan.cli import plan
from grpojax.extensions.plan.hlo import Traffic
from grpojax.extensions.plan.plan_calls import PlannedCall, calls_of, of_other
from grpojax.host.errors import UserError
from grpojax.losses import Objective
from grpojax.models import Compute, DecoderConfig, flops
from grpojax.models.compute import ModelConfig
from grpojax.programs.optimizer import make_optimizer
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.programs.policy_update import policy_objective
from grpojax.programs.state import abstract_state, decoder_network
from grpojax.programs.update import make_update
from grpojax.run import recipe as recipes
from grpojax.types import Prompts

CONFIG = DecoderConfig(
    family="qwen2", vocab_size=4096, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=128, rope_theta=1e6, qkv_bias=True,
)  # fmt: skip
GIB = 2**30
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

MESH = """
import sys
from grpojax import sharding
from grpojax.extensions.plan import planner
print(planner.topology_mesh(sys.argv[1], sharding.MeshConfig()).shape)
"""


UNEVEN = (
    tpu_plans.PLANNED
    + """
from unittest import mock
import numpy as np
from grpojax.programs import packing

whole = packing.pack

def pack(prompts, samples, arrays, **how):
    most = samples.tokens.shape[2]
    lengths = np.random.default_rng(0).exponential(most / 5, samples.lengths.shape).astype(int)
    samples = dataclasses.replace(samples, lengths=lengths.clip(1, most))
    packed, layout = whole(prompts, samples, arrays, **{**how, "least": 1024})
    print(json.dumps([packed.tokens.shape, [x.shape for x in packed.gather]]))
    return packed, layout

with mock.patch.object(packing, "pack", pack):
    (report,) = planned(*json.loads(sys.argv[1]))
print(json.dumps([report.error, report.temp]))
"""
)


def sizes(prompts, group, tokens, prompt_tokens=128):
    """Overrides that say how large a rollout is."""
    rollout = {"prompts": prompts, "group": group, "max_tokens": tokens}
    return [*(f"rollout.{name}={n}" for name, n in rollout.items()), f"data.max_prompt_tokens={prompt_tokens}"]


@pytest.mark.slow
@needs_libtpu
def test_attention_of_uneven_lengths_pays_for_three_and_not_for_the_longest():
    """With gather indices of full length for all, the queries and their results are more than the whole program has."""
    recipe = tpu_plans.recipe("variant.kl_coef=0.04", "mesh.fsdp=4", *sizes(16, 16, 512))
    done = tpu_compiler.run(UNEVEN, json.dumps([dataclasses.asdict(CONFIG), "v5e:2x2", ["score"], recipe]))
    assert done.returncode == 0, done.stderr[-3000:]
    (_, shards, _, size), gather = json.loads(done.stdout.splitlines()[-2])
    error, temp = json.loads(done.stdout.splitlines()[-1])
    assert not error and [x[3] for x in gather] == [size, size // 2, size // 4]
    completions = sum(x[2] for x in gather)
    assert shards == 4 and temp * GIB < completions * size * CONFIG.num_heads * CONFIG.head_dim * 2


@pytest.mark.slow
@needs_libtpu
def test_an_update_has_no_room_for_all_layers_in_bfloat16_nor_for_copies_of_its_moments():
    config = dataclasses.replace(CONFIG, vocab_size=16384, intermediate_size=8192, num_layers=8)
    update = tpu_plans.plan(config, "v5e:2x2", *sizes(4, 4, 128), programs=["update"])["update"]
    assert not update.error and update.temp * GIB < 2 * flops.matmul_weights(config) / 4


@pytest.mark.in_ci("v5e")
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "mesh", "overlap"),
    [("v5e:4x4", {"fsdp": 16}, 0.0), ("v5p:2x2x4", {"fsdp": 8, "tensor": 2}, 0.25)],
    ids=["v5e", "v5p, with samples that go on"],
)
def test_programs_compile_and_move_what_they_must(topology, mesh, overlap):
    laid_out = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    more = ["variant.kl_coef=0.04", f"rollout.overlap={overlap}"]
    reports = tpu_plans.plan(CONFIG, topology, *laid_out, *more, *sizes(8, 8, 128), vocab_chunk=1024)
    assert reports.keys() == {*plan_report.PROGRAMS, "score"}
    assert not any(r.error for r in reports.values())

    c, bfloat16 = CONFIG, 2 / mesh.get("tensor", 1) / GIB
    layer = c.hidden_size * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 3 * c.intermediate_size)
    params = c.num_layers * layer + c.vocab_size * c.hidden_size
    gathered = {name: Traffic(*r.collectives.get("all-gather", ())).gib for name, r in reports.items()}

    # Nothing of a weight's size moves for a token that is decoded, and no weight before.
    smallest_weight = c.hidden_size * c.num_kv_heads * c.head_dim * bfloat16
    assert reports["rollout"].per_iteration and [name for name, r in reports.items() if r.samples] == ["rollout"]
    assert all(t[1] < smallest_weight for t in reports["rollout"].per_iteration.values())
    assert gathered["rollout"] < smallest_weight

    # Layers and, in blocks, the vocabulary are gathered in bfloat16, once forward and once backward. Neither
    # activations nor logits are.
    assert gathered["update"] == pytest.approx(2 * params * bfloat16, rel=0.02)
    assert gathered["score"] == pytest.approx(params * bfloat16, rel=0.02)
    assert gathered["reshard"] == pytest.approx(params * bfloat16, rel=0.02)
    logits = 8 * 8 * 128 / mesh["fsdp"] * c.vocab_size * bfloat16
    assert all(t[2] < logits for t in reports["update"].collectives.values())

    # Master weights and two moments in float32, cut over all chips and updated in place.
    assert reports["update"].argument == pytest.approx(12 * params / 16 / GIB, rel=0.1)
    assert reports["update"].alias == pytest.approx(reports["update"].output, rel=0.01)
    assert reports["rollout"].argument == pytest.approx(params * bfloat16, rel=0.1)


@pytest.mark.slow
@needs_libtpu
def test_experts_on_shards_of_their_own_stay_there():
    """Tokens go to them in all-to-alls; no program moves as much as a shard's part of one layer's matrix."""
    config = dataclasses.replace(
        CONFIG, family="qwen3_moe", qkv_bias=False, qk_norm=True, mlp=Experts(count=64, chosen=2, size=1024)
    )
    laid_out = ["mesh.fsdp=1", "mesh.expert=8", *sizes(8, 8, 128)]
    reports = tpu_plans.plan(config, "v5p:2x2x2", *laid_out, programs=["rollout", "update"], vocab_chunk=1024)
    assert not any(r.error for r in reports.values())
    part = 64 // 8 * 256 * 1024 * 2 / GIB
    for name, report in reports.items():
        moved = {k: Traffic(*t) for one in (report.collectives, report.per_iteration) for k, t in one.items()}
        assert all(t.largest < part for kind, t in moved.items() if "all-to-all" not in kind), name
    assert Traffic(*reports["update"].collectives["all-to-all"]).count >= 5 * 2 * dispatch.EVEN_ROUNDS
    assert "all-to-all" not in reports["rollout"].per_iteration
    experts = 2 * 3 * 64 * 256 * 1024
    assert reports["update"].argument == pytest.approx(12 * experts / 8 / GIB, rel=0.15)
    assert reports["rollout"].argument == pytest.approx(2 * experts / 8 / GIB, rel=0.3)


REFUSED = (
    tpu_plans.PLANNED
    + """
from grpojax.host.errors import UserError
for given in json.loads(sys.argv[1]):
    try:
        planned(*given)
    except UserError as e:
        print(str(e).splitlines()[0])
"""
)


@pytest.mark.slow
@needs_libtpu
def test_chips_set_apart_run_the_rollout_and_are_sent_its_weights_alone():
    programs, small = ["rollout", "reshard"], sizes(8, 8, 16, 16)
    made = tpu_plans.plan(CONFIG, "v5e:2x4", "mesh.rollout=4", *small, programs=programs)
    rollout, reshard = (made[name] for name in programs)
    given = [
        (dataclasses.asdict(CONFIG), topology, programs, tpu_plans.recipe(f"mesh.rollout={chips}", *small))
        for topology, chips in (("v5e:4x4", 4), ("v5e:2x4", 1))
    ]
    refused = tpu_compiler.run(REFUSED, json.dumps(given)).stdout.splitlines()
    c = CONFIG
    layer = c.hidden_size * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 3 * c.intermediate_size)
    params = c.num_layers * layer + c.vocab_size * c.hidden_size
    # Each of the four that sample has the weights whole; the other four have a quarter of the state each.
    assert (rollout.sampling_chips, reshard.sampling_chips) == (4, 0) and rollout.resident == 0 < reshard.resident
    assert rollout.sent == pytest.approx(2 * params / GIB, rel=0.01)
    assert rollout.argument == pytest.approx(rollout.sent, rel=0.05)
    assert reshard.argument == pytest.approx(4 * params / 4 / GIB, rel=0.05)
    assert reshard.output == pytest.approx(rollout.sent, rel=0.05)
    assert "one machine only, which has no more than 8" in refused[0]
    assert "these 7 chips make no rectangle" in refused[1]


@pytest.mark.slow
@needs_libtpu
def test_eight_bits_travel_are_kept_and_are_read():
    more = ["rollout.weights=int8", "rollout.uncorrected=true"]
    made = tpu_plans.plan(CONFIG, "v5e:4x4", *more, *sizes(8, 8, 128), programs=["rollout", "reshard"])
    rollout, reshard = made["rollout"], made["reshard"]
    c = CONFIG
    layer = c.hidden_size * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 3 * c.intermediate_size)
    params = (c.num_layers * layer + c.vocab_size * c.hidden_size) / GIB  # a byte each
    assert rollout.argument == pytest.approx(params, rel=0.02)
    assert Traffic(*reshard.collectives["all-gather"]).gib == pytest.approx(params, rel=0.02)
    # A copy of all weights in bfloat16 would be twice as much.
    assert rollout.temp < 0.75 * params and rollout.read_each < 1.25 * params


def on_chips(config, devices=None, platform="cpu"):
    """The policy of a recipe, of two layers, on devices that are there."""
    mesh = sharding.make_mesh(sharding.MeshConfig(), devices)
    return planner.policy_shape(config.model, CONFIG, plan_chips.Chips(mesh, platform=platform))


def calls_with(*overrides, **given):
    config = recipes.load(*tpu_plans.recipe(*sizes(8, 4, 8, 8), *overrides))
    return calls_of(config, on_chips(config), **given)


@pytest.mark.parametrize(
    ("laid_out", "said"),
    [
        (sharding.MeshConfig(fsdp=2), "merged=false with mesh.fsdp=2 .*set mesh.fsdp=1"),
        (sharding.MeshConfig(fsdp=1, expert=2), "mesh.expert=2.*set mesh.expert=1"),
    ],
    ids=["fsdp", "expert"],
)
def test_a_plan_refuses_the_adapters_that_a_run_refuses(laid_out, said):
    config = ModelConfig(path="m", adapter=extension.section("model.adapter")(rank=4, merged=False))
    chips = plan_chips.Chips(sharding.make_mesh(laid_out, jax.devices()[:2]), platform="cpu")
    with pytest.raises(UserError, match=said):
        planner.policy_shape(config, CONFIG, chips)


@pytest.mark.parametrize(
    ("critic", "read", "own"),
    [
        (["variant=ppo", "critic={trunk: frozen, warmup_steps: 1}"], 2, 1),
        (["variant={name: token_critic, normalise: mean}"], 2, 3),
    ],
    ids=["frozen", "trained"],
)
@pytest.mark.slow
def test_a_critic_is_in_the_programs_and_the_memory(critic, read, own):
    (alone, without), (calls, state) = calls_with(), calls_with(*critic)
    floats = [sum(x.dtype == np.float32 for x in jax.tree.leaves(c["update"].args[2])) for c in (alone, calls)]
    assert floats[1] - floats[0] == read  # what it learns from, and its values before or its own weights
    warms = ["critic update"] if "ppo" in critic[0] else []
    assert alone.keys() == {*plan_report.PROGRAMS} and calls.keys() == {*plan_report.PROGRAMS, "critic", *warms}
    # The critic's weights, and of a trunk that is trained the two moments; a head is nothing beside them.
    weights = plan_compile.per_chip(alone["reshard"].own)
    sums = [sum(planner.kept(s).values()) for s in (without, state)]
    assert sums[1] - sums[0] == pytest.approx(own * weights, rel=0.01)
    assert plan_compile.per_chip(calls["update"].own) == pytest.approx((3 + own) * weights, rel=0.01)
    for name in ("critic", *warms):
        calls[name].program.trace(*calls[name].args)


@pytest.mark.parametrize(
    ("variant", "more", "names"),
    [
        ("grpo", [], ["rollout"]),
        ("remax", [], ["rollout", "greedy"]),
        ("xrpo", ["rollout.sample_allocation={probe: 1, phases: 3}"], ["rollout", "rollout phase"]),
        ("nthr", [], ["rollout", "influence"]),
        ("gt_likelihood", [], ["rollout", "true answers"]),
        ("clip_cov", ["train.ppo_epochs=2"], ["rollout", "covariance mask"]),
        ("gtpo", [], ["rollout", "score with entropy"]),
        ("{name: grpo, kl_coef: 0.1}", ["train.reference_every=3"], ["rollout", "reference refresh"]),
    ],
)
@pytest.mark.slow
def test_a_variants_own_programs_are_those_that_its_run_calls(variant, more, names):
    """By name; `tests/run/test_run_calls.py` has the shapes."""
    calls, _ = calls_with(
        "data.validation=builtin:arithmetic/test.jsonl", "train.eval_limit=8", f"variant={variant}", *more
    )
    assert [name for name in calls if name not in ("update", "score", "reshard", "evaluation")] == names
    assert calls["evaluation"].args[1].tokens.shape == (8, 8)  # train.eval_limit
    for name in names:
        calls[name].program.trace(*calls[name].args)


@pytest.mark.slow
def test_what_reads_rows_of_minibatches_is_there_for_both_of_their_sizes():
    """Of the rows of a whole batch, and of the smaller ones of a ragged one; what a step never runs is not there."""
    given = ["variant={name: ppo, kl_coef: 0.1}", "critic.warmup_steps=1"]
    calls, _ = calls_with(*given, *sizes(16, 8, 256, 64))
    assert {n for n in calls if "score" in n or "critic" in n or "update" in n} == {
        what + name
        for what in ("", "ragged ")
        for name in ("update", "score", "reference score", "critic", "critic update")
    }
    rows = {
        name: call.args[-1].tokens.shape
        for name, call in calls.items()
        if f"ragged {name}" in calls or name.startswith("ragged ")
    }
    assert len({shape for name, shape in rows.items() if name.startswith("ragged ")}) == 1
    assert rows["ragged score"] != rows["score"]
    calls["ragged critic"].program.trace(*calls["ragged critic"].args)
    mask = calls_with("variant=clip_cov", *sizes(16, 8, 256, 64))[0]["ragged covariance mask"]
    assert len({mask.program.trace(*mask.args).out_info.shape, rows["ragged score"]}) == 1
    assert not any(
        "score" in name for name in calls_with("variant={name: grpo, kl_coef: 0.0}", *sizes(16, 8, 256, 64))[0]
    )


@pytest.mark.slow
def test_true_answers_are_planned_whatever_reward_a_failure_has():
    calls, _ = calls_with("variant={name: gt_likelihood, fail_reward: -1.0}")
    assert calls["true answers"].times == 1  # eight groups, one on each device


@pytest.mark.slow
def test_an_update_of_few_samples_that_teach_has_rows_of_its_own():
    """Although all samples of the step are as short."""
    for more in ([], ["train.skip_zero_advantage=true"]):
        config = recipes.load(*tpu_plans.recipe("variant={name: grpo, kl_coef: 0}", *sizes(16, 8, 64, 32), *more))
        calls, _ = calls_of(config, on_chips(config, jax.devices()[:1], platform="tpu"))
        assert ("ragged update" in calls) == bool(more)


def test_a_teacher_is_in_the_programs_and_the_memory():
    larger = dataclasses.replace(CONFIG, num_layers=2 * CONFIG.num_layers)
    calls, state = calls_with("variant={name: distill, teacher: another}", read_shape=lambda path: larger)
    assert planner.kept(state)["teacher"] > 1.2 * plan_compile.per_chip(calls["score"].own)
    calls["teacher"].program.trace(*calls["teacher"].args)


@pytest.mark.slow
def test_a_supervised_recipe_has_its_update_and_scores():
    from grpojax.extensions.supervised import dry_supervised

    folder = Path(__file__).parents[3] / "configs" / "supervised"
    more = ["train.microbatches=2", "model.path=builtin:tiny"]
    cases = (
        (dry_supervised.SFT, "sft", ["update"], (2, 8, 8, 48)),
        (dry_supervised.DPO, "dpo", ["update", "score"], (2, 8, 4, 512)),
    )
    for kind, name, names, shape in cases:
        config = kind.load(folder / f"{name}.yaml", more)
        calls, state = of_other(kind, config, on_chips(config))
        assert list(calls) == names
        assert sum(planner.kept(state).values()) == plan_compile.per_chip(calls["update"].own)
        part = calls["update"].args[2]
        assert getattr(part, "rows", part).tokens.shape == shape
        for call in calls.values():
            call.program.trace(*call.args)
    with pytest.raises(UserError, match="train.batch_size=16 does not divide over 8.*multiple of 24"):
        odd = dry_supervised.SFT.load(folder / "sft.yaml", ["train.microbatches=3"])
        of_other(dry_supervised.SFT, odd, on_chips(odd))


@pytest.mark.exhaustive("extensions/plan/test_planner.py::test_a_critic_is_in_the_programs_and_the_memory")
@needs_libtpu
def test_plan_prints_the_critic():
    overrides = ["variant=ppo", "critic.warmup_steps=2", "critic.layers=1", "model.dtype=bfloat16"]
    recipe = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
    code = "import sys; from grpojax.cli import main as cli; sys.exit(cli.main(sys.argv[1:]))"
    done = tpu_compiler.run(code, "plan", recipe, "--topology", "v5e:2x2", "--layers", "1", *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()]
    table = rows.index("program") + 1  # what compiles is said before it
    assert rows[table : table + 6] == ["update", "critic update", "rollout", "evaluation", "reshard", "critic"]


def test_a_recipe_over_a_base_is_known_for_what_it_is():
    folder = Path(__file__).parents[3] / "configs"
    assert plan._has_rollout(folder / "variants" / "dapo.yaml")
    assert not plan._has_rollout(folder / "supervised" / "sft.yaml")


def test_a_supervised_recipe_without_its_command(capsys):
    recipe = str(Path(__file__).parents[3] / "configs" / "supervised" / "sft.yaml")
    assert cli.main(["plan", recipe]) == 2
    assert "give --recipe sft or --recipe dpo" in capsys.readouterr().err


@needs_libtpu
@pytest.mark.slow
def test_unknown_topology_is_a_users_error():
    done = tpu_compiler.run(MESH, "v5e:3x5x7")
    assert "UserError: no TPU topology 'v5e:3x5x7'" in done.stderr


@pytest.mark.slow
@needs_libtpu
def test_a_v4_chip_is_one_device():
    done = tpu_compiler.run(MESH, "v4:2x2x4")
    assert "('fsdp', 16)" in done.stdout, done.stderr[-3000:]


SLICES = """
from grpojax import sharding
from grpojax.extensions.plan import planner
mesh = planner.topology_mesh("v5e:2x2", sharding.MeshConfig(data=2), 2)
print(mesh.shape, [[d.slice_index for d in row.flat] for row in mesh.devices])
"""


@pytest.mark.slow
@needs_libtpu
def test_the_data_axis_goes_across_slices():
    done = tpu_compiler.run(SLICES)
    assert "('data', 2), ('fsdp', 4)" in done.stdout, done.stderr[-3000:]
    assert done.stdout.strip().endswith("[[0, 0, 0, 0], [1, 1, 1, 1]]")


@pytest.mark.slow
def test_compiled_update_holds_no_logits():
    """Compiled for the CPU, the temporaries of an update are smaller than its float32 logits."""
    config = dataclasses.replace(CONFIG, vocab_size=65536, hidden_size=32, intermediate_size=32, head_dim=8)
    optimizer = make_optimizer(OptimizerConfig(), 10)
    graph, network = decoder_network(config, optimizer)
    state = abstract_state({"policy": network})["policy"]
    full = np.ones((4, 4, 64), np.float32)
    batch = Flat(
        prompts=Prompts(
            tokens=np.zeros((4, 8), np.int32),
            lengths=np.full(4, 8, np.int32),
            uids=np.arange(4, dtype=np.uint32),
            first_sample=np.zeros(4, np.int32),
        ),
        tokens=full.astype(np.int32),
        lengths=np.full((4, 4), 64, np.int32),
        arrays=dict(advantages=full, weights=full),
    )
    packed, _ = flat_batches.pack(batch)
    update = jax.jit(
        make_update(policy_objective(graph, Objective(), Compute(), entropy=True), optimizer), donate_argnums=0
    )
    compiled = update.lower(state, {}, packed).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < full.size * config.vocab_size * 4 / 2


class Refused:
    """A program that does not compile."""

    def __init__(self, message):
        self.message = message

    def lower(self, *args):
        raise jax.errors.JaxRuntimeError(self.message)


def test_a_program_that_does_not_fit_is_reported():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (22.69G) exceeds available HBM (15.75G). HLO module: jit_f.\nSee https://openxla.org/xla/errors"
    )
    v5e, run = [types.SimpleNamespace(device_kind="TPU v5 lite")], {"weights": 2 * GIB, "optimiser": 4 * GIB}

    def compile_it(message):
        call = PlannedCall(program=Refused(message), args=())
        return plan_compile.compile_program("update", call, run=run, compute_s=1.0, devices=v5e)

    report = compile_it(message)
    assert "22.69G" in report.error and "15.75G" in report.error and "https" not in report.error
    assert np.isnan(report.total) and not report.fits
    assert report.consumers == {"weights": 2.0, "optimiser": 4.0, "temporaries": 22.69}
    assert compile_it(message.replace("22.69G", "2.5T")).consumers["temporaries"] == 2560
    table = plan_report.format_table([report])
    assert f"update: does not fit: {report.error}" in table
    assert "update needs GiB: temporaries 22.69, optimiser 4.00, weights 2.00" in table
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_it("INTERNAL: a bug")


def test_a_program_must_have_room_beside_the_runs_state():
    sizes = {"argument": 6.0, "temp": 5.0, "output": 3.0, "alias": 2.0, "room": 15.75}
    fits = planner.ProgramReport(name="update", compile_s=1.0, resident=3.5, **sizes)
    beside = {"reference": 4.0, "temporaries": 5.0}
    too_much = planner.ProgramReport(name="update", compile_s=1.0, resident=4.0, consumers=beside, **sizes)
    assert fits.fits and "fit" not in plan_report.format_table([fits])
    assert not too_much.fits
    lines = plan_report.format_table([too_much]).splitlines()[2:]
    assert lines[0] == "update: does not fit: 16.00 GiB with the run's state, and a chip has 15.75"
    assert lines[1] == "update needs GiB: temporaries 5.00, reference 4.00"
    assert plan_compile.room("TPU v5 lite") == 15.75 and plan_compile.room("cpu") == np.inf
    assert plan_compile.room("NVIDIA L4") == pytest.approx(24e9 / GIB * 63 / 64)


def test_table_tells_sizes_and_traffic():
    report = planner.ProgramReport(
        name="rollout", compile_s=12.3, argument=2.0, temp=0.5, output=0.25, alias=0.125, resident=1.0,
        seconds={"compute": 0.5, "HBM": 1.234},
        collectives={"all-gather": Traffic(3, 0.5, 0.25)}, per_iteration={"all-reduce": Traffic(1, 4 / GIB, 4 / GIB)},
        samples=True,
    )  # fmt: skip
    head, row, *rest = plan_report.format_table([report]).splitlines()
    assert head.split()[0] == "program"
    assert row.split() == ["rollout", "12", "2.00", "0.50", "0.25", "0.12", "2.62", "3.62", "1.23", "HBM"]
    assert rest == [
        "rollout moves: 3 all-gather (512 MiB)",
        "rollout moves for each token: 1 all-reduce (4 B)",
        "rollout is busy: compute 0.5 s, HBM 1.23 s",
    ]
    learns = dataclasses.replace(report, name="ragged update", samples=False)
    lines = plan_report.format_table([learns]).splitlines()
    assert "ragged update moves for each iteration of its loops: 1 all-reduce (4 B)" in lines
    assert "ragged update is busy with one iteration of its loops: compute 0.5 s, HBM 1.23 s" in lines
    assert lines[-1].startswith("at least s of ragged programs is of one iteration")


@pytest.mark.slow
def test_the_batch_is_the_trainers():
    """Fewer prompts than shards: each stands in several, with its part of the group; minibatches take a share."""

    def batch(prompts, *more):
        objective = "variant={name: grpo, kl_coef: 0.1}"
        recipe = tpu_plans.recipe(*sizes(prompts, 8, 128, 64), "model.remat=layer", objective, *more)
        config = recipes.load(*recipe)
        calls, _ = calls_of(config, on_chips(config, platform="tpu"))
        return calls["rollout"], calls["update"].args[2]

    call, packed = batch(4)
    assert call.args[1].tokens.shape == (8, 64)
    assert call.program.fn.keywords["config"].group == 4
    assert packed.tokens.shape == (1, 8, 4, 128)
    # advantages, weights, and the log-probs of reference and sampler
    assert [x.shape for x in jax.tree.leaves(packed) if x.dtype == np.float32] == 4 * [(1, 8, 4, 128)]
    assert packed.prompts.sharding.shard_shape(packed.prompts.shape) == (1, 1, 1, 64)
    _, packed = batch(16, "train.minibatches=2", "train.microbatches=4")
    assert packed.tokens.shape == (4, 8, 2, 128)
    # with several updates also those of the policy before them
    assert sum(x.dtype == np.float32 for x in jax.tree.leaves(packed)) == 5
    _, packed = batch(4, "train.ppo_epochs=2")
    assert packed.arrays["old_logps"] is not None
    with pytest.raises(UserError, match="5 prompts of a batch"):
        batch(15, "train.minibatches=3")


@pytest.mark.slow
def test_the_flops_of_a_program():
    """Two layers by hand: a step's matrix products, and what decoding reads of weights, keys and values."""
    c = CONFIG

    def counted(*more, **given):
        recipe = recipes.load(*tpu_plans.recipe(*sizes(4, 6, 10, 32), "train.minibatches=2", *more))
        calls, _ = calls_of(recipe, on_chips(recipe, jax.devices()[:4]), **given)
        return {name: call.flops for name, call in calls.items()}

    got = counted("rollout.decode_slots=4")
    forward = flops.forward_flops(c, [32] * 4, [[10] * 6] * 4)
    part = flops.forward_flops(c, [32] * 4, [[10] * 3] * 4)  # a minibatch's two prompts, each on two devices
    assert got["update"] == pytest.approx(4 * part)  # backward costs two, and one is done again
    assert got["score"] == pytest.approx(part) and got["rollout"] == pytest.approx(forward) and got["reshard"] == 0
    kept = counted("model.remat=none")
    logits = 2 * 4 * 3 * 10 * c.vocab_size * c.hidden_size
    assert kept["update"] == pytest.approx(3 * part + logits)
    taught = counted("variant={name: distill, teacher: another}", read_shape=lambda path: c)
    assert taught["teacher"] == taught["score"] == got["score"] and taught["update"] == got["update"]
    # Four groups at a time, one of each device, each in two halves that read its prompt.
    late = counted("variant=nthr", "rollout.group=8")
    assert late["influence"] == pytest.approx(flops.forward_flops(c, [32] * 8, [[10] * 4] * 8))
    weights = 2 * (flops.matmul_weights(c) + c.vocab_size * c.hidden_size)
    keys = 4 * c.num_layers * c.num_kv_heads * c.head_dim  # a token's, with its values, in bfloat16
    read = weights + (32 + 4 * 10) * keys  # one prompt a chip, four slots, and the whole ring of each
    assert flops.decode_bytes(c, 32, 10, prompts=1, slots=4) == read


def test_a_number_of_the_host_lies_on_no_chip():
    """Such as the share of the run that an update's schedule follows."""
    assert plan_compile.per_chip({"share": jax.ShapeDtypeStruct((), np.float32)}) == 0
