"""The programs that a run calls, by name, from its dry steps (`grpojax.run.dry`)."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from grpojax import sharding
from grpojax.device import Program
from grpojax.models import DecoderConfig, compute_of, decoder, flops, kv_heads
from grpojax.models.hf.config_json import from_hf
from grpojax.programs import adapter, kv_cache
from grpojax.programs.policy import PolicyShape, Sampling
from grpojax.programs.sampler import Draws
from grpojax.run import dry, parts
from grpojax.run.dry import Called, Phase, RecipeKind
from grpojax.run.parts.part import read_shape
from grpojax.run.recipe import Config
from grpojax.types import Prompts, Rows

_SMALL = {  # as config.json
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
_SMALL_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """A program and its arguments, with every prompt and completion at its longest.

    Attributes:
      program: the program.
      args: shapes in place of arrays.
      own: those of their leaves that are part of the run's state. They take memory also while the program does not
        run.
      phase: the part of a step that calls it first.
      times: how often a step calls it; 0 if only some steps do, or none.
      samples: whether it runs on the chips that sample.
      flops: FLOPs of the program on all chips together; 0 if it multiplies nothing, or if the number is unknown.
      iterations: number of iterations of a rollout's loop if every sample is at its longest.
      cache: bytes of a rollout's keys and values on one chip.
      blocks: number of blocks of a rollout's cache.
      live: average share of these blocks that a decode step reads.
      loops: how often other loops run whose length a compiled program does not say, by the name of their scope.
    """

    program: Program
    args: tuple[Any, ...]
    own: Any = ()
    phase: Phase = "update"
    times: int = 0
    samples: bool = False
    flops: float = 0.0
    iterations: int = 0
    cache: int = 0
    blocks: int = 1
    live: float = 1.0
    loops: Mapping[str, int] = dataclasses.field(default_factory=dict)


class RunCalls(NamedTuple):
    """The programs of a run by name, and its state by role: everything that it keeps on the devices, as shapes."""

    calls: dict[str, PlannedCall]
    state: dict[str, Any]


def calls_of(
    config: Config, policy: PolicyShape, *, read_shape: Callable[[str], DecoderConfig] = read_shape
) -> RunCalls:
    """The programs of a recipe's run, those of a step first.

    A second size of an update's rows, for shorter samples, has the prefix "ragged ". Scores with other weights than the
    policy's have the role of these as a prefix, if they are another program for it.

    Args:
      config, policy, read_shape: as of `grpojax.run.dry.run_of`.

    Raises:
      UserError: sizes that do not divide over the devices.
    """
    whole = dry.run_of(config, policy, read_shape=read_shape)
    steps, found = [parts.warmup_steps(config) + 1], _Found(policy, whole.state, config)
    found.add(_step(whole, *steps), of_a_step=True)
    if steps != [1]:
        steps.append(1)  # in which the policy does not learn
        found.add(_learned(whole, [1]))
    found.add([*whole.end_step(config.train.reference_every or 1), *whole.evaluate()])
    short = whole.shorter()
    found.add([*short.sample(), *_learned(short, steps)], short=True)
    return RunCalls(found.named(), {**whole.state})


def a_step(config: Config) -> dict[str, PlannedCall]:
    """The programs of a recipe's step by name, and how often it calls each.

    Their shapes mean nothing: these follow from the model and the sizes, and the counts do not. So a small model takes
    the step, with few prompts.
    """
    rollout, train, model = config.rollout, dataclasses.replace(config.train, microbatches=1), _SMALL
    if config.method.plan is None:  # of which the phases follow from the prompts
        rollout = dataclasses.replace(rollout, prompts=4 * train.minibatches, decode_slots=0)
    if rollout.router_replay or train.balance_coef:
        model = _SMALL | _SMALL_MIXTURE | {"model_type": "qwen3_moe"}
    model, short = from_hf(model), dataclasses.replace(config.data, max_prompt_tokens=8)
    config = dataclasses.replace(config, rollout=rollout, train=train, data=short)
    compute = compute_of(config.model, platform="tpu")
    policy = PolicyShape(
        config=model,
        graph=decoder.abstract(model)[0],
        compute=compute,
        sampling=Sampling(None, compute),
        adapter=adapter.of(config.model),
    )
    run = dry.run_of(config, policy, read_shape=lambda path: model)
    found = _Found(policy, run.state, config)
    found.add(_step(run, parts.warmup_steps(config) + 1), of_a_step=True)
    return found.named()


def of_other(kind: RecipeKind, config: Any, policy: PolicyShape) -> RunCalls:
    """As `calls_of` for a run of another kind of recipe; raises `UserError` likewise."""
    calls, state = kind.step(config, policy)
    found = _Found(policy, state)
    found.add(calls)
    return RunCalls(found.named(), {**state})


def _step(run: dry.DryRun, number: int) -> list[Called]:
    late = _most(run.late(fails=True), run.late(fails=False))
    return [*run.sample(), *late, *_learned(run, [number])]


def _learned(run: dry.DryRun, steps: Iterable[int]) -> list[Called]:
    return [call for number in steps for calls in run.learn(number, run.pack()) for call in calls]


def _most(*runs: list[Called]) -> list[Called]:
    """Of each program the calls of the run that calls it most often."""
    found = list[Called]()
    for program in {call.program: None for calls in runs for call in calls}:
        found += max(([call for call in calls if call.program is program] for calls in runs), key=len)
    return found


class _Found:
    """Calls of a run with this state; of equal ones the first.

    Args:
      policy: the model.
      state: by role.
      config: the recipe of a run that samples.
    """

    def __init__(self, policy: PolicyShape, state: Mapping[str, Any], config: Config | None = None):
        self._policy, self._config = policy, config
        self._loops = {} if policy.config.mlp is None else policy.config.mlp.loops
        self._roles = {id(x): role for role, part in state.items() for x in jax.tree.leaves(part)}
        self._calls, self._short = dict[Any, PlannedCall](), set[Any]()

    def add(self, calls: Iterable[Called], *, of_a_step: bool = False, short: bool = False) -> None:
        """Adds some, which count if they are ``of_a_step``. ``short`` ones are of shorter samples."""
        for program, args, phase, samples in calls:
            mesh = self._policy.sampling.mesh if samples else self._policy.mesh
            args = jax.tree.map(lambda x, mesh=mesh: _as_shape(x, mesh), args)
            leaves, tree = jax.tree.flatten(args)
            key = program, tree, *((x.shape, str(x.dtype), x.sharding) for x in leaves)
            if key not in self._calls:
                own = [x for x in leaves if id(x) in self._roles]
                made = PlannedCall(program=program, args=args, own=own, phase=phase, samples=samples, loops=self._loops)
                self._calls[key] = made
                self._short |= {key} if short else set()
            if of_a_step:
                self._calls[key] = dataclasses.replace(self._calls[key], times=self._calls[key].times + 1)

    def named(self) -> dict[str, PlannedCall]:
        """All by name."""
        named = dict[str, PlannedCall]()
        for key, call in self._calls.items():
            name = self._name(key, call)
            if name in named:
                name = next(f"{name} {n}" for n in range(2, len(self._calls) + 2) if f"{name} {n}" not in named)
            named[name] = self._with_work(key, call)
        return named

    def _name(self, key: Any, call: PlannedCall) -> str:
        name, short = call.program.name, key in self._short
        if call.phase == "evaluation":
            return name.replace("rollout", "evaluation") if "rollout" in name else f"evaluation {name}"
        alike = [(k, c) for k, c in self._calls.items() if c.program is call.program and c.phase != "evaluation"]
        roles = {self._roles[id(x)] for x in jax.tree.leaves(call.args[0]) if id(x) in self._roles}
        if roles and "policy" not in roles and sum((k in self._short) == short for k, _ in alike) > 1:
            name = f"{min(roles)} {name}"
        return f"ragged {name}" if short and not all(k in self._short for k, _ in alike) else name

    def _with_work(self, key: Any, call: PlannedCall) -> PlannedCall:
        if isinstance(call.program.made_up, Draws):
            assert self._config is not None
            return _of_rollout(call, self._config.data.max_prompt_tokens, self._policy)
        if call.program.flops is None or key in self._short:
            return call
        found = jax.tree.leaves(call.args, is_leaf=lambda x: isinstance(x, Rows))
        rows = next(x for x in found if isinstance(x, Rows))
        return dataclasses.replace(call, flops=call.program.flops(*_sizes(rows, self._config)))


def _as_shape(x: Any, mesh: Any) -> jax.ShapeDtypeStruct:
    """Shape of an argument. A key of the host gets to all devices, and a number of it lies on none."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    placed = sharding.named(mesh, ()) if isinstance(x, jax.Array) else None
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype if hasattr(x, "dtype") else np.float32, sharding=placed)


