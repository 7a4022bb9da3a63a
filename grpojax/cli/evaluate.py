"""``grpojax eval``: a model's results on held-out problems, scored by the run's own rewards."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the command and its arguments."""
    parser = command(
        "eval",
        run,
        "Evaluates a model on held-out problems, or continues what is in --out.",
        joins=True,
        overrides=True,
        about=("target", "run directory, Hugging Face folder, or builtin:tiny"),
    )
    of_run = parser.add_mutually_exclusive_group()
    of_run.add_argument("--step", type=int, help="checkpoint of the run; the newest by default")
    of_run.add_argument("--best", action="store_true", help="the run's checkpoint with the highest eval/reward")
    parser.add_argument(
        "--data",
        metavar="SET",
        action="append",
        default=[],
        help="a file of problems, or 'validation' or 'test' for the run's own (may be repeated); validation by default",
    )
    parser.add_argument("--samples", type=int, default=1, help="n, the completions of each problem")
    parser.add_argument("--k", metavar="K,K", help="values of k for pass@k and maj@k, each at most n; n by default")
    parser.add_argument("--temperature", type=float, help="0 is greedy; by default 0 for one sample, 1 for several")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0 for all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this mass")
    parser.add_argument("--min-p", type=float, default=0.0, help="least share of the likeliest token's probability")
    parser.add_argument("--max-tokens", type=int, help="most tokens of a completion; the run's by default, or 512")
    parser.add_argument("--no-end", action="store_true", help="for a model without a token that ends a completion")
    parser.add_argument("--limit", type=int, default=0, help="only the first LIMIT problems; 0 takes all")
    parser.add_argument("--batch", type=int, default=128, help="completions that are drawn at a time")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and intervals")
    parser.add_argument("--out", metavar="DIR", help="folder to write; RUN/eval/step_N or evaluations/NAME by default")


def run(args: argparse.Namespace) -> int:
    """Evaluates, or resumes an evaluation. All processes draw and score; the first writes and prints."""
    import contextlib
    import dataclasses
    import functools

    from grpojax import data
    from grpojax.cli import targets
    from grpojax.evaluation import Evaluator, summarize, table, table_of_sets
    from grpojax.host import agreement, files, processes
    from grpojax.host.compile_cache import keep_compiled
    from grpojax.host.console import log
    from grpojax.models import hf
    from grpojax.programs.policy import Policy, model_facts
    from grpojax.programs.sampler_config import unrounded
    from grpojax.records.evaluations import Record
    from grpojax.rewards import Rewards
    from grpojax.run import checks, parts
    from grpojax.run.today import with_day

    ks = _ks(args)
    with contextlib.ExitStack() as held:
        with processes.AllOrNone():
            target = targets.read_target(args.target, args.overrides, sets=args.data, step=args.step, best=args.best)
            recipe, folder = target.recipe, str(data.locate(target.recipe.model.path))
            tokenizer = hf.load_tokenizer(folder)
            recipe = with_day(recipe, tokenizer)
            target = dataclasses.replace(target, recipe=recipe)
            keep_compiled(recipe.compile_cache, target.run)
            config = _config(args, ks, recipe.rollout.max_tokens, unrounded(recipe.rollout.cache_dtype))
            episodes, environments = parts.of(recipe).get("environment"), None
            if episodes is not None:
                environments = episodes.environments_of(recipe.environment, tokenizer)
                held.callback(environments.close)
            tools = None if environments is None else environments.tools
            tokenize = data.Tokenize(tokenizer, recipe.data, tools=tools)
            rewards = held.enter_context(Rewards(recipe.method.rewards, read=tokenize.read))
            evaluator = Evaluator(rewards, recipe.evaluate)
            log.info("%s", evaluator.about())
            policy = Policy(recipe.model, recipe.mesh, tokenizer=tokenizer).load()
            players = None
            if episodes is not None:
                players = episodes.players_of(recipe, policy, environments, tokenize, rewards)
            no_end = args.no_end or recipe.rollout.no_end
            hf.check_ends(recipe.model.path, policy.eos_ids, no_end=no_end, setting="--no-end")
            sets = _load(target, tokenize, rewards)
            first = next(iter(sets.values()))
            for loaded in sets.values():
                given = config.sampler.max_tokens, policy.config.max_positions
                checks.positions(loaded[: config.limit or None], *given, setting="--max-tokens ")
            for line in rewards.notes(tokenize.special, tokenize.tail(first[0].ids)):
                log.warning("%s", line)
            tree = recipe.resolved()
            how = {name: tree[name] for name in ("model", "mesh")}
            given = {name: target.settings(config, evaluator, loaded) for name, loaded in sets.items()}
            agreement.agree(evaluation=given, batch=args.batch, config=how, **model_facts(tree))
            out = files.path(args.out or target.out)
            if len(sets) > 1 and (out / "settings.json").exists():
                raise UserError(f"{out} holds the evaluation of one set; give another --out for several")
            records: dict[str, Record] = {}
            if processes.is_first():
                for name, loaded in sets.items():
                    place = out / name if len(sets) > 1 else out
                    record = Record(place, given[name], loaded[: config.limit or None])
                    records[name] = held.enter_context(record)
            starts = [len(records[name].done) if records else 0 for name in sets]
            starts = json.loads(processes.meet(json.dumps(starts))[0])
        weights = functools.cache(lambda: _weights(policy, target))
        found = dict[str, dict[str, Any]]()
        for (name, loaded), start in zip(sets.items(), starts, strict=True):
            problems, record = list(loaded[: config.limit or None]), records.get(name)
            if len(sets) > 1:
                log.info("%s: %d problems", name, len(problems))
            if start:
                place = record.directory if record is not None else out
                log.info("%s: going on after %d of %d problems", place, start, len(problems))
            if start < len(problems):
                how_to = {"config": config, "evaluator": evaluator, "start": start, "players": players}
                _go_on(record, policy, weights(), target, problems, **how_to)
            if record is not None:
                metrics = summarize(record.done, config, evaluator.judge)
                record.finish(metrics)
                found[name] = {"problems": len(problems), "metrics": metrics}
        if len(found) == 1:
            (one,) = found.values()
            print(table(one["metrics"], config, one["problems"]))
        elif found:
            files.write_json(out / "summary.json", {"sets": found})
            print(table_of_sets(found, config))
        if found:
            print(f"wrote {out}")
    return 0


