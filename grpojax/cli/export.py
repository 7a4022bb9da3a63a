"""``grpojax export``: a run's policy as a folder that transformers or peft opens, with its critic in a subfolder."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    export = command(
        "export",
        run,
        "Writes a run's policy as a Hugging Face folder, adapters as a PEFT folder, a critic in FOLDER/critic.",
        joins=True,
        overrides=True,
        about=("run_dir", "run directory"),
    )
    export.add_argument("--to", required=True, help="folder to create")
    export.add_argument("--step", type=int, help="checkpoint to take; the newest by default")
    export.add_argument("--merged", action="store_true", help="adapters merged into their base, as a whole model")
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the written weights"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the folder. With several processes, all of them read and the first writes."""
    from flax import nnx

    from grpojax import extension
    from grpojax.host import agreement, files, processes
    from grpojax.host.compile_cache import keep_compiled
    from grpojax.models import hf
    from grpojax.programs import state
    from grpojax.programs.policy import Policy, model_facts
    from grpojax.run import store

    with processes.AllOrNone():
        config, tree = _read(args.run_dir, args.overrides)
        options = [args.to, args.step, args.dtype, args.merged]
        agreement.agree(config=tree, options=options, **model_facts(tree))
        if args.merged and config.model.adapter is None:
            raise UserError(f"--merged: {args.run_dir} has no adapters, and its weights are whole; leave it out")
        if processes.is_first():
            _check_new(args.to)
        keep_compiled(run_dir=args.run_dir)
        policy = Policy(config.model, config.mesh)
        if policy.adapter is not None and not args.merged:
            policy.adapter.check_export(policy.config, policy.folder)
        policy.load()
    step = store.newest_step(args.run_dir) if args.step is None else args.step
    write_critic = None
    if config.critic is not None:
        write_critic = extension.load("needs", "critic", "critic").trained(policy, config.critic, args.run_dir, step)
    params = store.load_policy_params(policy, args.run_dir, step)
    try:
        if policy.adapter is not None and not args.merged:
            base = _base(config.model.path, policy.folder)
            policy.adapter.save(args.to, params, policy.config, base=base, dtype=args.dtype)
        else:
            whole = params if policy.adapter is None else state.merged(params, args.dtype, policy.mesh)
            model = nnx.merge(policy.graph, whole)
            hf.save(args.to, model, source=policy.folder, dtype=args.dtype, eos_ids=policy.eos_ids)
    except OSError as e:
        raise UserError(f"{e.filename or args.to}: {e.strerror or e}; give another --to") from None
    folders = [args.to]
    if write_critic is not None:
        folders.append(str(files.path(args.to) / "critic"))
        write_critic(folders[-1], args.dtype)
    for folder in folders if processes.is_first() else ():
        print(f"wrote {folder}")
    return 0


def _base(path: str, folder: str) -> str:
    """How peft finds the base: by its name on the hub, or by a folder's whole path."""
    from grpojax import data
    from grpojax.host import files

    return path.removeprefix(data.HUB) if path.startswith(data.HUB) else str(files.absolute(files.path(folder)))


def _read(run_dir: str, overrides: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The sections that reading the weights needs, built and as plain data."""
    import dataclasses

    from grpojax import extension
    from grpojax.host import files, settings
    from grpojax.models import ModelConfig
    from grpojax.models.hf.folder import read_json
    from grpojax.sharding import MeshConfig

    for text in overrides:
        key = text.partition("=")[0].strip()
        if key.split(".")[0] != "mesh" and key != "model.path":
            raise UserError(f"override {text!r} has no effect on an export, which takes options, mesh.* and model.path")
    file = files.path(run_dir) / "config.json"
    if not file.is_file():
        raise UserError(f"{run_dir} is no run directory: it has no config.json")
    tree, origins = settings.override(read_json(file), overrides)  # pyrefly: ignore
    fields = [("model", ModelConfig), ("mesh", MeshConfig), ("critic", extension.section("critic") | None)]
    sections = dataclasses.make_dataclass("Sections", fields, frozen=True)
    tree = {"model": tree.get("model", {}), "mesh": tree.get("mesh", {}), "critic": tree.get("critic")}
    return settings.build(sections, tree, origins), tree


def _check_new(to: str) -> None:
    """Checks the folder before anything is read, while the other processes can still learn of an error."""
    from grpojax.host import files

    folder = files.path(to)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} already exists and is not an empty folder; export to another one")
