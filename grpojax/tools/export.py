"""``grpojax export``: a run's policy as a folder that transformers opens, and its critic in one beside it."""

import argparse
from collections.abc import Callable

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    export = command("export", run, "Writes a run's policy as a Hugging Face folder, a critic in FOLDER/critic.")
    export.add_argument("run_dir", metavar="RUN", help="run directory")
    export.add_argument("--to", required=True, help="folder to make")
    export.add_argument("--step", type=int, help="checkpoint to take; the newest if left out")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights written")


def run(args: argparse.Namespace) -> int:
    """Writes the folder."""
    import dataclasses
    from pathlib import Path

    from flax import nnx

    from grpojax import data
    from grpojax.host import settings
    from grpojax.models import ModelConfig, critic, hf
    from grpojax.models.hf.config_json import read_json
    from grpojax.models.sharding import MeshConfig
    from grpojax.programs.compiling import keep_compiled
    from grpojax.programs.policy import Policy
    from grpojax.run import session
    from grpojax.run.critic import load_critic
    from grpojax.run.sections import CriticConfig

    file = Path(args.run_dir) / "config.json"
    if not file.is_file():
        raise UserError(f"{args.run_dir} is no run directory: it has no config.json")
    tree = read_json(file)
    # Of what may be an older version's recipe, no more than it takes to read the weights.
    fields = [("model", ModelConfig), ("mesh", MeshConfig), ("critic", CriticConfig | None)]
    sections = dataclasses.make_dataclass("Sections", fields, frozen=True)
    config = settings.build(
        sections, {"model": tree.get("model", {}), "mesh": tree.get("mesh", {}), "critic": tree.get("critic")}
    )
    keep_compiled(run_dir=args.run_dir)
    policy = Policy(config.model, config.mesh)
    params = session.load_policy_params(policy, args.run_dir, args.step)
    beside = None if config.critic is None else load_critic(policy, config.critic, args.run_dir, args.step)
    hf.save(args.to, nnx.merge(policy.graph, params), source=policy.folder, dtype=args.dtype)
    print(f"wrote {args.to}")
    if config.critic is not None and beside is not None:
        folder = str(Path(args.to) / "critic")
        source = policy.folder if config.critic.path is None else str(data.locate(config.critic.path))
        critic.save(folder, *beside, source=source, dtype=args.dtype)
        print(f"wrote {folder}")
    return 0
