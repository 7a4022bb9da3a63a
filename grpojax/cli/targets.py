"""The targets of `grpojax eval`: a run's checkpoint or a model's folder, with the recipe that goes with it."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epath

from grpojax import data, variants
from grpojax.evaluation import BEST, EvalConfig, Evaluator
from grpojax.host import agreement, files, processes, settings
from grpojax.host.errors import UserError
from grpojax.models.compute import ModelConfig
from grpojax.models.hf.folder import ADAPTER, is_adapter, model_folder, read_json, refuse_adapter
from grpojax.programs import adapter
from grpojax.programs.policy import weights_digest
from grpojax.records import metrics
from grpojax.records.checkpoint import Checkpoints
from grpojax.run.recipe import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A model to evaluate, and its problems.

    Attributes:
      recipe: the config that goes with it.
      sets: the sources of problems by the name of each set: the recipe's ``validation`` and ``test``, or a file's name.
      run: the run directory, or None for a Hugging Face folder.
      step: the step of the run's checkpoint.
      out: the default folder of the evaluation.
    """

    recipe: Config
    sets: dict[str, Any]
    run: epath.Path | None
    step: int | None
    out: epath.Path

    def settings(self, config: EvalConfig, evaluator: Evaluator, loaded: data.Problems) -> dict[str, Any]:
        """Everything that the results depend on, up to rounding. There are no paths, so that folders can be moved."""
        recipe = self.recipe
        chosen = loaded[: config.limit or None]
        model: dict[str, Any] = {"weights": weights_digest(data.locate(recipe.model.path)), "dtype": recipe.model.dtype}
        section = recipe.model.adapter
        if section is not None and section.path is not None and self.run is None:
            model["adapter"] = weights_digest(data.locate(section.path))
        if self.run is not None:
            # The settings that identify a run. Settings of its execution may change while it goes on.
            named_by: dict[str, Any] = {
                "variant": recipe.variant,
                "optimizer": recipe.optimizer,
                "seed": recipe.train.seed,
            }
            if recipe.own_critic is not None:
                named_by["critic"] = recipe.own_critic
            if section is not None:
                named_by["adapter"] = section
            known = settings.to_dict(named_by)
            model |= {"run": agreement.digest(json.dumps(known, sort_keys=True).encode()), "step": self.step}
            if recipe.train.updates_a_rollout == 1:
                model["alike"] = variants.twin_at_one_update(recipe.method.variant)
        given = _fields(recipe.data, *data.PARTS) | {
            "fingerprint": loaded.fingerprint,
            "problems": len(chosen),
            "tokens": agreement.digest(*(repr(p.ids).encode() for p in chosen)),
        }
        return settings.to_dict(
            {
                "model": model,
                "data": given,
                "eval": _fields(config, "batch"),
                "rewards": _fields(evaluator.rewards.config, "workers"),
                "judge": evaluator.judge and evaluator.judge.metric,
            }
        )


# The settings of a target without a run.
_BARE = {
    "data": {"train": "-"},
    "rewards": [{"name": "math_answer"}],
    "rollout": {"max_tokens": 512},
    "train": {"steps": 1},
    "run": {"dir": "-"},
}
_OVERRIDES = ("model", "data", "rewards", "evaluate", "mesh")


def read_target(
    target: str,
    overrides: Sequence[str] = (),
    *,
    sets: Sequence[str] = (),
    step: int | None = None,
    best: bool = False,
) -> Target:
    """Reads the target. If there are several processes, all must call it.

    Args:
      target: run directory, Hugging Face folder or ``builtin:tiny``.
      overrides: ``a.b=c`` for the sections model, data, rewards, evaluate and mesh.
      sets: the problems: "validation" or "test" for the recipe's own, or paths of files and other sources;
        ``data.validation`` if there are none.
      step: step of a run's checkpoint; the newest if None.
      best: take the checkpoint with the highest ``eval/reward`` in the metrics; the newest of equal ones.

    Raises:
      UserError: the target has none of these forms or no such checkpoint, or there are no problems.
    """
    folder, based = data.locate(target), False
    for text in overrides:
        key = text.partition("=")[0].strip()
        adapts = key == "model.path" and is_adapter(folder)
        based |= adapts
        if key.split(".")[0] not in _OVERRIDES or (key in ("model", "model.path", "data.train") and not adapts):
            raise UserError(
                f"override {text!r} has no effect on an evaluation, which takes options, model.*, data.*, rewards, "
                "evaluate.*, mesh.*"
            )
    if is_adapter(folder):
        tree = _adapter_tree(target, None if based else "model.path=FOLDER")
    else:
        try:
            tree = _tree(folder)
        except UserError as e:
            raise UserError(f"{target} is no run directory and no Hugging Face folder: {e}") from None
    if {"model", "run"} <= tree.keys() and "rollout" not in tree:
        raise UserError(
            f"{target} is a supervised run, which has no rewards: grpojax export {target} --to FOLDER, and evaluate "
            "the folder"
        )
    run = folder if {"model", "rollout", "run"} <= tree.keys() else None
    if run is None:
        tree = {**_BARE, "model": {"path": target, **tree.get("model", {})}}
    tree, origins = settings.override(tree, overrides)
    recipe = settings.build(Config, tree, {"": str(folder / "config.json"), **origins})
    if run is None and (section := recipe.model.adapter) is not None and section.path is None:
        raise UserError("model.adapter without a path learns nothing here; set model.adapter.path, or evaluate a run")
    if not sets and not recipe.data.validation:
        raise UserError(f"{target} has no problems for evaluation; give --data FILE")
    named = _named(recipe, sets or ("validation",), target)
    if run is None:
        if step is not None or best:
            raise UserError(f"--step and --best are for a run directory, and {target} is none")
        name = folder.name if files.in_bucket(folder) else Path(target.removeprefix(data.BUILTIN)).resolve().name
        out = files.path("evaluations") / "_".join([name, *(named if len(named) > 1 else ())])
        return Target(recipe=recipe, sets=named, run=None, step=None, out=out)
    # All processes take the first one's: while the run still saves, another process may see more checkpoints.
    step = int(processes.meet(str(_pick_step(run, step, best)))[0])
    folder = "test" if list(named) == ["test"] else "eval"
    out = run / folder / "_".join([f"step_{step}", *(named if len(named) > 1 else ())])
    return Target(recipe=recipe, sets=named, run=run, step=step, out=out)


