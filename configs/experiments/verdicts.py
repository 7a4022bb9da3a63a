"""The registered comparisons (``docs/registration.md``), from the runs of their sweeps.

python -m configs.experiments.verdicts failing runs/experiments --json failing.json

``--keep FILE`` notes the outcomes of all runs that are over in a file of its own, and reads there those of runs whose
folders are gone: a row may be made in parts, and on several machines. ``docs/experiments.md`` and its notebook are made
from ``notebooks/results/registered.jsonl``.
"""

import argparse
import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from grpojax.diagnostics import rank_correlation
from grpojax.evaluation.estimates import pass_at_k
from grpojax.extensions.experiments.comparison import verdicts
from grpojax.extensions.experiments.measures import measure
from grpojax.extensions.experiments.runs import FAILED, NO_REASON, SIGNAL, UNFINISHED, of_sweep, read_runs, read_sweep
from grpojax.extensions.problems import reasoning

AT = "sweep", "method", "seed"
HALF_OF_START = 0.13  # test accuracy of a policy that has lost half of what the start can do
OPTIMISERS = "adamw", "sgd"


def survived(run):
    """0 for a run that broke off, or that ends with less than half of the start's accuracy; else 1."""
    return float(run.ending[0] != FAILED and accuracy(run) >= HALF_OF_START)


def accuracy(run):
    return run.value("test/accuracy")


def solved(run, levels=(3, 4, 5), k=64):
    """Mean pass@k of the test problems of some levels; 0 for a run that failed."""
    if run.ending[0] == FAILED:
        return 0.0
    rows = reasoning.rows("tallies", run.config["data"]["test"]["options"])
    level = {row["question"]: row["level"] for row in rows}
    counts = [
        (len(a.samples), sum(bool(s.correct) for s in a.samples)) for a in run.attempts if level[a.prompt] in levels
    ]
    return float(np.mean([pass_at_k(n, c, k) for n, c in counts]))


def follows(run):
    """Share of wrong samples in the last tenth of the run whose steps lead to their answer; None if the run failed."""
    return None if run.ending[0] == FAILED else measure(run)["samples"]["parts"][-1]["follows"]["wrong"]


def length(run):
    """Mean length in tokens of wrong samples in the last tenth of the run; None if the run failed."""
    return None if run.ending[0] == FAILED else measure(run)["samples"]["parts"][-1]["length"]["wrong"]


