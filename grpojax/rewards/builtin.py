r"""The built-in rewards: frozen dataclasses whose fields are their options.

Each is called like a reward function, ``reward(prompts, completions, tokens, **columns)``, and returns the same.
"""

import abc
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from grpojax.host.errors import UserError, require
from grpojax.rewards import answers, steps

Texts = Sequence[str]  # [N]
Ids = Sequence[Sequence[int]]  # [N], ragged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward(abc.ABC):
    """What all have in common.

    Attributes:
      isolated: whether a call may hang or take much memory, so that it runs in a worker process.
      needs_gold: whether the data must have reference answers.
      needs_pieces: whether it reads the text of each token, as the column ``pieces``.
      reads_text: whether it reads the text of a completion.
    """

    isolated: ClassVar[bool] = False
    needs_gold: ClassVar[bool] = False
    needs_pieces: ClassVar[bool] = False
    reads_text: ClassVar[bool] = True

    @abc.abstractmethod
    def __call__(
        self, prompts: Texts, completions: Texts, tokens: Ids, **columns: Any
    ) -> Sequence[float | None | list[tuple[int, float]]]:
        """The rewards of the samples; of one whose steps have rewards, ``(token end, reward)`` of each step."""

    def check_gold(self, gold: str) -> None:  # noqa: B027  most rewards take any
        """Raises `UserError` for a gold answer that this reward cannot judge by."""

    def at_once(self, completion: str, gold: str | None) -> float | None:
        """The reward where a look is enough; None where it takes a call. Only for rewards that are isolated."""
        return None

    def looks_for(self) -> str:
        """The text that it looks for in completions, as far as it is known; "" for none."""
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marked(Reward):
    r"""Rewards that look for a marked answer.

    Attributes:
      marker: where the answer stands: ``"####"``, ``'\boxed{}'``, any text; None takes any of the known ones.
    """

    marker: str | None = None

    def __post_init__(self):
        if self.marker is not None and not self.marker.strip():
            raise UserError(f"marker={self.marker!r}: give the text before an answer, or null for the known ones")

    def looks_for(self) -> str:
        return self.marker or ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathAnswer(Marked):
    r"""1 if the marked answer equals the reference answer as mathematics, otherwise 0 (`answers.check_answer`).

    A sample for which math-verify fails is invalid.

    Attributes:
      marker: where the answer stands: ``"####"``, ``'\boxed{}'``, any text; None takes any of the known ones.
    """

    isolated: ClassVar[bool] = True
    needs_gold: ClassVar[bool] = True

    def __call__(
        self, prompts: Texts, completions: Texts, tokens: Ids, *, gold: Texts, **columns: Any
    ) -> list[float | None]:
        return [self._judge(text, want) for text, want in zip(completions, gold, strict=True)]

    def _judge(self, completion: str, gold: str) -> float:
        given, known = answers.extract_answer(completion, self.marker), self.at_once(completion, gold)
        if given is None or known is not None:
            return known or 0.0
        return float(answers.math_equal(given, answers.bare(gold)))

    def at_once(self, completion: str, gold: str | None) -> float | None:
        given = answers.extract_answer(completion, self.marker)
        if given is None:
            return 0.0
        decided = answers.compare(given, answers.bare(gold or ""))
        return None if decided is None else float(decided)

    def check_gold(self, gold: str) -> None:
        answers.check_gold(answers.bare(gold))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(Marked):
    """1 if the marked answer is the reference answer up to spelling (`answers.normal_form`), otherwise 0.

    Attributes:
      marker: as in `MathAnswer`.
    """

    needs_gold: ClassVar[bool] = True

    def __call__(
        self, prompts: Texts, completions: Texts, tokens: Ids, *, gold: Texts, **columns: Any
    ) -> list[float | None]:
        given = (answers.extract_answer(text, self.marker) for text in completions)
        return [
            float(g is not None and answers.same_spelling(g, answers.bare(want)))
            for g, want in zip(given, gold, strict=True)
        ]

    def check_gold(self, gold: str) -> None:
        answers.bare(gold)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerFormat(Marked):
    """1 if a completion marks an answer at all, otherwise 0.

    Attributes:
      marker: as in `MathAnswer`.
    """

    def __call__(self, prompts: Texts, completions: Texts, tokens: Ids, **columns: Any) -> list[float | None]:
        return [float(answers.extract_answer(text, self.marker) is not None) for text in completions]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format(Reward):
    """1 if the whole completion matches a regular expression, otherwise 0.

    Attributes:
      pattern: a regular expression in Python's syntax; a dot matches a line break too.
    """

    pattern: str
    isolated: ClassVar[bool] = True  # a pattern can take exponential time

    def __post_init__(self):
        try:
            re.compile(self.pattern, re.DOTALL)
        except (re.error, RecursionError, OverflowError) as e:
            raise UserError(f"pattern={self.pattern!r}: not a regular expression: {e}") from None

    def __call__(self, prompts: Texts, completions: Texts, tokens: Ids, **columns: Any) -> list[float | None]:
        pattern = re.compile(self.pattern, re.DOTALL)
        return [float(pattern.fullmatch(text) is not None) for text in completions]

    def looks_for(self) -> str:
        literal = re.sub(r"\\([^A-Za-z0-9])", r"\1", self.pattern)
        return re.sub(r"\([^()]*\)[?*]", "", literal)  # without what may be missing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Marked):
    """Multiple choice: 1 if the marked answer is the reference letter, otherwise 0.

    ``B``, ``(b)``, ``B.`` and ``B) a dog`` are the letter B; ``B dogs`` is not.

    Attributes:
      marker: as in `MathAnswer`.
      letters: the possible choices.
    """

    letters: str = "ABCDEFGHIJ"
    needs_gold: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if len(set(self.letters)) < 2 or not re.fullmatch("[A-Z]+", self.letters):
            raise UserError(f"letters={self.letters!r}: give two capital letters or more, such as ABCD")

    def __call__(
        self, prompts: Texts, completions: Texts, tokens: Ids, *, gold: Texts, **columns: Any
    ) -> list[float | None]:
        given = (answers.extract_answer(text, self.marker) for text in completions)
        return [
            float(g is not None and self._letter(g) is not None and self._letter(g) == self._letter(answers.bare(want)))
            for g, want in zip(given, gold, strict=True)
        ]

    def _letter(self, answer: str) -> str | None:
        m = re.match(r"\(?([A-Za-z])(?:\)?$|\)|[.:])", answers.clean(answer[:300]))
        return m[1].upper() if m and m[1].upper() in self.letters else None

    def check_gold(self, gold: str) -> None:
        if self._letter(answers.bare(gold)) is None:
            raise UserError(f"gold answer {gold[:80]!r} is none of the letters {self.letters}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftOverlong(Reward):
    """Length in tokens: 0 up to ``max_tokens - buffer``, then it falls linearly to ``-factor`` at ``max_tokens``.

    The length of an episode has what its environment answered (the column ``episode_tokens``), as the limit has.
    DAPO's soft overlong punishment, arXiv:2503.14476, eq. 13: `grpojax.allocation.overlong_penalty`. The paper's factor
    is 1 for a correctness of 1 or -1. For one of 1 or 0, 0.5 keeps the proportion: with 1, a right sample at the limit
    has the reward of a wrong one.

    >>> reward = SoftOverlong(max_tokens=100, buffer=20, factor=1.0)
    >>> [round(r, 6) for r in reward([""] * 4, [""] * 4, [range(n) for n in (80, 81, 90, 101)])]
    [0.0, -0.05, -0.5, -1.0]
    """

    max_tokens: int
    buffer: int
    factor: float = 0.5
    reads_text: ClassVar[bool] = False

    def __post_init__(self):
        require(self, factor="(0, inf)")
        if not 1 <= self.buffer <= self.max_tokens:
            raise UserError(f"buffer={self.buffer}: must be between 1 and max_tokens={self.max_tokens}")

    def __call__(self, prompts: Texts, completions: Texts, tokens: Ids, **columns: Any) -> list[float | None]:
        # Here, since workers import this module and must not import jax; they never call this one.
        from grpojax.allocation import overlong_penalty

        lengths = np.array(columns.get("episode_tokens", [len(ids) for ids in tokens]), np.int32)
        return (self.factor * np.asarray(overlong_penalty(lengths, self.max_tokens, self.buffer))).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetition(Reward):
    """Minus the share of a completion's token n-grams that occurred before: 0 without repetition, near -1 in a loop.

    Attributes:
      ngram: n, the number of tokens of an n-gram.

    >>> Repetition(ngram=2)([""], [""], [[1, 2, 1, 2, 3]])
    [-0.25]
    """

    ngram: int = 20
    reads_text: ClassVar[bool] = False

    def __post_init__(self):
        require(self, ngram="[1, inf)")

    def __call__(self, prompts: Texts, completions: Texts, tokens: Ids, **columns: Any) -> list[float | None]:
        return [self._share(ids) for ids in tokens]

    def _share(self, ids: Sequence[int]) -> float:
        grams = [tuple(ids[i : i + self.ngram]) for i in range(len(ids) - self.ngram + 1)]
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Equations(Reward):
    """A reward for each step with equations: 1 if all its equations hold, otherwise 0.

    For a variant that learns from rewards of steps (``grpo_process``). A step without an equation has no reward of its
    own (`grpojax.rewards.steps.check_equations`).

    Attributes:
      separator: what ends a step (`grpojax.rewards.steps.split_steps`).

    >>> Equations()([""], [""], [[0] * 5], pieces=[["1+1=2", ".", chr(10), "so 2*3", "=5"]])
    [[(3, 1.0), (5, 0.0)]]
    """

    separator: str = "\n"
    needs_pieces: ClassVar[bool] = True
    reads_text: ClassVar[bool] = False

    def __post_init__(self):
        if not self.separator:
            raise UserError("separator='': give the text that ends a step")

    def __call__(
        self, prompts: Texts, completions: Texts, tokens: Ids, *, pieces: Sequence[Texts], **columns: Any
    ) -> list[list[tuple[int, float]]]:
        return [self._judge(of_sample) for of_sample in pieces]

    def _judge(self, pieces: Texts) -> list[tuple[int, float]]:
        each = [(end, steps.check_equations(text)) for end, text in steps.split_steps(pieces, self.separator)]
        return [(end, float(holds)) for end, holds in each if holds is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Follows(Reward):
    r"""1 if a completion's steps lead to its own answer, right or wrong, otherwise 0.

    The steps are all lines before the answer, each an ``a + b = c`` that begins with the result of the one before it
    (`grpojax.rewards.steps.chain_results`). They lead to the last result and to the list of all results, such as
    ``8, 6``. An answer without steps gets 0. It is meant for a weight of 0, to measure how often answers do not follow
    from the reasoning before them.

    Attributes:
      marker: the text before the answer.
      arithmetic: whether the result of each step must also be right.

    >>> texts = ["3 + 4 = 8\n8 - 2 = 6\n## Answer: 6", "3 + 4 = 7\n## Answer: 9", "## Answer: 7"]
    >>> Follows()([""] * 3, texts, [[]] * 3), Follows(arithmetic=True)([""], texts[:1], [[]])
    ([1.0, 0.0, 0.0], [0.0])
    """

    marker: str = "## Answer:"
    arithmetic: bool = False

    def __post_init__(self):
        if not self.marker.strip():
            raise UserError(f"marker={self.marker!r}: give the text before an answer")

    def __call__(self, prompts: Texts, completions: Texts, tokens: Ids, **columns: Any) -> list[float | None]:
        return [self._judge(text) for text in completions]

    def _judge(self, completion: str) -> float:
        reasoning, _, _ = completion.rpartition(self.marker)
        results = steps.chain_results(reasoning, self.arithmetic)
        given = answers.extract_answer(completion, self.marker)
        if given is None or not results:
            return 0.0
        return float(any(answers.same_spelling(given, x) for x in (str(results[-1]), ", ".join(map(str, results)))))

    def looks_for(self) -> str:
        return self.marker


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment(Reward):
    """What ``get_reward()`` of an episode's environment returned; a sample without is invalid.

    >>> Environment()([""] * 2, [""] * 2, [[]] * 2, environment_reward=[0.5, None])
    [0.5, None]
    """

    reads_text: ClassVar[bool] = False

    def __call__(
        self,
        prompts: Texts,
        completions: Texts,
        tokens: Ids,
        *,
        environment_reward: Sequence[float | None],
        **columns: Any,
    ) -> list[float | None]:
        return list(environment_reward)


REWARDS: dict[str, type[Reward]] = {
    "math_answer": MathAnswer,
    "answer": Answer,
    "answer_format": AnswerFormat,
    "format": Format,
    "choice": Choice,
    "soft_overlong": SoftOverlong,
    "repetition": Repetition,
    "equations": Equations,
    "follows": Follows,
    "environment": Environment,
}


def make(name: str, options: Mapping[str, Any]) -> Reward:
    """The reward of that name; options are already checked."""
    return REWARDS[name](**options)


def freeze(options: Mapping[str, Any]) -> str:
    """Options as text: a key, and the same in every process."""
    return json.dumps(dict(options), sort_keys=True)


def thaw(options: str) -> dict[str, Any]:
    """The inverse of `freeze`."""
    return json.loads(options)
