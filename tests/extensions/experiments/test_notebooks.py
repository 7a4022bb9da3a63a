"""The notebook of the experiments runs, and what is saved for it holds together."""

import json

import pytest
from notebook_files import FOLDER, printed_by
from scipy import stats

REPORT = json.loads((FOLDER / "results" / "controls.json").read_text())


OWN = [c for c in REPORT["comparisons"] if "control" in c["roles"]]


@pytest.mark.slow
def test_experiments():
    """Read from saved results: six claims, each with what was measured."""
    printed = printed_by("experiments.ipynb")
    assert printed.count("claimed: ") == printed.count("measured: accuracy") == printed.count("so: ") == len(OWN) == 6
    for c in OWN:
        interval = f"{c['low']:+.3f} to {c['high']:+.3f}"
        said = "no difference of 0.05 or more" if c["verdict"] == "equivalent" else c["verdict"]
        assert f"measured: accuracy {c['difference']:+.3f} ({interval}), {said}\n" in printed


def test_saved_verdicts_follow_from_the_saved_values():
    """By scipy's t tests and Holm's procedure with two hypotheses a comparison, of which one at most is true."""
    values, margin = {r["method"]: r["values"] for r in REPORT["results"]}, REPORT["margin"]
    ps = {}
    for c in OWN:
        d = [values[c["method"]][str(seed)] - values[c["other"]][str(seed)] for seed in c["seeds"]]
        test = stats.ttest_1samp(d, 0)
        assert (c["low"], c["high"]) == pytest.approx(test.confidence_interval(), abs=1e-5)
        ends = ((-margin, "greater"), (margin, "less"))
        ps[c["method"], "p_corrected"] = test.pvalue
        ps[c["method"], "p_equivalent_corrected"] = max(
            stats.ttest_1samp(d, end, alternative=side).pvalue for end, side in ends
        )
    corrected, least = {}, 0.0
    for rank, key in enumerate(sorted(ps, key=ps.__getitem__)):
        least = corrected[key] = max(least, min(1.0, ps[key] * min(len(OWN), len(ps) - rank)))
    for c in OWN:
        differs, equal = (corrected[c["method"], name] for name in ("p_corrected", "p_equivalent_corrected"))
        assert (c["p_corrected"], c["p_equivalent_corrected"]) == pytest.approx((differs, equal), rel=1e-2, abs=1e-6)
        side = "better" if c["difference"] > 0 else "worse"
        assert c["verdict"] == ("equivalent" if equal <= 0.05 else side if differs <= 0.05 else "inconclusive")
