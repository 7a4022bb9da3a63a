"""The verdict on a completion."""

from grpojax.host.errors import UserError
from grpojax.rewards import pool, sandbox
from grpojax.rewards.answers.equality import compare, is_prose
from grpojax.rewards.answers.extract import BOX, MARKERS, extract_answer
from grpojax.rewards.answers.mathematics import is_calm, math_equal, math_parses
from grpojax.rewards.answers.spelling import normal_form, number


def check_gold(gold: str) -> None:
    """Raises `UserError` where a gold answer is empty or can be neither read as mathematics nor compared as text."""
    if not normal_form(gold):
        raise UserError(f"gold answer {gold[:80]!r} is empty")
    if number(normal_form(gold)) is None and not is_prose(gold) and not _bounded("math_parses", gold):
        raise UserError(f"gold answer {gold[:80]!r} cannot be read")


def check_answer(completion: str, gold: str, *, marker: str | None = None) -> bool:
    r"""Whether a completion's marked answer is the gold answer.

    Same spelling, the same number or, by the math-verify library, the same mathematics. It runs in a worker process
    where an answer might keep it longer. False too where there is no verdict, as that library fails or takes over ten
    seconds; `verdict` tells.

    Args:
      completion: the whole text; without a marked answer it is wrong.
      gold: the reference answer, bare or marked itself.
      marker: where the answer stands, as in `extract_answer`.

    Raises:
      UserError: the gold answer is empty.

    >>> check_answer("3 + 4 = 7\n#### 7", "7"), check_answer("I think 7", "7")
    (True, False)
    >>> check_answer(r"It is \boxed{\frac{1}{2}}", "0.5")
    True
    """
    return verdict(completion, gold, marker=marker) is True


def verdict(completion: str, gold: str, *, marker: str | None = None) -> bool | None:
    """`check_answer`, but None where it could not be computed."""
    gold = bare(gold)
    given = extract_answer(completion, marker)
    if given is None:
        return False
    decided = compare(given, gold)
    return decided if decided is not None else _bounded("math_equal", given, gold)


def bare(gold: str) -> str:
    """A gold answer without its marker; raises `UserError` where nothing is left."""
    found = extract_answer(gold) if BOX.search(gold) or any(m in gold for m in MARKERS) else gold
    if not found or not normal_form(found):
        raise UserError(f"gold answer {gold[:80]!r} is empty")
    return found


def _bounded(name: str, *answers: str) -> bool | None:
    """Calls `math_equal` or `math_parses`: here if that is soon done, else in a worker process; None if it fails."""
    function = {"math_equal": math_equal, "math_parses": math_parses}[name]
    if is_calm(*answers) or sandbox.in_worker():
        try:
            return function(*answers)
        except Exception:  # its own, and sympy's of every kind
            return None
    return pool.shared().call(function, *answers)
