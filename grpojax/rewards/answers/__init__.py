r"""Answers in completions: found, brought to one spelling, and compared with a gold answer.

A comparison stops at the first step that decides: the same spelling; units that differ; two numbers; words; and last
the math-verify library, which knows fractions, sets, intervals, equations and LaTeX, but may run for ever on an
answer such as ``10^{10^{9}}``. Whoever calls `math_equal` must be able to stop it; `check_answer` sees to that itself.
"""

from grpojax.rewards.answers.check import bare, check_answer, check_gold, verdict
from grpojax.rewards.answers.equality import ballot, compare, is_prose
from grpojax.rewards.answers.extract import MARKERS, extract_answer
from grpojax.rewards.answers.mathematics import is_calm, math_equal, math_parses
from grpojax.rewards.answers.spelling import clean, normal_form, number, same_spelling

__all__ = [
    "MARKERS",
    "ballot",
    "bare",
    "check_answer",
    "check_gold",
    "clean",
    "compare",
    "extract_answer",
    "is_calm",
    "is_prose",
    "math_equal",
    "math_parses",
    "normal_form",
    "number",
    "same_spelling",
    "verdict",
]
