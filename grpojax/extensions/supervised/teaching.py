"""The kinds of supervised training: the weights of a batch, the loss, and the held-out metrics."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from grpojax import data
from grpojax import losses as L
from grpojax.extensions.supervised import supervised_update
from grpojax.extensions.supervised.answered import (
    Answered,
    AnsweredConfig,
    AnsweredProblems,
    load_answered,
    read_answer,
    read_pair,
)
from grpojax.extensions.supervised.finetune_recipe import DPOConfig, SFTConfig
from grpojax.host.errors import UserError
from grpojax.models.compute import Compute
from grpojax.programs import packing
from grpojax.programs.packing import NONE, Layout
from grpojax.programs.policy import PolicyShape
from grpojax.programs.update import Loss
from grpojax.run.batch import Batch
from grpojax.types import Rollout, Rows, Samples, Tokens

Column = tuple[str, str, str]
REFERENCE = "reference"  # of `Batch.signals`: sums of log-probs by the reference, ``[P, G]``
_SPEED: tuple[Column, ...] = (("grad", "grad_norm", ".3f"), ("tok/s", "tokens_per_s", ".0f"))
_SECONDS: tuple[Column, ...] = (("seconds", "time/step_s", ".2f"),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes that all batches of a run have in common, so that few programs are compiled.

    Attributes:
      group: completions of a prompt.
      prompt, completion: most tokens of each in the data.
      shards, microbatches: the cut of a batch.
      gather: `grpojax.models.compute.Compute.needs_gather`.
    """

    group: int
    prompt: int
    completion: int
    shards: int
    microbatches: int
    gather: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionLoss:
    """Completions, learned by cross-entropy (`grpojax.extensions.supervised.finetune_recipe.SFTTrainConfig`)."""

    group: int
    aggregate: Literal["token_mean", "sequence_mean"]
    columns: ClassVar[tuple[Column, ...]] = (("loss", "loss", ".4f"), ("entropy", "entropy", ".3f"), *_SPEED, *_SECONDS)
    needs_reference: ClassVar[bool] = False

    def answers(
        self, given: Any, tokenize: data.Tokenize, config: AnsweredConfig, end: int, known: data.Known
    ) -> AnsweredProblems:
        """Reads the data; ``end`` is the token that ends an answer, ``known`` what held-out parts have."""
        return load_answered(given, tokenize, config, read_answer, end=end, group=self.group, known=known)

    def objective(self, graph: Any, compute: Compute) -> Loss:
        """The loss of a part."""
        return supervised_update.sft_objective(graph, compute)

    def part(self, batch: Batch, shapes: Shapes) -> tuple[Any, Layout]:
        """What the loss reads, in rows."""
        weights = np.asarray(L.loss_weights(batch.rollout.sampled, self.aggregate, count_empty=False))
        return pack(batch, shapes, {"weights": weights})

    def held_out(self, logps: Samples, lengths: Samples, reference: Samples) -> dict[str, float]:
        """Metrics from sums of log-probs ``[N, G]`` over ``lengths`` tokens, which are 0 for missing completions."""
        there, total = lengths > 0, np.asarray(logps, np.float64)
        nll = -total.sum() / lengths.sum()
        each = -(total[there] / lengths[there]).mean()
        return {"eval/loss": float(nll if self.aggregate == "token_mean" else each), "eval/nll": float(nll)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preferences:
    """Pairs of a chosen and a rejected completion, by DPO
    (`grpojax.extensions.supervised.finetune_recipe.DPOTrainConfig`)."""

    beta: float
    columns: ClassVar[tuple[Column, ...]] = (
        ("loss", "loss", ".4f"),
        ("margin", "rewards/margins", ".3f"),
        ("accuracy", "rewards/accuracies", ".2f"),
        *_SPEED,
        *_SECONDS,
    )
    needs_reference: ClassVar[bool] = True

    def answers(
        self, given: Any, tokenize: data.Tokenize, config: AnsweredConfig, end: int, known: data.Known
    ) -> AnsweredProblems:
        """Reads the data; ``end`` is the token that ends an answer, ``known`` what held-out parts have."""
        return load_answered(given, tokenize, config, read_pair, end=end, known=known)

    def objective(self, graph: Any, compute: Compute) -> Loss:
        """The loss of a part."""
        return supervised_update.dpo_objective(graph, compute, self.beta)

    def part(self, batch: Batch, shapes: Shapes) -> tuple[Any, Layout]:
        """What the loss reads, in rows."""
        reference = batch.signals[REFERENCE]
        sign = np.broadcast_to(np.array([[1.0], [-1.0]], np.float32), batch.rollout.tokens.shape)
        rows, layout = pack(batch, shapes, {supervised_update.SIGN: sign})
        weights = np.full(len(reference), 1.0 / len(reference), np.float32)
        ref, weights = (
            supervised_update.by_prompts(x, shapes.shards, shapes.microbatches)
            for x in (np.asarray(reference, np.float32), weights)
        )
        return supervised_update.Pairs(rows=rows, reference=ref, weights=weights), layout

    def held_out(self, logps: Samples, lengths: Samples, reference: Samples) -> dict[str, float]:
        """Metrics from sums of log-probs ``[N, 2]``."""
        loss = L.dpo_loss(logps[:, 0], logps[:, 1], reference[:, 0], reference[:, 1], beta=self.beta)
        each = supervised_update.pair_metrics(jnp.asarray(logps), jnp.asarray(reference), self.beta)
        means = {f"eval/{name}": float(np.mean(jax.device_get(x))) for name, x in each.items()}
        return {"eval/loss": float(np.mean(np.asarray(loss))), **means}


Teaching = CompletionLoss | Preferences


def teaching_of(config: SFTConfig | DPOConfig) -> Teaching:
    """The kind of training that a recipe is for."""
    if isinstance(config, SFTConfig):
        return CompletionLoss(group=config.train.group, aggregate=config.train.aggregate)
    return Preferences(beta=config.train.beta)


def to_batch(entries: Sequence[Answered], shapes: Shapes, reference: Samples | None = None) -> Batch:
    """Entries as a batch; the learned tokens are its own (`grpojax.types.Rollout.sampled`). Missing completions have
    length 0. ``reference [P, G]`` are sums of log-probs."""
    tokens = np.zeros((len(entries), shapes.group, shapes.completion), np.int32)
    lengths, learned = np.zeros(tokens.shape[:2], np.int32), np.zeros(tokens.shape, bool)
    for p, entry in enumerate(entries):
        for g, (ids, turns) in enumerate(zip(entry.completions, entry.turns, strict=True)):
            tokens[p, g, : len(ids)] = ids
            lengths[p, g] = len(ids)
            of_assistant = np.arange(len(turns)) % 2 == 0
            learned[p, g, : len(ids)] = np.repeat(of_assistant, turns)
    problems = [data.Problem(entry.uid, entry.ids, "", None, {}) for entry in entries]
    return Batch(
        problems=problems,
        rollout=Rollout(tokens=tokens, lengths=lengths, sampled=learned),
        signals={} if reference is None else {REFERENCE: reference},
    )


def pack(batch: Batch, shapes: Shapes, arrays: Mapping[str, Tokens] = NONE) -> tuple[Rows, Layout]:
    """A batch in rows with some arrays of its tokens, cut like the run's batches."""
    how = {"shards": shapes.shards, "microbatches": shapes.microbatches, "gather": shapes.gather}
    prompts, samples = data.to_prompts(batch.problems, shapes.prompt), batch.rollout
    return packing.pack_groups(prompts, Rollout(tokens=samples.tokens, lengths=samples.lengths), arrays, **how)


def check_cut(config: SFTConfig | DPOConfig, shards: int) -> None:
    """Raises `UserError` if a batch does not divide over this number of batch shards and its micro-batches."""
    size, parts = config.train.batch_size, config.train.microbatches
    if size % (shards * parts):
        raise UserError(
            f"train.batch_size={size} does not divide over {shards} batch shards with train.microbatches={parts} each: "
            f"make it a multiple of {shards * parts}"
        )


def longest_entries(config: SFTConfig | DPOConfig, policy: PolicyShape) -> tuple[list[Answered], Shapes]:
    """A batch of made-up answers at their longest, as many to a prompt as it may have, and their sizes.

    Raises:
      UserError: the batch does not divide over the devices.
    """
    check_cut(config, policy.shards)
    shapes = Shapes(
        group=config.train.group if isinstance(config, SFTConfig) else 2,
        prompt=config.data.max_prompt_tokens,
        completion=config.data.max_tokens,
        shards=policy.shards,
        microbatches=config.train.microbatches,
        gather=policy.compute.needs_gather,
    )
    ids, turns = ((0,) * shapes.completion,) * shapes.group, ((shapes.completion,),) * shapes.group
    entries = [Answered(uid, (0,) * shapes.prompt, ids, turns) for uid in range(config.train.batch_size)]
    return entries, shapes
