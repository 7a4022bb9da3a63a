"""The notebook and the page of the experiments have the verdicts that follow from the outcomes of the runs."""

import numpy as np
import pytest
from notebook_files import FOLDER, printed_by
from scipy import stats

PAGE = FOLDER.parent / "docs/experiments.md"


@pytest.fixture
def verdicts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    from configs.experiments import verdicts

    return verdicts


@pytest.fixture
def rows(verdicts):
    """The comparisons of all registered rows that are whole."""
    return verdicts.whole_rows(verdicts.kept_in(FOLDER / "results" / "registered.jsonl"))


@pytest.mark.slow
def test_the_notebook_has_the_verdicts_of_all_whole_rows(verdicts, rows):
    printed = printed_by("experiments.ipynb")
    assert all(line in printed for found in rows.values() for line in verdicts.table(found))
    assert all(f"\n{row:<14}" in f"\n{printed}" for row in verdicts.ROWS)
    for columns, count in ((7, 8), (13, 5)):  # pass@k of the start, Δ(x) along training
        lines = [line for line in printed.splitlines() if line.startswith("| ") and line.count("|") == columns + 1]
        assert len(lines) == count and all(line in PAGE.read_text() for line in lines)


def check_verdicts(compared, differences, margin):
    """Of one family, by scipy's t tests and Holm's procedure with two hypotheses a comparison, of which one at most is
    true. Differences that are all 0 have no spread; that every seed lies within the margin has chance 1/2 a seed."""
    ps = {}
    for n, (c, d) in enumerate(zip(compared, differences, strict=True)):
        if not np.any(d):
            assert (c["low"], c["high"]) == (None, None)
            ps[n, "p_corrected"], ps[n, "p_equivalent_corrected"] = 1.0, 0.5 ** len(d)
            continue
        test = stats.ttest_1samp(d, 0)
        assert (c["low"], c["high"]) == pytest.approx(test.confidence_interval(), abs=1e-5)
        ends = ((-margin, "greater"), (margin, "less"))
        ps[n, "p_corrected"] = test.pvalue
        ps[n, "p_equivalent_corrected"] = max(stats.ttest_1samp(d, end, alternative=side).pvalue for end, side in ends)
    corrected, least = {}, 0.0
    for rank, key in enumerate(sorted(ps, key=ps.__getitem__)):
        least = corrected[key] = max(least, min(1.0, ps[key] * min(len(compared), len(ps) - rank)))
    for n, c in enumerate(compared):
        differs, equal = (corrected[n, name] for name in ("p_corrected", "p_equivalent_corrected"))
        assert (c["p_corrected"], c["p_equivalent_corrected"]) == pytest.approx((differs, equal), rel=1e-2, abs=1e-6)
        side = "better" if c["difference"] > 0 else "worse"
        assert c["verdict"] == ("equivalent" if equal <= 0.05 else side if differs <= 0.05 else "inconclusive")


def test_the_page_has_the_verdicts_that_follow_from_the_noted_outcomes(verdicts, rows):
    page = PAGE.read_text()
    assert {"rare", "likelihood"} <= rows.keys()
    for row, found in rows.items():
        for number in {c["family"] for c in found}:
            family = [c for c in found if c["family"] == number]
            differences = [np.subtract(*([v[s] for s in sorted(v)] for v in c["values"])) for c in family]
            check_verdicts(family, differences, family[0]["margin"])
        missing = [line for line in verdicts.table(found) if line not in page]
        assert not missing, (row, missing)
