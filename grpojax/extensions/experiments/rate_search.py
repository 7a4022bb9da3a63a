"""A sweep's runs: first, if rates are given, the search for each method's learning rate, and then the comparison."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from grpojax.extensions.experiments import sweeps
from grpojax.extensions.experiments.jobs import Job, JobsOutcome, Queue
from grpojax.extensions.experiments.runs import of_failed
from grpojax.extensions.experiments.sweep import Sweep, identity, introduction, record, shared, unique
from grpojax.extensions.experiments.sweeps import Chosen, Failure, Rate
from grpojax.host.console import log
from grpojax.records.metrics import read_metrics

MOST_EXTENSIONS = 3  # extensions of a range at whose end the best rate is

RateJobs = Mapping[tuple[str, float, int], Job]  # by label, rate and seed
Ended = tuple[float | None, Failure | None]  # the last held-out reward of a run, and how the run failed


def run(sweep: Sweep, queue: Queue, pilot: str | None = None) -> JobsOutcome:
    """Prints how the methods differ, chooses learning rates if there are several, and makes the missing runs.

    Args:
      sweep: what is to be compared.
      queue: what runs it.
      pilot: as in `introduction`.

    Raises:
      UserError: a recipe is not valid; then nothing has been started.
    """
    jobs = sweep.jobs()  # all recipes are checked before anything starts
    rates = {name: sorted(sweep.rates) for name in sweep.methods} if sweep.rates else {}
    search = rate_jobs(sweep, rates)
    for line in introduction(sweep, jobs, pilot):
        log.info(line)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    sweeps.write(sweep.folder, record(sweep, jobs))
    left_out: dict[str, Failure] = {}
    if search:
        chosen, searched = choose_rates(sweep, queue, search)
        if searched.stopped:
            return searched
        left_out, jobs = searched.failed, sweep.jobs(chosen)
    made = queue.run(list(unique(jobs).values()))
    sweeps.write(sweep.folder, record(sweep, jobs, made))
    made.failed = left_out | made.failed
    return made


def rate_jobs(sweep: Sweep, rates: Mapping[str, Sequence[float]]) -> RateJobs:
    """The runs by which rates are chosen. They are sorted by seed and rate first. So if several run at once, a method's
    first run has compiled the programs that its others find in the cache.

    Args:
      sweep: what is to be compared.
      rates: label -> the rates of a method.
    """
    return {
        (name, rate, seed): sweep.rate_job(name, rate, seed)
        for seed in sweep.rate_seeds
        for rate in sorted({rate for each in rates.values() for rate in each})
        for name, each in rates.items()
        if rate in each
    }


def choose_rates(sweep: Sweep, queue: Queue, search: RateJobs) -> tuple[dict[str, float], JobsOutcome]:
    """The learning rate of each method with the highest mean of the last held-out rewards (`best`).

    Each rate has a run of the full length for each of `Sweep.rate_seeds`. A run that fails counts as 0
    (`grpojax.extensions.experiments.runs.of_failed`). Where the best rate is at an end of the range, the range is
    extended there (`next_rate`), at most `MOST_EXTENSIONS` times. The choice and the results behind it are kept in
    ``rates.json``, so that a restarted sweep continues with them. If none of a method's runs has a held-out reward, the
    method is left out, and its rate is searched again at the next start.

    Args:
      sweep: what is to be compared.
      queue: what runs it.
      search: `rate_jobs` of the given rates.

    Returns:
      The rates, and an outcome in which the methods that are left out are failed, by label.
    """
    kept, outcome = sweeps.read_rates(sweep.folder), JobsOutcome()
    asked = {name: _digest(job for key, job in search.items() if key[0] == name) for name in sweep.methods}
    found = {
        name for name in asked if name in kept and (kept[name].asked, kept[name].rate is None) == (asked[name], False)
    }
    jobs = {key: job for key, job in search.items() if key[0] not in found}
    results: dict[str, dict[float, dict[int, Ended]]] = {}
    while jobs:
        jobs = shared(jobs)
        made = queue.run(list(unique(jobs).values()))
        if made.stopped:
            return {}, JobsOutcome(stopped=True)
        for (name, rate, seed), job in jobs.items():
            ended = last_reward(job), made.failed.get(job.name)
            results.setdefault(name, {}).setdefault(rate, {})[seed] = ended
        more: dict[str, list[float]] = {}
        for name in dict.fromkeys(name for name, _, _ in jobs):
            chosen = _choose(asked[name], results[name])
            if chosen.edge is not None and len(chosen.curve) < len(sweep.rates) + MOST_EXTENSIONS:
                more[name] = [next_rate([x.rate for x in chosen.curve], chosen.edge)]
                log.info(
                    "%s: the best learning rate, %g, is the %s of the range; %g is tried too",
                    *(name, chosen.rate, chosen.edge, more[name][0]),
                )
                continue
            kept[name] = chosen
            sweeps.write_rates(sweep.folder, kept)
        jobs = rate_jobs(sweep, more)
    for name in asked:
        if kept[name].rate is None:
            text = "no learning rate gave a held-out reward; its runs are left out"
            outcome.failed[name] = Failure(status=None, step=0, lines=(text,))
            log.warning("%s: %s", name, text)
        else:
            log.info("%s: %s", name, _summary(kept[name], len(sweep.rate_seeds)))
    return {name: rate for name in asked if (rate := kept[name].rate) is not None}, outcome


def _digest(jobs: Iterable[Job]) -> str:
    """A digest of the runs by which a method's learning rate is chosen."""
    return hashlib.sha256(json.dumps([identity(job.config) for job in jobs]).encode()).hexdigest()[:32]


