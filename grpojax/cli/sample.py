"""``grpojax sample``: completions of one prompt."""

import argparse
from collections.abc import Callable
from typing import Any

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    sample = command("sample", run, "Samples completions of one prompt.", joins=True)
    sample.add_argument("model", help="Hugging Face folder, PEFT folder, run directory, or builtin:tiny")
    sample.add_argument("--step", type=int, help="checkpoint of a run; the newest by default")
    sample.add_argument("--base", metavar="FOLDER", help="the base of adapters, instead of the one that they name")
    sample.add_argument("--prompt", required=True, help="the question")
    sample.add_argument("--system", help="system message, '' for none; of a run its own by default, as the next three")
    sample.add_argument(
        "--template",
        choices=("auto", "chat", "plain"),
        help="chat template, or the bare question; auto takes the template if there is one",
    )
    sample.add_argument(
        "--template-options",
        metavar="YAML",
        help="variables of the chat template, such as {enable_thinking: false}",
    )
    sample.add_argument("--today", metavar="YYYY-MM-DD", help="date for a chat template that writes one")
    sample.add_argument("--no-end", action="store_true", help="for a model without a token that ends a completion")
    sample.add_argument("-n", type=int, default=1, help="number of samples")
    sample.add_argument("--max-tokens", type=int, default=256, help="most tokens of a completion")
    sample.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    sample.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0 for all")
    sample.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this mass")
    sample.add_argument("--min-p", type=float, default=0.0, help="least share of the likeliest token's probability")
    sample.add_argument("--seed", type=int, default=0, help="seed of sampling")
    sample.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the computation")


def run(args: argparse.Namespace) -> int:
    """Prints the completions. If there are several processes, each draws them by itself, and the first prints.

    A run is asked as it asks its own problems, with their instruction and examples.
    """
    import logging
    import sys

    import jax

    from grpojax import data
    from grpojax.cli.engine import Engine
    from grpojax.host import processes, settings
    from grpojax.host.compile_cache import keep_compiled
    from grpojax.host.console import log
    from grpojax.programs.sampler_config import SamplerConfig
    from grpojax.run import checks

    keep_compiled()
    config = SamplerConfig(
        group=args.n,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
    )
    engine = Engine(args.model, step=args.step, base=args.base, dtype=args.dtype, no_end=args.no_end)
    if engine.plays and processes.is_first():
        said = "the run plays episodes: here a prompt has no tools, and nothing answers; grpojax eval plays them"
        print(said, file=sys.stderr)
    source = settings.build(data.DataConfig, _asks(args, engine.asks) | {"train": "-"})
    ids = data.Tokenize(engine.tokenizer, source)(args.prompt)
    if not args.prompt or not ids:
        raise UserError("--prompt is empty")
    problems = [data.Problem(0, ids, args.prompt, None, {})]
    at_most = {"setting": "--max-tokens ", "prompts": "the prompt's length"}
    checks.positions(problems, args.max_tokens, engine.max_positions, **at_most)
    prompts = data.to_prompts(problems, len(ids))
    log.setLevel(logging.WARNING)  # standard output has only completions, and no messages on compiling
    rollout = engine.load().draw(prompts, jax.random.key(args.seed), config)
    rows = zip(rollout.tokens[0], rollout.lengths[0], strict=True)
    for tokens, length in rows if processes.is_first() else ():
        print(engine.tokenizer.decode(tokens[:length].tolist(), skip_special_tokens=True))
    return 0


def _asks(args: argparse.Namespace, of_run: dict[str, Any]) -> dict[str, Any]:
    """How the prompt is made, as fields of `grpojax.data.DataConfig`: the run's, but for what the command says."""
    from grpojax.host import settings

    given = {"system": args.system, "template": args.template, "today": args.today}
    if args.template_options is not None:
        given |= settings.override({}, [f"template_options={args.template_options}"])[0]
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("template") == "plain":
        if given.get("system"):
            raise UserError("--template plain has no place for --system; write it into --prompt")
        of_run = {name: value for name, value in of_run.items() if name not in ("system", "template_options", "today")}
    asks = of_run | given
    return {name: value for name, value in asks.items() if value != "" or name not in ("system", "today")}
