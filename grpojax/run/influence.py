"""The influence of tokens on each other in groups of a batch on the host (`grpojax.programs.influence`)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpojax import data
from grpojax.host import processes
from grpojax.models import flops
from grpojax.programs import influence
from grpojax.programs.influence import Influence
from grpojax.programs.policy import Policy
from grpojax.run.regroup import regroup
from grpojax.types import Samples, Tokens

TOKENS = 4096  # of a shard that the decoder runs on at once, at most: its activations are the larger part


class Influences:
    """Computes them.

    Args:
      policy: its weights may change from call to call.
      program: that does it (`grpojax.programs.influence.make_influence`).
      longest_prompt: most tokens of a prompt in the run.
    """

    def __init__(self, policy: Policy, program: Callable[..., Influence], *, longest_prompt: int):
        self.policy, self.program, self.longest_prompt = policy, program, longest_prompt

    def flops(self, problems: Sequence[data.Problem], tokens: Tokens, lengths: Samples) -> float:
        """Useful FLOPs of a call on these groups (`grpojax.models.flops`)."""
        entries = (influence.vocabulary(tokens, lengths, self.policy.config.vocab_size) >= 0).sum(1)
        forward = flops.forward_flops(self.policy.config, [len(p.ids) for p in problems], lengths)
        return forward + flops.influence_flops(self.policy.config, lengths, entries)

    def __call__(
        self,
        params: Any,
        problems: Sequence[data.Problem],
        tokens: Tokens,
        lengths: Samples,
        weights: Tokens,
        *,
        most: int,
        tokens_at_once: int,
        own: bool = False,
    ) -> Influence:
        """``scores [n, G, T]`` and, if asked for, ``own [n, G]``, on the host.

        Args:
          params: the policy's weights.
          problems, tokens, lengths: of the n groups, ``[n, G, T]`` and ``[n, G]``.
          weights: ``[n, G, T]``, as in `grpojax.credit.influence`.
          most: groups of a whole batch.
          tokens_at_once: about how many of a shard the decoder may run on.
          own: the sum of each sample's scores over its own tokens alone, too.
        """
        policy = self.policy
        entries = influence.vocabulary(tokens, lengths, policy.config.vocab_size)
        scores, alone = [], []
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
            found = self.program(
                params,
                groups.rows,
                groups.place(samples),
                groups.place(weights),
                groups.place_groups(entries, -1),
                copies=groups.copies,
                group=part if own else 0,
            )
            scores.append(groups.fetch(found.scores))
            if found.own is not None:  # [prompts of a shard, B, G]
                alone.append(groups.of_groups(np.swapaxes(processes.fetch(found.own), 0, 1).reshape(-1, part)))
        return Influence(np.concatenate(scores), np.concatenate(alone) if own else None)
