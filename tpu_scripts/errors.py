"""What ends a command, and what may pass by itself."""

from __future__ import annotations


class Mistake(Exception):
    """The user's to mend: one line with the value and the remedy. Exit status 2."""


class Failure(Exception):
    """It did not work out, and trying again by itself will not help: one line. Exit status 1."""


class Passing(Exception):
    """A call that may work a little later: no answer, a torn connection, a service that is busy."""