def _load(target: Any, tokenize: Any, rewards: Any) -> dict[str, Any]:
    """The problems of every set; the recipe's own are those that the run evaluates."""
    from grpojax import data
    from grpojax.run import held_out

    config = target.recipe.data
    own = held_out.load(config, rewards, tokenize) if {"validation", "test"} & target.sets.keys() else {}
    sets = {}
    for name, given in target.sets.items():
        if name in own and given == getattr(config, name):
            sets[name] = own[name]
            continue
        sets[name] = data.load_problems(
            given, tokenize, config, rewards.check_gold, compared=rewards.compares, of_row=tokenize.of_row
        )
        held_out.announce(sets[name], "validation", config)
    return sets


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


def _weights(policy: Any, target: Any) -> Any:
    """The weights that are evaluated, laid out for sampling."""
    from grpojax.programs import policy_state
    from grpojax.run import store

    if target.run is None:
        return policy.reshard(policy_state.at_start(policy))
    return policy.reshard(store.load_policy_params(policy, target.run, target.step))


def _go_on(
    record: Any,
    policy: Any,
    params: Any,
    target: Any,
    problems: Any,
    *,
    config: Any,
    evaluator: Any,
    start: int,
    players: Any,
) -> None:
    """Evaluates the problems from ``start`` on, batch by batch; only the first process has the record."""
    import jax

    from grpojax.evaluation import evaluate, headline
    from grpojax.host import processes
    from grpojax.host.console import log

    batches = evaluate(
        policy,
        params,
        problems,
        config,
        evaluator,
        max_prompt_tokens=target.recipe.data.max_prompt_tokens,
        start=start,
        **({} if players is None else players.in_evaluation(params, config, jax.block_until_ready)),
    )
    for batch in batches:
        with processes.AllOrNone():
            if record is not None:
                record.append(batch)
                so_far = headline(evaluator.metrics(record.done), config)
                log.info("%d/%d problems, %s so far", len(record.done), len(problems), so_far)
