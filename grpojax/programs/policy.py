"""A model on its devices, with its tokenizer and its rollout program. It knows nothing of the run."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from etils import epath
from jax.sharding import Mesh

from grpojax import data, device, sharding
from grpojax.device import Dry, Program
from grpojax.host import agreement
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models import decoder, hf
from grpojax.models.compute import Compute, ModelConfig, compute_of
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.weight_table import check_mesh, shardings
from grpojax.programs import adapter, batch_shards, state
from grpojax.programs.adapter import Adapter
from grpojax.programs.sampler import rollout_program, unfinished
from grpojax.programs.sampler_config import SamplerConfig, plain
from grpojax.sharding import MeshConfig
from grpojax.types import Prompts, Rollout


def model_facts(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that identify the models of a recipe, for `grpojax.host.agreement.agree`.

    Args:
      recipe: the recipe as plain data.

    Returns:
      A dict with "weights" and "tokenizer". Each has a digest for every folder that the recipe names: the folders of
      the policy, of the adapters that it starts from, of the critic and of the teacher.
    """
    variant = recipe.get("variant")
    model = recipe["model"]
    named = [model.get("path"), (model.get("adapter") or {}).get("path"), (recipe.get("critic") or {}).get("path")]
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
    """A digest that identifies a folder's weights without reading all of them."""
    return agreement.digest_of_files(folder, "*.safetensors")


