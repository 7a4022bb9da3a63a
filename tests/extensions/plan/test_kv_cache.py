"""What a token of a compiled rollout reads, writes and sends."""

import dataclasses
import importlib.util
import json
import re

import pytest
import tpu_compiler
import tpu_plans
from cache_programs import SMALL, lowered
from compiled_writes import each_token
from short_blocks import blocks_of

from grpojax import sharding
from grpojax.extensions.plan import hlo, plan_shapes
from grpojax.models import Compute, flops
from grpojax.programs import kv_cache
from grpojax.programs.sampler_config import SamplerConfig


@pytest.mark.slow
def test_a_token_reads_weights_prompts_and_live_blocks():
    """From the compiled HLO; in float32, twice the bytes of the formula."""
    config = SamplerConfig(group=8, max_tokens=256, decode_slots=4)
    ring = kv_cache.ring(256, Compute())
    assert (ring.blocks, ring.width) == (4, 64)
    text = lowered(config, Compute()).compile().as_text()
    block_of_a_layer = 4 * 4 * 4 * 4 * 128 * 64  # and no more than any weight
    assert each_token(text, 1000) and not each_token(text, block_of_a_layer)
    module = hlo.analyse(text)
    for blocks in (1, 2, 4):
        moved = module.each - module.optional * (1 - blocks / ring.blocks)
        longest = blocks * ring.width - 7
        least = 2 * flops.decode_bytes(SMALL, 96, longest, prompts=4, slots=4, block=ring.width)
        assert moved < 1.25 * least, (blocks, moved / least)


@pytest.mark.slow
def test_on_a_cpu_a_block_of_a_layer_is_widened_at_a_time():
    """And the cache is kept in eight bits: what the loop carries of it is int8."""
    config = SamplerConfig(group=8, max_tokens=256, decode_slots=4, cache_dtype="int8")
    text = lowered(config, Compute()).compile().as_text()
    block = 4 * 4 * 4 * 128 * 64  # numbers of a layer's
    assert {size for *_, size in each_token(text, block)} <= {block, 4 * block}
    shapes = re.findall(r"(\w+)\[4,4,4,(?:128,64|64,128)\]", text)
    assert "s8" in shapes and "bf16" not in shapes


PLANNED = (
    tpu_plans.PLANNED
    + """
from pathlib import Path
from unittest import mock
from grpojax.extensions.plan import hlo
folder, given = json.loads(sys.argv[1])
analyse = hlo.analyse
def kept(text, turns):
    Path(folder, "hlo.txt").write_text(text)
    return analyse(text, turns)
with mock.patch.object(hlo, "analyse", kept):
    report, = planned(*given)
print(json.dumps([report.read_each, report.optional_each, report.per_iteration, report.temp]))
"""
)


@pytest.mark.slow
@pytest.mark.in_ci("int8 of fewer slots")
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("cells", "mesh"),
    [
        ({}, {"fsdp": 2, "tensor": 2}),
        ({"cache_dtype": "int8", "decode_slots": 5}, {"fsdp": 4}),
    ],
    ids=["tensor", "int8 of fewer slots"],
)
def test_on_a_tpu_a_token_reads_weights_prompts_and_live_blocks(cells, mesh, tmp_path):
    """As `plan` says it, of Qwen2.5-1.5B at its full depth on v5e; and no weight or block is written anew. Eight bits
    take half the bytes and those of the scales, in memory too."""
    sizes = {"prompts": 16, "group": 16, "max_tokens": 1024, "uncorrected": bool(cells), **cells}
    more = [f"rollout.{name}={value}" for name, value in sizes.items()]
    more += ["data.max_prompt_tokens=512", *(f"mesh.{axis}={size}" for axis, size in mesh.items())]
    model = dataclasses.asdict(plan_shapes.SHAPES["qwen2.5-1.5b"])
    given = model, "v5e:2x2", ["rollout"], tpu_plans.recipe(*more)
    done = tpu_compiler.run(PLANNED, json.dumps([str(tmp_path), given]))
    assert done.returncode == 0, done.stderr[-3000:]
    each, optional, moved, temp = json.loads(done.stdout.splitlines()[-1])
    c, tensor = plan_shapes.SHAPES["qwen2.5-1.5b"], mesh.get("tensor", 1)
    ring = kv_cache.ring(1024, Compute(platform="tpu"))
    rows, slots = 16 // mesh["fsdp"], cells.get("decode_slots", 16)
    cache = kv_cache.format_of_cache(cells.get("cache_dtype", "bfloat16"), Compute(platform="tpu"))
    for blocks in range(1, ring.blocks + 1):
        read = (each - optional * (1 - blocks / ring.blocks)) * 2**30
        longest = blocks * ring.width - 7
        least = flops.decode_bytes(c, 512, longest, prompts=rows, slots=slots, block=ring.width, cache=cache) / tensor
        assert read < 1.25 * least, (blocks, read / least)
    full = -(-slots * c.num_kv_heads // tensor // 8) * 8 * tensor // c.num_kv_heads  # of heads and slots, whole tiles
    whole = rows * (512 + full * ring.size) * flops.kv_bytes(c, cache)
    assert optional * 2**30 < 1.01 * rows * slots * ring.size * flops.kv_bytes(c, cache) / tensor
    assert temp * 2**30 < 1.1 * whole / tensor + 2**25
    text = (tmp_path / "hlo.txt").read_text()
    weight = c.hidden_size * c.num_kv_heads * c.head_dim * 2 // tensor  # the smallest; larger are the tokens drawn
    assert each_token(text, 1000)
    assert [x for x in each_token(text, weight) if "bf16" in x[1] or "s8" in x[1]] == []
    assert tensor > 1 or all(largest <= 4 / 2**30 for _, _, largest in moved.values())


@pytest.mark.slow
def test_shards_tell_each_other_four_bytes_a_token():
    mesh = sharding.make_mesh(sharding.MeshConfig(data=8, fsdp=1))
    config = SamplerConfig(group=3, max_tokens=4, decode_slots=2)
    with blocks_of(2):
        module = hlo.analyse(lowered(config, Compute(mesh=mesh), prompts=16, length=8).compile().as_text())
    moved = [(c.kind, c.size) for c in module.collectives if c.unknown and c.wire]
    assert moved == [("all-reduce", 4)]
