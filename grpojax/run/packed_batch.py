"""The input of one update: its share of a step's batch in rows on the devices, and the way back to the host."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpojax.device import ROWS, Device
from grpojax.models.experts import choice_dtype
from grpojax.programs import batch_shards, blocks, calls, packing
from grpojax.programs.packing import Layout, Packed
from grpojax.programs.policy import PolicyShape
from grpojax.run import parts
from grpojax.run.recipe import Config
from grpojax.types import PerToken, Tokens, TrainBatch


@dataclasses.dataclass
class PackedBatch:
    """One update's share of a step, in rows. Its per-token arrays fill up as they become known.

    Attributes:
      places: indices of its prompts in the batch, ``[p]``.
      batch: its samples on the host, spread over the shards.
      packed: its rows on the devices.
      layout: the positions of its tokens ``[p, G, T]`` in the rows.
      live: whether any of its tokens has a weight.
    """

    places: np.ndarray
    batch: TrainBatch
    packed: Packed
    layout: Layout
    live: bool = True

    def add(self, device: Device, host: Mapping[str, Tokens]) -> None:
        """Copies arrays ``[p, G, T]`` of the host into the rows."""
        rows = {name: self.layout.pack(np.asarray(x)) for name, x in host.items()}
        self.set(**device.put(rows, ROWS))

    def of(self, lengths: np.ndarray) -> TrainBatch:
        """Its samples with other lengths, ``[p, G]``."""
        return dataclasses.replace(self.batch, lengths=lengths.reshape(np.shape(self.batch.lengths)))

    def set(self, **rows: Any) -> None:
        """Sets arrays ``[M, B, R, S]`` of the devices in the rows."""
        per_token = dataclasses.replace(self.packed.per_token, **rows)
        self.packed = dataclasses.replace(self.packed, per_token=per_token)


def whole(device: Device, minis: Sequence[PackedBatch], rows: Sequence[Any]) -> Tokens:
    """Rows of every minibatch back to ``[P, G, T]`` on the host."""
    unpacked = [m.layout.unpack(device.get(x)) for m, x in zip(minis, rows, strict=True)]
    whole = [batch_shards.gather_groups(x, len(m.places)) for m, x in zip(minis, unpacked, strict=True)]
    return np.concatenate(whole)[np.argsort(np.concatenate([m.places for m in minis]))]


def longest_batch(config: Config, policy: PolicyShape) -> TrainBatch:
    """The samples of an update on the host, with every prompt and completion at its longest.

    If a plan gives prompts different numbers of samples, each counts with the most. The real total is never as large.
    """
    train, method, rollout = config.train, config.method, config.rollout
    variant, kinds = method.variant, parts.kinds(method.variant).values()
    tokens = room(rollout.max_tokens) if method.replaces_samples else rollout.max_tokens
    prompts = calls.longest_prompts(rollout.prompts // train.minibatches, config.data.max_prompt_tokens)
    spread, group = batch_shards.spread(prompts, method.widest(rollout.group), policy.shards)
    full = np.zeros((len(spread.lengths), group, tokens), np.float32)
    choices = dict[str, np.ndarray]()
    if rollout.router_replay and policy.config.experts is not None:
        experts, longest = policy.config.experts, spread.tokens.shape[1]
        width, dtype = len(policy.config.layers_of("mixture")) * experts.chosen, choice_dtype(experts.count)
        choices["choices"] = np.zeros((*full.shape, width), dtype)
        choices["prompt_choices"] = np.zeros((len(full), longest, width), dtype)
    there = {"sampler_logps": not method.replaces_samples}
    there["old_logps"] = method.scores_old(train.updates_a_rollout)
    there |= {name: True for kind in kinds for name in kind.rows(variant)}
    return TrainBatch(
        prompts=spread,
        tokens=full.astype(np.int32),
        lengths=np.full(full.shape[:2], tokens, np.int32),
        per_token=PerToken(
            advantages=full,
            weights=full,
            covariance_mask=full.astype(bool) if variant.objective.needs_covariance_mask else None,
            action_starts=full.astype(bool)
            if config.environment and variant.objective.needs_displacement_weights
            else None,
            **{name: full for name, needed in there.items() if needed},
        ),
        **choices,
    )


def room(most: int, longest: int = 0) -> int:
    """T for spliced samples of up to ``longest`` tokens and drawn ones of ``most``: 16 more than drawn, or twice that,
    and so on.

    It depends only on the step's own samples, so that a resumed run has the same shapes.

    Example:
      >>> room(8), room(8, 24), room(8, 25)
      (24, 24, 40)
    """
    more = 16
    while most + more < longest:
        more *= 2
    return most + more


def in_rows(config: Config, policy: PolicyShape, batch: TrainBatch) -> Packed:
    """A `longest_batch` in rows, as shapes on the devices."""
    packed, _ = packing.pack(
        batch, shards=policy.shards, microbatches=config.train.microbatches, gather=policy.compute.needs_gather
    )
    return calls.on_mesh(packed, policy.mesh, None)


def ragged(config: Config, policy: PolicyShape, batch: TrainBatch, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments of an update whose samples are shorter: it takes only the blocks of rows that hold a token.

    Empty if such blocks would save nothing.
    """
    train = config.train
    least = blocks.LEAST.get(policy.compute.platform or jax.default_backend(), blocks.LEAST["tpu"])
    how = {"microbatches": train.microbatches, "least": least, "gaps": train.skip_zero_advantage}
    sizes = blocks.sizes_of(batch, shards=policy.shards, **how)
    return blocks.others(sizes, np.shape(batch.lengths)[1] if policy.compute.needs_gather else 0, args)


def work(config: Config, policy: PolicyShape) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of an update's prompts and of its samples, at their longest. A prompt in several batch shards is computed
    in each of them."""
    each = config.rollout.prompts // config.train.minibatches
    copies = max(1, policy.shards // each)
    samples = np.full((each * copies, max(1, config.rollout.group // copies)), config.rollout.max_tokens)
    return np.full(each * copies, config.data.max_prompt_tokens), samples
