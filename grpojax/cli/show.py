"""``grpojax show``: the samples of a run."""

import argparse
from collections.abc import Callable, Mapping, Sequence

from grpojax.host.errors import UserError

Sample = Mapping  # a line of a step's samples
_SHOWN = 2000  # characters from each end of a long prompt


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Its arguments."""
    show = command("show", run, "Shows the samples of a run's step, best and worst first.")
    show.add_argument("run_dir", metavar="RUN", help="run directory")
    show.add_argument("--step", type=int, help="step to show; the newest by default")
    show.add_argument("-n", type=int, default=3, help="number of best and of worst samples, each of another prompt")
    show.add_argument("--critic", action="store_true", help="the critic's output for each token")
    show.add_argument("--uid", type=int, help="only this prompt's samples, all of them")


def run(args: argparse.Namespace) -> int:
    """Prints the samples."""
    from grpojax.records.samples import ranked_samples, read_samples

    if args.n < 1:
        raise UserError(f"-n {args.n}: must be at least 1")
    step, samples = read_samples(args.run_dir, args.step)
    uids = {s["uid"] for s in samples}
    if args.uid is None:
        shown = best_and_worst(samples, args.n)
    elif args.uid in uids:
        shown = {"": ranked_samples([s for s in samples if s["uid"] == args.uid])}
    else:
        raise UserError(f"step {step} has no prompt {args.uid}; it has {sorted(uids)}")
    decode = _decode(args.run_dir, samples) if args.critic else None
    print(f"step {step}: {len(samples)} samples of {len(uids)} prompts")
    for name, rows in shown.items():
        for row in rows:
            print(f"\n--- {name + ': ' if name else ''}{_text(row)}")
            if decode is not None:
                print(_critic(row, decode))
    return 0


def best_and_worst(samples: Sequence[Sample], n: int) -> dict[str, list[Sample]]:
    """Samples from both ends of a step, no two of the same prompt.

    Args:
      samples: those of the step.
      n: number of samples from each end; with fewer than ``2 n`` prompts, half of the prompts for each end.

    Returns:
      "best": the highest rewards, the highest first. "worst": the lowest, the lowest first; it picks its prompts before
      "best" does. "invalid": of prompts without any reward. Where samples are equal, those of prompts with the higher
      mean are the better ones.

    Example:
      >>> rewards = {7: [1.0, 0.0], 8: [1.0, 1.0], 9: [0.0, 0.0]}
      >>> samples = [{"uid": uid, "reward": r} for uid, group in rewards.items() for r in group]
      >>> {name: [(s["uid"], s["reward"]) for s in rows] for name, rows in best_and_worst(samples, 1).items()}
      {'best': [(8, 1.0)], 'worst': [(9, 0.0)], 'invalid': []}
    """
    from grpojax.records.samples import ranked_samples

    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample["uid"], []).append(sample)
    ranked = {uid: ranked_samples([s for s in group if s["reward"] is not None]) for uid, group in groups.items()}
    means = {uid: sum(s["reward"] for s in group) / len(group) for uid, group in ranked.items() if group}
    low = sorted(means, key=lambda uid: (ranked[uid][-1]["reward"], means[uid]))[: min(n, len(means) // 2)]
    high = sorted(means.keys() - low, key=lambda uid: (-ranked[uid][0]["reward"], -means[uid], uid))[:n]
    return {
        "best": [ranked[uid][0] for uid in high],
        "worst": [ranked[uid][-1] for uid in low],
        "invalid": [group[0] for uid, group in groups.items() if uid not in means][:n],
    }


def _text(row: Sample) -> str:
    import json

    numbers = {"reward": row["reward"], **row["rewards"], "advantage": row["advantage"]}
    text = "  ".join(f"{k} {'invalid' if v is None else format(v, '.3g')}" for k, v in numbers.items())
    return (
        f"prompt {row['uid']} sample {row['sample']}  {text}  {row['length']} tokens, ended by {row['stop']}\n"
        f"{_printable(_asked(row))}\n{_written(row)}\n"
        f"[answer {json.dumps(row['answer'])}, gold {json.dumps(row['gold'])}]"
    )


def _asked(row: Sample) -> str:
    """The prompt. Of an episode as the policy saw it, with the schemas of its tools; the middle of a long one is cut.

    Example:
      >>> _asked({"prompt": "2+3", "rendered_prompt": "x" * 1999 + "y" * 4000 + "z" * 1999})[1990:2040]
      'xxxxxxxxxy\\n[3998 characters are left out]\\nyzzzzzzz'
    """
    text = row.get("rendered_prompt", row["prompt"])
    if len(text) <= 2 * _SHOWN:
        return text
    return f"{text[:_SHOWN]}\n[{len(text) - 2 * _SHOWN} characters are left out]\n{text[-_SHOWN:]}"


def _written(row: Sample) -> str:
    """What the policy wrote. Of an episode turn by turn: ``>>>`` is before a turn of the policy, and ``<<<`` before
    what its environment answered, each with its number of tokens.

    Example:
      >>> _written({"turns": ["2+3=<call>", "5", "It is 5."], "sampled": [7, 1, 4]}).splitlines()
      ['>>> (7 tokens) 2+3=<call>', "<<< (1 tokens, not the policy's) 5", '>>> (4 tokens) It is 5.']
    """
    if "turns" not in row:
        return f">>> {_printable(row['completion'].strip())}"
    lines = []
    for n, (text, tokens) in enumerate(zip(row["turns"], row["sampled"], strict=True)):
        about = f"<<< ({tokens} tokens, not the policy's)" if n % 2 else f">>> ({tokens} tokens)"
        lines.append(f"{about} {_printable(text.strip())}")
    return "\n".join(lines)


def _decode(run_dir: str, samples: Sequence[Sample]) -> Callable[[int], str]:
    """A function from token to text, by a run's tokenizer; raises `UserError` if the samples are without a critic."""
    import json

    from grpojax import data
    from grpojax.host import files
    from grpojax.models import hf

    if not all("critic" in s for s in samples):
        raise UserError(f"--critic: the samples of {run_dir} are of a run without a critic")
    config = json.loads(files.read(files.path(run_dir) / "config.json"))
    tokenizer = hf.load_tokenizer(str(data.locate(config["model"]["path"])))
    return lambda token: tokenizer.decode([token])


def _critic(row: Sample, decode: Callable[[int], str]) -> str:
    """A line for each token: the critic's output before the step's update, and the token."""
    lines = (f"{value:+10.4f}  {_printable(decode(i))!r}" for i, value in zip(row["ids"], row["critic"], strict=True))
    return "\n".join(("critic:", *lines))


def _printable(text: str) -> str:
    """The text without control characters for a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
