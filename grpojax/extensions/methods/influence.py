"""The influence of tokens on each other, which NTHR reads (`grpojax.extensions.methods.token_influence`)."""

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpojax import data
from grpojax.advantages import Signals
from grpojax.credit.hidden_states import outcome_signs
from grpojax.device import ROWS, Program, cut
from grpojax.extensions.methods import token_influence
from grpojax.extensions.methods.regroup import regroup, tokens_at_once
from grpojax.extensions.methods.token_influence import Influence
from grpojax.host.on_host import on_host
from grpojax.models import flops
from grpojax.programs import policy_state
from grpojax.programs.policy import Policy, PolicyShape
from grpojax.run.batch import Batch
from grpojax.run.make_programs import Programs
from grpojax.run.parts.part import Declared, Networks, Part
from grpojax.types import Array, Samples, Tokens

TOKENS = 4096  # most tokens of a shard that the decoder runs on at once: its activations take most of the memory


@functools.cache  # a run asks for it at every step
def influence_program(shape: PolicyShape, temperature: float, copies: int, group: int) -> Program:
    """NTHR's scores (`grpojax.extensions.methods.token_influence.make_influence`). Its FLOPs are those of the forward:
    the products with a group's vocabulary depend on how large that is."""
    made = token_influence.make_influence(shape.graph, shape.compute, temperature=temperature)
    work = functools.partial(flops.forward_flops, shape.config)
    how = {"out": cut(shape.mesh, ROWS), "flops": work}
    return Program("influence", functools.partial(made, copies=copies, group=group), **how)


class Influences:
    """Computes the influence in groups of a batch on the host.

    Args:
      policy: the policy, whose weights may change between calls.
      temperature: the temperature that the samples were drawn at.
      longest_prompt: most tokens of a prompt in the run.
    """

    def __init__(self, policy: Policy, *, temperature: float, longest_prompt: int):
        self.policy, self.temperature, self.longest_prompt = policy, temperature, longest_prompt

    def flops(self, problems: Sequence[data.Problem], tokens: Tokens, lengths: Samples, mask: Tokens) -> float:
        """Useful FLOPs of a call on these groups (`grpojax.models.flops`)."""
        entries = (token_influence.vocabulary(tokens, mask, self.policy.config.vocab_size) >= 0).sum(1)
        forward = flops.forward_flops(self.policy.config, [len(p.ids) for p in problems], lengths)
        return forward + flops.influence_flops(self.policy.config, lengths, entries)

    def __call__(
        self,
        params: Any,
        problems: Sequence[data.Problem],
        tokens: Tokens,
        lengths: Samples,
        mask: Tokens,
        weights: Tokens,
        *,
        most: int,
        tokens_at_once: int,
        own: bool = False,
    ) -> Influence:
        """``scores [n, G, T]`` and, if asked for, ``own [n, G]``, on the host.

        Args:
          params: the policy's weights.
          problems, tokens, lengths: those of the n groups; ``[n, G, T]`` tokens and ``[n, G]`` lengths.
          mask: ``[n, G, T]`` bool, the policy's own tokens, whose vocabulary the scores are restricted to.
          weights: ``[n, G, T]``, as in `grpojax.credit.influence`.
          most: number of groups of a whole batch.
          tokens_at_once: about how many tokens of a shard the decoder may run on.
          own: whether to return also the sum of each sample's scores over only its own tokens.
        """
        policy = self.policy
        entries = token_influence.vocabulary(tokens, mask, policy.config.vocab_size)
        scores, own_sums = [], []
        for groups in regroup(
            policy,
            problems,
            tokens,
            lengths,
            most=most,
            longest_prompt=self.longest_prompt,
            tokens_at_once=min(tokens_at_once, TOKENS),
            one_prompt=True,
        ):
            part = groups.layout.batch_shape[1]
            samples = np.broadcast_to((np.arange(tokens.shape[1], dtype=np.int32) % part)[:, None], tokens.shape)
            program = influence_program(policy.shape, self.temperature, groups.copies, part if own else 0)
            rows = groups.place(samples), groups.place(weights), groups.place_groups(entries, -1)
            found = policy.device.call(program, params, groups.rows, *rows)
            scores.append(groups.fetch(found.scores))
            if found.own is not None:  # [prompts of a shard, B, G]
                own_sums.append(groups.of_groups(np.swapaxes(policy.device.get(found.own), 0, 1).reshape(-1, part)))
        return Influence(np.concatenate(scores), np.concatenate(own_sums) if own else None)


class TokenInfluence(Part):
    """NTHR's scores. They are 0 in groups that are not mixed, for which they are not computed."""

    options = ("self_term", "select")
    signals = {
        "influence": Declared("P G T", "how far a step on the right samples raises a token's log-prob"),
        "influence_means": Declared("P G", "its mean over a sample"),
        "draws": Declared("P G T", "random numbers in [0, 1), for a selection that is random"),
    }

    def open(self, policy: Policy, programs: Programs, *, longest_prompt: int) -> None:
        super().open(policy, programs, longest_prompt=longest_prompt)
        temperature = self.config.rollout.temperature
        self.influences = Influences(policy, temperature=temperature, longest_prompt=longest_prompt)
        self.work = 0.0

    def after(self, networks: Networks, batch: Batch, counted: Samples) -> tuple[dict[str, Array], dict[str, float]]:
        options, rollout = self.variant.options, batch.rollout
        outcome = batch.by_name[self.method.deciding]
        with on_host():
            sign = np.asarray(outcome_signs(Signals(outcome=outcome, valid=np.isfinite(counted))))
        mixed = (sign > 0).any(1) & (sign < 0).any(1)
        scores, means = np.zeros(rollout.tokens.shape, np.float32), np.zeros(counted.shape, np.float32)
        chosen, self.work = np.flatnonzero(mixed), 0.0
        if len(chosen):
            mask = batch.sampled[chosen]
            right = mask & (sign[chosen] > 0)[..., None]
            groups = [batch.problems[int(i)] for i in chosen], rollout.tokens[chosen], rollout.lengths[chosen], mask
            self.work = self.influences.flops(*groups)
            found = self.influences(
                policy_state.weights(networks),
                *groups,
                right.astype(np.float32),
                most=len(batch.problems),
                tokens_at_once=tokens_at_once(rollout.tokens.size, self.config.train, self.policy.shards),
                own=not options["self_term"],
            )
            scores[chosen] = found.scores
            total = np.where(mask, found.scores, 0.0).sum(-1)
            if found.own is not None:
                total = total - found.own
            means[chosen] = total / np.maximum(batch.own_lengths[chosen], 1)
        made = {"influence": scores, "influence_means": means}
        if options["select"] == "random":
            # It depends only on the samples, so that a resumed run draws the same.
            seed = zlib.crc32(np.ascontiguousarray(rollout.tokens).tobytes())
            made["draws"] = np.random.default_rng(seed).random(rollout.tokens.shape, np.float32)
        return made, {"nthr/mixed_groups": float(len(chosen))}

    def flops(self, batch: Batch) -> dict[str, float]:
        return {"late": self.work}
