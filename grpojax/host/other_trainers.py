"""The keys of TRL, verl and Tunix next to ours: one table, for ``docs/start/coming_from.md`` and for errors.

If an unknown key is another trainer's, the error names our key (`key_for`).
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

TRAINERS = {"trl": "TRL", "verl": "verl", "tunix": "Tunix"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting in each trainer, as Markdown. A dash means that there is no such key.

    A cell may start with pieces of code, separated by commas or "or". In ``ours``, the first one is the key to set. In
    the others, each is a key, or a key with a value (``loss_type="grpo"``).
    """

    ours: str
    trl: str = "-"
    verl: str = "-"
    tunix: str = "-"


TABLES: Mapping[str, tuple[Row, ...]] = {
    "Sizes": (
        Row("`rollout.group`", "`num_generations`", "`actor_rollout_ref.rollout.n`", "`num_generations`"),
        Row(
            "`rollout.prompts`: prompts of a step, over all devices",
            "`generation_batch_size` or `per_device_train_batch_size` × processes × `steps_per_generation`, ÷ "
            "`num_generations`",
            "`data.train_batch_size`",
            "batch size of the data set",
        ),
        Row(
            "`rollout.max_tokens`", "`max_completion_length`", "`data.max_response_length`", "`max_tokens_to_generate`"
        ),
        Row(
            "`data.max_prompt_tokens`; longer prompts are left out, never cut",
            "-",
            "`data.max_prompt_length`",
            "`max_prompt_length`",
        ),
        Row("`train.ppo_epochs`", "`num_iterations`", "`actor.ppo_epochs`", "`num_iterations`"),
        Row(
            "`train.minibatches`: updates of one pass",
            "`steps_per_generation` ÷ `gradient_accumulation_steps`, 1 by default",
            "`ppo_mini_batch_size`: `train_batch_size` ÷ it",
            "`mini_batch_size`: batch size ÷ it",
        ),
        Row(
            "`train.microbatches`: their number; the gradient does not depend on it",
            "`gradient_accumulation_steps`",
            "`ppo_micro_batch_size_per_gpu`: batch size ÷ it",
            "`train_micro_batch_size`: batch size ÷ it",
        ),
        Row(
            "`train.steps`: rollouts; or `train.tokens`",
            "`max_steps` ÷ (`num_iterations` × updates of one pass)",
            "`trainer.total_training_steps`",
            "`max_steps`",
        ),
        Row(
            "`train.steps`; a run's length is not given in passes over the data",
            "`num_train_epochs`: × prompts ÷ `rollout.prompts`",
            "`trainer.total_epochs`: × prompts ÷ `rollout.prompts`",
        ),
    ),
    "The method": (
        Row(
            "`variant: {name: grpo, kl_coef: 0.0}`",
            '`loss_type="grpo"`',
            "`adv_estimator=grpo`, `loss_agg_mode=seq-mean-token-mean`",
            '`loss_agg_mode="sequence-mean-token-mean"`',
        ),
        Row(
            "`variant: {name: grpo, aggregate: token_mean}`; `dapo` also filters groups, clips higher and has an "
            "overlong penalty",
            '`loss_type="dapo"`, TRL\'s default',
            "`loss_agg_mode=token-mean`, verl's default",
            '`loss_agg_mode="token-mean"`',
        ),
        Row(
            "`variant: dr_grpo`",
            '`loss_type="dr_grpo"`, `scale_rewards=False`',
            "`norm_adv_by_std_in_grpo=False`",
            '`algo_variant="drgrpo"`',
        ),
        Row(
            "`variant: gspo`, `gspo_token`; they also set `clip_low: 0.0003`, `clip_high: 0.0004` and "
            "`aggregate: sequence_mean`",
            '`importance_sampling_level="sequence"`, which leaves `epsilon` and `loss_type` as they are',
            "`policy_loss.loss_mode=gspo`",
            '`loss_algo="gspo-token"`',
        ),
        Row("`variant.kl_coef`", "`beta`", "`kl_loss_coef` with `use_kl_loss`", "`beta`"),
        Row("`variant.clip_low`; TRL's and Tunix's sets both", "`epsilon`", "`clip_ratio_low`", "`epsilon`"),
        Row("`variant.clip_high`", "`epsilon_high`", "`clip_ratio_high`", "`epsilon_high`"),
        Row("`variant.clip_dual`", "`delta`", "`clip_ratio_c`", "`epsilon_c`"),
        Row(
            "`variant: cispo`, whose bound is `variant.weight_max`",
            '`loss_type="cispo"`, `epsilon_high`',
            "`policy_loss.loss_mode=cispo`",
        ),
        Row("`variant: sapo`", '`loss_type="sapo"`', "`policy_loss.loss_mode=sapo`"),
        Row("`variant.tau_positive`", "`sapo_temperature_pos`"),
        Row("`variant.tau_negative`", "`sapo_temperature_neg`"),
        Row(
            "`variant: luspo`, which also clips at 0.002 and 0.0025",
            '`loss_type="luspo"`, `importance_sampling_level="sequence"`',
        ),
        Row(
            "`variant: high_entropy_tokens` with `fraction`; it also filters groups, clips higher and has "
            "`aggregate: token_mean`",
            "`top_entropy_quantile`",
        ),
        Row("`variant.kl_kind: unbiased`", "`use_bias_correction_kl`"),
        Row("`variant: max_rl`, which also has `aggregate: token_mean`", '`scale_rewards="mean"`'),
        Row("`variant: lite_ppo`", '`scale_rewards="batch"`'),
        Row(
            "`rewards.combine: normalize` with `variant: gdpo`",
            '`multi_objective_aggregation="normalize_then_sum"`',
        ),
        Row("`train.truncated: mask`", "`mask_truncated_completions`", tunix="`overlong_loss_masking`"),
        Row("`train.reference_every`", "`ref_model_sync_steps` with `sync_ref_model`"),
        Row("`train.reference_mix`", "`ref_model_mixup_alpha`"),
        Row(
            "`variant.importance: truncate` or `mask`; seldom needed, as sampler and trainer are one model",
            "`vllm_importance_sampling_correction`",
            tunix='`sampler_is="token"`',
        ),
    ),
    "Rewards and data": (
        Row(
            '`rewards: [{name: "module:f"}]`, `f(prompts, completions, tokens, **columns)`',
            "`reward_funcs=[f]`, `f(prompts, completions, **columns)`",
            "`custom_reward_function`: its `path` and `name`",
            "`reward_fns=[f]`",
        ),
        Row(
            "a reward of `None` makes the whole sample invalid, unless the weight is 0",
            "a reward of `None` leaves only that function out of the sum",
        ),
        Row("`rewards`: a `weight` beside each name", "`reward_weights`"),
        Row("`data.prompt`", "column `prompt`", "`data.prompt_key`", "key `prompts`"),
        Row(
            "`data.answer`; all other columns reach the reward functions too",
            "the columns reach the functions",
            "column `reward_model.ground_truth`",
        ),
        Row("`data.train`", "`train_dataset`", "`data.train_files`"),
        Row("`data.validation`", "`eval_dataset`", "`data.val_files`"),
        Row("`data.template_options`", "`chat_template_kwargs`"),
    ),
    "Tools and environments": (
        Row("`environment.name`", "`environment_factory`", "an agent loop", "an environment of its agentic learner"),
        Row(
            "`environment.choices`, and a column `environment`",
            "a dict as `environment_factory`, and a column `environment`",
            "a column `agent_name`",
            "in its agentic learner",
        ),
        Row("`environment.tools`", "`tools`", "`multi_turn.function_tool_path`", "tools of its agentic learner"),
        Row(
            "`environment.max_turns`: turns, of which the last calls no tool",
            "`max_tool_calling_iterations`: rounds of calls, one less",
            "`multi_turn.max_assistant_turns`",
            "in its agentic learner",
        ),
        Row(
            "`environment.max_tool_tokens`: tokens, the rest is cut",
            "-",
            "`multi_turn.max_tool_response_length`: characters",
            "in its agentic learner",
        ),
        Row(
            "`rewards: [{name: environment}]`",
            "a method `get_reward`, without being asked for",
            "in the agent loop",
            "in its agentic learner",
        ),
    ),
    "The optimiser and the sampler": (
        Row("`optimizer.learning_rate`, 1e-6", "`learning_rate`, 1e-6", "`actor.optim.lr`", "the optax optimiser"),
        Row(
            "`optimizer.schedule`: `constant`, `linear` or `cosine`",
            "`lr_scheduler_type`; `linear` by default",
            "in `actor.optim`",
            "the optax optimiser",
        ),
        Row(
            "`optimizer.warmup_steps`, in updates",
            "`warmup_steps`",
            "`actor.optim.lr_warmup_steps`",
            "the optax optimiser",
        ),
        Row(
            "`optimizer.weight_decay`, 0",
            "`weight_decay`, 0",
            "`actor.optim.weight_decay`",
            "the optax optimiser",
        ),
        Row("`optimizer.grad_clip`, 1", "`max_grad_norm`, 1", "`actor.grad_clip`", "the optax optimiser"),
        Row(
            "`rollout.temperature`, 1; training cuts no tokens off",
            "`temperature`",
            "`rollout.temperature`",
            "`temperature`",
        ),
    ),
    "Running": (
        Row("`run.dir`", "`output_dir`", "`trainer.default_local_dir`", "checkpoint folder"),
        Row("`model.dtype: bfloat16`", "`bf16`"),
        Row("`model.remat`", "`gradient_checkpointing`", "`enable_gradient_checkpointing`"),
        Row("`train.eval_every`", "`eval_steps`", "`trainer.test_freq`", "`eval_every_n_steps`"),
        Row(
            "`train.checkpoint_every`, `train.checkpoint_minutes`",
            "`save_steps`",
            "`trainer.save_freq`",
            "checkpoint options",
        ),
        Row("`train.log_every`", "`logging_steps`"),
        Row("`tracking.samples`, on by default", "`log_completions`"),
        Row("`tracking.wandb`", "`report_to`", "`trainer.logger`"),
        Row("`mesh: {data: 1, fsdp: -1, tensor: 1}`", "accelerate, DeepSpeed, FSDP", "FSDP or Megatron", "`mesh`"),
        Row("`model.adapter: {rank: 32}`", "`peft_config`", "`model.lora_rank`", "LoRA providers"),
        Row(
            "the sampler is built in; there is no other engine",
            "`use_vllm`",
            "in `rollout.name`",
            "`rollout_engine`",
        ),
        Row("`rollout.ahead`, `rollout.overlap`, `mesh.rollout`", "-", "asynchronous trainers"),
    ),
}
_CODE = r"`([^`]+)`"
_KEY = r"[a-z_0-9]+(?:\.[a-z_0-9]+)*"


