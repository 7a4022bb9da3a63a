"""The exceptions whose message is for the user, and the check of a setting's range."""

import re
from typing import ClassVar


class UserError(ValueError):
    """A mistake that the user can fix. Its message has one or two lines: the given value and the remedy.

    The command line prints it without a traceback and exits with its status, 2.
    """

    status: ClassVar[int] = 2


class PassingError(UserError):
    """An error that the command did not cause: another start may succeed. The status is 1, as for any other failure."""

    status: ClassVar[int] = 1


def require(config: object, **ranges: str) -> None:
    """Raises `UserError` if an attribute of ``config`` is outside of its range.

    Args:
      config: a settings object; call this from its ``__post_init__``.
      ranges: attribute name to an interval in mathematical notation, ``"(0, 1]"`` or ``"[1, inf)"``; the value None
        passes.

    Example:
      >>> from types import SimpleNamespace
      >>> require(SimpleNamespace(top_p=1.5), top_p="(0, 1]")
      Traceback (most recent call last):
      grpojax.host.errors.UserError: top_p=1.5: must be over 0 and at most 1
    """
    for name, interval in ranges.items():
        value = getattr(config, name)
        opens, low, high, closes = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", interval).groups()  # pyrefly: ignore
        over, under = float(low), float(high)
        if value is None or (
            (value > over or (opens == "[" and value == over)) and (value < under or (closes == "]" and value == under))
        ):
            continue
        bounds = [] if low == "-inf" else [f"{'at least' if opens == '[' else 'over'} {low}"]
        bounds += [] if high == "inf" else [f"{'at most' if closes == ']' else 'under'} {high}"]
        raise UserError(f"{name}={value!r}: must be {' and '.join(bounds)}")
