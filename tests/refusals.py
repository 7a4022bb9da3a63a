"""What a mistake on the command line says."""

from pathlib import Path

QUICKSTART = str(Path(__file__).parents[1] / "configs" / "quickstart.yaml")


def check_said(message, capsys):
    """``message`` stands in two lines at most, none of a traceback."""
    error = capsys.readouterr().err
    assert message in error and error.count("\n") <= 2 and "Traceback" not in error, error