class Sampling(NamedTuple):
    """The devices that sample: their mesh, None for one, and how the decoder runs on them."""

    mesh: Mesh | None
    compute: Compute

    @property
    def shards(self) -> int:
        """Number of equal parts that a batch of prompts is cut into."""
        return sharding.shards(self.mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyShape:
    """A `Policy` without weights and tokenizer. It determines the shapes of the policy's programs.

    Attributes:
      config: config of the decoder.
      graph: graph definition of the decoder.
      compute: how to run the decoder. Its mesh has the devices that learn.
      sampling: the devices that sample.
      adapter: what learns in place of the weights; None if these learn.
    """

    config: DecoderConfig
    graph: Any
    compute: Compute
    sampling: Sampling
    adapter: Adapter | None = None

    @property
    def mesh(self) -> Mesh | None:
        """The devices that learn."""
        return self.compute.mesh

    @property
    def shards(self) -> int:
        """Number of equal parts that an update's batch is cut into."""
        return sharding.shards(self.mesh)


class Policy:
    """A decoder with the programs that cast it for sampling and sample from it.

    Args:
      model: where the model is, and how to run it.
      mesh: how the devices are laid out, and which of them sample.
      devices: the devices to run on; None takes all.
      eos_ids: tokens that end a sample. None takes the model's own. With an empty tuple every sample runs to the end.
      tokenizer: the tokenizer of the model's folder, if it is loaded already.

    Attributes:
      params: the weights once `load` has read them. With adapters they are the base
        (`grpojax.programs.adapter.Adapter.on_base`). Code that takes the weights over sets this to None.
      count: number of all devices.
      device, shards, compute: the devices that learn, with their number of batch shards and compute settings.
      sampling_device, sampling: the devices that sample. They are those that learn, unless ``mesh.rollout`` reserves
        some.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: MeshConfig,
        devices: Sequence[jax.Device] | None = None,
        *,
        eos_ids: tuple[int, ...] | None = None,
        tokenizer: Any = None,
    ):
        devices = devices or jax.devices()
        self.count = len(devices)
        learning, others = sharding.disaggregate(mesh, devices)
        laid_out = sharding.make_mesh(mesh, learning)  # also for one device, so that impossible sizes raise
        self.mesh = None if len(learning) == 1 else laid_out
        self.shards = sharding.shards(self.mesh)
        self.folder = str(data.locate(model.path))
        self.compute, self.adapter = compute_of(model, self.mesh), adapter.of(model)
        self.tokenizer = hf.load_tokenizer(self.folder) if tokenizer is None else tokenizer
        self.eos_ids = hf.eos_ids(self.folder, self.tokenizer) if eos_ids is None else eos_ids
        if eos_ids is None and (note := hf.ends_note(self.folder, self.tokenizer)):
            log.info("%s", note)
        self.config = hf.fit_tokenizer(hf.read_config(self.folder), self.tokenizer, self.folder)
        check_mesh(self.config, self.mesh)
        if self.mesh is not None and self.adapter is not None:
            self.adapter.check_axes(fsdp=self.mesh.shape["fsdp"], expert=self.mesh.shape["expert"])
        self.graph, self.params = decoder.abstract(self.config)[0], None

        self.device = self.sampling_device = device.Real(self.mesh)
        self.sampling, self.disaggregated = Sampling(self.mesh, self.compute), bool(others)
        if others:
            self.sampling = _sampling_devices(others, laid_out, self.compute)
            self.sampling_device = device.Real(self.sampling.mesh, others[0])

    def load(self) -> "Policy":
        """Reads the weights; returns the policy."""
        if self.adapter is not None:
            self.adapter.check(self.config)
        dtype = None if self.adapter is None else self.compute.dtype  # frozen weights need no higher precision
        _, params = state.split(hf.load(self.folder, tokenizer=self.tokenizer, mesh=self.mesh, dtype=dtype))
        self.params = params if self.adapter is None else self.adapter.on_base(params)
        return self

    def reshard(self, params: Any, weights: Literal["compute", "int8"] = "compute") -> Any:
        """Turns training weights into those that `sample` takes: in ``model.dtype`` or eight bits, whole over ``fsdp``
        and cut by ``tensor`` (`grpojax.sharding.ROLLOUT`). It is `state.make_reshard`, or, with the base of an adapter
        as it is, `Adapter.make_cast`. On one device in float32, without an adapter, these are the training weights
        themselves.

        Nobody keeps the result: a rollout's weights are freed when its program is over."""
        program = _reshard_program(self.shape, weights)
        made = params if program is None else self.device.call(program, params)
        if self.disaggregated:
            made = self._sent(made)
        return made if self.adapter is None or self.adapter.merged else adapter.joined(params, made)

    def sample(
        self,
        params: Any,
        prompts: Prompts,
        key: Any,
        config: SamplerConfig,
        *,
        partial: Rollout | None = None,
        left: int = 0,
        name: str = "rollout",
    ) -> Rollout:
        """Dispatches a rollout of prompts that are on the host. ``params`` come from `reshard`. ``partial`` and
        ``left`` are as in `grpojax.programs.sampler.sample_groups`, with ``partial`` on the host. The log calls the
        program by its ``name``."""
        placed, config = self.laid_out(prompts, config)
        how = {"eos_ids": self.eos_ids, "compute": self.sampling.compute, "name": name}
        if partial is None:
            return self.sampling_device.call(rollout_program(self.graph, config, **how), params, placed, key)
        split = jax.tree.map(lambda x: x.reshape(-1, config.group, *x.shape[2:]), partial)
        _check_partial(split, left, self.sampling.shards)
        goes_on = rollout_program(self.graph, config, **how, left=left)
        return self.sampling_device.call(goes_on, params, placed, key, self.sampling_device.put(split))

    def _sent(self, weights: Any) -> Any:
        """Sends weights to the devices that sample. A device's part of a weight has the same shape on both sides, so
        it is copied as it is."""
        if self.sampling.mesh is None:
            return self.sampling_device.put(weights)
        return jax.device_put(weights, shardings(weights, self.sampling.mesh, sharding.ROLLOUT))

    def laid_out(self, prompts: Prompts, config: SamplerConfig) -> tuple[Prompts, SamplerConfig]:
        """`on_shards`, with the prompts on the devices that sample."""
        spread, config = on_shards(prompts, config, self.sampling.shards)
        return self.sampling_device.put(spread), config

    def fetch(self, rollout: Rollout, n_prompts: int) -> Rollout:
        """Waits for a rollout and returns it on the host, ``[P, G, ...]``."""
        whole = self.sampling_device.get(rollout)
        return jax.tree.map(lambda x: batch_shards.gather_groups(x, n_prompts), whole)

    @property
    def shape(self) -> PolicyShape:
        """The policy without weights and tokenizer."""
        return PolicyShape(
            config=self.config,
            graph=self.graph,
            compute=self.compute,
            sampling=self.sampling,
            adapter=self.adapter,
        )

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decodes token ids to texts, without special tokens."""
        return hf.decode_all(self.tokenizer, rows)


class DryPolicy(Policy):
    """A policy without weights and tokenizer, on devices that compute nothing (`grpojax.device.Dry`). Every text of it
    is empty.

    Args:
      shape: the policy.
      longest: whether made-up samples are as long as they may be.
    """

    device: Dry  # pyrefly: ignore
    sampling_device: Dry  # pyrefly: ignore

    def __init__(self, shape: PolicyShape, *, longest: bool = True):
        self.config, self.graph, self.compute, self.adapter = shape.config, shape.graph, shape.compute, shape.adapter
        self.mesh, self.shards, self.sampling = shape.mesh, shape.shards, shape.sampling
        self.disaggregated = shape.sampling.mesh is not shape.mesh
        self.device = Dry(shape.mesh, longest=longest)
        self.sampling_device = Dry(shape.sampling.mesh, longest=longest)
        self.params, self.tokenizer = None, _NoTokenizer()
        self.eos_ids: tuple[int, ...] = (0,)

    def _sent(self, weights: Any) -> Any:
        if self.sampling.mesh is None:
            return self.sampling_device.put(weights)
        placed = shardings(weights, self.sampling.mesh, sharding.ROLLOUT)
        return jax.tree.map(device.shapes, weights, placed)

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Empty texts."""
        return [""] * len(rows)


class _NoTokenizer:
    """Gives empty texts. A text has five tokens, so that a marker and an answer behind a sample nearly fill the room
    that spliced samples have (`grpojax.run.minibatch.room`)."""

    def decode(self, ids: Sequence[int], **how: Any) -> str:
        return ""

    def encode(self, text: str, **how: Any) -> list[int]:
        return [0] * 5


@functools.lru_cache(maxsize=8)  # a run asks for it at every rollout
def _reshard_program(shape: PolicyShape, weights: Literal["compute", "int8"]) -> Program | None:
    if shape.adapter is not None and not shape.adapter.merged:
        return shape.adapter.make_cast(shape.compute)
    return state.make_reshard(shape.config, shape.compute, weights, adapted=shape.adapter is not None)


def on_shards(prompts: Prompts, config: SamplerConfig, count: int) -> tuple[Prompts, SamplerConfig]:
    """Spreads prompts over ``count`` batch shards. If groups are split, a prompt appears once for each part of its
    group, and the returned config has the size of a part as its ``group``."""
    spread, group = batch_shards.spread(prompts, config.group, count)
    config = plain(config)
    if group != config.group:
        config = dataclasses.replace(config, group=group, decode_slots=min(config.decode_slots, group))
    return spread, config


def _sampling_devices(devices: Sequence[jax.Device], learning: Mesh, compute: Compute) -> Sampling:
    """`Sampling` on devices that only sample. Each has as large a part of a weight as the devices that learn give."""
    config = sharding.sampling_mesh(learning, len(devices))
    mesh = None if len(devices) == 1 else sharding.make_mesh(config, devices)
    return Sampling(mesh, dataclasses.replace(compute, mesh=mesh))


def _check_partial(partial: Rollout, left: int, shards: int) -> None:
    """Raises `UserError` if a batch shard has more unfinished samples than a rollout can continue."""
    most = int(unfinished(partial).reshape(shards, -1).sum(1).max())
    if most > left:
        raise UserError(
            f"a batch shard has {most} samples under way, and rollout.overlap has room for {left}: the run was stopped "
            f"on another number of batch shards than these {shards}; go on with as many as it had"
        )
