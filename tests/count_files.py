"""How much of grpojax a step of the quickstart goes through: ``python tests/count_files.py``.

Prints the number of files with a function that runs between drawing a batch and the end of its update, of these
functions, and of their lines, and for each file how many functions ran and which. A step is what happens from one line
of ``metrics.jsonl`` to the next, in a run that is warm. What jax traces is counted whenever that happens: its programs
are traced once and run in every step. The first line is of everything from the command to the saved checkpoint.
"""

import ast
import collections
import functools
import inspect
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
# Held-out problems and checkpoints are no part of a step.
ONLY_STEPS = (
    *("train.steps=4", "train.eval_every=0", "train.checkpoint_every=0"),
    *("data.validation=null", "data.test=null"),
)
FROM, TO = 2, 3  # the lines of metrics.jsonl between which a step is counted
COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")


class Counter:
    """Notes which functions of a folder run, in this thread and in those that start while it is active.

    Args:
      root: the folder.
      in_step: whether what runs now is of the step that is counted.

    Attributes:
      ran: names of the functions that ran in the step, by file.
      whole: of those that ran at any time.
      traced: of those that ran while jax traced them for a `jax.jit` that was made while this was active.
    """

    def __init__(self, root: Path, in_step: Callable[[], bool]):
        self.ran: dict[str, set[str]] = collections.defaultdict(set)
        self.traced: dict[str, set[str]] = collections.defaultdict(set)
        self.whole: dict[str, set[str]] = collections.defaultdict(set)
        self._root, self._in_step, self._tracing = f"{root.resolve()}/", in_step, threading.local()
        self._jit = jax.jit

    def __enter__(self) -> "Counter":
        jax.jit = self._jit_noted
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        jax.jit = self._jit

    def _jit_noted(self, function: Callable | None = None, **options):
        """`jax.jit` of a function that says when it is traced."""
        if function is None:
            return functools.partial(self._jit_noted, **options)

        @functools.wraps(function)
        def traced(*args, **kwargs):
            before, self._tracing.now = getattr(self._tracing, "now", False), True
            try:
                return function(*args, **kwargs)
            finally:
                self._tracing.now = before

        return self._jit(traced, **options)

    def _note(self, frame, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._root) or not code.co_flags & inspect.CO_OPTIMIZED:
            return  # the last is true of functions, and not of the bodies of modules and classes
        found = [self.whole]
        if getattr(self._tracing, "now", False):
            found.append(self.traced)
        elif self._in_step():
            found.append(self.ran)
        for each in found:
            names = each[code.co_filename.removeprefix(self._root)]
            if code.co_name not in COMPREHENSIONS:
                names.add(code.co_qualname)


def lines(path: Path) -> int:
    """Lines of a file; 0 where there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def size(root: Path, functions: Mapping[str, set[str]]) -> str:
    """Files, functions and their lines, from names of functions by file below ``root``. A line counts once."""
    seen = 0
    for file, names in functions.items():
        spans = [range(n.lineno, (n.end_lineno or 0) + 1) for name, n in defined(root / file) if name in names]
        seen += len({line for span in spans for line in span})
    return f"{len(functions)} files, {sum(map(len, functions.values()))} functions of {seen} lines"


def defined(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """The functions of a file by their qualified names, decorators left out."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", child
                yield from below(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                yield from below(child, f"{prefix}{child.name}.")
            else:
                yield from below(child, prefix)

    yield from below(ast.parse(path.read_text(encoding="utf-8")), "")


def main() -> int:
    """Counts the files of a step of the quickstart."""
    root = Path(__file__).parents[1] / "grpojax"
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "run", "metrics.jsonl")
        with Counter(root, lambda: FROM <= lines(metrics) < TO) as counter:
            from grpojax.cli import main as cli

            status = cli.main(["train", str(QUICKSTART), *ONLY_STEPS, f"run.dir={metrics.parent}"])
        if status or lines(metrics) < TO:
            print("the run wrote no metrics of a step", file=sys.stderr)
            return 1
    each, traced = len(counter.ran), len(counter.traced)
    functions = {file: counter.ran[file] | counter.traced[file] for file in {*counter.ran, *counter.traced}}
    print(f"from the command to the checkpoint: {size(root, counter.whole)}")
    print(f"{size(root, functions)} are of a step")
    print(f"{each} files run in each step, {traced} while jax traces")
    for file, names in sorted(functions.items()):
        print(f"{len(names):3} {file}: {', '.join(sorted(names))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