def model_of(target: str, dtype: str | None = None, base: str | None = None) -> tuple[ModelConfig, epath.Path | None]:
    """``(model, run)`` of a run directory, a PEFT folder or a Hugging Face folder; ``run`` is None for the last two.

    Args:
      target: the directory or folder.
      dtype: dtype to run it in; None takes the run's, or float32.
      base: the folder of the adapters' base; None takes the run's, or the one that they name.

    Raises:
      UserError: the target is none of these.
    """
    folder = data.locate(target)
    adapts = is_adapter(folder)
    tree = _adapter_tree(target, "--base FOLDER" if base is None else None) if adapts else _tree(folder)
    run = folder if {"model", "run"} <= tree.keys() else None
    given = tree["model"] if run is not None or adapts else {"path": target}
    given |= {"dtype": dtype} if dtype is not None else {}
    if base is not None:
        if not given.get("adapter"):
            raise UserError(f"--base {base}: {target} holds no adapters; leave it out")
        given |= {"path": base}
    return settings.build(ModelConfig, given), run


def _tree(folder: epath.Path) -> dict[str, Any]:
    """``config.json`` of a run or of a model."""
    refuse_adapter(model_folder(folder))
    return read_json(folder / "config.json")


def _adapter_tree(target: str, option: str | None) -> dict[str, Any]:
    """The model's section of a recipe for a PEFT folder.

    Args:
      target: the folder.
      option: what a user gives to name the base; None if it is given, and the folder's own need not be there.
    """
    config, base = adapter.kind(f"{target} holds an adapter").read(str(data.locate(target)))
    key = f"{data.locate(target) / ADAPTER}: base_model_name_or_path"
    if option is not None and not base:
        raise UserError(f"{key} names no base; give {option}")
    path = base if files.path(base).exists() else f"{data.HUB}{base}"
    if option is not None:
        try:
            data.locate(path)
        except UserError:
            got = f"; from the hub: hf download {base}" if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", base) else ""
            raise UserError(f"{key}={base!r}: no such folder here{got}\ngive the base's folder by {option}") from None
    return {"model": {"path": path, "adapter": settings.to_dict(config)}}


def _named(recipe: Config, sets: Sequence[str], target: str) -> dict[str, Any]:
    """The sources of problems by name. The name is used for a folder and for a row of the table."""
    found = dict[str, Any]()
    for given in sets:
        if given in ("validation", "test"):
            name, source = given, getattr(recipe.data, given)
            if not source:
                raise UserError(f"--data {given}: {target} has no data.{given}; give a file")
        else:
            dataclasses.replace(recipe.data, validation=given)  # raises if the name is not valid
            name, source = re.sub(r"[^\w-]+", "_", re.sub(r"^.*/|\.[^/]*$", "", given)) or "data", given
        if source in found.values():
            raise UserError(f"--data {given} occurs twice")
        same = [other for other in found if re.sub(r"_\d+$", "", other) == name]
        found[f"{name}_{len(same) + 1}" if same else name] = source
    return found


def _pick_step(run: epath.Path, step: int | None, best: bool) -> int:
    folder, steps = run / "checkpoints", []
    if folder.is_dir():
        checkpoints = Checkpoints(folder, read_only=True)
        try:
            steps = checkpoints.steps()
        finally:
            checkpoints.close()
    if not steps:
        raise UserError(f"{run} has no checkpoint yet")
    if step is not None and step not in steps:
        raise UserError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    if best:
        lines = [x for x in metrics.read_metrics(run) if x["step"] in steps and x.get(BEST) is not None]
        if not lines:
            raise UserError(f"--best: none of {run}'s checkpoints has an {BEST}; give --step")
        return max((x[BEST], x["step"]) for x in lines)[1]
    return steps[-1] if step is None else step


def _fields(config: Any, *but: str) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in but}
