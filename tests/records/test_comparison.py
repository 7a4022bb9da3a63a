"""Statistics over seeds, against loops over every choice of signs."""

import doctest
import itertools

import numpy as np
import pytest

from grpojax.evaluation import bootstrap, paired_test
from grpojax.records import comparison, report_charts


def loop_p(d):
    """The share of the 2^n choices of signs with a sum at least as far from 0."""
    far = [
        abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=len(d))
    ]
    return sum(x >= abs(sum(d)) - 1e-12 for x in far) / len(far)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_sign_flip_counts_every_choice(n):
    rng = np.random.default_rng(n)
    for _ in range(5):
        d = rng.normal(0.5, 1, n)
        assert comparison.sign_flip(d) == pytest.approx(loop_p(d), abs=1e-12)
        assert comparison.sign_flip(-d) == comparison.sign_flip(d)
    assert comparison.sign_flip(np.full(n, 0.3)) == 2 / 2**n  # and no less
    assert comparison.sign_flip(np.zeros(n)) == 1


def test_sign_flip_agrees_with_the_test_over_problems():
    d = np.array([0.25, -0.5, 0.75, 0.5, 0.5, 1.0, 0.0, 0.25])
    assert comparison.sign_flip(d) == pytest.approx(paired_test(np.zeros(8), d).p, abs=1e-12)
    many = np.random.default_rng(0).integers(-2, 4, 23) / 4
    assert comparison.sign_flip(many) == pytest.approx(paired_test(np.zeros(23), many).p, abs=0.01)  # random signs


@pytest.mark.parametrize("bad", [[], [np.nan], [[1.0]]])
def test_sign_flip_refuses_what_is_no_list_of_numbers(bad):
    with pytest.raises(ValueError, match="needs"):
        comparison.sign_flip(bad)


@pytest.mark.parametrize("n", [4, 6, 7])
@pytest.mark.parametrize("level", [0.05, 0.2, 0.5])
def test_the_smallest_difference_shown_is_where_the_test_turns(n, level):
    rng = np.random.default_rng(n)
    for sign in (1, -1):
        d = sign * abs(rng.normal(1, 2, n))
        least = comparison.smallest_shown(d, level)
        if 2 / 2**n > level:
            assert least is None
            continue
        scatter = d - d.mean()
        assert loop_p(scatter + sign * (least + 1e-6)) <= level
        assert least == 0 or loop_p(scatter + sign * (least - 1e-6)) > level


def test_seeds_needed_is_what_the_smallest_p_allows():
    for m in (1, 2, 3, 10, 40):
        n = comparison.seeds_needed(m)
        assert m * 2 / 2**n <= 0.05 < m * 2 / 2 ** (n - 1)


def test_holm_against_its_definition():
    rng = np.random.default_rng(3)
    for m in (1, 2, 5, 7):
        ps = rng.random(m).tolist()
        ranked = sorted(ps)
        want = {p: min(1.0, max((m - j) * ranked[j] for j in range(i + 1))) for i, p in enumerate(ranked)}
        assert comparison.holm(ps) == pytest.approx([want[p] for p in ps])
    assert comparison.holm([0.01, 0.01, 0.5]) == pytest.approx([0.03, 0.03, 0.5]) and comparison.holm([]) == []


def test_the_bootstrap_of_three_seeds_is_that_of_all_27_draws():
    values = [0.1, 0.2, 0.6]
    means = [np.mean(draw) for draw in itertools.product(values, repeat=3)]
    assert bootstrap(values) == pytest.approx(np.quantile(means, [0.025, 0.975], method="inverted_cdf"))


@pytest.mark.parametrize("module", [comparison, report_charts])
def test_examples(module):
    assert doctest.testmod(module).failed == 0
