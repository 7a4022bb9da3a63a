"""How good a model is on held-out problems, by the run's own rewards, with estimates and intervals.

``eval/reward`` and each reward by name for every run; accuracy, pass@k and majority votes where one of the rewards says
what is right. The estimates need only numpy. Modules that draw samples from a model are imported when they are used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from grpojax.evaluation.estimates import Comparison, bootstrap, majority_at_k, paired_test, pass_at_k
from grpojax.evaluation.judge import EvaluateConfig, Judge, judge_of

if TYPE_CHECKING:
    from grpojax.evaluation.attempts import Evaluator, evaluate
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
        table_of_sets,
        verdict,
    )

# Names of the modules that load flax and optax, or the libraries of the data.
_OF_MODULE = {
    "attempts": ("Evaluator", "evaluate"),
    "rewarded": ("columns_of", "submit"),
    "summary": (
        "BEST",
        "Attempt",
        "EvalConfig",
        "Sample",
        "by_problem",
        "headline",
        "means",
        "report",
        "summarize",
        "table",
        "table_of_sets",
        "verdict",
    ),
}
_MODULE_OF = {name: module for module, names in _OF_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


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
    "table_of_sets",
    "verdict",
]
