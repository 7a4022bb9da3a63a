"""``grpojax eval``: a model on held-out problems."""

import argparse
from collections.abc import Callable

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    evaluate = command(
        "eval",
        run,
        "Evaluates a model on held-out problems, or goes on with what is in --out.",
        overrides=True,
        about=("target", "run directory, Hugging Face folder, or builtin:tiny"),
    )
    of_run = evaluate.add_mutually_exclusive_group()
    of_run.add_argument("--step", type=int, help="checkpoint of the run; the newest if left out")
    of_run.add_argument("--best", action="store_true", help="the run's checkpoint with the highest eval/accuracy")
    evaluate.add_argument("--data", metavar="FILE", help="problems; the run's data.eval if left out")
    evaluate.add_argument("--samples", type=int, default=1, help="n: completions of each problem")
    evaluate.add_argument("--k", metavar="K,K", help="of pass@k and maj@k, each at most n; n if left out")
    evaluate.add_argument("--temperature", type=float, help="0 is greedy; 0 for one sample, 1 for several")
    evaluate.add_argument("--top-k", type=int, default=0)
    evaluate.add_argument("--top-p", type=float, default=1.0)
    evaluate.add_argument("--min-p", type=float, default=0.0)
    evaluate.add_argument("--max-tokens", type=int, help="longest completion; the run's, or 512")
    evaluate.add_argument("--limit", type=int, default=0, help="only the first problems; 0 takes all")
    evaluate.add_argument("--batch", type=int, default=128, help="completions at a time")
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--out", metavar="DIR", help="RUN/eval/step_N, or evaluations/NAME, if left out")


def run(args: argparse.Namespace) -> int:
    """Evaluates; prints a table and where the attempts are."""
    from grpojax.data import problems as data
    from grpojax.evaluation import evaluate
    from grpojax.host.console import log
    from grpojax.programs.sampler import SamplerConfig
    from grpojax.run import trainer

    try:
        ks = tuple(sorted({int(k) for k in args.k.split(",")})) if args.k is not None else ()
    except ValueError:
        raise UserError(f"--k {args.k!r}: give whole numbers with commas, such as 1,4,8") from None
    if args.samples < 1:
        raise UserError(f"--samples {args.samples}: must be at least 1")
    target = evaluate.read_target(args.target, args.overrides, data_file=args.data, step=args.step, best=args.best)
    recipe = target.recipe
    usual = 0.0 if args.samples == 1 else 1.0
    sampler = SamplerConfig(
        group=args.samples,
        max_tokens=recipe.rollout.max_tokens if args.max_tokens is None else args.max_tokens,
        temperature=usual if args.temperature is None else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        cache_dtype=recipe.rollout.cache_dtype,
    )
    config = evaluate.EvalConfig(sampler=sampler, ks=ks, limit=args.limit, seed=args.seed, batch=args.batch)
    judge = evaluate.judge_of(recipe.make_rewards())
    log.info("judged by %s", judge.reward)

    policy = trainer.Policy(recipe)
    tokenize = data.Tokenize(policy.tokenizer, recipe.data)
    loaded = data.load_problems(recipe.data.eval or (), tokenize, recipe.data, judge.check_gold)
    for line in loaded.notes("eval", recipe.data):
        log.info("%s", line)
    problems = list(loaded[: config.limit or None])
    out = args.out or target.out
    with evaluate.Record(out, target.settings(config, judge, loaded), problems) as record:
        done = record.done
        if done:
            log.info("%s: going on after %d of %d problems", out, len(done), len(problems))
        if len(done) < len(problems):
            params = policy.params
            if target.run is not None:
                policy.params = params = None
                params = trainer.load_policy_params(policy, recipe, target.run, target.step)
            batches = policy.attempts(
                policy.reshard(params), problems, config, judge, max_prompt_tokens=recipe.data.max_prompt_tokens,
                start=len(done),
            )  # fmt: skip
            for batch in batches:
                record.append(batch)
                right = 100 * sum(a.score for a in done) / len(done)
                log.info("%d/%d problems, %.1f %% right so far", len(done), len(problems), right)
        metrics = evaluate.summary(done, config)
        record.finish(metrics)
    print(evaluate.table(metrics, config, len(problems)))
    print(f"wrote {out}")
    return 0
