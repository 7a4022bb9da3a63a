"""What fits what: a recipe with other models, on several devices, with every weight learning or adapters only; by
shapes, without compiling."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from grpojax import extension
from grpojax.extensions.plan import plan_chips, plan_estimate, plan_search
from grpojax.extensions.plan.plan_run import RunBound
from grpojax.extensions.plan.plan_shapes import shape_of
from grpojax.host.errors import UserError
from grpojax.programs.adapter import SETTING
from grpojax.run.recipe import Config

RANK = 32  # of adapters, where the recipe has none
LEARNS = ("full", "LoRA", "LoRA, int8 base")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A model on a device.

    Attributes:
      model: the model.
      learns: one of `LEARNS`.
      device: the device.
      fits: whether the run fits.
      refused: why there is no plan; then the fields below mean nothing.
      needs: GiB per chip that the program needs which needs most, with the run's state.
      room: GiB of a chip that programs can use.
      largest: the name of that program.
      data, fsdp, expert, tensor: the mesh that was found (`grpojax.extensions.plan.plan_search.best`).
      microbatches: the micro-batches of an update that were found.
      step_s: the least seconds of a step.
      bound_by: the resource that takes most of them: "compute", "HBM", or the links.
    """

    model: str
    learns: str
    device: str
    fits: bool = False
    refused: str = ""
    needs: float = 0.0
    room: float = 0.0
    largest: str = ""
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    microbatches: int = 1
    step_s: float = 0.0
    bound_by: str = ""

    @property
    def missing(self) -> float:
        """GiB that each chip lacks."""
        return max(0.0, self.needs - self.room)


def cells(config: Config, models: Sequence[str], devices: Sequence[str]) -> list[Cell]:
    """Plans a recipe for every model, way to learn and device, in this order.

    Args:
      config: the recipe. Its model, mesh and ``train.microbatches`` are replaced; its adapter is kept where it has one.
      models: folders, or names of `grpojax.extensions.plan.plan_shapes.SHAPES`.
      devices: as `grpojax.extensions.plan.plan_chips.parse` takes them.

    Raises:
      UserError: there is no such model or device.
    """
    shapes = {name: shape_of(name) for name in models}
    targets = {name: plan_chips.parse(name) for name in devices}
    ways = {learns: _learning(config, learns) for learns in LEARNS}
    return [
        _cell(model, learns, device, way, target, shape)
        for model, shape in shapes.items()
        for learns, way in ways.items()
        for device, target in targets.items()
    ]


class _Way(NamedTuple):
    """A recipe with a way to learn, and what its step calls."""

    config: Config
    calls: plan_search.Calls


def _learning(config: Config, learns: str) -> _Way | UserError:
    """The recipe with this way to learn, or why it cannot have it."""
    adapter = None
    try:
        if learns != LEARNS[0]:
            base = "compute" if learns == LEARNS[1] else "int8"
            section = config.model.adapter or extension.load("sections", SETTING, learns)(rank=RANK)
            adapter = dataclasses.replace(section, base=base)
        made = dataclasses.replace(config, model=dataclasses.replace(config.model, adapter=adapter))
        return _Way(made, plan_estimate.calls_of_a_step(made))
    except UserError as e:
        return e


def _cell(model: str, learns: str, device: str, way: _Way | UserError, target: Any, shape: Any) -> Cell:
    names = {"model": model, "learns": learns, "device": device}
    try:
        if isinstance(way, UserError):
            raise way
        fit = plan_search.best(way.config, target, shape, calls=way.calls)
    except UserError as e:
        return Cell(**names, refused=str(e).splitlines()[0])
    run, largest = fit.estimate.run, fit.largest
    return Cell(
        **names,
        **dataclasses.asdict(fit.split),
        fits=fit.fits,
        needs=fit.needs,
        room=largest.room,
        largest=largest.name,
        step_s=run.step,
        bound_by=_bound_by(run),
    )


def _bound_by(run: RunBound) -> str:
    """The resource that bounds most of a step's seconds."""
    seconds = dict[str, float]()
    for each, what in run.phases.values():
        seconds[what] = seconds.get(what, 0.0) + each
    return max(seconds, key=lambda what: seconds[what])


def as_json(found: Sequence[Cell]) -> str:
    """The cells as a JSON list; what does not apply is null."""
    rows = []
    for cell in found:
        row = dataclasses.asdict(cell) | {"missing": cell.missing}
        if cell.refused:
            known = ("model", "learns", "device", "fits", "refused")
            row = {name: value if name in known else None for name, value in row.items()}
        rows.append(row)
    return json.dumps(rows, indent=1)


_HEAD = ("model", "learns", "device", "GiB", "of", "step", "bound by", "mesh, micro-batches")


def format_cells(found: Sequence[Cell]) -> str:
    """The cells as text for people, a line for each."""
    rows = [_HEAD, *(_row(cell) for cell in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    text = [
        "by shapes and data sheets, nothing compiled; GiB per chip, a step takes at least that long",
        "mesh and micro-batches are those with which it fits, or lacks least; they do not change what a run learns",
    ]
    return "\n".join(text + [_line(row, widths) for row in rows])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    numbers = ("GiB", "of", "step")
    aligned = (f"{x:>{n}}" if name in numbers else f"{x:<{n}}" for x, n, name in zip(row, widths, _HEAD, strict=True))
    return "  ".join(aligned).rstrip()


def _row(cell: Cell) -> tuple[str, ...]:
    names = (cell.model, cell.learns, cell.device)
    if cell.refused:
        return (*names, "-", "-", "-", "-", f"no plan: {cell.refused}")
    mesh = f"fsdp={cell.fsdp} tensor={cell.tensor}"
    mesh += "".join(f" {axis}={n}" for axis, n in (("expert", cell.expert), ("data", cell.data)) if n > 1)
    sizes = (f"{cell.needs:.1f}", f"{cell.room:.1f}")
    if not cell.fits:
        return (*names, *sizes, "-", "-", f"lacks {cell.missing:.1f} GiB ({cell.largest}) with {mesh}")
    return (*names, *sizes, f"{cell.step_s:.3g} s", cell.bound_by, f"{mesh} microbatches={cell.microbatches}")


def markdown(found: Sequence[Cell]) -> str:
    """A table in Markdown for each way to learn: models down, devices across."""
    by_way = {learns: [cell for cell in found if cell.learns == learns] for learns in LEARNS}
    return "\n\n".join(f"## {learns}\n\n" + "\n".join(_markdown(some)) for learns, some in by_way.items())


def _markdown(found: Sequence[Cell]) -> Iterator[str]:
    devices = list(dict.fromkeys(cell.device for cell in found))
    rooms = {cell.device: cell.room for cell in found if cell.room}
    yield "| model | " + " | ".join(f"{d}, {rooms[d]:.1f} GiB" if d in rooms else d for d in devices) + " |"
    yield "|---" * (len(devices) + 1) + "|"
    for model in dict.fromkeys(cell.model for cell in found):
        yield f"| {model} | " + " | ".join(_short(cell) for cell in found if cell.model == model) + " |"
    for model, why in dict.fromkeys((cell.model, cell.refused) for cell in found if cell.refused):
        yield f"\nNo plan for {model}: {why}."


def _short(cell: Cell) -> str:
    if cell.refused:
        return "no plan"
    if not cell.fits:
        return f"lacks {cell.missing:.0f} GiB" if cell.missing >= 1 else f"lacks {cell.missing:.1f} GiB"
    return f"{cell.needs:.1f}; {cell.step_s:.2g} s"
