"""Checks of a run: sizes that do not fit, updates without a finite gradient, an end that has been passed."""

from collections.abc import Sequence

from grpojax import data, variants
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.programs import batch_shards, kv_cache, packing
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.programs.policy import Policy
from grpojax.run.recipe import Config
from grpojax.run.run_state import State
from grpojax.run.sections import RolloutConfig

SMALLER = "lower optimizer.learning_rate or optimizer.grad_clip"  # the remedy for gradients that are not finite


def shapes(config: Config, count: int, sampling: int) -> None:
    """Raises `UserError` if prompts, minibatches or micro-batches do not divide over the batch shards, or if no sample
    of a shard can be left to the next rollout.

    Args:
      config: the recipe.
      count, sampling: number of batch shards of the devices that learn, and of those that sample.
    """
    if config.method.plan is None:
        batch_shards.spread_sizes(config.rollout.prompts, config.rollout.group, sampling)
    if config.rollout.overlap:
        most_left(config.rollout, sampling)
    for prompts in (config.rollout.prompts, config.rollout.prompts // config.train.minibatches):
        rows, group = batch_shards.spread_sizes(prompts, config.method.widest(config.rollout.group), count)
    packing.check_cut(rows // count, group, config.train.microbatches)


def adapter(policy: Policy) -> None:
    """Raises `UserError` if the policy is to have adapters that peft could not read after the run."""
    if policy.adapter is None:
        return
    if why := policy.adapter.check_start(policy.config, policy.folder):
        log.warning(f"model.adapter: {why}; export this run with --merged")


def most_left(config: RolloutConfig, shards: int) -> int:
    """The most samples that a rollout leaves unfinished in a batch shard: a share of the shard's samples.

    Args:
      config: has the share, prompts and group.
      shards: batch shards of the devices that sample.

    Raises:
      UserError: the prompts do not divide over the shards, or the share is less than one of their samples.

    Example:
      >>> most_left(RolloutConfig(overlap=0.1, prompts=16, group=8), 2)
      6
      >>> most_left(RolloutConfig(overlap=0.29, prompts=100, group=1), 1)
      29
    """
    if config.prompts % shards:
        raise UserError(
            f"rollout.overlap={config.overlap:g} with rollout.prompts={config.prompts} over {shards} batch shards: a "
            "group that goes on stays in its shard; make prompts a multiple of them, or set overlap=0"
        )
    samples = config.prompts * config.group // shards
    if not (most := int(round(config.overlap * samples, 9))):
        raise UserError(
            f"rollout.overlap={config.overlap:g} of the {samples} samples of a batch shard is less than one: make it "
            f"1/{samples} or more, or 0"
        )
    return most


def variant_source(config: Config) -> None:
    """Raises `UserError` if a stored recipe names a source of its variant that differs from the present one."""
    found = variants.source(config.method.variant.name)
    given = config.variant.get("source", found) if isinstance(config.variant, dict) else found
    if found is not None and given != found:
        raise UserError(
            f"variant.source={given!r}: {config.method.variant.name} has changed since, and is {found!r} now\n"
            "restore its file, or leave variant.source out of the recipe"
        )


def cache(config: Config, policy: Policy) -> None:
    """Raises `UserError` if the devices that sample cannot read such keys and values."""
    kv_cache.format_of_cache(config.rollout.cache_dtype, policy.sampling.compute)


def positions(
    problems: Sequence[data.Problem],
    longest: int,
    most: int,
    *,
    setting: str = "rollout.max_tokens=",
    prompts: str = "data.max_prompt_tokens",
) -> None:
    """Raises `UserError` if samples could become longer than the positions that the model was made for.

    Args:
      problems: their prompts.
      longest: most tokens of a sample.
      most: the model's positions.
      setting: what ``longest`` comes from, as a user writes it before the number.
      prompts: what else to lower.
    """
    prompt = max(len(p.ids) for p in problems)
    if prompt + longest > most:
        raise UserError(
            f"{setting}{longest} after a prompt of {prompt} tokens is over the model's max_position_embeddings={most}: "
            f"lower it, or {prompts}"
        )


def passes(config: Config, problems: data.Problems) -> None:
    """Warns if solved prompts would be left out of later passes over the data, but the run ends within the first.

    There is no warning if that cannot be known: with several sources, and in a run that ends by tokens.
    """
    steps, filtered = config.train.steps, config.method.filter
    if config.method.retire is None or steps is None or len(problems.weights) > 1:
        return
    most = steps * config.rollout.prompts * (1 if filtered is None else filtered.max_rollouts or 1)
    if most <= len(problems):
        log.warning(
            "the run draws at most %d prompts and the data has %d problems: there is no second pass, so no solved "
            "prompt is left out; use fewer problems or more steps",
            most,
            len(problems),
        )


def warm_up(optimizer: OptimizerConfig, updates: int | None) -> None:
    """Warns of a warm-up that a run does not come to the end of. It may be a trial of a longer one, or made longer.

    Args:
      optimizer: has the warm-up.
      updates: of the whole run; None if that is not known.
    """
    if updates is not None and updates < optimizer.warmup_steps:
        log.warning(
            "optimizer.warmup_steps=%d is more than the run's %d updates: the learning rate ends at %.2g %% of %g",
            optimizer.warmup_steps,
            updates,
            100 * updates / optimizer.warmup_steps,
            optimizer.learning_rate,
        )


def finite(number: int, skipped: float, in_a_row: int, *, most: int, remedy: str) -> None:
    """Warns of updates that a step has skipped, and stops the run if there are too many ``in_a_row``."""
    if not skipped:
        return
    log.warning("step %d: %d updates skipped, gradient not finite", number, skipped)
    if in_a_row >= most:
        raise UserError(
            f"step {number}: {in_a_row} updates in a row had a gradient that is not finite; the weights before them "
            f"are saved\n{remedy}"
        )


def length(config: Config, state: State) -> None:
    """Raises `UserError` if a run is already beyond its present end."""
    done, steps, tokens = state.step, config.train.steps, config.train.tokens
    if steps is not None and done > steps:
        raise UserError(f"train.steps={steps}: the run in {config.run.dir} is at step {done} already")
    if tokens is not None and state.sampled_tokens >= tokens and state.budget not in (None, tokens):
        raise UserError(f"train.tokens={tokens}: the run in {config.run.dir} has drawn {state.sampled_tokens} already")
