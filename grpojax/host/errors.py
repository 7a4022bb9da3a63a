"""The exceptions whose message is for the user, and the checks of a setting's range and of a path."""

import errno
import os
import re
import reprlib
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


def check_path(text: str) -> None:
    """Raises `UserError` for a local path that no file can have: too long, or with characters that no name has.

    Example:
      >>> check_path("runs/a\\0b")
      Traceback (most recent call last):
      grpojax.host.errors.UserError: 'runs/a\\x00b' cannot be a path: embedded null byte
    """
    try:
        os.lstat(text)
    except ValueError as e:  # UnicodeEncodeError is one
        why = getattr(e, "reason", e)
    except OSError as e:
        if e.errno != errno.ENAMETOOLONG:
            return  # what is made of it says what is the matter
        why = e.strerror
    else:
        return
    shown = reprlib.Repr()
    shown.maxstring = 80
    raise UserError(f"{shown.repr(text)} cannot be a path: {why}")
