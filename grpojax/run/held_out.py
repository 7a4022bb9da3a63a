"""The held-out problems of a run, and its evaluations on them by its own rewards.

The validation set is evaluated on the run's schedule. It picks the best checkpoint and rings alarms, and a search picks
rates by it. The test set is evaluated once, with the final weights, and nothing is picked by it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpojax import data, evaluation
from grpojax.host import files, processes
from grpojax.host.console import log
from grpojax.programs import policy_state
from grpojax.programs.policy import Policy
from grpojax.programs.sampler_config import unrounded
from grpojax.records import evaluations
from grpojax.rewards import Rewards
from grpojax.run import recorder
from grpojax.run.recipe import Config
from grpojax.run.run_state import State

SETS = ("validation", "test")
TELL_S = 20.0  # between two lines on how far an evaluation is


class HeldOut:
    """Evaluates on ``data.validation`` and ``data.test``; a set that is None is not evaluated.

    Args:
      config: the recipe.
      policy: the policy that samples.
      rewards: the run's own rewards.
      tokenize: question to token ids.
      sync: waits for a rollout.
      players: what plays the run's episodes; None where samples have one turn.

    Attributes:
      evaluator: the rewards, and which of them says whether a sample is right.
      problems: problems of the validation set, ``train.eval_limit`` at most.
      test: all problems of the test set.
      fingerprints: fingerprints of all rows of both sets, by the set's name; None for a set that is not given.
      known: the problems of both sets, including those over the limit.
      best: the metric that decides which checkpoint is best; None without a validation set.
      attempts: the attempts of the last evaluation.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        rewards: Rewards,
        tokenize: data.Tokenize,
        *,
        sync: Callable[[Any], object],
        players: Any = None,
    ):
        self.policy, self._sync, self._players = policy, sync, players
        self._folder = files.path(config.run.dir)
        self._max_prompt_tokens = config.data.max_prompt_tokens
        self.evaluator = evaluation.Evaluator(rewards, config.evaluate)
        self.config = config_of(config)
        loaded = load(config.data, rewards, tokenize)
        self.fingerprints = {name: loaded[name].fingerprint if name in loaded else None for name in SETS}
        self.known = data.Known()
        for problems in loaded.values():
            self.known = self.known.and_those_of(problems)
        self.problems: Sequence[data.Problem] = ()
        self.test: Sequence[data.Problem] = loaded.get("test", ())
        self.best: str | None = None
        self.attempts: list[evaluation.Attempt] = []
        if "validation" in loaded:
            self.problems, self.best = loaded["validation"][: config.train.eval_limit], evaluation.BEST
        elif config.train.eval_every:
            log.info("train.eval_every=%d does nothing: there is no data.validation", config.train.eval_every)
        if loaded:
            log.info("held-out problems are %s", self.evaluator.about())

    def evaluate(self, state: State) -> tuple[dict[str, float], dict[str, float]]:
        """The metrics of a state's policy on the validation set, twice: they also choose the best checkpoint. The
        attempts go to ``eval/step_N.jsonl``."""
        self.attempts = self._attempts(self.problems, state, "eval")
        values = self.evaluator.metrics(self.attempts, self.config.ks)
        log.info("step %d  %s of %d", state.step, evaluation.headline(values, self.config), len(self.attempts))
        return values, values

    def read_test(self, state: State) -> dict[str, float] | None:
        """The metrics of the final policy on the whole test set, with ``test/problems``, its number of problems; None
        without one. The attempts go to ``test/step_N.jsonl``."""
        if not self.test:
            return None
        log.info("evaluating data.test, once and with the final weights: %d problems", len(self.test))
        done = self._attempts(self.test, state, "test")
        values = self.evaluator.metrics(done, self.config.ks)
        named = {name.replace("eval/", "test/", 1): value for name, value in values.items()}
        return {**named, "test/problems": float(len(done))}

    def _attempts(self, problems: Sequence[data.Problem], state: State, folder: str) -> list[evaluation.Attempt]:
        """Attempts the problems; the first process writes ``folder/step_N.jsonl``."""
        params, number = self.policy.reshard(policy_state.weights(state.networks)), state.step
        batches = evaluation.evaluate(
            self.policy,
            params,
            problems,
            self.config,
            self.evaluator,
            max_prompt_tokens=self._max_prompt_tokens,
            sync=self._sync,
            **({} if self._players is None else self._players.in_evaluation(params, self.config, self._sync)),
        )
        done, told = list[evaluation.Attempt](), time.monotonic()
        for batch in batches:
            done += batch
            if time.monotonic() - told > TELL_S and len(done) < len(problems):
                told = time.monotonic()
                log.info("%d/%d problems evaluated", len(done), len(problems))
        if processes.is_first():
            with recorder.optional(f"the evaluation of step {number} is not kept"):
                evaluations.write(self._folder / folder / f"step_{number}.jsonl", done)
        return done

    def report(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Prints the held-out reward before and after, three samples, and the test set's figures."""
        summary = evaluation.report(lines, self.config)
        if summary:
            log.info("%s", summary)
        if self.attempts:
            log.info("the first held-out problems, with the answers of the final policy:")
        for attempt in self.attempts[:3]:
            sample = attempt.samples[0]
            verdict = evaluation.verdict(attempt, sample)
            log.info("Q: %s\n%s\n[%s]", attempt.prompt, sample.completion.strip(), verdict)
        if tested := [line for line in lines if "test/problems" in line]:
            last = {name.replace("test/", "eval/", 1): value for name, value in tested[-1].items()}
            shown = evaluation.headline(last, self.config).replace("held-out", "test")
            log.info("%s of %d problems, read once with the final weights", shown, last["eval/problems"])
        elif summary and not self.test:
            log.info("no data.test: the held-out figures are of data.validation, which also chooses checkpoints")


def load(config: data.DataConfig, rewards: Rewards, tokenize: data.Tokenize) -> dict[str, data.Problems]:
    """The held-out sets that a recipe names, by ``validation`` and ``test``; logs what was left out.

    A generated validation problem that is also in the test set is left out of validation.
    """
    loaded, known = dict[str, data.Problems](), data.Known()
    for name in reversed(SETS):
        given = getattr(config, name)
        if not given:
            continue
        loaded[name] = data.load_problems(
            given,
            tokenize,
            config,
            rewards.check_gold,
            compared=rewards.compares,
            known=known,
            of_row=tokenize.of_row,
        )
        known = known.and_those_of(loaded[name])
        announce(loaded[name], name, config)
    return loaded


def announce(loaded: data.Problems, name: str, config: data.DataConfig) -> None:
    """Logs the number of problems found in a part of the data, and those left out."""
    for line in loaded.notes(name, config):
        log.info("%s", line)
    for line in loaded.warnings(name):
        log.warning("%s", line)


def config_of(config: Config) -> evaluation.EvalConfig:
    """How a run samples its held-out problems."""
    return evaluation.EvalConfig.in_training(
        samples=config.train.eval_samples,
        temperature=config.train.eval_temperature,
        limit=config.train.eval_limit,
        max_tokens=config.rollout.max_tokens,
        cache_dtype=unrounded(config.rollout.cache_dtype),
    )
