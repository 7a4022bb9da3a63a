"""A model on its devices with its tokenizer and its rollout program, and nothing of the run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from grpojax import data
from grpojax.host import agreement, processes
from grpojax.models import hf, sharding
from grpojax.models.compute import ModelConfig, compute_of
from grpojax.models.sharding import MeshConfig
from grpojax.programs import lanes, state
from grpojax.programs.compiling import Programs
from grpojax.programs.sampler import SamplerConfig, sample_groups
from grpojax.types import Prompts, Rollout


def model_facts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What tells the models of a recipe from others, for `grpojax.host.agreement.agree`.

    Args:
      recipe: as plain data.

    Returns:
      By name "weights" and "tokenizer"; each has a digest for every folder that the recipe names: the policy's, the
      critic's, the teacher's.
    """
    variant = recipe.get("variant")
    named = [recipe["model"].get("path"), (recipe.get("critic") or {}).get("path")]
    named.append(variant.get("teacher") if isinstance(variant, Mapping) else None)
    folders = {str(name): data.locate(str(name)) for name in named if name}
    return {
        "weights": {name: weights_digest(folder) for name, folder in folders.items()},
        "tokenizer": {
            name: agreement.digest_of_files(folder, "*.json", "*.jinja", "merges.txt", "tokenizer.model")
            for name, folder in folders.items()
        },
    }


def weights_digest(folder: epath.PathLike) -> str:
    """Tells a folder's weights from others without reading all of them."""
    return agreement.digest_of_files(folder, "*.safetensors")


class Policy:
    """A decoder with the programs that cast it for sampling and sample from it.

    Args:
      model: where it is, and how to run it.
      mesh: how the devices are laid out.
      devices: what to run on; None takes all there are.
      eos_ids: tokens that end a sample; None takes the model's own, and none at all lets every sample run to the end.

    Attributes:
      params: the weights as loaded; set to None by whoever takes them over.
      turn: called with a rollout that is waited for; may raise, and the rollout is dropped.
    """

    turn: Callable[[Rollout], None]

    def __init__(
        self,
        model: ModelConfig,
        mesh: MeshConfig,
        devices: Sequence[jax.Device] | None = None,
        *,
        eos_ids: tuple[int, ...] | None = None,
    ):
        devices = devices or jax.devices()
        laid_out = sharding.make_mesh(mesh, devices)  # refuses sizes that one device cannot have, too
        self.mesh = None if len(devices) == 1 else laid_out
        self.lanes = sharding.lanes(self.mesh)
        self.folder = str(data.locate(model.path))
        self.compute = compute_of(model, self.mesh)
        self.tokenizer = hf.load_tokenizer(self.folder)
        self.eos_ids = hf.eos_ids(self.folder, self.tokenizer) if eos_ids is None else eos_ids
        loaded = hf.load(self.folder, mesh=self.mesh)
        self.config = loaded.config
        self.graph, self.params = state.split(loaded)
        self.reshard = state.make_reshard(self.compute)
        self.programs = Programs()
        self.turn = _no_turn

    def sample(self, params: Any, prompts: Prompts, key: Any, config: SamplerConfig) -> Rollout:
        """Dispatches a rollout of host prompts; ``params`` are the rollout's (`state.make_reshard`)."""
        spread, group = lanes.spread(prompts, config.group, self.lanes)
        config = SamplerConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(SamplerConfig)})
        if group != config.group:
            config = dataclasses.replace(config, group=group, slots=min(config.slots, group))
        placed = jax.tree.map(
            lambda x: processes.place(x, sharding.named(self.mesh, ("lane",) + (None,) * (x.ndim - 1))), spread
        )

        def run(params: Any, prompts: Prompts, key: Any) -> Rollout:
            return sample_groups(self.graph, params, prompts, key, config, eos_ids=self.eos_ids, compute=self.compute)

        return self.programs(f"rollout ({config.group} a prompt)", run, params, placed, key, static=config)

    def fetch(self, rollout: Rollout, n_prompts: int) -> Rollout:
        """A rollout on the host, ``[P, G, ...]``."""
        self.turn(rollout)
        return jax.tree.map(lambda x: lanes.gather_groups(processes.fetch(x), n_prompts), rollout)

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def _no_turn(rollout: Rollout) -> None:
    """Outside of a run nothing is agreed on."""
