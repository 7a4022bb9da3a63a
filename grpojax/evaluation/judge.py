"""Which of a run's rewards says which samples are right, and how it is read.

A reward decides what is right, in the run's own workers and under their limits. A reward for length or format is never
used as accuracy unless the recipe says so.
"""

import dataclasses

from grpojax.host.errors import UserError
from grpojax.rewards import RewardConfig, RewardsConfig, answers, builtin

# Built-in rewards that compare with a gold answer, and those that never say that something is right.
COMPARING = (builtin.MathAnswer, builtin.Answer, builtin.Choice)
NEVER_ONE = (builtin.SoftOverlong, builtin.Repetition)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Which samples are right in an evaluation.

    Attributes:
      judge: name in metrics of the reward that is 1 for a right sample and 0 for a wrong one. None takes the first
        reward that compares with a reference answer (math_answer, answer, choice); if there is none, there is no
        accuracy. The judge may have weight 0: then nothing is learned from it.
    """

    judge: str | None = None


@dataclasses.dataclass(frozen=True)
class Judge:
    """Reads verdicts off a reward.

    Attributes:
      metric: the reward's name in metrics.
      reward: the built-in reward that compares with a reference answer; None for any other, which has no answers to
        vote by.
      text: the text that it reads as a completion (`grpojax.rewards.RewardConfig.text`).
    """

    metric: str
    reward: builtin.MathAnswer | builtin.Answer | builtin.Choice | None
    text: str = "completion"

    def verdict(self, value: float) -> bool | None:
        """Whether a sample with this reward is right; None where the reward is invalid (NaN).

        Raises:
          UserError: the reward is neither 0 nor 1.
        """
        if value != value:
            return None
        if value not in (0.0, 1.0):
            raise UserError(
                f"evaluate.judge: {self.metric!r} gave {value:g}, but a judge gives 1 for right and 0 for wrong\n"
                "name a reward that does, or none (evaluate.judge=null): a graded one is reported as eval/reward"
            )
        return value == 1.0

    @property
    def votes(self) -> bool:
        """Whether samples have answers, so that majorities can be counted."""
        return self.reward is not None

    def vote(self, completion: str) -> str | None:
        """The completion's answer in one spelling: a letter, a normal form, or what `answers.ballot` makes of it.

        It does not use the reference answer, which would join right votes and leave wrong ones separate.
        """
        if isinstance(self.reward, builtin.Choice):
            letters = self.reward.letters
            return next((c for c in letters if self.reward([""], [completion], [[]], gold=[c]) == [1.0]), None)
        if self.reward is None:
            return None
        spelling = answers.ballot if isinstance(self.reward, builtin.MathAnswer) else answers.normal_form
        return spelling((answers.extract_answer(completion, self.reward.marker) or "")[:300]) or None


def judge_of(rewards: RewardsConfig, named: str | None = None) -> Judge | None:
    """The reward named, or else the first that compares with a gold answer; None where no reward says what is right.

    Raises:
      UserError: no reward has that name, or it is one that is never 1.

    >>> terms = (RewardConfig(name="answer_format"), RewardConfig(name="answer", label="exact", weight=0.0))
    >>> judge_of(RewardsConfig(terms=terms)).metric, judge_of(RewardsConfig(terms=terms), "answer_format").metric
    ('exact', 'answer_format')
    >>> judge_of(RewardsConfig(terms=(RewardConfig(name="answer_format"),))) is None
    True
    """
    if named is None:
        return next((judge for judge in map(_judge, rewards.terms) if judge.votes), None)
    term = next((t for t in rewards.terms if t.metric == named), None)
    if term is None:
        names = ", ".join(t.metric for t in rewards.terms)
        raise UserError(
            f"evaluate.judge={named!r} is not a reward of the run, which has {names}\n"
            "a reward that only judges has weight 0, as in {name: math_answer, weight: 0}"
        )
    if issubclass(builtin.REWARDS.get(term.name, object), NEVER_ONE):
        raise UserError(
            f"evaluate.judge={named!r}: that reward is never 1; name one that is 1 for right and 0 for wrong"
        )
    return _judge(term)


def _judge(term: RewardConfig) -> Judge:
    known = builtin.REWARDS.get(term.name, object)
    return Judge(term.metric, known(**term.options) if issubclass(known, COMPARING) else None, term.text)


def marker_of(rewards: RewardsConfig, judge: Judge | None) -> str | None:
    """The text before a sample's answer, by the judge or the first reward that looks for one; None for any known."""
    if judge is not None and judge.reward is not None:
        return judge.reward.marker
    marked = (t for t in rewards.terms if issubclass(builtin.REWARDS.get(t.name, object), builtin.Marked))
    return next((t.options.get("marker") for t in marked), None)
