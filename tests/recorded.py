"""Records what short runs compute, so that two versions of the library can be compared bit for bit.

    python tests/recorded.py record --to before.json
    python tests/recorded.py record --to after.json --tree OTHER_CHECKOUT
    python tests/recorded.py compare before.json after.json

A recording has the metrics of each step, digests of all samples and all held-out attempts, and digests of the final
weights of each network. Nothing in it depends on time or on a path. It does depend on jax and on the processor, which
it names: make both recordings on one machine.

The status is 0; 1 if a run failed or something differs; 2 for a mistake in the command.
"""

import argparse
import dataclasses
import gzip
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  numpy then knows bfloat16
import numpy as np
import quick_xla
from safetensors.numpy import load_file, save_file

TIMED = ("time/", "tokens_per_s", "utilisation")  # beginnings of the names of metrics that no two runs share

# What runs have in common. Their rollouts have one shape where they can, so that the compile cache has the later ones.
LOOP = ("train.seed=0", "train.checkpoint_every=0", "train.eval_every=2", "optimizer.warmup_steps=0")
SAMPLED = (
    *LOOP,
    *("train.steps=3", "train.tokens=null", "rollout.prompts=8", "rollout.group=4"),
    *("data.validation.options.size=8", "data.test.options.size=8"),
)
STORIES = (
    *SAMPLED,
    *("optimizer.learning_rate=3.0e-4", "rollout.max_tokens=24", "data.max_prompt_tokens=64"),
    *(f"data.{split}.options.levels=[2, 3]" for split in ("train", "validation", "test")),  # solved now and then
)
ANSWERED = (
    *LOOP,
    *("train.steps=4", "train.epochs=null", "train.batch_size=8", "optimizer.learning_rate=3.0e-4"),
    *("model={path: 'builtin:tiny', remat: none}", "data.max_prompt_tokens=32", "data.max_tokens=32"),
)
SEVERAL_UPDATES = ("train.minibatches=2", "train.ppo_epochs=2", "train.microbatches=2")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A short run: ``grpojax COMMAND configs/BASE`` with overrides, by processes that have so many CPU devices each."""

    base: str
    overrides: Sequence[str] = ()
    common: Sequence[str] = STORIES
    command: str = "train"
    devices: int = 1
    processes: int = 1


RECIPES = {
    "quickstart": Recipe("quickstart.yaml"),
    "kl": Recipe("quickstart.yaml", ("variant.kl_coef=0.05", "train.reference_every=2")),
    "updates": Recipe("quickstart.yaml", SEVERAL_UPDATES),
    "dynamic_sampling": Recipe("variants/dapo.yaml"),
    "critic": Recipe("variants/token_critic.yaml", ("critic.optimizer.warmup_steps=0",)),
    "nthr": Recipe("variants/nthr.yaml"),
    "ahead_partial": Recipe("quickstart.yaml", ("rollout.ahead=1", "rollout.overlap=0.25", "train.steps=4")),
    "xrpo": Recipe("variants/xrpo.yaml", ("rollout.sample_allocation={exemplars: 1}", "data.max_prompt_tokens=160")),
    "gt_likelihood": Recipe("variants/gt_likelihood.yaml"),
    "remax": Recipe("variants/remax.yaml"),
    "devices": Recipe("quickstart.yaml", ("mesh={data: 2, fsdp: 4}",), devices=8),
    "processes": Recipe("quickstart.yaml", ("mesh={data: 2, fsdp: 1}",), processes=2),
    "sft": Recipe("supervised/sft.yaml", ("data.train=sft.jsonl", "data.validation=sft.jsonl"), ANSWERED, "sft"),
    "dpo": Recipe("supervised/dpo.yaml", ("data.train=dpo.jsonl", "data.validation=dpo.jsonl"), ANSWERED, "dpo"),
    "episodes": Recipe("calculator.yaml", common=SAMPLED),
    "adapters": Recipe("lora.yaml", ("optimizer.learning_rate=1.0e-3",)),
    "mixture": Recipe(
        "quickstart.yaml",
        ("model.path=mixture", "rollout.router_replay=true", "train.balance_coef=0.01", *SEVERAL_UPDATES),
    ),
}


class Failed(Exception):
    """A command ended with an error; the message has the last lines of what it said."""


def record(tree: Path, names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Runs recipes with the library of a checkout; the recording, and the names of those that failed."""
    recipes, failed = {}, []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        made = facts(tree, folder)
        shutil.copytree(tree / "configs", folder / "configs")
        write_answers(folder)
        write_mixture(tree / "grpojax" / "assets" / "tiny", folder / "mixture")
        for name in names:
            begun = time.monotonic()
            try:
                recipes[name] = run(name, tree, folder)
            except Failed as e:
                failed.append(name)
                print(f"{name}: {e}", file=sys.stderr, flush=True)
            print(f"{name:16} {time.monotonic() - begun:5.0f} s{'  failed' * (name in failed)}", flush=True)
    return {"made": made, "recipes": recipes}, failed


