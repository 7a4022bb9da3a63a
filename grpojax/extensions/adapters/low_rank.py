"""Low-rank adapters as a run has them."""

import dataclasses
from typing import Any, ClassVar

import jax
from etils import epath
from jax.sharding import Mesh

from grpojax.device import Device
from grpojax.extensions.adapters import factors, peft
from grpojax.extensions.adapters.adapter_config import AdapterConfig
from grpojax.host.errors import UserError
from grpojax.models.decoder_config import DecoderConfig
from grpojax.models.weight import WeightTable
from grpojax.types import Array


@dataclasses.dataclass(frozen=True)
class LowRank:
    """A `grpojax.programs.adapter.Adapter`: factors of linear layers (`grpojax.extensions.adapters.factors`), kept in
    folders of peft."""

    config: AdapterConfig

    table: ClassVar[WeightTable] = factors.FACTORS
    read = staticmethod(peft.read_config)
    make_cast = staticmethod(factors.make_cast)

    @property
    def path(self) -> str | None:
        """Folder of the factors that a run starts from."""
        return self.config.path

    @property
    def merged(self) -> bool:
        """Whether rollouts sample with merged weights."""
        return self.config.merged

    def check_axes(self, *, fsdp: int, expert: int) -> None:
        """As of the protocol."""
        if expert > 1:
            raise UserError(
                f"model.adapter with mesh.expert={expert}: experts on shards of their own cannot be frozen; set "
                "mesh.expert=1, with the devices in mesh.fsdp"
            )
        if not self.merged and fsdp > 1:
            raise UserError(
                f"model.adapter.merged=false with mesh.fsdp={fsdp} would gather the base for each token; set "
                "mesh.fsdp=1, with the devices in mesh.tensor or mesh.data"
            )

    def check(self, decoder: DecoderConfig) -> None:
        """As of the protocol."""
        if self.path is not None:
            peft.check(self.config, decoder)

    def check_start(self, decoder: DecoderConfig, folder: epath.PathLike) -> str:
        """As of the protocol: peft must be able to read the factors, if they are not merged."""
        return peft.check_start(self.config, decoder, folder)

    def check_export(self, decoder: DecoderConfig, folder: epath.PathLike) -> None:
        """As of the protocol."""
        peft.check_modules(self.config, decoder, folder)

    def abstract(self, decoder: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
        """As of the protocol."""
        return factors.abstract(self.config, decoder)

    def on_base(self, params: Any) -> Any:
        """As of the protocol."""
        return factors.on_base(params, self.config)

    def first(self, decoder: DecoderConfig, base: Any, seed: int, device: Device) -> dict[str, Array]:
        """As of the protocol."""
        if self.path is not None:
            return peft.load(self.config, decoder, device)
        return self.fresh(decoder, base, seed, device.mesh)

    def fresh(self, decoder: DecoderConfig, base: Any, seed: int, mesh: Mesh | None) -> dict[str, Array]:
        """As of the protocol."""
        return factors.fresh(self.config, decoder, base, seed, mesh)

    def save(self, path: str, params: Any, decoder: DecoderConfig, *, base: str, dtype: str) -> None:
        """As of the protocol."""
        peft.save(path, factors.factors_of(params), self.config, decoder, base=base, dtype=dtype)
