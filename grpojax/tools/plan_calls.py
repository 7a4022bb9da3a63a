"""The programs that a variant needs beside those of every run, with the shapes that the trainer gives them."""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from grpojax.evaluation import EvalConfig
from grpojax.models import Compute, DecoderConfig, flops, kv_heads, sharding
from grpojax.models import critic as models
from grpojax.models.weight_table import shardings
from grpojax.programs import batch_shards, influence, kv_cache, packing, sampler
from grpojax.programs.compiling import program
from grpojax.programs.critic_update import CriticModel
from grpojax.programs.sampler import SamplerConfig, most_left, no_samples
from grpojax.programs.state import make_reshard
from grpojax.run.groups import greedy_of
from grpojax.run.method import Method
from grpojax.run.parts.influence import TOKENS
from grpojax.run.programs import Programs
from grpojax.run.regroup import part_sizes, tokens_at_once
from grpojax.run.sections import TrainConfig
from grpojax.types import PerToken, Prompts, Rollout, TrainBatch

ANSWER_TOKENS = 16  # of `grpojax.run.parts.true_answers.splice_groups`, at the least


class Call(NamedTuple):
    """A jitted program, its arguments, those of them that are the run's own, and the groups that its work is of, a
    prompt that stands in several shards as often as it does.

    Of a rollout also how often its loop runs where every sample is at its longest, bytes of keys and values on a chip,
    the blocks of its cache, and the share of them that a token's step reads, on the average.

    ``apart`` says that it runs on the chips that do nothing but sample, ``static`` has its static keyword arguments.
    """

    program: Any
    args: tuple[Any, ...]
    own: Any
    groups: tuple[int, int, int] | None = None  # prompts, samples of each, tokens of each
    iterations: int = 0
    cache: int = 0
    blocks: int = 1
    live: float = 1.0
    apart: bool = False
    static: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """What all programs of a run have in common.

    Attributes:
      config: the model.
      graph: the decoder's graph definition.
      compute: how to run it, mesh included.
      prompts, prompt_tokens: of a rollout, and of the longest prompt.
      sampling: group, longest completion, temperature, slots.
      evaluation: what is drawn of held-out problems, where there are any.
      weights: of the rollout; evaluation takes those in the compute dtype.
      overlap: share of a rollout's samples that may go on in the next one.
      apart: the chips that do nothing but sample, where there are any.
    """

    config: DecoderConfig
    graph: Any
    compute: Compute
    prompts: int
    prompt_tokens: int
    sampling: SamplerConfig
    evaluation: EvalConfig | None = None
    weights: Literal["compute", "int8"] = "compute"
    overlap: float = 0.0
    apart: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        """The devices that learn."""
        assert self.compute.mesh is not None
        return self.compute.mesh

    @property
    def sampling_mesh(self) -> Mesh:
        """The devices that sample."""
        return self.mesh if self.apart is None else self.apart


def longest_prompts(count: int, tokens: int) -> Prompts:
    """``count`` prompts of ``tokens`` tokens."""
    zero = np.zeros(count, np.int32)
    return Prompts(
        tokens=np.zeros((count, tokens), np.int32),
        lengths=zero + tokens,
        uids=zero.astype(np.uint32),
        first_sample=zero,
    )


