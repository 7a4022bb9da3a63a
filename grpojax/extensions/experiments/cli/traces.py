"""``grpojax traces``: the verified samples of a run, as chats that ``grpojax sft`` learns from."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    about = ("run_dir", "run directory")
    traces = command("traces", run, "Exports a run's verified samples as chats.", overrides=True, about=about)
    traces.add_argument("--to", required=True, help="JSON lines file to write")
    traces.add_argument("--by", metavar="REWARD", help="reward that says what is right; the run's own by default")
    traces.add_argument("--success", type=float, default=1.0, help="least value of this reward (default 1)")
    traces.add_argument("--least-reward", type=float, help="least sum of all rewards")
    traces.add_argument("--most", type=int, default=0, help="most completions of a prompt; 0 for all (default)")


def run(args: argparse.Namespace) -> int:
    """Writes the file, and reports the samples that were left out."""
    import dataclasses
    import json

    from grpojax import data
    from grpojax.extensions.experiments.traces import TraceConfig, select_traces, trace_row
    from grpojax.host import files, settings
    from grpojax.models import hf
    from grpojax.models.hf.folder import read_json
    from grpojax.records.samples import read_samples, sample_steps
    from grpojax.run.recipe import Config

    if wrong := [text for text in args.overrides if not text.startswith("data.train=")]:
        raise UserError(
            f"override {wrong[0]!r} has no effect on traces, which takes data.train, where the data has moved"
        )
    file = files.path(args.run_dir) / "config.json"
    if not file.is_file():
        raise UserError(f"{args.run_dir} is no run directory: it has no config.json")
    steps = sample_steps(args.run_dir)
    tree, origins = settings.override(read_json(file), args.overrides)
    recipe = settings.build(Config, tree, {"": str(file), **origins})
    config = TraceConfig(
        decides=args.by or recipe.method.deciding, success=args.success, least_reward=args.least_reward, most=args.most
    )
    traces = select_traces((read_samples(args.run_dir, step) for step in steps), config)
    if not traces.samples:
        raise UserError(
            f"{args.run_dir}: no sample of {len(steps)} steps is right by {config.decides!r}; {_left_out(traces)}"
        )
    asked = recipe.data
    tokenize = data.Tokenize(hf.load_tokenizer(data.locate(recipe.model.path)), asked)
    if asked.template == "auto":  # without a chat template, the model read one text and no messages
        asked = dataclasses.replace(asked, template="chat" if tokenize.chat else "plain")
    questions = data.read_questions(asked)  # for a chat, the samples have only the last message
    rows = []
    for step, sample in traces.samples:
        question = questions.get(sample["uid"], "")
        if sample["prompt"] != (question if isinstance(question, str) else question[-1]["content"]):
            raise UserError(
                f"prompt {sample['uid']} of {args.run_dir} is not row {sample['uid']} of data.train any more: restore "
                "the file, or say data.train=FILE"
            )
        messages = data.chat_of(question, asked)
        whole = {**sample, "completion": tokenize.message(sample.get("with_special_tokens", sample["completion"]))}
        rows.append(trace_row(step, whole, messages, args.run_dir, recipe.model.path))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        files.make_folder(files.path(args.to).parent)
        files.write(args.to, text.encode(errors="replace"))
    except OSError as e:
        raise UserError(f"--to {args.to}: {e.strerror}") from None
    prompts = len({sample["uid"] for _, sample in traces.samples})
    print(f"wrote {args.to}: {len(rows)} samples of {prompts} prompts, from {len(steps)} steps; {_left_out(traces)}")
    return 0


def _left_out(traces: Any) -> str:
    names: Mapping[str, str] = {
        "wrong": "wrong or without a verdict",
        "cut": "cut at the length limit",
        "duplicate": "duplicates",
        "over": "over the most of a prompt",
    }
    return "left out: " + ", ".join(f"{n} {names[why]}" for why, n in traces.left_out.items())
