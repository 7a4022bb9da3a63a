"""The teacher of a run: a frozen model whose log-probs of the policy's own tokens are learned from."""

import numpy as np

from grpojax import data
from grpojax.host.errors import UserError
from grpojax.models import DecoderConfig, hf
from grpojax.programs import state
from grpojax.programs.policy import Policy
from grpojax.run.method import Method
from grpojax.types import Tokens


class RunTeacher:
    """A model that reads what the policy said. It runs as the policy does, and no checkpoint has its weights.

    Args:
      policy: whose tokens it reads, and on whose devices its weights are cut by the same rules.
      path: its folder.
      longest: tokens of the longest prompt with the longest completion.

    Raises:
      UserError: it has another tokenizer, or too few tokens or positions.

    Attributes:
      config: its shape.
      graph: its graph definition.
      params: its weights.
    """

    def __init__(self, policy: Policy, path: str, *, longest: int):
        named, folder = f"variant.teacher={path!r}", str(data.locate(path))
        self.config = read_shape(path)
        if hf.load_tokenizer(folder).get_vocab() != policy.tokenizer.get_vocab():
            raise UserError(
                f"{named} has another tokenizer than the policy, {policy.folder}: take a teacher with its vocabulary"
            )
        self.config = hf.fit_tokenizer(self.config, policy.tokenizer, named)
        if longest > self.config.max_positions:
            raise UserError(
                f"{named} was made for {self.config.max_positions} positions, and data.max_prompt_tokens + "
                f"rollout.max_tokens is {longest}: lower one of them, or take another teacher"
            )
        self.graph, self.params = state.split(hf.load(folder, tokenizer=policy.tokenizer, mesh=policy.mesh))

    def told(self, own: Tokens, teacher: Tokens, live: Tokens) -> dict[str, float]:
        """Metrics of a step, before its updates.

        Args:
          own, teacher: ``[P, G, T]`` log-probs, the policy's and the teacher's.
          live: ``[P, G, T]`` bool, the tokens that count.
        """
        apart = (np.asarray(own, np.float64) - teacher)[live]
        return {"teacher/kl": float(apart.mean()) if apart.size else float("nan")}


def read_shape(path: str) -> DecoderConfig:
    """The shape of the model in a teacher's folder; raises `UserError` where there is none."""
    try:
        return hf.read_config(data.locate(path))
    except UserError as e:
        raise UserError(f"variant.teacher={path!r}: {e}") from None


def teacher_of(policy: Policy, method: Method, *, longest: int) -> RunTeacher | None:
    """The teacher that the variant names; None where it has none."""
    if "teacher" not in method.variant.needs:
        return None
    return RunTeacher(policy, method.variant.options["teacher"], longest=longest)
