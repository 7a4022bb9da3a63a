"""``grpojax export``: a run's policy as a folder that transformers opens."""

import argparse
from collections.abc import Callable

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    export = command("export", run, "Writes a run's policy as a Hugging Face folder.")
    export.add_argument("run_dir", metavar="RUN", help="run directory")
    export.add_argument("--to", required=True, help="folder to make")
    export.add_argument("--step", type=int, help="checkpoint to take; the newest if left out")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights written")


def run(args: argparse.Namespace) -> int:
    """Writes the folder."""
    import dataclasses
    import json
    from pathlib import Path

    from flax import nnx

    from grpojax.host import settings
    from grpojax.models import ModelConfig, hf
    from grpojax.models.sharding import MeshConfig
    from grpojax.programs.policy import Policy
    from grpojax.run import session

    file = Path(args.run_dir) / "config.json"
    if not file.is_file():
        raise UserError(f"{args.run_dir} is no run directory: it has no config.json")
    tree = json.loads(file.read_text(encoding="utf-8"))
    # Of what may be an older version's recipe, no more than it takes to read the weights.
    sections = dataclasses.make_dataclass("Sections", [("model", ModelConfig), ("mesh", MeshConfig)], frozen=True)
    config = settings.build(sections, {name: tree.get(name, {}) for name in ("model", "mesh")})
    policy = Policy(config.model, config.mesh)
    params = session.load_policy_params(policy, args.run_dir, args.step)
    hf.save(args.to, nnx.merge(policy.graph, params), source=policy.folder, dtype=args.dtype)
    print(f"wrote {args.to}")
    return 0