def _sizes(rows: Rows, config: Config | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the prompts ``[n]`` and samples ``[n, G]`` of rows at their longest. G is the mean if prompts get
    different numbers of samples."""
    prompts, tokens = int(np.prod(rows.prompt_lengths.shape)), rows.tokens.shape
    samples = int(np.prod(tokens[:-1])) // prompts
    if config is not None:
        samples = max(1, samples * config.rollout.group // config.method.widest(config.rollout.group))
    return np.full(prompts, rows.prompts.shape[-1]), np.full((prompts, samples), tokens[-1])


def _of_rollout(call: PlannedCall, longest: int, policy: PolicyShape) -> PlannedCall:
    """A rollout of prompts of so many tokens with its work, and with the sizes of its loop and caches."""
    draws = call.program.made_up
    assert isinstance(draws, Draws)
    sampler, compute, mesh, shards = draws.config, draws.compute, policy.sampling.mesh, policy.sampling.shards
    rows, group, tokens = _prompts_of(call.args), sampler.group, sampler.max_tokens
    slots = sampler.decode_slots or group
    ring, rounds = kv_cache.ring(tokens, compute), -(-group // slots)
    cells = (rows * longest + rows * slots * ring.size) // shards // (1 if mesh is None else mesh.shape["tensor"])
    cached = dataclasses.replace(policy.config, num_kv_heads=kv_heads.on_mesh(policy.config, mesh))

    def work(drawn: int) -> float:
        return flops.forward_flops(policy.config, np.full(rows, longest), np.full((rows, group), drawn))

    others = flops.flops_in_vain(policy.config, compute, rows // shards * slots, rows * group * (tokens - 1))
    whole, first = work(tokens) + others, work(draws.tokens)
    later = max(1, -(-tokens // draws.tokens) - 1)
    return dataclasses.replace(
        call,
        flops={"all": whole, "first": first, "later": (whole - first) / later}[draws.turn],
        iterations=rounds * (tokens - 1) if draws.turn == "all" else draws.tokens,
        cache=cells * flops.kv_bytes(cached, kv_cache.format_of_cache(sampler.cache_dtype, compute)),
        blocks=ring.blocks,
        live=ring.mean_live(tokens, rounds) if draws.turn == "all" else 1.0,
    )


def _prompts_of(args: tuple[Any, ...]) -> int:
    """Prompts of a rollout with these arguments: weights, and then prompts or samples that wait for an answer."""
    given = args[1]
    return (given.lengths if isinstance(given, Prompts) else given.prompt_lengths).shape[0]