def kept(run, within=20):
    """0 if the training reward falls by more than 0.2 from a step to one of the next ``within``, or the run fails."""
    rewards = [line["reward"] for line in run.lines if "reward" in line]
    falls = [a - b for i, a in enumerate(rewards) for b in rewards[i + 1 : i + 1 + within]]
    return float(run.ending[0] != FAILED and max(falls, default=0.0) <= 0.2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Comparisons that are corrected together.

    Attributes:
      outcome: a number of each run.
      margin: differences within it count as none.
      pairs: labels of sweeps, each a method and what it is compared with. One with a sweep before it, such as
        ``critic/2e-4/grpo``, is of that sweep; others are of each of ``sweeps`` in turn.
      sweeps: the sweeps by folder. Of those in one tuple the mean of a seed is taken.
      seeds: their number. There is no verdict before all are there.
    """

    outcome: object
    margin: float
    pairs: tuple[tuple[str, str], ...]
    sweeps: tuple[tuple[str, ...], ...]
    seeds: int = 8

    def place(self, sweep, method):
        """The sweep and the label of a method, in one of ``sweeps``."""
        named, _, label = method.rpartition("/")
        return named or sweep, label

    @property
    def places(self):
        """All sweeps and labels that it reads."""
        return {self.place(name, x) for names in self.sweeps for name in names for pair in self.pairs for x in pair}


def _c(c):
    return f"negative_advantage-c={c}"


ARMS = "configs.experiments.arms"
PLACEBO, PERMUTED = f"{ARMS}-placebo", f"{ARMS}-permuted_likelihood"
CONTROL, BOTH = _c(0.0), tuple((f"failing/{name}",) for name in OPTIMISERS)
PENALTY = (
    *((_c(c), CONTROL) for c in (0.1, 0.3, 1.0)),
    (PLACEBO, CONTROL),
    (_c(1.0), PLACEBO),
    ("ngrpo", "ngrpo-count=0"),
)
LIKELIHOOD = (("gt_likelihood", CONTROL), ("gt_likelihood", PERMUTED), (PERMUTED, CONTROL), ("gt_likelihood", PLACEBO))
RATES = tuple(f"rare/{name}_{times}" for name in OPTIMISERS for times in (1, 4, 16))
RARE = (("rare_token", "rare_token-limit=1.0"),)
WAYS_IN = "prefixes/grpo", "exemplars/xrpo", f"plain/{_c(0.1)}"
WORKING = "gt_likelihood-groups=all-likelihood=log-train_on=spliced-answer_term=1.0"
ROWS = {
    "critic": tuple(
        Family(
            outcome=o,
            margin=m,
            pairs=(("token_critic", "critic/2e-4/grpo"),),
            sweeps=(("critic/2e-4",), ("critic/1e-3",), ("critic/5e-3",)),
        )
        for o, m in ((survived, 0.25), (accuracy, 0.05))
    ),
    "rare": (Family(outcome=survived, margin=0.25, pairs=RARE, sweeps=(RATES,), seeds=6),),
    "groups": (
        Family(
            outcome=solved,
            margin=0.1,
            pairs=(("culling", "grpo"),),
            sweeps=(("groups/4",), ("groups/16",), ("groups/64",)),
        ),
    ),
    "failing": (
        Family(outcome=solved, margin=0.15, pairs=PENALTY, sweeps=BOTH),
        Family(outcome=accuracy, margin=0.05, pairs=PENALTY, sweeps=BOTH),
        Family(outcome=follows, margin=0.1, pairs=LIKELIHOOD, sweeps=BOTH),
        Family(outcome=accuracy, margin=0.05, pairs=LIKELIHOOD, sweeps=BOTH),
    ),
    "nthr": (Family(outcome=accuracy, margin=0.024, pairs=(("nthr", "nthr-eta=1.0"),), sweeps=(("nthr",),), seeds=48),),
    "search": (Family(outcome=kept, margin=0.25, pairs=(("llds", "llds-llds_coef=0.0"),), sweeps=(("search",),)),),
    "lengths": (
        Family(
            outcome=length,
            margin=10.0,
            pairs=(("grpo-aggregate=constant", "grpo"), ("dr_grpo-aggregate=sequence_mean", "grpo")),
            sweeps=(("lengths",),),
        ),
    ),
    "mixture": tuple(
        Family(outcome=o, margin=m, pairs=(("gspo", "grpo"),), sweeps=(("mixture/plain",), ("mixture/replay",)))
        for o, m in ((survived, 0.25), (accuracy, 0.05))
    ),
    "normalisation": (
        Family(
            outcome=accuracy,
            margin=0.05,
            pairs=(("lite_ppo", "grpo"), ("dr_grpo", "grpo")),
            sweeps=(("normalisation",),),
        ),
    ),
    "guided": tuple(
        Family(
            outcome=o,
            margin=m,
            pairs=tuple((f"guided/{arm}", "guided/plain/grpo") for arm in WAYS_IN),
            sweeps=(("guided/plain",),),
        )
        for o, m in ((solved, 0.1), (accuracy, 0.05))
    ),
    "likelihood": tuple(
        Family(
            outcome=o,
            margin=m,
            pairs=tuple((WORKING, f"failing/adamw/{other}") for other in (CONTROL, "gt_likelihood")),
            sweeps=(("likelihood",),),
        )
        for o, m in ((accuracy, 0.05), (follows, 0.1))
    ),
}


def read(folder):
    """The runs of a sweep that are finished or failed, by label and seed, and notes on the others."""
    found = read_sweep([folder])
    if found is None:
        raise SystemExit(f"{folder}: no sweep; docs/registration.md has the command")
    methods, notes = of_sweep(*found, read_runs([folder])[0])
    notes += [f"{run.path}: left out, {run.state()}" for m in methods for run in m.runs if not over(run)]
    return {m.name: {run.seed: run for run in m.ended if over(run)} for m in methods}, notes


def over(run):
    """Whether a run is finished, or failed for a reason of its own. One that was killed from outside goes on."""
    return run.ending[0] != UNFINISHED and not run.ending[1].startswith((NO_REASON, SIGNAL))


def sweeps_of(families):
    """The names of a row's sweeps."""
    return list(dict.fromkeys(sweep for family in families for sweep, _ in sorted(family.places)))


def outcomes(families, folder):
    """The outcomes of a row's runs that are over, by sweep, label and seed, and notes on the others."""
    found, notes = {}, []
    for name in filter(lambda name: (folder / name).exists(), sweeps_of(families)):
        methods, more = read(folder / name)
        notes += more
        for label, runs in methods.items():
            for seed, run in runs.items():
                values = {family.outcome.__name__: family.outcome(run) for family in families}
                found[name, label, seed] = values | described(run)
    return found, notes


def described(run):
    """What is told of a run without a verdict.

    Mean and variance of the gradient's norm, the entropy and the size of a critic's bias at the end, the share of
    different texts in groups that fail, in the last tenth, and means over all steps of what guidance and routers log.
    None is for what the run does not have.
    """
    made = measure(run)
    norm, parts = made["grad_norm"] or {}, (made["samples"] or {}).get("parts") or [{}]
    means = {}
    for name in ("guidance/solved", "guidance/plain_solved", "guidance/waiting", "router/entropy"):
        logged = [line[name] for line in run.lines if line.get(name) is not None]
        means |= {name: float(np.mean(logged))} if logged else {}
    return {
        "grad_norm": norm.get("mean"),
        "grad_norm_variance": norm.get("variance"),
        "entropy": (made["entropy"] or [None])[-1],
        "critic_bias": (made["critic_bias"] or [None])[-1],
        "distinct": parts[-1].get("distinct"),
        **means,
    }


def compare(families, found):
    """A mapping for each comparison of a row, from its runs' `outcomes`; raises `SystemExit` if some are missing."""
    out = []
    for number, family in enumerate(families):
        outcome = family.outcome.__name__
        rows = [(names, *pair) for names in family.sweeps for pair in family.pairs]
        made = []
        for names, *pair in rows:
            places = [[family.place(name, x) for name in names] for x in pair]
            seeds = sorted(
                set.intersection(*({s for *at, s in found if (*at,) == place} for each in places for place in each))
            )
            if len(seeds) < family.seeds:
                raise SystemExit(f"{' and '.join(pair)} have {len(seeds)} of {family.seeds} seeds: no verdict yet")
            values = [{s: [found[*place, s][outcome] for place in each] for s in seeds} for each in places]
            seeds = [s for s in seeds if all(x is not None for v in values for x in v[s])]
            norms = [[found[*place, s]["grad_norm"] for place in each for s in seeds] for each in places]
            made.append((
                [{s: float(np.mean(v[s])) for s in seeds} for v in values],
                [float(np.mean([x for x in each if x is not None])) for each in norms],
            ))  # fmt: skip
        differences = [[a[s] - b[s] for s in a] for (a, b), _ in made]
        for (names, a, b), (values, norms), v in zip(rows, made, verdicts(differences, family.margin), strict=True):
            out.append({
                "family": number, "outcome": outcome, "margin": family.margin, "sweeps": names, "method": a, "other": b,
                "values": values, "grad_norms": norms, **dataclasses.asdict(v),
            })  # fmt: skip
    return out


def keep(file, found):
    """Adds the outcomes of runs to a file, and returns all that it has. A value that is there stays."""
    known = kept_in(file) if file.exists() else {}
    for at, values in found.items():
        known[at] = dict(zip(AT, at, strict=True)) | values | known.get(at, {})
    file.write_text("".join(json.dumps(known[at]) + "\n" for at in sorted(known)))
    return known


def kept_in(file):
    """The outcomes that a file has, by sweep, label and seed."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {tuple(line[name] for name in AT): line for line in lines}


def whole_rows(runs):
    """The comparisons of all rows that have every seed, by row."""
    found = {}
    for row, families in ROWS.items():
        with contextlib.suppress(SystemExit):
            found[row] = compare(families, runs)
    return found


def with_one_seed_less(found):
    """Those of `compare`'s comparisons that get another verdict with one seed left out, with those seeds' share."""
    changes = []
    for number in dict.fromkeys(c["family"] for c in found):
        family = [c for c in found if c["family"] == number]
        differences = [{s: a[s] - b[s] for s in a} for a, b in (c["values"] for c in family)]
        seeds = sorted(set().union(*differences))
        left = [[[x for s, x in d.items() if s != out] for d in differences] for out in seeds]
        made = [verdicts(each, family[0]["margin"]) for each in left]
        for i, c in enumerate(family):
            share = float(np.mean([v[i].verdict != c["verdict"] for v in made]))
            changes += [(c, share)] if share else []
    return changes


def short(name):
    """A label, or a sweep, as a reader knows it."""
    return name.replace(f"{ARMS}-", "").replace(WORKING, "gt_likelihood, as elsewhere")


def table(found):
    """The lines of a markdown table of `compare`'s comparisons."""
    columns = "outcome", "sweep", "method", "compared with", "seeds", "means", "norms", "difference", "95 %", "p"
    columns += "p, margin", "verdict"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for x in found:
        means = " / ".join(f"{np.mean([*v.values()]):.3f}" for v in x["values"])
        norms = " / ".join(f"{n:.3g}" for n in x["grad_norms"])
        interval = "-" if x["low"] is None else f"{x['low']:+.3f} to {x['high']:+.3f}"
        ps = ("-" if p is None else f"{p:.2g}" for p in (x["p_corrected"], x["p_equivalent_corrected"]))
        verdict = f"no difference of {x['margin']:g} or more" if x["verdict"] == "equivalent" else x["verdict"]
        names = x["outcome"], ", ".join(x["sweeps"]), f"`{short(x['method'])}`", f"`{short(x['other'])}`"
        shown = (*names, len(x["values"][0]), means, norms, f"{x['difference']:+.3f}", interval, *ps, verdict)
        lines.append(f"| {' | '.join(map(str, shown))} |")
    return lines


def start_table(right, draws=1000, ks=(1, 4, 16, 64, 219, 338)):
    """The lines of a markdown table of the start's mean pass@k by level, from the right ones of each problem's draws.

    In row 3 a prompt is drawn 219 times in a run. 338 is the most that culling makes of it, with groups of 4.
    """
    lines = [f"| gifts | {' | '.join(f'pass@{k}' for k in ks)} |", "|---" * (len(ks) + 1) + "|"]
    for level, counts in right.items():
        means = (np.mean([pass_at_k(draws, count, k) for count in counts]) for k in ks)
        lines.append(f"| {level} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return lines


def rank_correlation_given(scores, displacement, given):
    """The rank correlation of scores and -displacement, given a third value: its rank and rank² are regressed out."""
    a, b, z = (rankdata(x) for x in (scores, -np.asarray(displacement), given))
    known = np.stack([np.ones_like(z), z, z**2], 1)
    left = [x - known @ np.linalg.lstsq(known, x, rcond=None)[0] for x in (a, b)]
    return float(np.corrcoef(*left)[0, 1])


def along_table(found, epsilon=0.0):
    """The lines of a markdown table of `grpojax displacement`'s numbers, from policies along training.

    ``found`` has them by policy: ``start`` or ``<seed>_<step>``. Policies of one step share a line: Δ and the share of
    displaced questions (Δ up to epsilon) are over all their questions, correlations are means over policies.
    GWHES is compared with the Δ of the first method, the control.
    """
    steps = {}
    for name, numbers in found.items():
        steps.setdefault(0 if name == "start" else int(name.split("_")[1]), []).append(numbers)
    control, *others = next(iter(found.values()))["displacement"]
    columns = ["step", "questions", "right samples"]
    columns += [f"{what}, `{short(m)}`" for what in ("Δ", "displaced") for m in (control, *others)]
    columns += ["GWHES and -Δ", "given right samples"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for step, policies in sorted(steps.items()):
        deltas = [np.concatenate([x["displacement"][m] for x in policies]) for m in (control, *others)]
        right = np.concatenate([x["right"] for x in policies])
        pairs = [(x["gwhes"], np.array(x["displacement"][control]), x["right"]) for x in policies]
        shown = [str(step), str(len(right)), f"{right.mean():.2f}"]
        shown += [f"{d.mean():+.3f}" for d in deltas] + [f"{np.mean(d <= epsilon):.2f}" for d in deltas]
        shown += [f"{np.mean([rank_correlation(np.array(g), d) for g, d, _ in pairs]):.2f}"]
        shown += [f"{np.mean([rank_correlation_given(*x) for x in pairs]):.2f}"]
        lines.append(f"| {' | '.join(shown)} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("folder", type=Path, help="the folder that has the sweeps' folders")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="JSON lines with the outcomes of runs that are over")
    args = parser.parse_args()
    runs, notes = outcomes(ROWS[args.row], args.folder)
    print(*notes, sep="\n")
    if args.keep:
        runs = keep(args.keep, runs)
    found = compare(ROWS[args.row], runs)
    print(*table(found), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
