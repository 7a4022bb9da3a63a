"""What leaves CI has a guard that stays."""

import ast
from pathlib import Path

HERE = Path(__file__).parent


def functions():
    """Tests of all files as ``file.py::name``, with the source of their decorators."""
    for path in sorted(HERE.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(HERE).as_posix()}::{node.name}", node.decorator_list


def is_exhaustive(decorator):
    return ast.unparse(decorator).startswith("pytest.mark.exhaustive")


def test_a_test_that_leaves_ci_names_one_that_stays():
    decorators = dict(functions())
    left = {
        name: next(filter(is_exhaustive, given)) for name, given in decorators.items() if any(map(is_exhaustive, given))
    }
    assert left
    for name, mark in left.items():
        assert isinstance(mark, ast.Call) and len(mark.args) == 1, f"{name}: no guard is named"
        guard = ast.literal_eval(mark.args[0])
        assert guard in decorators and guard not in left, f"{name}: {guard} is not a test of CI"
