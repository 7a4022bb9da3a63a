r"""Answers in completions: found, brought to one spelling, and compared with a gold answer.

A comparison stops at the first step that decides: the same spelling; units that differ; two numbers; text; the values
of what `reading` can read; and last the math-verify library, for integrals and the like, which may run for ever.
Whoever calls `math_equal` must be able to stop it; `check_answer` sees to that itself.
"""

from grpojax.rewards.answers.check import bare, check_answer, check_gold, verdict
from grpojax.rewards.answers.equality import ballot, compare, is_prose
from grpojax.rewards.answers.extract import MARKERS, extract_answer
from grpojax.rewards.answers.mathematics import math_equal, math_parses
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
    "is_prose",
    "math_equal",
    "math_parses",
    "normal_form",
    "number",
    "same_spelling",
    "verdict",
]