@dataclasses.dataclass(frozen=True)
class Meant:
    """Our key for another trainer's key.

    Attributes:
      trainers: which trainers have it, such as "TRL's and Tunix's".
      key: our key; None if there is none.
      remedy: what to do, in words.
    """

    trainers: str
    key: str | None
    remedy: str


def key_for(name: str) -> Meant | None:
    """Our key for another trainer's, by the last part of its name; None if no trainer has that name.

    The first row counts in which it is a key of another trainer, and our key has another name.

    Example:
      >>> key_for("beta")
      Meant(trainers="TRL's and Tunix's", key='variant.kl_coef', remedy='set variant.kl_coef')
      >>> key_for("actor_rollout_ref.rollout.n").remedy
      'set rollout.group'
    """
    last = name.rpartition(".")[2]
    for row in (row for rows in TABLES.values() for row in rows):
        found = {field: code for field in TRAINERS for code in _codes(getattr(row, field)) if _last(code) == last}
        code = next(_codes(row.ours), "")
        if not found or _last(code) == last:
            continue
        whose = " and ".join(f"{TRAINERS[field]}'s" for field in found)
        if not code:
            return Meant(whose, None, f"leave it out: {row.ours}")
        key = re.match(_KEY, code)[0]  # pyrefly: ignore
        field, given = next(iter(found.items()))
        other = " (another number, see docs/start/coming_from.md)" if "÷" in getattr(row, field) else ""
        return Meant(whose, key, f"set {key if '=' in given else code}{other}")
    return None


def _codes(cell: str) -> Iterator[str]:
    """The keys that a cell starts with."""
    start = re.match(rf"{_CODE}(?:(?:, | or ){_CODE})*", cell)
    return (code for code in re.findall(_CODE, start[0] if start else "") if re.match(_KEY + r"(?![\w(])", code))


def _last(code: str) -> str:
    found = re.match(_KEY, code)
    return found[0].rpartition(".")[2] if found else ""


def markdown(title: str) -> str:
    """A table of `TABLES` as Markdown."""
    lines = ["| grpojax | TRL | verl | Tunix |", "|---|---|---|---|"]
    lines += [f"| {row.ours} | {row.trl} | {row.verl} | {row.tunix} |" for row in TABLES[title]]
    return "\n".join(lines)
