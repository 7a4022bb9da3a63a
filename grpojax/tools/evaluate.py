"""``grpojax eval``: what a model makes of held-out problems, judged by the run's own rewards."""

import argparse
from collections.abc import Callable
from typing import Any

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the command and its arguments."""
    parser = command(
        "eval",
        run,
        "Evaluates a model on held-out problems, or goes on with what is in --out.",
        joins=True,
        overrides=True,
        about=("target", "run directory, Hugging Face folder, or builtin:tiny"),
    )
    of_run = parser.add_mutually_exclusive_group()
    of_run.add_argument("--step", type=int, help="checkpoint of the run; the newest if left out")
    of_run.add_argument("--best", action="store_true", help="the run's checkpoint with the highest eval/reward")
    parser.add_argument("--data", metavar="FILE", help="problems; the run's data.validation if left out")
    parser.add_argument("--samples", type=int, default=1, help="n: completions of each problem")
    parser.add_argument("--k", metavar="K,K", help="of pass@k and maj@k, each at most n; n if left out")
    parser.add_argument("--temperature", type=float, help="0 is greedy; 0 for one sample, 1 for several")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, help="longest completion; the run's, or 512")
    parser.add_argument("--no-end", action="store_true", help="for a model without a token that ends a completion")
    parser.add_argument("--limit", type=int, default=0, help="only the first problems; 0 takes all")
    parser.add_argument("--batch", type=int, default=128, help="completions at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="DIR", help="RUN/eval/step_N, or evaluations/NAME, if left out")


def run(args: argparse.Namespace) -> int:
    """Evaluates, or goes on. All processes draw and judge; the first writes the folder and prints the table."""
    import contextlib
    import dataclasses

    from grpojax import data
    from grpojax.evaluation import Evaluator, summarize, table
    from grpojax.host import agreement, processes
    from grpojax.host.console import log
    from grpojax.models import hf, quantised
    from grpojax.programs.compiling import keep_compiled
    from grpojax.programs.policy import Policy, model_facts
    from grpojax.records.evaluations import Record
    from grpojax.rewards import Rewards
    from grpojax.run.today import with_day
    from grpojax.tools import targets

    ks = _ks(args)
    with contextlib.ExitStack() as held:
        with processes.AllOrNone():
            target = targets.read_target(
                args.target, args.overrides, data_file=args.data, step=args.step, best=args.best
            )
            recipe, folder = target.recipe, str(data.locate(target.recipe.model.path))
            tokenizer = hf.load_tokenizer(folder)
            recipe = with_day(recipe, tokenizer)
            target = dataclasses.replace(target, recipe=recipe)
            keep_compiled(recipe.compile_cache, target.run)
            config = _config(args, ks, recipe.rollout.max_tokens, quantised.exact(recipe.rollout.cache_dtype))
            tokenize = data.Tokenize(tokenizer, recipe.data)
            rewards = held.enter_context(Rewards(recipe.method.rewards, read=tokenize.read))
            evaluator = Evaluator(rewards, recipe.evaluate)
            log.info("%s", evaluator.about())
            policy = Policy(recipe.model, recipe.mesh, tokenizer=tokenizer)
            no_end = args.no_end or recipe.rollout.no_end
            hf.check_ends(recipe.model.path, policy.eos_ids, no_end=no_end, setting="--no-end")
            check, compared = rewards.check_gold, rewards.compares
            loaded = data.load_problems(recipe.data.validation or (), tokenize, recipe.data, check, compared=compared)
            for line in loaded.notes("validation", recipe.data):
                log.info("%s", line)
            problems = list(loaded[: config.limit or None])
            for line in rewards.notes(tokenize.special, tokenize.tail(problems[0].ids)):
                log.warning("%s", line)
            given = target.settings(config, evaluator, loaded)
            tree = recipe.resolved()
            how = {name: tree[name] for name in ("model", "mesh")}
            agreement.agree(evaluation=given, batch=args.batch, config=how, **model_facts(tree))
            record, start, out = None, 0, args.out or target.out
            if processes.is_first():
                record = held.enter_context(Record(out, given, problems))
                start = len(record.done)
            start = int(processes.meet(str(start))[0])
        if start:
            log.info("%s: going on after %d of %d problems", out, start, len(problems))
        if start < len(problems):
            _go_on(record, policy, target, problems, config, evaluator, start)
        if record is not None:
            metrics = summarize(record.done, config, evaluator.judge)
            record.finish(metrics)
            print(table(metrics, config, len(problems)))
            print(f"wrote {out}")
    return 0


def _ks(args: argparse.Namespace) -> tuple[int, ...]:
    if args.samples < 1:
        raise UserError(f"--samples {args.samples}: must be at least 1")
    try:
        return tuple(sorted({int(k) for k in args.k.split(",")})) if args.k is not None else ()
    except ValueError:
        raise UserError(f"--k {args.k!r}: give whole numbers with commas, such as 1,4,8") from None


def _config(args: argparse.Namespace, ks: tuple[int, ...], max_tokens: int, cache_dtype: Any) -> Any:
    from grpojax.evaluation import EvalConfig
    from grpojax.programs.sampler_config import SamplerConfig

    usual = 0.0 if args.samples == 1 else 1.0
    sampler = SamplerConfig(
        group=args.samples,
        max_tokens=max_tokens if args.max_tokens is None else args.max_tokens,
        temperature=usual if args.temperature is None else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        cache_dtype=cache_dtype,
    )
    return EvalConfig(sampler=sampler, ks=ks, limit=args.limit, seed=args.seed, batch=args.batch)


def _go_on(record: Any, policy: Any, target: Any, problems: Any, config: Any, evaluator: Any, start: int) -> None:
    """Evaluates the problems from ``start`` on, batch by batch; the first process has the record."""
    from grpojax.evaluation import evaluate, headline
    from grpojax.host import processes
    from grpojax.host.console import log
    from grpojax.run import session

    params = policy.params
    if target.run is not None:
        policy.params = params = None
        params = session.load_policy_params(policy, target.run, target.step)
    batches = evaluate(
        policy,
        policy.reshard(params),
        problems,
        config,
        evaluator,
        max_prompt_tokens=target.recipe.data.max_prompt_tokens,
        start=start,
    )
    for batch in batches:
        with processes.AllOrNone():
            if record is not None:
                record.append(batch)
                so_far = headline(evaluator.metrics(record.done), config)
                log.info("%d/%d problems, %s so far", len(record.done), len(problems), so_far)
