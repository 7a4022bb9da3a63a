"""The real TPU compiler takes every program of a run, and what it makes moves no weights while decoding."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECK = """
import dataclasses, sys
from grpojax import plan
from grpojax.losses import Objective
from grpojax.models import DecoderConfig
from grpojax.sampler import SamplerConfig
from grpojax.sharding import MeshConfig

config = DecoderConfig(family="qwen2", vocab_size=8192, hidden_size=512, intermediate_size=1024, num_layers=2,
                       num_heads=4, num_kv_heads=2, head_dim=128, rope_theta=1e6, qkv_bias=True)
reports = plan.plan(config, prompts=8, prompt_tokens=256, sampling=SamplerConfig(group=8, max_tokens=256),
                    topology=sys.argv[1], mesh=MeshConfig(fsdp=-1), objective=Objective(kl_coef=0.04))
assert [r.name for r in reports] == list(plan.PROGRAMS)
assert not any(r.error for r in reports), [r.error for r in reports]
gib = 2**30
smallest_weight = config.hidden_size * config.num_kv_heads * config.head_dim * 2 / gib
by_name = {r.name: r for r in reports}
for kind, traffic in by_name["rollout"].per_iteration.items():
    assert traffic.gib < smallest_weight, (kind, traffic)
# 4 samples a chip of 256 tokens each: their logits, in bfloat16, are never gathered.
logits = 8 * 8 * 256 * config.vocab_size * 2 / gib
for kind, traffic in by_name["update"].collectives.items():
    assert traffic.largest < logits / 8, (kind, traffic)
assert by_name["update"].collectives, "a sharded update that moves nothing is not sharded"
print(plan.format_table(reports))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:2x2x4"])
def test_programs_compile_and_decoding_moves_no_weights(topology):
    env = dict(os.environ, PYTHONPATH=str(HERE.parent), JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
    env |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", CHECK, topology], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "rollout" in done.stdout


def test_collectives_are_counted_by_loop():
    from grpojax import plan

    assert dataclasses.is_dataclass(plan.ProgramReport)
    once, each = plan.collectives(
        """
ENTRY %main (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  ROOT %ag = f32[16]{0} all-gather(%p), channel_id=1, dimensions={0}
}
"""
    )
    assert each == {} and once["all-gather"].count == 1
    assert once["all-gather"].gib == 16 * 4 / 2**30
