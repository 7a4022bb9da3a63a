"""The critic of a run: where its weights come from, the programs that it runs in, and what is told of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optax
from etils import epath
from flax import nnx

from grpojax import data, variants
from grpojax.host import files, processes
from grpojax.host.errors import UserError
from grpojax.models import critic as models
from grpojax.models import hf, sharding
from grpojax.models.compute import Compute
from grpojax.models.decoder_config import DecoderConfig
from grpojax.programs.critic_update import ROLE, TRUNK, CriticModel
from grpojax.programs.policy import Policy
from grpojax.programs.state import Network, abstract_state, init_state
from grpojax.records.checkpoint import Checkpoints
from grpojax.run.sections import CriticConfig
from grpojax.types import Tokens


def critic_model(
    config: CriticConfig, policy: DecoderConfig, compute: Compute, critic: variants.Critic | None = None
) -> CriticModel:
    """The critic of a recipe without its weights; without the variant's ``critic``, one that does not learn."""
    read = policy if config.path is None else hf.read_config(data.locate(config.path))
    model = CriticModel(
        config=models.trunk_config(read, config.layers), compute=compute, frozen=config.trunk == "frozen"
    )
    return model if critic is None else dataclasses.replace(model, at=critic.at, loss=critic.loss)


class RunCritic:
    """The critic of a run.

    Args:
      policy: the network beside it.
      config: its section of the recipe.
      critic: the variant's.
      longest: tokens of the longest prompt with the longest completion.

    Attributes:
      model: its description.
    """

    def __init__(self, policy: Policy, config: CriticConfig, critic: variants.Critic, *, longest: int):
        self.policy, self.config, self.critic = policy, config, critic
        if config.path is not None:
            _check_tokenizer(policy, config.path)
        self.model = critic_model(config, policy.config, policy.compute, critic)
        if longest > self.model.config.max_positions:
            raise UserError(
                f"critic.path={config.path!r} was made for {self.model.config.max_positions} positions, and data."
                f"max_prompt_tokens + rollout.max_tokens is {longest}: lower one of them, or take another trunk"
            )
        self._read = None if config.path is None else _read(policy, config)

    def networks(self, optimizer: optax.GradientTransformation) -> dict[str, Network]:
        """What a checkpoint has of it: a frozen trunk is read, or copied from the policy as it started, again."""
        return {ROLE: self.model.networks(optimizer)[ROLE]}

    def start(self, policy: Any, optimizer: optax.GradientTransformation, *, restored: bool) -> dict[str, Any]:
        """Its state by role; of a run that goes on, what no checkpoint has.

        Args:
          policy: the policy's weights at the start of the run.
          optimizer: what it learns with.
          restored: whether a checkpoint has the rest.
        """
        read, self._read = self._read, None
        if restored and not self.model.frozen:
            return {}
        mesh = self.policy.mesh
        trunk, head = read or first_weights(self.policy, self.config, policy)
        params, frozen = self.model.weights(trunk, processes.place(head, sharding.named(mesh, ("hidden",))))
        return frozen if restored else frozen | {ROLE: init_state(params, optimizer, mesh, models.CRITIC)}

    def told(self, outputs: Tokens, targets: Tokens, live: Tokens) -> dict[str, float]:
        """Metrics of what it said before the updates of a step.

        Args:
          outputs, targets: ``[P, G, T]``.
          live: ``[P, G, T]`` bool, the tokens that count.
        """
        said = np.asarray(self.critic.loss.said(outputs))[live].astype(np.float64)
        if self.critic.signal == "token_bias":
            return {"critic/bias_abs": float(np.abs(said).mean()) if said.size else float("nan")}
        return {"critic/explained_variance": explained_variance(said, targets[live].astype(np.float64))}

    def said(self, signals: Mapping[str, Tokens]) -> Tokens:
        """What it said of every token before the updates, ``[P, G, T]`` float64, as it acts on the advantages."""
        return np.asarray(self.critic.loss.said(signals[self.critic.signal]), np.float64)


def annotate(rows: Sequence[dict[str, Any]], tokens: Tokens, lengths: np.ndarray, said: Tokens) -> None:
    """Adds to samples (`grpojax.run.batch.sample_rows`) their tokens and what the critic said of each."""
    said = np.round(said, 5)
    places = [(p, g, n) for p, group in enumerate(lengths.tolist()) for g, n in enumerate(group) if n]
    for row, (p, g, n) in zip(rows, places, strict=True):
        row |= {"ids": tokens[p, g, :n].tolist(), "critic": said[p, g, :n].tolist()}


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """``1 - Var(R - V) / Var(R)``: 1 for perfect values, 0 for constant ones; NaN where returns are all equal.

    Example:
      >>> explained_variance(np.array([0.0, 0.5]), np.array([0.0, 1.0]))
      0.75
    """
    if not returns.size or returns.max() == returns.min():
        return float("nan")
    return float(1.0 - (returns - values).var() / returns.var())


def first_weights(policy: Policy, config: CriticConfig, params: Any) -> tuple[Any, np.ndarray]:
    """Trunk and head ``[D]`` that a run starts from; ``params`` are the policy's at its start."""
    if config.path is not None:
        return _read(policy, config)
    trunk = models.trunk_config(policy.config, config.layers)
    head = np.zeros(trunk.hidden_size, np.float32)
    if config.layers is not None:
        return models.fresh(trunk, config.seed, policy.mesh), head
    return models.from_decoder(trunk, params), head


def load_critic(policy: Policy, config: CriticConfig, run_dir: epath.PathLike, step: int) -> tuple[Any, Any]:
    """Trunk (a `grpojax.models.Decoder`) and head of a run's checkpoint of a step."""
    model = critic_model(config, policy.config, policy.compute)
    abstract = abstract_state({ROLE: model.networks(None)[ROLE]}, policy.mesh)[ROLE]
    checkpoints = Checkpoints(files.path(run_dir) / "checkpoints", read_only=True)
    try:
        params = checkpoints.restore_params(abstract, step, role=ROLE)
    finally:
        checkpoints.close()
    frozen = {TRUNK: first_weights(policy, config, policy.params)[0]} if model.frozen else {}
    return model.parts(params, frozen)


def frozen(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a critic reads of a run's state and does not change: the trunk, where it is frozen."""
    return {TRUNK: state[TRUNK]} if TRUNK in state else {}


def _read(policy: Policy, config: CriticConfig) -> tuple[Any, np.ndarray]:
    folder = str(data.locate(config.path or ""))
    decoder = hf.load(folder, mesh=policy.mesh)
    trunk = models.trunk_config(decoder.config)
    return models.from_decoder(trunk, nnx.state(decoder)), models.read_head(folder, trunk)


def _check_tokenizer(policy: Policy, path: str) -> None:
    """Raises `UserError` where a critic would read the policy's tokens as others."""
    folder = data.locate(path)
    tokenizer = hf.load_tokenizer(str(folder))
    if tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UserError(
            f"critic.path={path!r} has another tokenizer than the policy, {policy.folder}: take one with its"
        )
    hf.fit_tokenizer(hf.read_config(folder), tokenizer, f"critic.path={path!r}")
