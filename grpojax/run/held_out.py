"""The held-out problems of a run: what its own rewards say of the policy on them, on the run's schedule."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpojax import data, evaluation
from grpojax.host import files, processes
from grpojax.host.console import log
from grpojax.models import quantised
from grpojax.programs.policy import Policy
from grpojax.records import evaluations
from grpojax.rewards import Rewards
from grpojax.run import recorder
from grpojax.run.recipe import Config


class HeldOut:
    """Evaluates on ``data.validation``; without it there is nothing to evaluate on.

    Args:
      config: the recipe.
      policy: what samples.
      rewards: the run's own.
      tokenize: question to token ids.

    Attributes:
      evaluator: the rewards, and the one of them that says what is right.
      fingerprint: of all rows read; None without.
      best: the metric that the best checkpoint is told by; None without.
      attempts: of the last evaluation.
    """

    def __init__(self, config: Config, policy: Policy, rewards: Rewards, tokenize: data.Tokenize):
        self.policy = policy
        self._folder = files.path(config.run.dir)
        self._max_prompt_tokens = config.data.max_prompt_tokens
        self.evaluator = evaluation.Evaluator(rewards, config.evaluate)
        self.config = config_of(config)
        self.problems: Sequence[data.Problem] = ()
        self.fingerprint: str | None = None
        self.best: str | None = None
        self.attempts: list[evaluation.Attempt] = []
        if config.data.validation:
            check, compared = rewards.check_gold, rewards.compares
            loaded = data.load_problems(config.data.validation, tokenize, config.data, check, compared=compared)
            for line in loaded.notes("validation", config.data):
                log.info("%s", line)
            self.problems, self.fingerprint = loaded[: config.train.eval_limit], loaded.fingerprint
            self.best = evaluation.BEST
            log.info("held-out problems are %s", self.evaluator.about())
        elif config.train.eval_every:
            log.info("train.eval_every=%d does nothing: there is no data.validation", config.train.eval_every)

    def evaluate(self, number: int, params: Any) -> dict[str, float] | None:
        """The metrics of the policy after ``number`` steps; None without problems.

        Args:
          number: steps done; the attempts go to ``eval/step_N.jsonl``.
          params: the rollout's weights.
        """
        if not self.problems:
            return None
        batches = evaluation.evaluate(
            self.policy, params, self.problems, self.config, self.evaluator, max_prompt_tokens=self._max_prompt_tokens
        )
        self.attempts = [attempt for batch in batches for attempt in batch]
        if processes.is_first():
            with recorder.optional(f"the evaluation of step {number} is not kept"):
                evaluations.write(self._folder / "eval" / f"step_{number}.jsonl", self.attempts)
        values = self.evaluator.metrics(self.attempts, self.config.ks)
        log.info("step %d  %s of %d", number, evaluation.headline(values, self.config), len(self.attempts))
        return values

    def report(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """What became of the held-out reward, and three samples."""
        if said := evaluation.report(lines, self.config):
            log.info("%s", said)
        for attempt in self.attempts[:3]:
            sample = attempt.samples[0]
            verdict = evaluation.verdict(attempt, sample)
            log.info("Q: %s\n%s\n[%s]", attempt.prompt, sample.completion.strip(), verdict)


def config_of(config: Config) -> evaluation.EvalConfig:
    """What a run draws of its held-out problems."""
    return evaluation.EvalConfig.in_training(
        samples=config.train.eval_samples,
        temperature=config.train.eval_temperature,
        limit=config.train.eval_limit,
        max_tokens=config.rollout.max_tokens,
        cache_dtype=quantised.exact(config.rollout.cache_dtype),
    )