def run(name: str, tree: Path, folder: Path) -> dict[str, Any]:
    """Runs a recipe to its end in ``folder``; what is recorded of it."""
    recipe, made, exported = RECIPES[name], folder / "runs" / name, folder / "weights" / name
    overrides = [*recipe.common, *recipe.overrides, f"run.dir=runs/{name}"]
    grpojax([recipe.command, f"configs/{recipe.base}", *overrides], tree, folder, recipe.devices, recipe.processes)
    devices = recipe.devices * recipe.processes  # the run's mesh, in one process
    grpojax(["export", f"runs/{name}", "--to", f"weights/{name}"], tree, folder, devices)
    lines = (made / "metrics.jsonl").read_text().splitlines()
    texts = sorted(file for place in ("samples", "eval", "test") for file in (made / place).glob("step_*.jsonl*"))
    weights: dict[str, dict[str, str]] = {}
    for file in sorted(exported.rglob("*.safetensors")):  # the policy's, and those of a critic in a folder in there
        role = "policy" if file.parent == exported else file.parent.name
        weights.setdefault(role, {}).update(digests_of_tensors(file))
    return {
        "metrics": [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMED)} for line in lines],
        "texts": {str(file.relative_to(made)): digests_of_lines(file) for file in texts},
        "weights": weights,
    }


def grpojax(arguments: Sequence[str], tree: Path, folder: Path, devices: int, processes: int = 1) -> None:
    """Runs a command of a checkout's library in ``folder``, by one process or several that join."""
    entry = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]["grpojax"]
    module, function = entry.split(":")
    program = [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())"]
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    started, said = [], [folder / f"said_{i}.txt" for i in range(processes)]
    for i, file in enumerate(said):
        env = environment(tree, folder, devices)
        if processes > 1:
            env |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes), "JAX_PROCESS_ID": str(i)}
        with file.open("w") as out:
            given: dict[str, Any] = dict(cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT)
            started.append(subprocess.Popen([*program, *arguments], **given))
    statuses = [process.wait() for process in started]
    if any(statuses):
        last = "\n".join(line for file in said for line in file.read_text().splitlines()[-20:])
        raise Failed(f"grpojax {arguments[0]} ended with {', '.join(map(str, statuses))}\n{last}")


