"""How good a model is on held-out problems: what the run's own rewards say of it, and estimates with intervals.

``eval/reward`` and each reward by name for every run; accuracy, pass@k and majority votes where one of the rewards says
what is right.
"""

from grpojax.evaluation.attempts import Evaluator, evaluate
from grpojax.evaluation.estimates import Comparison, bootstrap, majority_at_k, paired_test, pass_at_k
from grpojax.evaluation.judge import EvaluateConfig, Judge, judge_of
from grpojax.evaluation.rewarded import columns_of, submit
from grpojax.evaluation.summary import (
    BEST,
    Attempt,
    EvalConfig,
    Sample,
    by_problem,
    headline,
    means,
    report,
    summarize,
    table,
    verdict,
)

__all__ = [
    "BEST",
    "Attempt",
    "Comparison",
    "EvalConfig",
    "EvaluateConfig",
    "Evaluator",
    "Judge",
    "Sample",
    "bootstrap",
    "by_problem",
    "columns_of",
    "evaluate",
    "headline",
    "judge_of",
    "majority_at_k",
    "means",
    "paired_test",
    "pass_at_k",
    "report",
    "submit",
    "summarize",
    "table",
    "verdict",
]
