"""Statistics over seeds, against scipy.stats and against their definitions."""

import numpy as np
import pytest
from scipy import stats

from grpojax.extensions.experiments import comparison
from grpojax.extensions.experiments.comparison import BETTER, EQUIVALENT, OPEN, WORSE, verdicts


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_intervals_and_p_values_are_those_of_scipy(n):
    rng = np.random.default_rng(n)
    for d in rng.normal(0.3, 1, (5, n)):
        want = stats.ttest_1samp(d, 0.0)
        interval = want.confidence_interval(0.95)
        assert comparison.t_interval(d) == pytest.approx((interval.low, interval.high))
        assert comparison.p_difference(d) == pytest.approx(want.pvalue) == comparison.p_difference(-d)
        sides = stats.ttest_1samp(d, -0.7, alternative="greater"), stats.ttest_1samp(d, 0.7, alternative="less")
        assert comparison.p_equivalent(d, 0.7) == pytest.approx(max(side.pvalue for side in sides))


def test_intervals_of_many_at_once():
    d = np.random.default_rng(0).normal(size=(7, 11, 3))
    low, high = comparison.t_interval(d)
    assert low.shape == high.shape == (7, 11)
    assert (low[2, 5], high[2, 5]) == comparison.t_interval(d[2, 5])


@pytest.mark.parametrize("n", [2, 3, 8])
def test_differences_without_a_spread_show_no_more_than_their_signs(n):
    """The t statistic of equal differences is infinite; with rounding it is as good as that."""
    for d in ([0.25] * n, [0.1 + 0.2 - 0.3 + 0.25, *[0.25] * (n - 1)]):
        assert np.isnan(comparison.t_interval(d)).all()
        assert comparison.p_difference(d) == 2 / 2**n
        assert comparison.p_equivalent(d, 0.3) == 1 / 2**n and comparison.p_equivalent(d, 0.2) == 1
    assert comparison.p_difference([0.0] * n) == 1 and comparison.p_equivalent([0.0] * n, 0.02) == 1 / 2**n
    (found,) = verdicts([[0.25] * n])
    assert (found.low, found.shown, found.verdict) == (None, None, BETTER if 2 / 2**n <= 0.05 else OPEN)


@pytest.mark.parametrize("bad", [[], [0.1], [0.1, np.nan], [[1.0, 2.0]]])
def test_what_is_no_list_of_differences_is_refused(bad):
    with pytest.raises(ValueError, match="needs"):
        comparison.p_difference(bad)


@pytest.mark.parametrize("margin", [0.0, -0.1, np.nan])
def test_a_margin_is_over_0(margin):
    with pytest.raises(ValueError, match="must be over 0"):
        comparison.p_equivalent([0.1, 0.2], margin)


def test_holm_against_its_definition():
    rng = np.random.default_rng(3)
    for m in (1, 2, 5, 7):
        ps = rng.random(m).tolist()
        ranked = sorted(ps)
        for most in (1, 3, m):
            factors = [min(most, m - j) for j in range(m)]
            want = {p: min(1.0, max(factors[j] * ranked[j] for j in range(i + 1))) for i, p in enumerate(ranked)}
            assert comparison.holm(ps, most) == pytest.approx([want[p] for p in ps])
    assert comparison.holm([0.01, 0.01, 0.5]) == pytest.approx([0.03, 0.03, 0.5]) and comparison.holm([]) == []


def test_the_smallest_difference_shown_is_where_the_verdict_turns():
    rng = np.random.default_rng(1)
    others = [rng.normal(0, 1, 5) for _ in range(2)]  # p-values over 0.05
    scatter = rng.normal(0, 1, 5)
    scatter -= scatter.mean()
    least = verdicts([scatter + 0.1, *others])[0].shown
    for sign, verdict in ((1, BETTER), (-1, WORSE)):
        assert verdicts([scatter + sign * least * 1.001, *others])[0].verdict == verdict
        assert verdicts([scatter + sign * least * 0.999, *others])[0].verdict == OPEN


def test_a_verdict_is_corrected_for_the_others():
    rng = np.random.default_rng(2)
    d = [0.2, 0.5, 0.6, 0.4, 0.8]
    one, many = verdicts([d])[0], verdicts([d, *rng.normal(0, 1, (11, 5))])[0]
    assert one.p == many.p and one.p_corrected == one.p <= 0.05 and one.verdict == BETTER
    assert many.p_corrected == pytest.approx(12 * many.p) and many.verdict == OPEN


def test_a_difference_within_the_margin_is_equivalent_however_sure_it_is():
    d = [0.010, 0.011, 0.009, 0.010, 0.012]
    assert verdicts([d])[0].verdict == BETTER and verdicts([d], margin=0.05)[0].verdict == EQUIVALENT
    assert verdicts([d], margin=0.005)[0].verdict == BETTER


def test_one_seed_tests_nothing():
    one, two = verdicts([[0.5], [0.5, 0.6]], margin=0.1)
    assert (one.p, one.p_equivalent, one.p_corrected, one.low, one.verdict) == (None, None, None, None, OPEN)
    assert two.p_corrected == two.p  # not corrected for what is not tested
    assert verdicts([]) == []