def abstract(x: Any, placed: NamedSharding | None) -> jax.ShapeDtypeStruct:
    """An array without its numbers."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)


def place(tree: Any, mesh: Mesh, *before: None) -> Any:
    """Arrays as they lie on the devices: ``before`` axes, then shards."""

    def placed(x: np.ndarray) -> jax.ShapeDtypeStruct:
        axes = (*before, "shard", *(None,) * (x.ndim - len(before) - 1))
        return abstract(x, sharding.named(mesh, axes))

    return jax.tree.map(placed, tree)


def _sample(graph: Any, params: Any, prompts: Prompts, key: Any, partial: Rollout | None = None, **how: Any) -> Rollout:
    return sampler.sample_groups(graph, params, prompts, key, partial=partial, **how)


def _laid_out(run: Shapes, count: int, sampling: SamplerConfig) -> tuple[Prompts, dict[str, Any]]:
    """``count`` prompts as the shards get them, and how the samples of each are drawn."""
    parts = sharding.shards(run.sampling_mesh)
    prompts, group = batch_shards.spread(longest_prompts(count, run.prompt_tokens), sampling.group, parts)
    config = dataclasses.replace(sampling, group=group, decode_slots=min(sampling.decode_slots, group))
    compute = dataclasses.replace(run.compute, mesh=run.sampling_mesh)
    return prompts, {"config": config, "eos_ids": (0,), "compute": compute}


def rollout(run: Shapes, whole: Any, count: int, sampling: SamplerConfig, overlap: float = 0.0) -> Call:
    """A rollout of ``count`` prompts by the policy, its weights cast and whole on every batch shard."""
    mesh, parts = run.sampling_mesh, sharding.shards(run.sampling_mesh)
    prompts, how = _laid_out(run, count, sampling)
    config, compute = how["config"], how["compute"]
    key = abstract(jax.eval_shape(lambda: jax.random.key(0)), sharding.named(mesh, ()))
    shape, tokens = (len(prompts.lengths), config.group), sampling.max_tokens
    slots = config.decode_slots or config.group
    args = whole, place(prompts, mesh), key
    if overlap:
        how["left"] = most_left(overlap, count, sampling.group, parts)
        args = *args, place(no_samples(*shape, tokens), mesh)
    made = program("rollout", functools.partial(_sample, run.graph, **how))
    rows, ring = len(prompts.lengths), kv_cache.ring(tokens, compute)
    dtype = kv_cache.dtype_of(sampling.cache_dtype, compute)
    kept = (rows * run.prompt_tokens + rows * slots * ring.size) // parts // mesh.shape["tensor"]
    spread = dataclasses.replace(run.config, num_kv_heads=kv_heads.on_mesh(run.config, mesh))
    cache = kept * flops.kv_bytes(spread, dtype)
    rounds = -(-config.group // slots)
    live, apart = ring.mean_live(tokens, rounds), run.apart is not None
    return Call(made, args, (), (*shape, tokens), rounds * (tokens - 1), cache, ring.blocks, live, apart)


def _resharded(run: Shapes, params: Any, weights: Literal["compute", "int8"]) -> tuple[Call, Any]:
    """The program that makes a rollout's weights, and these where they are sampled with."""
    reshard = make_reshard(run.config, run.compute, weights)
    whole = jax.eval_shape(reshard, params)
    whole = jax.tree.map(abstract, whole, shardings(whole, run.sampling_mesh, sharding.ROLLOUT))
    return Call(reshard, (params,), params), whole


