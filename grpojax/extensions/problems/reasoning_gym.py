"""The procedural tasks of reasoning-gym (arXiv:2505.24760) as problems, and its scores as the reward.

`Attempts` is an environment in which a wrong answer may be followed by another one.

Runs offline; needs the extra ``reasoning-gym``.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from grpojax.extensions.problems.reasoning import without_order
from grpojax.host.errors import UserError
from grpojax.rewards.answers import extract_answer

with contextlib.suppress(ImportError):  # here, so that a worker has it before its limits of time and memory hold
    import reasoning_gym  # pyrefly: ignore

# Task i of seed s is drawn with the seed s + i, so that neighbouring seeds have all but one task in common: ours are
# this far apart. They end where numpy's do, at 2^32.
APART, MOST_SEED, MOST_SIZE = 1_000_003, 4_000, 1_000_000
SUMS = ("chain_sum", "decimal_chain_sum")  # families in which the order of the terms makes no other problem
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Task:
    """What it takes to score an answer: the column ``task`` of a row.

    Attributes:
      family, options: of its data set; the options as JSON.
      entry: question, answer and what else the family knows of it.
    """

    family: str
    options: str
    entry: Mapping[str, Any]

    def fingerprint(self) -> str:
        """What counts in the fingerprint of the data. The order of the sets in some entries differs by process."""
        return f"{self.family} {self.options}: {self.entry['question']} {self.entry['answer']}"


def rows(family: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Problems of one of reasoning-gym's families, the same ones in every process and on every host.

    Args:
      family: such as "chain_sum".
      options: ``size`` (1000 unless given) and ``seed`` (0 to 4000; 0 unless given; problems for evaluation need
        another one than those for training), and whatever the family's own config takes. Where two seeds draw the same
        problem, the run leaves it out of the part that is trained on (`grpojax.data.problems.Known`).

    Returns:
      Rows of ``question``, ``answer`` and ``task``; without ``answer`` where a family has no single right one, and
      ``data.answer`` must be null.

    Raises:
      UserError: the package is missing, or has no such family or option, or refuses a value.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(f"reasoning_gym:{family} needs the package: pip install 'grpojax[reasoning-gym]'")
    size, seed = options.get("size", 1000), options.get("seed", 0)
    for name, value, least, most in (("size", size, 1, MOST_SIZE), ("seed", seed, 0, MOST_SEED)):
        if type(value) is not int or not least <= value <= most:
            raise UserError(f"reasoning_gym:{family}: {name}={value!r}: must be an integer from {least} to {most}")
    drawn = {**options, "size": size, "seed": seed * APART}
    try:
        asked = json.dumps([family, drawn])
    except TypeError as e:  # such as a date, which YAML has and JSON has not
        raise UserError(f"reasoning_gym:{family}: an option is no plain value: {e}") from None
    # Some families go through sets, whose order Python draws anew in every process unless PYTHONHASHSEED is set.
    child = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import _draw_for_parent; _draw_for_parent()"],
        input=asked.encode(),
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"drawing its problems ended with exit status {child.returncode}"
        raise UserError(f"reasoning_gym:{family}: {last}")
    made = pickle.loads(child.stdout)
    if isinstance(made, str):
        raise UserError(f"reasoning_gym:{family}: {made}")
    frozen = json.dumps(drawn, sort_keys=True)
    return [
        {"question": e["question"]}
        | ({} if e["answer"] is None else {"answer": str(e["answer"])})
        | {"task": Task(family, frozen, e)}
        for e in made
    ]


def content(family: str, question: str) -> str:
    """What a question of a family asks: of a chain of sums and differences the same for all orders of its terms.

    Example:
      >>> content("chain_sum", "12 + 9 =") == content("chain_sum", "9 + 12 ="), content("lcm", "6 + 4")
      (True, '6 + 4')
    """
    return without_order(question) if family in SUMS else question


def score(
    prompts: Sequence[str],
    completions: Sequence[str],
    tokens: Sequence[Sequence[int]],
    *,
    task: Sequence[Task | None],
    marker: str | None = None,
    partial: bool = True,
    **columns: Any,
) -> list[float | None]:
    r"""The family's own score of each marked answer, in [0, 1]; 0 without one.

    Args:
      task: the column of that name. A sample of a row without one is invalid.
      marker: where the answer stands: ``"<answer>"`` for the text between that tag and its end, over several lines
        if need be, or as in `grpojax.rewards.answers.extract_answer`; None takes the tag, then any of those.
      partial: whether an answer that is not wholly right counts in part. Most families give a right answer among
        other text its share of the characters, so that "17" for "7" is worth a half; False gives that nothing.
    """
    return [
        None if t is None else _score(t, _marked(text, marker), partial)
        for t, text in zip(task, completions, strict=True)
    ]


def _score(task: Task, answer: str | None, partial: bool) -> float:
    """Some families raise on an answer that they cannot parse. It is wrong, not without a verdict: a sample that is
    invalid would weigh nothing, and the policy would never learn to keep to the format."""
    if answer is None:
        return 0.0
    dataset = _dataset(task.family, task.options)
    try:
        value = float(dataset.score_answer(answer, task.entry))
    except MemoryError:
        raise
    except Exception:
        return 0.0
    return value if partial or value >= 1 else 0.0


def _marked(completion: str, marker: str | None) -> str | None:
    if marker in (None, "<answer>"):
        tagged = TAGGED.findall(completion)
        if tagged or marker:
            return tagged[-1].strip() or None if tagged else None
    return extract_answer(completion, marker)


class Attempts:
    """A problem with several attempts: an environment with one tool, which says whether an answer is right.

    Args:
      attempts: after so many answers the episode is over.
      partial: as in `score`: whether an answer that is not wholly right counts in part.
      discount: factor of the reward for each attempt before the last one.
    """

    deterministic = True

    def __init__(self, attempts: int = 3, partial: bool = False, discount: float = 1.0):
        self._most, self._partial, self._discount = attempts, partial, discount

    def reset(self, task: Task) -> None:
        """Begins a problem, of a row of the source ``reasoning_gym:``."""
        if not isinstance(task, Task):
            raise UserError(f"environment reasoning_gym: a row's task is {type(task).__name__}, of another source")
        self._task, self._made, self._reward = task, 0, 0.0
        self.done = False

    def submit(self, answer: str) -> str:
        """Checks an answer.

        Args:
            answer: the answer alone, without an explanation
        """
        if self.done:
            raise ValueError("there is no attempt left")
        value = _score(self._task, answer.strip() or None, self._partial)
        self._reward = value * self._discount**self._made
        self._made += 1
        self.done = value >= 1 or self._made >= self._most
        return "Right." if value >= 1 else "Wrong." if self.done else "Wrong, try again."

    def get_reward(self) -> float:
        """The score of the last answer; 0 without one."""
        return self._reward


@functools.lru_cache(maxsize=256)
def _dataset(family: str, options: str) -> Any:
    return reasoning_gym.create_dataset(family, **json.loads(options))


def _draw(family: str, options: Mapping[str, Any]) -> list[dict[str, Any]] | str:
    """The entries of a data set, or what is wrong with its name or its options."""
    from reasoning_gym.factory import DATASETS  # pyrefly: ignore

    if family not in DATASETS:
        close = difflib.get_close_matches(family, DATASETS, n=1)
        return f"reasoning-gym has no such family{f'; did you mean {close[0]!r}?' if close else ''}"
    known = [field.name for field in dataclasses.fields(DATASETS[family][1])]
    if unknown := sorted(set(options) - set(known)):
        return f"unknown option {unknown[0]!r}; it has {', '.join(known)}"
    try:
        return list(reasoning_gym.create_dataset(family, **options))
    except Exception as e:  # each family checks its options with assertions of its own
        return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


def _draw_for_parent() -> None:
    """Reads a family and its options from standard input and writes what `_draw` makes of them."""
    with contextlib.redirect_stdout(sys.stderr):
        made = _draw(*json.load(sys.stdin))
    sys.stdout.buffer.write(pickle.dumps(made))