def _choose(asked: str, results: Mapping[float, Mapping[int, Ended]]) -> Chosen:
    """The choice that follows from a method's results by rate and seed."""
    curve = []
    for rate, by_seed in sorted(results.items()):
        values = {
            seed: of_failed(reward or 0.0) if failure else reward or 0.0 for seed, (reward, failure) in by_seed.items()
        }
        failed = {seed: failure for seed, (_, failure) in by_seed.items() if failure is not None}
        curve.append(Rate(rate=rate, mean=sum(values.values()) / len(values), values=values, failed=failed))
    if all(reward is None for by_seed in results.values() for reward, _ in by_seed.values()):
        return Chosen(asked=asked, rate=None, edge=None, curve=curve)
    rate, edge = best(curve)
    return Chosen(asked=asked, rate=rate, edge=edge, curve=curve)


def _summary(chosen: Chosen, seeds: int) -> str:
    each = ", ".join(f"{x.rate:g} {x.mean:.3f}" for x in chosen.curve)
    text = f"learning rate {chosen.rate:g}, by held-out reward over {seeds} seeds: {each}"
    if failed := sum(len(x.failed) for x in chosen.curve):
        text += f"; {failed} runs failed and count as 0"
    if chosen.edge is not None:
        text += f"; it is still the {chosen.edge} of the range after {MOST_EXTENSIONS} extensions"
    return text


def last_reward(job: Job) -> float | None:
    """The last held-out reward that a run recorded; None if it recorded none."""
    rewards = [x for line in read_metrics(job.directory) if (x := line.get("eval/reward")) is not None]
    return rewards[-1] if rewards else None


def best(curve: Sequence[Rate]) -> tuple[float, str | None]:
    """The rate with the highest mean, and the end of the range at which it is: "lowest", "highest", or None if inside.

    If several are equal, it takes the smallest inside of the range, or else the smallest.

    Args:
      curve: results from the lowest to the highest rate, at least three.
    """
    top = max(x.mean for x in curve)
    if inside := [x.rate for x in curve[1:-1] if x.mean == top]:
        return inside[0], None
    return (curve[0].rate, "lowest") if curve[0].mean == top else (curve[-1].rate, "highest")


def next_rate(rates: Sequence[float], edge: str) -> float:
    """The rate beyond an end of the range, at the same ratio to it as its neighbour inside; rounded to three digits.

    Args:
      rates: from low to high.
      edge: "lowest" or "highest".

    Example:
      >>> next_rate([1e-4, 3e-4, 1e-3], "highest"), next_rate([1e-4, 3e-4, 1e-3], "lowest")
      (0.00333, 3.33e-05)
    """
    end, inner = (rates[0], rates[1]) if edge == "lowest" else (rates[-1], rates[-2])
    return float(f"{end * end / inner:.3g}")