def rollouts(run: Shapes, params: Any, method: Method | None) -> dict[str, Call]:
    """Those of a step: one of groups, or a probe and a phase; greedy completions; and those of held-out problems. And
    what makes their weights of the policy's."""
    sampling, parts = run.sampling, sharding.shards(run.sampling_mesh)
    reshard, whole = _resharded(run, params, run.weights)

    def one_shard_each(count: int) -> int:
        return -(-count // parts) * parts

    if method is None or method.plan is None:
        calls = {"rollout": rollout(run, whole, run.prompts, sampling, run.overlap)}
    else:
        plan, slots = method.plan, sampling.decode_slots
        more = run.prompts * (sampling.group - plan.probe) // plan.phases
        probe, one = (dataclasses.replace(sampling, group=n, decode_slots=min(slots, n)) for n in (plan.probe, 1))
        calls = {
            "rollout": rollout(run, whole, one_shard_each(run.prompts), probe),
            "rollout phase": rollout(run, whole, one_shard_each(more), one),
        }
    if method is not None and "greedy" in method.variant.needs:
        calls["greedy"] = rollout(run, whole, one_shard_each(run.prompts), greedy_of(sampling))
    if (held_out := run.evaluation) is not None:
        count = max(1, held_out.batch // held_out.sampler.group)
        count = min(count, held_out.limit) if held_out.limit else count
        if run.weights != "compute":
            calls["evaluation reshard"], whole = _resharded(run, params, "compute")
        calls["evaluation"] = rollout(run, whole, one_shard_each(count), held_out.sampler)
    return calls | {"reshard": reshard}


def scores(
    run: Shapes, programs: Programs, params: Any, packed: packing.Packed, method: Method, train: TrainConfig
) -> dict[str, Call]:
    """What is computed of samples beside the log-probs: before the rewards, after them, and before an update."""
    needs, calls = method.variant.needs, {}
    objective = method.variant.objective
    if "entropy" in needs:
        calls["score with entropy"] = Call(programs.score_policy, (params, packed.rows), params)
    if objective.needs_covariance_mask:
        logps = packed.per_token.advantages
        key = abstract(jax.eval_shape(lambda: jax.random.key(0)), sharding.named(run.mesh, ()))
        without = dataclasses.replace(packed, per_token=dataclasses.replace(packed.per_token, covariance_mask=None))
        args = key, logps, without, packed.rows.tokens
        calls["covariance mask"] = Call(programs.covariance_mask, args, ())
    if "hidden_states" in needs:
        calls["influence"] = _influence(run, programs, params, method, train)
    if "ground_truth" in needs:
        rows, groups, _, _ = _late_rows(run, method, train, ANSWER_TOKENS, most=None)
        calls["true answers"] = Call(programs.score, (params, rows), params, groups)
    return calls


def _late_rows(
    run: Shapes, method: Method, train: TrainConfig, over: int, *, most: int | None
) -> tuple[Any, tuple[int, int, int], int, packing.Layout]:
    """A quarter of a batch (`grpojax.run.regroup.regroup`) at its longest, one prompt at a time where ``most`` says how
    many tokens: its rows, what they are of, how many groups, and their layout."""
    group, parts = method.widest(run.sampling.group), sharding.shards(run.mesh)
    tokens = run.sampling.max_tokens
    at_once = tokens_at_once(run.prompts * group * tokens, train, parts)
    at_once = at_once if most is None else min(at_once, most)
    tokens += over
    filled, microbatches = part_sizes(run.prompts, group, tokens, parts, at_once, one_prompt=most is not None)
    prompts, part = batch_shards.spread(longest_prompts(filled, run.prompt_tokens), group, parts)
    shape = len(prompts.lengths), part
    batch = TrainBatch(
        prompts=prompts,
        tokens=np.zeros((*shape, tokens), np.int32),
        lengths=np.full(shape, tokens, np.int32),
        per_token=PerToken(),
    )
    packed, layout = packing.pack(batch, shards=parts, microbatches=microbatches, gather=run.compute.needs_gather)
    return place(packed.rows, run.mesh, None), (*shape, tokens), filled, layout


def _influence(run: Shapes, programs: Programs, params: Any, method: Method, train: TrainConfig) -> Call:
    rows, (spread, part, tokens), filled, layout = _late_rows(run, method, train, 0, most=TOKENS)
    parts, group = sharding.shards(run.mesh), spread * part // filled
    samples, weights = np.zeros(layout.index.shape, np.int32), np.zeros(layout.index.shape, np.float32)
    width = influence.vocabulary_width(group * tokens, params["embed"].shape[0])
    entries = np.zeros((spread // parts, parts, width), np.int32)
    own = not method.variant.options["self_term"]
    args = params, rows, *(place(x, run.mesh, None) for x in (samples, weights, entries))
    static = {"copies": spread // filled, "group": part if own else 0}
    return Call(programs.influence, args, params, (spread, part, tokens), static=static)


def at_least(config: DecoderConfig, calls: Mapping[str, Call], run: Shapes) -> dict[str, float]:
    """Seconds of the FLOPs of those calls that say what their work is; every chip that it runs on shares in it."""
    chip, out = flops.CHIPS.get(run.mesh.devices.flat[0].device_kind), {}
    for name, call in calls.items():
        if call.groups is not None and chip is not None:
            count, group, tokens = call.groups
            forward = flops.forward_flops(config, np.full(count, run.prompt_tokens), np.full((count, group), tokens))
            mesh = run.sampling_mesh if call.apart else run.mesh
            out[name] = forward / mesh.size / chip.flops
    return out


def limits(
    config: DecoderConfig,
    mesh: Mesh,
    prompts: int,
    prompt_tokens: int,
    sampling: SamplerConfig,
    minibatches: int,
    *,
    critic: CriticModel | None = None,
    teacher: DecoderConfig | None = None,
    remat: str = "layer",
) -> dict[str, float]:
    """Seconds of the FLOPs of the programs on a minibatch, recomputation included, at the data sheet's rate.

    Every chip shares in all work; a prompt that stands in several shards is computed in each of them.
    """
    chip = flops.CHIPS.get(mesh.devices.flat[0].device_kind)
    if chip is None:
        return {}
    rate = chip.flops
    each = prompts // minibatches
    copies = max(1, sharding.shards(mesh) // each)
    completions = np.full((each * copies, max(1, sampling.group // copies)), sampling.max_tokens)
    sizes = np.full(each * copies, prompt_tokens), completions
    forward = flops.forward_flops(config, *sizes) / mesh.size / rate
    said, learned, taught = 0.0, 0.0, 0.0
    if teacher is not None:
        taught = flops.forward_flops(teacher, *sizes) / mesh.size / rate
    if critic is not None:
        said = models.forward_flops(critic.config, *sizes) / mesh.size / rate
        learned = said if critic.frozen else 3 * said
    return {
        "score": forward,
        "score with entropy": forward,
        "update": flops.update_flops(config, *sizes, remat=remat) / mesh.size / rate + learned,
        "teacher": taught,
        "critic": said,
        "critic update": learned,
    }
