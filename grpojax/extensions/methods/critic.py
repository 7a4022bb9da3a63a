"""The critic: the origin of its weights, its values for a batch, and its update."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax
from etils import epath
from flax import nnx

from grpojax import data, variants
from grpojax import losses as L
from grpojax.device import ROWS, Program, cut, quick_options
from grpojax.extensions.methods import critic_model as models
from grpojax.extensions.methods.critic_update import ROLE, TRUNK, CriticModel, make_critic_score
from grpojax.extensions.methods.method_sections import CriticConfig
from grpojax.host import files
from grpojax.host.errors import UserError
from grpojax.models import hf
from grpojax.models.decoder_config import DecoderConfig
from grpojax.programs import policy_state
from grpojax.programs.optimizer import make_optimizer
from grpojax.programs.policy import Policy, PolicyShape
from grpojax.programs.state import Network, abstract_state, init_state, merged
from grpojax.records.checkpoint import Checkpoints
from grpojax.run import weighing
from grpojax.run.batch import Batch
from grpojax.run.make_programs import ProgramInputs
from grpojax.run.minibatch import Minibatch
from grpojax.run.parts.part import Declared, InRows, Networks, Part, mean, read_shape
from grpojax.run.recipe import Config
from grpojax.run.run_state import State
from grpojax.run.work import prompts
from grpojax.types import Array, Tokens


def critic_model(config: CriticConfig, policy: PolicyShape, critic: variants.Critic | None = None) -> CriticModel:
    """The critic of a recipe without its weights. If the variant has no ``critic``, it does not learn."""
    read = policy.config if config.path is None else hf.read_config(data.locate(config.path))
    if config.layers is not None and not read.uniform:
        _check_kinds(read, config.layers)
    model = CriticModel(
        config=models.trunk_config(read, config.layers),
        compute=policy.compute,
        frozen=config.trunk == "frozen",
        adapter=policy.adapter if config.path is None and config.layers is None else None,
    )
    return model if critic is None else dataclasses.replace(model, at=critic.at, loss=critic.loss)


def _check_kinds(read: DecoderConfig, layers: int) -> None:
    """Raises `UserError` if a decoder has layers of two kinds, and its first ``layers`` are all of one."""
    least = max(read.kinds.index(kind) for kind in set(read.kinds)) + 1
    if layers < least:
        raise UserError(
            f"critic.layers={layers}: so many first layers of a {read.family} model are of one kind, and it needs "
            f"both\nset critic.layers to at least {least}"
        )


class LearnedCritic(Part):
    """A network that learns with the policy and gives a signal for every token.

    Raises:
      UserError: its trunk has another tokenizer, or too few positions.

    Attributes:
      model: its description.
    """

    learns = ROLE
    scorings = 1
    signals = {
        "token_bias": Declared("P G T", "its outputs from the state after each token, before the step's updates"),
        "values": Declared("P G T", "its outputs from the state before each token, before the step's updates"),
    }
    arrays = variants.critics.ARRAYS

    @staticmethod
    def trained(
        policy: Policy, config: CriticConfig, run_dir: epath.PathLike, step: int
    ) -> Callable[[epath.PathLike, str], None]:
        """Reads a run's critic. Returns a function of a folder and a dtype that writes it there."""
        trunk, head = load_critic(policy, config, run_dir, step)
        source = policy.folder if config.path is None else str(data.locate(config.path))
        return lambda folder, dtype: models.save(folder, trunk, head, source=source, dtype=dtype)

    @classmethod
    def fills(cls, variant: variants.Variant) -> tuple[str, ...]:
        assert variant.critic is not None
        loss = variant.critic.loss
        there = {"critic_targets": True, "critic_outputs": loss.needs_outputs, "critic_weights": loss.own_weights}
        return tuple(name for name, needed in there.items() if needed)

    @classmethod
    def warmup_steps(cls, config: Config) -> int:
        return 0 if config.own_critic is None else config.own_critic.warmup_steps

    def __init__(self, config: Config, shape: PolicyShape, read_shape: Callable[[str], DecoderConfig] = read_shape):
        super().__init__(config, shape, read_shape)
        section, rule = config.own_critic, self.variant.critic
        assert section is not None and rule is not None
        self.section, self.rule = section, rule
        self.model = critic_model(section, shape, rule)

    @functools.cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.section.optimizer, self.config.train.updates, self.model.table)

    def networks(self) -> dict[str, Network]:
        return self.model.networks(self._optimizer)

    def make(self, inputs: ProgramInputs) -> Mapping[str, Program]:
        """``(params, frozen, rows) -> [M, B, R, S]``, its outputs."""
        compute, work = inputs.compute, functools.partial(models.forward_flops, self.model.config)
        how = {"out": cut(compute.mesh, ROWS), "options": quick_options(compute.platform), "flops": work}
        return {ROLE: Program(ROLE, make_critic_score(self.model), **how)}

    def key(self) -> Any:
        """With its description."""
        return *super().key(), self.model

    def load(self, policy: Policy) -> None:
        section, config = self.section, self.config
        if section.path is not None:
            _check_tokenizer(policy, section.path)
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        if longest > self.model.config.max_positions:
            raise UserError(
                f"critic.path={section.path!r} was made for {self.model.config.max_positions} positions, and data."
                f"max_prompt_tokens + rollout.max_tokens is {longest}: lower one of them, or take another trunk"
            )
        self._read = None if section.path is None else _read(policy, section)

    def saved(self) -> tuple[str, ...]:
        """The saved roles. A frozen trunk is not saved: it is read again, or copied again from the policy's start."""
        return (ROLE,)

    def start(self, params: Any, restored: Networks | None) -> dict[str, Any]:
        read, self._read = self._read, None
        if restored is not None and (not self.model.frozen or self.model.adapter is not None):
            return {}
        device = self.policy.device
        if self.model.adapter is not None:
            return {ROLE: init_state(self._factors(params), self._optimizer, device, self.model.table)}
        trunk, head = read or first_weights(self.policy, self.section, params)
        learned, frozen = self.model.weights(trunk, device.put(head, ("hidden",)))
        if restored is not None:
            return frozen
        return frozen | {ROLE: init_state(learned, self._optimizer, device, self.model.table)}

    def _factors(self, base: Any) -> dict[str, Any]:
        """The adapter factors that learn on the policy's base."""
        model, policy = self.model, self.policy
        assert model.adapter is not None
        head = np.zeros(model.config.hidden_size, np.float32)
        seed = self.config.train.seed
        factors = {} if model.frozen else model.adapter.fresh(model.config, base, seed, policy.mesh)
        return {**factors, "token_head": policy.device.put(head, ("hidden",))}

    def frozen(self, networks: Networks) -> dict[str, Any]:
        """The frozen weights: the base of its adapters, or else its trunk if that is frozen."""
        if self.model.adapter is not None:
            return policy_state.frozen(networks)
        return {TRUNK: networks[TRUNK]} if TRUNK in networks else {}

    def before(self, networks: Networks, minis: Sequence[Minibatch]) -> tuple[dict[str, Tokens], InRows]:
        outputs = self.on_rows(self.programs.parts[ROLE], minis, networks[ROLE].params, self.frozen(networks))
        arrays = {"critic_outputs": outputs} if self.rule.loss.needs_outputs else {}
        return {self.rule.signal: self.whole(minis, outputs)}, arrays

    def weigh(self, batch: Batch) -> tuple[dict[str, Tokens], dict[str, float]]:
        learned, targets = batch.live, weighing.advantages(self.method, batch, self.rule.targets)
        arrays = {"critic_targets": targets}
        if self.rule.loss.own_weights:
            arrays["critic_weights"] = weights = np.zeros(targets.shape, np.float32)
            for which in batch.minibatches:
                weights[which] = L.loss_weights(batch.live[which], "token_mean")
        values = np.asarray(self.rule.loss.prediction(batch.signals[self.rule.signal]))[learned].astype(np.float64)
        if self.rule.signal == "token_bias":
            return arrays, {"critic/bias_abs": mean(np.abs(values))}
        return arrays, {"critic/explained_variance": explained_variance(values, targets[learned].astype(np.float64))}

    def columns(self, batch: Batch) -> dict[str, Array]:
        """The critic's output for every token before the updates, as the advantages read it."""
        return {ROLE: np.asarray(self.rule.loss.prediction(batch.signals[self.rule.signal]), np.float64)}

    def flops(self, batch: Batch) -> dict[str, float]:
        forward = models.forward_flops(self.model.config, prompts(batch), batch.rollout.lengths)
        return {"score": forward, "update": forward * self.model.passes * self.config.train.ppo_epochs}

    def warning(self, state: State) -> str | None:
        if state.step > self.section.warmup_steps:
            return None
        return f"the run ended in critic.warmup_steps={state.step}: the policy has learned nothing"


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """``1 - Var(R - V) / Var(R)``: 1 for perfect values, 0 for constant ones; NaN if all returns are equal.

    Example:
      >>> explained_variance(np.array([0.0, 0.5]), np.array([0.0, 1.0]))
      0.75
    """
    if not returns.size or returns.max() == returns.min():
        return float("nan")
    return float(1.0 - (returns - values).var() / returns.var())


def first_weights(policy: Policy, config: CriticConfig, params: Any) -> tuple[Any, np.ndarray]:
    """Trunk and head ``[D]`` that a run starts from; ``params`` are the policy's weights at the start."""
    if config.path is not None:
        return _read(policy, config)
    trunk = models.trunk_config(policy.config, config.layers)
    head = np.zeros(trunk.hidden_size, np.float32)
    if config.layers is not None:
        return models.fresh(trunk, config.seed, policy.mesh), head
    return models.from_decoder(trunk, params), head


def load_critic(policy: Policy, config: CriticConfig, run_dir: epath.PathLike, step: int) -> tuple[Any, Any]:
    """Trunk (a `grpojax.models.Decoder`) and head from a run's checkpoint of a step."""
    model = critic_model(config, policy.shape)
    abstract = abstract_state({ROLE: model.networks(None)[ROLE]}, policy.mesh)[ROLE]
    checkpoints = Checkpoints(files.path(run_dir) / "checkpoints", read_only=True)
    try:
        params = checkpoints.restore_params(abstract, step, role=ROLE)
    finally:
        checkpoints.close()
    if model.adapter is not None:
        trunk, head = model.parts(params, {policy_state.BASE: policy.params})
        graph, weights = nnx.split(trunk)
        return nnx.merge(graph, merged(weights, "float32", policy.mesh)), head
    frozen = {TRUNK: first_weights(policy, config, policy.params)[0]} if model.frozen else {}
    return model.parts(params, frozen)


def _read(policy: Policy, config: CriticConfig) -> tuple[Any, np.ndarray]:
    folder = str(data.locate(config.path or ""))
    decoder = hf.load(folder, mesh=policy.mesh)
    trunk = models.trunk_config(decoder.config)
    return models.from_decoder(trunk, nnx.state(decoder)), models.read_head(folder, trunk)


def _check_tokenizer(policy: Policy, path: str) -> None:
    """Raises `UserError` if a critic's tokenizer would read the policy's tokens as other tokens."""
    folder = data.locate(path)
    tokenizer = hf.load_tokenizer(str(folder))
    if tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UserError(
            f"critic.path={path!r} has another tokenizer than the policy, {policy.folder}: take one with its"
        )
    hf.fit_tokenizer(hf.read_config(folder), tokenizer, f"critic.path={path!r}")
