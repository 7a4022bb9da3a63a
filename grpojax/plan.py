"""Ahead-of-time compiles of a run's programs for a TPU slice that is not there, and what they need of it.

The real compiler, the real shapes and shardings, the trainer's own programs: only the arrays are missing. It needs
libtpu installed, and no TPU.
"""

import collections
import dataclasses
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpojax import packing, sampler, sharding, step
from grpojax.errors import UserError
from grpojax.losses import Objective
from grpojax.models.config import DecoderConfig
from grpojax.models.decoder import Compute
from grpojax.sampler import SamplerConfig
from grpojax.sharding import MeshConfig
from grpojax.step import OptimizerConfig
from grpojax.types import Prompts, TrainBatch

PROGRAMS = ("update", "score", "rollout", "reshard")


class Traffic(NamedTuple):
    """Collectives of one kind: how many run, and GiB of their results on one chip."""

    count: int
    gib: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """What one compiled program needs; sizes are GiB on each chip.

    Attributes:
      name: one of `PROGRAMS`.
      compile_s: seconds that tracing and compiling took here.
      argument: its inputs (weights, optimiser state, batch).
      temp: what it allocates while it runs.
      output: its results.
      alias: the part of the results that is written over donated inputs.
      collectives: of one run, by kind; those in a loop of known length count once an iteration.
      per_iteration: of one iteration of the loops whose length depends on the data, by kind. In "rollout" that is
        one decode step.
      largest: GiB of the largest result of a collective.
    """

    name: str
    compile_s: float
    argument: float
    temp: float
    output: float
    alias: float
    collectives: Mapping[str, Traffic]
    per_iteration: Mapping[str, Traffic]

    @property
    def total(self) -> float:
        """GiB that the program needs on each chip while it runs."""
        return self.argument + self.temp + self.output - self.alias


def topology_mesh(topology: str, mesh: MeshConfig) -> jax.sharding.Mesh:
    """The mesh of a slice such as "v5e:4x4" or "v5p:2x2x4"; raises `UserError` for one that libtpu does not know."""
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # off a TPU VM, asking for its metadata only waits
    try:
        devices = topologies.get_topology_desc(topology, platform="tpu").devices
    except Exception as e:  # whatever libtpu raises
        raise UserError(f"topology {topology!r}: {e} (is libtpu installed? `pip install libtpu`)") from None
    return sharding.make_mesh(mesh, devices)


def plan(
    config: DecoderConfig,
    *,
    topology: str = "v5e:4x4",
    mesh: MeshConfig = MeshConfig(),  # noqa: B008
    prompts: int = 8,
    prompt_tokens: int = 512,
    sampler_config: SamplerConfig = SamplerConfig(),  # noqa: B008
    compute: Compute = Compute(dtype="bfloat16"),  # noqa: B008
    objective: Objective = Objective(),  # noqa: B008
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
    microbatches: int = 1,
    programs: Sequence[str] = PROGRAMS,
    dump=None,
) -> list[ProgramReport]:
    where = topology_mesh(topology, mesh)
    compute = dataclasses.replace(compute, mesh=where, platform="tpu")
    opt = step.make_optimizer(optimizer, 1000)
    graph, state = step.abstract_state(config, opt, where)
    weights = jax.eval_shape(step.make_reshard(graph, compute), state.params)
    weights = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), weights,
        step.shardings(weights, where, sharding.ROLLOUT),
    )
    rep = sharding.named(where, ())
    P, T = prompts, sampler_config.max_tokens
    pr = Prompts(tokens=np.zeros((P, prompt_tokens), np.int32), lengths=np.full(P, prompt_tokens, np.int32), uids=np.zeros(P, np.uint32), first_sample=np.zeros(P, np.int32))
    pr, group = packing.spread(pr, sampler_config.group, sharding.lanes(where))
    shape = (len(pr.lengths), group, T)
    full = np.zeros(shape, np.float32)
    batch = TrainBatch(prompts=pr, tokens=full.astype(np.int32), lengths=np.full(shape[:2], T, np.int32), advantages=full, weights=full, behavior_logps=None, ref_logps=full if objective.needs_reference else None)
    packed, _ = packing.pack(batch, lanes=sharding.lanes(where), microbatches=microbatches, packs=compute.packs)
    put = lambda tree, lead: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.named(where, (*(None,)*lead, "lane", *(None,) * (x.ndim - 1 - lead)))), tree)
    packed, pr = put(packed, 1), put(pr, 0)
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=rep)
    lower = {
        "update": lambda: step.make_train_step(graph, objective, opt, compute, temperature=sampler_config.temperature).lower(state, packed),
        "score": lambda: step.make_score(graph, compute, temperature=sampler_config.temperature).lower(weights, packed.rows),
        "rollout": lambda: sampler._sample.lower(graph, weights, pr, key, dataclasses.replace(sampler_config, group=group), (0,), compute),
        "reshard": lambda: step.make_reshard(graph, compute).lower(state.params),
    }
    out = []
    for name in programs:
        t = time.time()
        low = lower[name]()
        t1 = time.time() - t
        c = low.compile()
        s = time.time() - t
        text = c.as_text()
        if dump:
            open(f"{dump}_{name}.txt", "w").write(text)
            print(name, "lower", t1, "shardings out", {str(x.spec) for x in jax.tree.leaves(c.output_shardings)})
        m = c.memory_analysis()
        g = lambda x: x / 2**30
        print(name, "peak", g(getattr(m, "peak_memory_in_bytes", 0)))
        co, pe = collectives(text)
        out.append(ProgramReport(name=name, compile_s=s, argument=g(m.argument_size_in_bytes), temp=g(m.temp_size_in_bytes), output=g(m.output_size_in_bytes), alias=g(m.alias_size_in_bytes), collectives=co, per_iteration=pe))
    return out


def collectives(text):
    return {}, {}
