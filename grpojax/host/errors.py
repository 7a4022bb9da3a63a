"""The one exception that a user's mistake raises."""


class UserError(ValueError):
    """A mistake that the user can mend. Its message is one or two lines: the value it got and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """
