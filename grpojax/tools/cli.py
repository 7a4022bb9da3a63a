"""``grpojax train | eval | compare | sample | show | export | bench | plan``: arguments in, exit status out.

Nothing heavy is imported before the arguments are known to be right.
"""

import argparse
import os
import sys

from grpojax.host.errors import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, where argparse would print all of the usage first."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="grpojax", description="Group-based reinforcement learning of language models.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, run, text, *, overrides=False, about=("config", "YAML recipe")):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if overrides:
            sub.add_argument(about[0], help=about[1])
            sub.add_argument("overrides", nargs="*", metavar="a.b=c", help=f"settings that replace the {about[0]}'s")
        return sub

    command("train", _train, "Trains, or goes on with the run in run.dir.", overrides=True)

    from grpojax.tools import compare, evaluate

    evaluate.register(command)
    compare.register(command)

    sample = command("sample", _sample, "Samples completions of one prompt from a Hugging Face folder.")
    sample.add_argument("model", help="Hugging Face folder, or builtin:tiny")
    sample.add_argument("--prompt", required=True)
    sample.add_argument("--system", help="system message")
    sample.add_argument("--template", choices=("auto", "chat", "plain"), default="auto")
    sample.add_argument("-n", type=int, default=1, help="number of samples")
    sample.add_argument("--max-tokens", type=int, default=256)
    sample.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    sample.add_argument("--top-k", type=int, default=0)
    sample.add_argument("--top-p", type=float, default=1.0)
    sample.add_argument("--min-p", type=float, default=0.0)
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")

    export = command("export", _export, "Writes a run's policy as a Hugging Face folder.")
    export.add_argument("run_dir", metavar="RUN", help="run directory")
    export.add_argument("--to", required=True, help="folder to make")
    export.add_argument("--step", type=int, help="checkpoint to take; the newest if left out")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights written")

    plan = command("plan", _plan, "Compiles a recipe's programs for a TPU slice that is not there.", overrides=True)
    plan.add_argument("--topology", default="v5e:4x4", help="such as v5e:4x4 or v5p:2x2x4")
    plan.add_argument("--layers", type=int, help="layers to compile; the model's own number if left out")

    show = command("show", _show, "Shows the samples of a run's step, best and worst first.")
    show.add_argument("run_dir", metavar="RUN", help="run directory")
    show.add_argument("--step", type=int, help="step to show; the newest if left out")
    show.add_argument("-n", type=int, default=3, help="samples from each end")
    show.add_argument("--uid", type=int, help="only this prompt's samples, all of them")

    bench = command("bench", _bench, "Measures where the time of a recipe's step goes.", overrides=True)
    bench.add_argument("--steps", type=int, default=5, help="timed steps; the median is reported")
    bench.add_argument("--full-length", action="store_true", help="ignore end-of-sequence tokens")
    bench.add_argument("--json", metavar="FILE", help="also write the figures there")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 2 for a user's mistake, 130 when interrupted."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse ends a list of positionals at the first option; settings may stand after options too.
    if wrong := [a for a in rest if a.startswith("-") or not hasattr(args, "overrides")]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if rest:
        args.overrides += rest
    try:
        if args.command == "eval":
            _setup()
        return args.run(args) or 0
    except UserError as e:
        if args.debug:
            raise
        print(f"grpojax: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # such as `grpojax show RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _setup() -> None:
    """Console and allocator; before jax is imported. Reward functions may stand in the folder one is in."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from grpojax.host import startup as host
    from grpojax.host.console import setup_console

    host.keep_memory()
    setup_console()


def _train(args) -> int:
    _setup()
    from grpojax.host import processes as hosts
    from grpojax.host.console import log
    from grpojax.run import recipe as config

    hosts.start()
    if not hosts.is_first():
        log.setLevel("WARNING")
    recipe = config.load(args.config, args.overrides)
    from grpojax.run.trainer import Trainer

    trainer = Trainer(recipe)
    finished = trainer.run()
    if finished:
        trainer.report()
    return 0


def _sample(args) -> int:
    _setup()
    import jax
    from flax import nnx

    from grpojax.data import problems as data
    from grpojax.models import Compute, hf
    from grpojax.programs.sampler import SamplerConfig, sample_groups

    config = SamplerConfig(
        group=args.n, max_tokens=args.max_tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
        min_p=args.min_p,
    )  # fmt: skip
    folder = str(data.locate(args.model))
    tokenizer = hf.load_tokenizer(folder)
    source = data.DataConfig(train="", system=args.system, template=args.template)
    ids = data.Tokenize(tokenizer, source)(args.prompt)
    if not ids:
        raise UserError("--prompt is empty")
    prompts = data.to_prompts([data.Problem(0, ids, args.prompt, None, {})], len(ids))
    graph, params = nnx.split(hf.load(folder, dtype=args.dtype))
    rollout = sample_groups(
        graph, params, prompts, jax.random.key(args.seed), config, eos_ids=hf.eos_ids(folder, tokenizer),
        compute=Compute(dtype=args.dtype),
    )  # fmt: skip
    for tokens, length in zip(rollout.tokens[0], rollout.lengths[0], strict=True):
        print(tokenizer.decode(tokens[:length].tolist(), skip_special_tokens=True))
    return 0


def _export(args) -> int:
    _setup()
    import json
    from pathlib import Path

    from flax import nnx

    from grpojax.host import settings
    from grpojax.models import hf
    from grpojax.run import recipe as config
    from grpojax.run import trainer

    file = Path(args.run_dir) / "config.json"
    if not file.is_file():
        raise UserError(f"{args.run_dir} is no run directory: it has no config.json")
    recipe = settings.build(config.Config, json.loads(file.read_text(encoding="utf-8")))
    policy = trainer.Policy(recipe)
    params = trainer.load_policy_params(policy, recipe, args.run_dir, args.step)
    hf.save(args.to, nnx.merge(policy.graph, params), source=policy.folder, dtype=args.dtype)
    print(f"wrote {args.to}")
    return 0


def _plan(args) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles, and nothing runs
    _setup()
    import dataclasses

    from grpojax.data import problems as data
    from grpojax.models import Compute, hf
    from grpojax.run import recipe as config
    from grpojax.tools import plan

    recipe = config.load(args.config, args.overrides)
    model = hf.read_config(data.locate(recipe.model.path))
    if args.layers is not None:
        if args.layers < 1:
            raise UserError(f"--layers {args.layers}: must be at least 1")
        model = dataclasses.replace(model, num_layers=args.layers)
    reports = plan.plan(
        model,
        prompts=recipe.rollout.prompts,
        prompt_tokens=recipe.data.max_prompt_tokens,
        sampling=recipe.rollout,
        topology=args.topology,
        mesh=recipe.mesh,
        compute=Compute(
            dtype=recipe.model.dtype,
            remat=recipe.model.remat,
            attention=recipe.model.attention,
            platform="tpu",
        ),
        objective=recipe.make_variant().objective,
        optimizer=recipe.optimizer,
        minibatches=recipe.train.minibatches,
        microbatches=recipe.train.microbatches,
    )
    print(plan.format_table(reports))
    return 0


def _show(args) -> int:
    import json

    from grpojax.records.samples import ranked_samples, read_samples

    if args.n < 1:
        raise UserError(f"-n {args.n}: must be at least 1")
    step, samples = read_samples(args.run_dir, args.step)
    ranked = ranked_samples(samples)
    if args.uid is not None:
        ranked = [s for s in ranked if s["uid"] == args.uid]
        if not ranked:
            raise UserError(f"step {step} has no prompt {args.uid}; it has {sorted({s['uid'] for s in samples})}")
        shown = [("", ranked)]
    else:
        cut = min(args.n, (len(ranked) + 1) // 2)
        shown = [("best", ranked[:cut]), ("worst", ranked[cut:][-args.n :][::-1])]
    print(f"step {step}: {len(samples)} samples of {len({s['uid'] for s in samples})} prompts")
    for name, rows in shown:
        for row in rows:
            numbers = {"reward": row["reward"], **row["rewards"], "advantage": row["advantage"]}
            text = "  ".join(f"{k} {'invalid' if v is None else format(v, '.3g')}" for k, v in numbers.items())
            print(
                f"\n--- {name + ': ' if name else ''}prompt {row['uid']} sample {row['sample']}  {text}  "
                f"{row['length']} tokens, ended by {row['stop']}"
            )
            print(f"{_printable(row['prompt'])}\n>>> {_printable(row['completion'].strip())}")
            print(f"[answer {json.dumps(row['answer'])}, gold {json.dumps(row['gold'])}]")
    return 0


def _printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _bench(args) -> int:
    _setup()
    from grpojax.run import recipe as config
    from grpojax.tools import bench

    recipe = config.load(args.config, args.overrides)
    bench.run(recipe, steps=args.steps, full_length=args.full_length, json_path=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