def environment(tree: Path, folder: Path, devices: int) -> dict[str, str]:
    """Of a process that imports the library of ``tree``. It has nothing of the caller's for jax and XLA, and a compile
    cache of this recording, which holds no program of another version."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    jax = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    return kept | jax | {"PYTHONPATH": str(tree), "XLA_FLAGS": quick_xla.flags(devices)}


def facts(tree: Path, folder: Path) -> dict[str, Any]:
    """The version that is recorded, and what digests depend on besides. Raises `Failed` if another one is imported."""
    asked = "import grpojax, jax, jaxlib; print(grpojax.__file__, jax.__version__, jaxlib.__version__, sep='\\n')"
    given: dict[str, Any] = dict(cwd=folder, env=environment(tree, folder, 1), capture_output=True, text=True)
    told = subprocess.run([sys.executable, "-c", asked], **given)
    if told.returncode or not Path(told.stdout.splitlines()[0]).is_relative_to(tree):
        raise Failed(f"{tree}: its grpojax is not what Python imports\n{told.stdout}{told.stderr}")
    git = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    given["env"] |= {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    cpus = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else None
    return {
        "commit": subprocess.run(git, **given).stdout.strip(),  # empty where the folder is no repository
        "jax": ", jaxlib ".join(told.stdout.splitlines()[1:]),
        "processor": f"{os.cpu_count()} x {model[1] if model else platform.processor()}",
        "xla_flags": quick_xla.flags(),
    }


def write_answers(folder: Path) -> None:
    """The data of supervised runs: two right answers to each question, and pairs."""
    sums = [(f"{a} + {b} = ?", f"## Answer: {a + b}") for a in range(3, 11) for b in range(2, 6)]
    answers = [{"prompt": q, "completion": text} for q, right in sums for text in (right, f"{q[:-1]}\n{right}")]
    pairs = [{"prompt": q, "chosen": right, "rejected": f"{right}0"} for q, right in sums]
    for name, rows in (("sft", answers), ("dpo", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_mixture(dense: Path, folder: Path, experts: int = 4) -> None:
    """A Qwen3-MoE whose experts are a dense Qwen3's MLPs with noise, so that it solves problems as that one does.

    It is made here and not by the library, so that all versions get the same one.
    """
    rng, weights = np.random.default_rng(0), {}
    for name, x in sorted(load_file(dense / "model.safetensors").items()):
        x = x.astype(np.float32)
        layer, mlp, kind = name.partition(".mlp.")
        if not mlp:
            weights[name] = x
        for i in range(experts) if mlp else ():
            weights[f"{layer}.mlp.experts.{i}.{kind}"] = x * rng.normal(1, 0.1, x.shape).astype(np.float32)
        if kind == "gate_proj.weight":
            weights[f"{layer}.mlp.gate.weight"] = rng.normal(0, 0.1, (experts, x.shape[1])).astype(np.float32)
    shutil.copytree(dense, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    config |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": config["intermediate_size"]}
    (folder / "config.json").write_text(json.dumps(config))


def digests_of_lines(file: Path) -> list[str]:
    """Of each line of a file of JSON, which may be compressed. The order of keys does not count."""
    text = (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).decode()
    return [_digest(json.dumps(json.loads(line), sort_keys=True).encode()) for line in text.split("\n") if line]


def digests_of_tensors(file: Path) -> dict[str, str]:
    """Of each tensor of a file, by its name."""
    return {k: _digest(f"{x.dtype} {x.shape} ".encode() + x.tobytes()) for k, x in sorted(load_file(file).items())}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Prints for each recipe where two recordings differ first; whether they are equal."""
    for name, value in a["made"].items():
        if name != "commit" and value != b["made"].get(name):
            print(f"note: numbers depend on {name}, which is {value} and {b['made'].get(name)}")
    equal = True
    for name in {**a["recipes"], **b["recipes"]}:
        x, y = (recording["recipes"].get(name) for recording in (a, b))
        found = list(differences(x, y)) if x and y else [f"it is in the {'first' if x else 'second'} recording only"]
        print("\n    ".join([f"{name}: {'differs' if found else 'equal'}", *found]))
        equal = equal and not found
    return equal


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Where two records of a recipe differ first: in the metrics, in each file of texts, in each network's weights."""
    lines = list(zip_longest(a["metrics"], b["metrics"], fillvalue={}))
    unequal = [(x, y, name) for x, y in lines for name in {**x, **y} if _value(x, name) != _value(y, name)]
    for x, y, name in unequal[:1]:
        yield f"{name} at step {(x or y)['step']}: {_value(x, name)} and {_value(y, name)}"
    for file in {**a["texts"], **b["texts"]}:
        pairs = list(zip_longest(a["texts"].get(file, ()), b["texts"].get(file, ())))
        if wrong := [i for i, (x, y) in enumerate(pairs, 1) if x != y]:
            yield f"{file}: line {wrong[0]} is the first of {len(wrong)} that differ, of {len(pairs)}"
    for role in {**a["weights"], **b["weights"]}:
        x, y = (record["weights"].get(role, {}) for record in (a, b))
        if wrong := [name for name in {**x, **y} if x.get(name) != y.get(name)]:
            yield f"weights of the {role}: {wrong[0]} is the first of {len(wrong)} that differ, of {len({**x, **y})}"


def _value(line: Mapping[str, Any], name: str) -> str:
    """A metric with all of its digits: texts differ where bits do, also of 0.0 and -0.0."""
    return repr(line[name]) if name in line else "nothing"


def main(arguments: Sequence[str] | None = None) -> int:
    """Records, compares, or lists the recipes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("record", help="runs the recipes")
    make.add_argument("--to", type=Path, required=True, metavar="FILE.json", help="gets the recording")
    make.add_argument("--tree", type=Path, default=Path(__file__).parents[1], metavar="FOLDER", help="checkout to run")
    make.add_argument("--only", metavar="NAME,NAME", help="recipes to run; all by default")
    two = commands.add_parser("compare", help="says where two recordings differ first")
    two.add_argument("recordings", nargs=2, type=Path, metavar="FILE.json")
    commands.add_parser("list", help="the recipes")
    args = parser.parse_args(arguments)
    if args.command == "list":
        for name, recipe in RECIPES.items():
            print(f"{name:16} grpojax {recipe.command} configs/{recipe.base} {' '.join(recipe.overrides)}")
        return 0
    if args.command == "compare":
        try:
            a, b = (json.loads(file.read_text()) for file in args.recordings)
            return 0 if compare(a, b) else 1
        except (OSError, ValueError, KeyError, TypeError) as e:
            parser.error(f"these are not two recordings: {type(e).__name__}: {e}")
    names = args.only.split(",") if args.only else list(RECIPES)
    if unknown := set(names) - RECIPES.keys():
        parser.error(f"--only: no recipe {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    if not (args.tree / "grpojax").is_dir() or not (args.tree / "configs").is_dir():
        parser.error(f"--tree {args.tree}: no checkout, which has the folders grpojax and configs")
    if not args.to.absolute().parent.is_dir():
        parser.error(f"--to {args.to}: there is no such folder")
    try:
        recording, failed = record(args.tree.resolve(), names)
    except Failed as e:
        parser.error(str(e))
    args.to.write_text(json.dumps(recording, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
