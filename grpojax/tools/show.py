"""``grpojax show``: what a run's samples say."""

import argparse
from collections.abc import Callable

from grpojax.host.errors import UserError


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    show = command("show", run, "Shows the samples of a run's step, best and worst first.")
    show.add_argument("run_dir", metavar="RUN", help="run directory")
    show.add_argument("--step", type=int, help="step to show; the newest if left out")
    show.add_argument("-n", type=int, default=3, help="samples from each end")
    show.add_argument("--uid", type=int, help="only this prompt's samples, all of them")


def run(args: argparse.Namespace) -> int:
    """Prints the samples."""
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
