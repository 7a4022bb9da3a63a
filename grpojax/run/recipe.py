"""The config of a run: one section for each module, each section that module's own frozen dataclass."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpojax import extension, variants
from grpojax.data import DataConfig, sources
from grpojax.evaluation import EvaluateConfig, judge_of
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.models.compute import ModelConfig
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.records.metrics import TrackingConfig
from grpojax.rewards import RewardConfig, RewardsConfig
from grpojax.run import exclusions, parts, run_method
from grpojax.run.profiling import ProfileConfig
from grpojax.run.sections import FilterConfig, RolloutConfig, RunConfig, TrainConfig
from grpojax.sharding import MeshConfig

if TYPE_CHECKING:
    CriticConfig = EnvironmentConfig = Any
else:
    CriticConfig, EnvironmentConfig = extension.section("critic"), extension.section("environment")

# Sections that an extension brings; without it none may be given.
OF_EXTENSIONS = ("critic", "environment", "model.adapter", "rollout.curriculum", "rollout.sample_allocation")

# Settings, or beginnings of their names, that a run may change when it goes on: they say how it is executed, recorded
# and ended. Some change what it computes a little: sums over other devices are rounded otherwise, and a reward that had
# too little time or memory may now have enough.
EXECUTION = (
    "run.",
    "mesh.",
    "tracking.",
    "compile_cache",
    "profile.",
    "evaluate",
    "model.remat",
    "model.attention",
    "rollout.decode_slots",
    "train.microbatches",
    "train.skip_zero_advantage",
    "train.eval_",
    "train.checkpoint_",
    "train.keep",
    "train.log_every",
    "train.max_skipped",
    "train.on_collapse",
    "train.hang_policy",
    "rewards.workers",
    "rewards.timeout_s",
    "rewards.memory_mb",
    "environment.workers",
    "environment.seconds",
    "environment.memory",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
@extension.with_sections()
class Config:
    """A whole run, as one YAML file describes it.

    Attributes:
      model: the policy: its weights, and how they run.
      data: the problems to train on, and those to evaluate on.
      rewards: what scores a sample: a list of rewards, or a mapping with the list as ``terms``.
      rollout: how many samples a step draws, and how.
      train: length of the run, updates per step, evaluations and checkpoints.
      run: where the run writes its files.
      variant: the method: a name, or a mapping of ``name`` and options.
      filter: which groups learn. "auto" takes the variant's own filter if it has one, "none" uses no filter, and a
        mapping sets one. Not with a variant that learns from groups whose rewards are all the same.
      critic: the second network of a variant that has one. None takes the defaults. Any other variant refuses it.
      environment: the tools that the policy may call and the environment that it acts in, over several turns. None for
        samples of one turn.
      evaluate: which reward decides whether a sample is right.
      optimizer: the policy's optimiser and its schedule.
      tracking: what is logged besides the metrics.
      mesh: how the devices are divided.
      profile: which steps are traced.
      compile_cache: folder of compiled programs: "auto" is ``~/.cache/grpojax``, None keeps nothing.
    """

    model: ModelConfig
    data: DataConfig
    rewards: tuple[RewardConfig, ...] | RewardsConfig
    rollout: RolloutConfig
    train: TrainConfig
    run: RunConfig
    variant: str | dict[str, Any] = "grpo"
    filter: FilterConfig | Literal["auto", "none"] = "auto"
    critic: CriticConfig | None = None
    environment: EnvironmentConfig | None = None
    evaluate: EvaluateConfig = EvaluateConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    tracking: TrackingConfig = TrackingConfig()
    mesh: MeshConfig = MeshConfig()
    profile: ProfileConfig = ProfileConfig()
    compile_cache: str | None = "auto"

    def __post_init__(self) -> None:
        judge_of(self.method.rewards, self.evaluate.judge)
        if self.rollout.prompts % self.train.minibatches:
            raise UserError(
                f"train.minibatches={self.train.minibatches} does not divide rollout.prompts={self.rollout.prompts}"
            )
        exclusions.check("recipe", self)
        parts.of(self)
        self._check_critic()
        self.profile.check(self.train.steps)

    def _check_critic(self) -> None:
        """Raises `UserError` where the critic's section leaves nothing to the policy."""
        steps, tokens = self.train.steps, self.train.tokens
        length = f"train.steps={steps}"
        if steps is None and tokens is not None:  # of a step that draws as little as there is
            steps, length = -(-tokens // (self.rollout.prompts * self.rollout.group)), f"train.tokens={tokens}"
        if self.critic is not None and steps is not None and self.critic.warmup_steps >= steps:
            raise UserError(f"critic.warmup_steps={self.critic.warmup_steps} of {length}: the policy would never learn")

    @property
    def names_levels(self) -> bool:
        """Whether it says where the problems' levels are."""
        given = any(source.level is not None for source in sources(self.data.train))
        return self.data.level != DataConfig.level or given

    @property
    def own_critic(self) -> CriticConfig | None:
        """The critic's section, or its default where the variant has a critic; None without."""
        return None if self.method.variant.critic is None else self.critic or extension.section("critic")()

    @functools.cached_property
    def method(self) -> run_method.RunMethod:
        """Variant, rewards and filter, resolved."""
        return run_method.resolve(self.variant, self.rewards, self.filter, self.rollout, self.train, recipe=Config)

    def resolved(self) -> dict[str, Any]:
        """The recipe as plain data, in which what can be written in two ways is written in one.

        ``method`` in it is what the variant stands for, every option and term with its value (`run_method.describe`).
        It is no setting: `settings_of` takes it out again where a stored recipe is built.
        """
        name = {"name": self.variant} if isinstance(self.variant, str) else self.variant
        source = variants.source(self.method.variant.name)
        if source is not None:  # a stored recipe keeps the digest that it was written with
            name = {**name, "source": name.get("source", source)}
        same = dataclasses.replace(self, variant=name, rewards=self.method.rewards, critic=self.own_critic)
        return {**settings.to_dict(same), "method": run_method.describe(self.method)}

    @staticmethod
    def settings_of(mapping: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a recipe, or of a stored one, which has ``method`` too (`resolved`)."""
        for key in OF_EXTENSIONS:
            outer, _, inner = key.partition(".")
            given = mapping.get(outer)
            if inner:
                given = given.get(inner) if isinstance(given, Mapping) else None
            if given is not None:
                extension.require("sections", key, key)
        stored = isinstance(method := mapping.get("method"), Mapping) and {"variant", "objective"} <= method.keys()
        return {key: value for key, value in mapping.items() if not (stored and key == "method")}

    def may_differ(self, name: str) -> bool:
        """Whether a run may be resumed with another value of the setting with this dotted name.

        That is so of settings that say how a run is executed, recorded and ended (`EXECUTION`), and of its length
        (``train.steps`` or ``train.tokens``) as long as the learning rates do not depend on it.
        `grpojax.records.directory.RunDirectory` asks for each setting that differs from the stored recipe.
        """
        rules = [self.optimizer] if self.own_critic is None else [self.optimizer, self.own_critic.optimizer]
        constant = all(rule.schedule == "constant" for rule in rules)
        return name.startswith(EXECUTION) or (name in ("train.steps", "train.tokens") and constant)


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads a recipe; raises `UserError` for anything in it that is not right.

    An override of ``train.steps`` stands in place of the file's ``train.tokens``, and the other way round.
    """
    given = list(overrides)
    sections = [text.partition("=")[0].strip().partition(".")[0] for text in given]
    if "method" in sections:
        raise UserError("method is what the variant stands for, not a setting: set variant, such as variant.kl_coef=0")
    of_train = [text for text, section in zip(given, sections, strict=True) if section == "train"]
    _, keys = settings.override({"train": {}}, of_train)  # a mapping may name them too
    for one, other in (("train.steps", "train.tokens"), ("train.tokens", "train.steps")):
        if one in keys and other not in keys:
            given.append(f"{other}=null")
    return settings.load(Config, path, given)
