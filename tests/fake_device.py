"""A device that computes next to nothing, for tests of what surrounds a run's programs.

It takes what the real programs take: each is traced with its arguments, which refuses what it does not take, and says
what comes back and whose memory is taken over. Results follow from every number of the arguments. So a run that forgets
some of them, such as weights or moments, continues differently from one that was never stopped.
"""

import contextlib
import zlib
from typing import Any

import jax
import numpy as np
import pytest

from grpojax import device
from grpojax.programs import sampler

# These do not run the model on samples. They compile quickly, and their results are read as what they say.
REAL = {"allocate", "episodes", "episode turns", "optimizer_init", "reference", "reshard"}


class Fake(device.Real):
    """Puts and gets arrays as a real device does, and makes up what programs return."""

    def call(self, program: device.Program, *args: Any) -> Any:
        if program.name in REAL:
            return super().call(program, *args)
        if program.name == "rollout":
            return sample_groups(*args, **program.fn.keywords)
        traced = program.trace(*args)
        given = traced.args_info[0]
        takes = any(info.donated for info in jax.tree.leaves(given))
        out = next_state(args, traced.out_info) if takes else made_of(args, traced.out_info)
        for x, info in zip(jax.tree.leaves(args), jax.tree.leaves(given), strict=True):
            if info.donated and isinstance(x, jax.Array):
                x.delete()
        return out

    def compile_ahead(self, calls: Any) -> None:
        """Compiles nothing."""


@contextlib.contextmanager
def in_place():
    """Inside the context, a run that is opened has a `Fake` for its devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "Real", Fake)
        yield


# ------------------------------------------------------------------------------------------------- what comes back


def made_of(args: Any, out: Any) -> Any:
    """Arrays of the shapes ``out`` that follow from ``args``; floats lie between 1 and 1.01."""
    rng = np.random.default_rng(digest(args))

    def some(info: Any) -> jax.Array:
        drawn = rng.random(info.shape)
        if info.dtype == bool:
            return jax.device_put(drawn < 0.5)
        return jax.device_put((1 + 0.01 * drawn if is_float(info) else 100 * drawn).astype(info.dtype))

    return jax.tree.map(some, out)


def next_state(args: tuple[Any, ...], out: Any) -> Any:
    """Of an update ``(state, frozen, packed) -> (state, metrics)``: floats of the state move by at most 0.01 and counts
    go up by one. The state stays as it is where the batch holds something that is not finite."""
    state, metrics = out
    finite = all(np.isfinite(x).all() for x in jax.tree.leaves(args[2]) if is_float(x))
    shift = np.random.default_rng(digest(args)).uniform(0, 0.01)

    def moved(x: Any, info: Any) -> jax.Array:
        more = np.asarray(x) + finite * (shift if is_float(x) else 1)
        return jax.device_put(more.astype(info.dtype), x.sharding)

    measured = made_of(args, metrics)
    skipped = {name: np.float32(not finite) for name in measured if name.endswith("skipped")}
    return jax.tree.map(moved, args[0], state), measured | skipped


def is_float(x: Any) -> bool:
    return jax.numpy.issubdtype(x.dtype, np.floating)


def digest(tree: Any) -> int:
    """A number that follows from every number of a tree."""
    found = 0
    for x in jax.tree.leaves(tree):
        is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        found = zlib.crc32(np.ascontiguousarray(jax.random.key_data(x) if is_key else x).tobytes(), found)
    return found


# ------------------------------------------------------------------------------------------------- samples


def sample_groups(params, prompts, key, partial=None, *, config, eos_ids, compute, left, graph=None):
    """As `grpojax.programs.sampler.rollout_program`. A token follows from weights, key, prompt, problem, sample and
    position; every sixth ends its sample, where one can."""
    if partial is not None and compute.mesh is not None:
        raise NotImplementedError("partial samples of several shards")
    prompts, of_rollout = jax.tree.map(np.asarray, prompts), digest((params, key))
    asked = [tokens[:n] for tokens, n in zip(prompts.tokens, prompts.lengths, strict=True)]
    likely = np.setdiff1d(np.arange(1, params["embed"][...].shape[0]), eos_ids)
    waiting = sampler.no_samples(len(prompts.lengths), config.group, config.max_tokens)
    next_tokens, next_logps = np.empty_like(waiting.tokens), np.empty_like(waiting.logps)
    for row, sample in np.ndindex(waiting.lengths.shape):
        number = int(prompts.first_sample[row]) + sample
        rng = np.random.default_rng((of_rollout, digest(asked[row]), int(prompts.uids[row]), number))
        ends = rng.random(config.max_tokens) < (1 / 6 if eos_ids else 0)
        next_tokens[row, sample] = np.where(ends, eos_ids[:1] or 0, rng.choice(likely, config.max_tokens))
        next_logps[row, sample] = -1 - 0.01 * rng.random(config.max_tokens)

    out = jax.tree.map(np.array, waiting if partial is None else partial)
    draws = out.lengths == 0  # of each sample the first token is drawn in any case
    while True:
        at = (*np.nonzero(draws), out.lengths[draws])
        out.tokens[at], out.logps[at] = next_tokens[at], next_logps[at]
        out.lengths[draws] += 1
        out.stopped[draws] = np.isin(next_tokens[at], eos_ids)
        draws = sampler.unfinished(out)
        enough = partial is not None and draws.sum() <= left and not draws.any(1).all()
        if enough or not draws.any():
            return jax.tree.map(jax.device_put, out)
