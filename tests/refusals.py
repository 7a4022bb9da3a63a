"""What a mistake on the command line says, in a recipe that has none."""

from pathlib import Path

RECIPE = str(Path(__file__).parent / "sums.yaml")


def check_said(message, capsys):
    """``message`` stands in two lines at most, none of a traceback."""
    error = capsys.readouterr().err
    assert message in error and error.count("\n") <= 2 and "Traceback" not in error, error
