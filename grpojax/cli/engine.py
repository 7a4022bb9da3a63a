"""A policy with its tokenizer and sampler, on one device: what `grpojax sample` and `grpojax serve` draw from."""

from typing import Any

import jax
from flax import nnx

from grpojax import data
from grpojax.cli.targets import model_of
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models import Compute, hf
from grpojax.models.hf.folder import read_json
from grpojax.programs import policy_state
from grpojax.programs.policy import Policy
from grpojax.programs.sampler import sample_groups
from grpojax.programs.sampler_config import SamplerConfig
from grpojax.run import store
from grpojax.sharding import MeshConfig
from grpojax.types import Prompts, Rollout

# What of a run's data section makes prompts of its problems.
_ASKS = "system", "examples", "instruction", "template", "template_options", "today"


class Engine:
    """A policy that can be sampled from. Reads the tokenizer; `load` reads the weights.

    Args:
      name: Hugging Face folder, PEFT folder, run directory, or ``builtin:tiny``.
      step: checkpoint of a run; None is the newest.
      base: folder of the adapters' base, instead of the one that they name.
      dtype: type of the computation, "float32" or "bfloat16".
      no_end: whether the model may lack a token that ends a completion.

    Attributes:
      folder: the model's folder.
      tokenizer: its tokenizer.
      eos_ids: tokens that end a completion.
      max_positions: the most tokens of a prompt and its completion.
      asks: how a run makes prompts of its problems, fields of `grpojax.data.DataConfig`; empty for a folder.
      plays: whether a run plays episodes.

    Raises:
      UserError: there is no such model, or no token ends a completion.
    """

    def __init__(self, name: str, *, step: int | None, base: str | None, dtype: Any, no_end: bool):
        self._model, self._run = model_of(name, dtype, base)
        self._step, self._dtype = step, dtype
        recipe = {} if self._run is None else read_json(self._run / "config.json")
        self.asks = {name: value for name, value in recipe.get("data", {}).items() if name in _ASKS}
        self.plays = recipe.get("environment") is not None
        if step is not None and self._run is None:
            raise UserError(f"--step is for a run directory, and {name} is none")
        self.folder = str(data.locate(self._model.path))
        self.tokenizer = hf.load_tokenizer(self.folder)
        self.eos_ids = hf.eos_ids(self.folder, self.tokenizer)
        hf.check_ends(self._model.path, self.eos_ids, no_end=no_end, setting="--no-end")
        if note := hf.ends_note(self.folder, self.tokenizer):
            log.info("%s", note)
        self.max_positions = hf.read_config(self.folder).max_positions
        self._graph: Any = None
        self._params: Any = None

    def load(self) -> "Engine":
        """Reads the weights; returns the engine."""
        if self._run is None and self._model.adapter is None:
            self._graph, self._params = nnx.split(hf.load(self.folder, tokenizer=self.tokenizer, dtype=self._dtype))
            return self
        policy = Policy(self._model, MeshConfig(), jax.local_devices()[:1], tokenizer=self.tokenizer).load()
        if self._run is None:
            weights = policy_state.at_start(policy)
        else:
            step = store.newest_step(self._run) if self._step is None else self._step
            weights = store.load_policy_params(policy, self._run, step)
        self._graph, self._params = policy.graph, policy.reshard(weights)
        return self

    def draw(self, prompts: Prompts, key: Any, config: SamplerConfig) -> Rollout:
        """Dispatches ``config.group`` samples of each prompt (`grpojax.programs.sampler.sample_groups`)."""
        how = {"eos_ids": self.eos_ids, "compute": Compute(dtype=self._dtype)}
        return sample_groups(self._graph, self._params, prompts, key, config, **how)
