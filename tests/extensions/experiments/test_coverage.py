"""How often intervals hold and verdicts are false, by simulation; ``docs/statistics.md`` has these numbers."""

import re
from pathlib import Path

import numpy as np
import pytest

from grpojax.extensions.experiments.comparison import BETTER, EQUIVALENT, OPEN, WORSE, t_interval, verdicts

DOCS = Path(__file__).parents[3] / "docs" / "statistics.md"
RUNS, SEEDS = 40_000, (3, 5, 8)
SYMMETRIC = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "t with 3 degrees of freedom": lambda rng, shape: rng.standard_t(3, shape),
}
SKEWED = {
    "exponential": lambda rng, shape: rng.exponential(size=shape) - 1,
    "lognormal": lambda rng, shape: rng.lognormal(size=shape) - np.exp(0.5),
    "one run in eight fails": lambda rng, shape: rng.normal(0, 0.02, shape) - 0.4 * (rng.random(shape) < 1 / 8) + 0.05,
}
DRAWS = SYMMETRIC | SKEWED


def coverage(name, seeds):
    """Of 95 % intervals of differences whose true mean is 0, the share with 0 inside, in %."""
    low, high = t_interval(DRAWS[name](np.random.default_rng(seeds), (RUNS, seeds)))
    return 100 * float(np.mean((low <= 0) & (0 <= high)))


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", SYMMETRIC)
def test_intervals_of_symmetric_differences_hold(name, seeds):
    assert 93 <= coverage(name, seeds) <= 97


def test_the_docs_have_the_simulated_coverage():
    """Skewed ones are not bounded, but printed: this row fails with the numbers that the docs should have."""
    rows = dict(re.findall(r"^\| ([\w ]+) \| ([\d. |]+) \|$", DOCS.read_text(encoding="utf-8"), re.M))
    simulated = {name: " | ".join(f"{coverage(name, n):.1f}" for n in SEEDS) for name in DRAWS}
    assert {name: rows.get(name) for name in DRAWS} == simulated


@pytest.mark.parametrize("truth", [[0.0] * 6, [0.0] * 3 + [0.04] * 3, [0.04] * 6])
def test_few_reports_have_a_false_verdict(truth):
    """Six comparisons, some with no difference and some with one as large as the margin: none of the former may be
    called better or worse, none of the latter equivalent."""
    rng = np.random.default_rng(len(set(truth)) + round(100 * truth[0]))
    reports, false = 400, 0
    for _ in range(reports):
        found = verdicts([rng.normal(mean, 0.02, 5) for mean in truth], margin=0.04)
        wrong = [(BETTER, WORSE) if mean == 0 else (EQUIVALENT, WORSE) for mean in truth]
        false += any(v.verdict in bad for v, bad in zip(found, wrong, strict=True))
    assert false / reports <= 0.05 + 2 * (0.05 * 0.95 / reports) ** 0.5


def test_many_seeds_find_what_is_there():
    rng = np.random.default_rng(0)
    found = verdicts([rng.normal(mean, 0.01, 8) for mean in (0.05, -0.05, 0.0)], margin=0.02)
    assert [v.verdict for v in found] == [BETTER, WORSE, EQUIVALENT]
    assert [v.verdict for v in verdicts([[0.01, -0.01, 0.0, 0.02]])] == [OPEN]  # no margin: nothing is equal
