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
    sample.add_argument("--system", help="system message")
    sample.add_argument(
        "--template",
        choices=("auto", "chat", "plain"),
        default="auto",
        help="chat template, or the bare question; auto takes the template if there is one",
    )
    sample.add_argument(
        "--template-options",
        metavar="YAML",
        default="{}",
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
    """Prints the completions. If there are several processes, each draws them by itself, and the first prints."""
    import logging

    import jax
    from flax import nnx

    from grpojax import data
    from grpojax.host import processes, settings
    from grpojax.host.console import log
    from grpojax.models import Compute, hf
    from grpojax.programs.compiling import keep_compiled
    from grpojax.programs.sampler import SamplerConfig, sample_groups
    from grpojax.tools.targets import model_of

    keep_compiled()
    config = SamplerConfig(
        group=args.n,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
    )
    model, run = model_of(args.model, args.dtype, args.base)
    if args.step is not None and run is None:
        raise UserError(f"--step is for a run directory, and {args.model} is none")
    folder = str(data.locate(model.path))
    tokenizer = hf.load_tokenizer(folder)
    given, _ = settings.override({}, [f"template_options={args.template_options}"])
    given |= {"train": "-", "system": args.system, "template": args.template, "today": args.today}
    source = settings.build(data.DataConfig, given)
    ids = data.Tokenize(tokenizer, source)(args.prompt)
    if not ids:
        raise UserError("--prompt is empty")
    eos_ids = hf.eos_ids(folder, tokenizer)
    hf.check_ends(model.path, eos_ids, no_end=args.no_end, setting="--no-end")
    if note := hf.ends_note(folder, tokenizer):
        log.info("%s", note)
    prompts = data.to_prompts([data.Problem(0, ids, args.prompt, None, {})], len(ids))
    log.setLevel(logging.WARNING)  # standard output has only completions, and no messages on compiling
    if run is None and model.adapter is None:
        graph, params = nnx.split(hf.load(folder, tokenizer=tokenizer, dtype=args.dtype))
    else:
        graph, params = _of_policy(model, run, args.step, tokenizer)
    rollout = sample_groups(
        graph,
        params,
        prompts,
        jax.random.key(args.seed),
        config,
        eos_ids=eos_ids,
        compute=Compute(dtype=args.dtype),
    )
    rows = zip(rollout.tokens[0], rollout.lengths[0], strict=True)
    for tokens, length in rows if processes.is_first() else ():
        print(tokenizer.decode(tokens[:length].tolist(), skip_special_tokens=True))
    return 0


def _of_policy(model: Any, run: Any, step: int | None, tokenizer: Any) -> tuple[Any, Any]:
    """``(graph, weights)`` on one device, of a run's checkpoint or of adapters on their base."""
    import jax

    from grpojax.models.sharding import MeshConfig
    from grpojax.programs import policy_state
    from grpojax.programs.policy import Policy
    from grpojax.run import session

    policy = Policy(model, MeshConfig(), jax.local_devices()[:1], tokenizer=tokenizer).load()
    if run is None:
        return policy.graph, policy.reshard(policy_state.at_start(policy))
    step = session.newest_step(run) if step is None else step
    return policy.graph, policy.reshard(session.load_policy_params(policy, run, step))
