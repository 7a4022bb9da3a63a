"""Errors that end a command, and errors that may pass by themselves."""

from __future__ import annotations


class Mistake(Exception):
    """An error that the user can fix: one line with the value and the remedy. Exit status 2."""


class Failure(Exception):
    """A failure that another try will not fix: one line. Exit status 1."""


class Passing(Exception):
    """A call that may work later: no answer, a broken connection, a busy service."""
