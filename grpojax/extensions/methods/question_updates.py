"""The effect of one update on one question on the likelihood of that question's right answers (arXiv 2505.18830).

The weights are reset for each question, so that Δ(x) is `grpojax.diagnostics.likelihood_displacement` as it is defined.
All methods learn from the same samples.
"""

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpojax import diagnostics, variants
from grpojax.extensions.methods.influence import Influences
from grpojax.host import settings
from grpojax.host.errors import UserError
from grpojax.programs import batch_shards, policy_state
from grpojax.programs.optimizer_config import OptimizerConfig
from grpojax.records.method_diff import Differences, differences, in_a_line, label, without_repeats
from grpojax.records.metrics import TrackingConfig
from grpojax.run import learn, recipe
from grpojax.run.batch import Batch
from grpojax.run.minibatch import Minibatch
from grpojax.run.recipe import Config
from grpojax.run.run_method import describe
from grpojax.train import Run, open_run
from grpojax.types import PerPrompt, Samples, Tokens, TrainState

SUCCESS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionUpdates:
    """Measurements on Q questions.

    Attributes:
      uids: ids of the questions.
      right: ``[Q]``, the share of right samples.
      gwhes: ``[Q]``, the mean of `grpojax.diagnostics.gwhes` over right samples.
      displacement: for each method ``[Q]``, Δ(x) in nats.
    """

    uids: Sequence[int]
    right: PerPrompt
    gwhes: PerPrompt
    displacement: Mapping[str, PerPrompt]


def read_methods(text: str) -> dict[str, str | dict[str, Any]]:
    """The methods in ``--methods`` by label: names, mappings as YAML, or recipe files, of which only the variant
    counts.

    Raises:
      UserError: there is no method, one has another form, or two have the same label.

    Example:
      >>> read_methods("grpo, {name: nthr, eta: 0}")
      {'grpo': 'grpo', 'nthr-eta=0': {'name': 'nthr', 'eta': 0}}
    """
    if not text.strip(" ,"):
        raise UserError(f"--methods {text!r}: name at least one variant")
    tree, _ = settings.override({}, [f"methods=[{text}]"])
    found: dict[str, str | dict[str, Any]] = {}
    for method in tree["methods"]:
        name, given = method, method
        if isinstance(method, str) and Path(method).suffix in (".yaml", ".yml", ".json"):
            name, given = Path(method).stem, _mapping(settings.read(method).get("variant", Config.variant))
        elif isinstance(method, str) or (isinstance(method, dict) and isinstance(method.get("name"), str)):
            name = label(method)
        else:
            raise UserError(
                f"--methods: {method!r} is no variant, no mapping such as {{name: nthr, eta: 0}} and no recipe"
            )
        if name in found:
            raise UserError(f"--methods: {name} occurs twice; give it once")
        found[name] = given
    return found


def recipes_of(
    path: str, overrides: Iterable[str], methods: Mapping[str, str | Mapping[str, Any]], *, controls: bool = False
) -> dict[str, Config]:
    """The recipes of `recipe_of` by label; with ``controls`` also those of the methods' controls.

    A control is `grpojax.variants.control` of a method with its options. A control that is already among the methods,
    under any label, is not added again.
    """
    given = list(overrides)
    recipes = {name: recipe_of(path, given, method) for name, method in methods.items()}
    for name in methods if controls else ():
        if (control := _control(recipes[name])) is None:
            continue
        made = recipe_of(path, given, control)
        if all(_differ(made, other) for other in recipes.values()):
            own = label(control)
            recipes[own if own not in recipes else f"{name}-control"] = made
    return recipes


def mismatches(path: str, overrides: Iterable[str], methods: Iterable[str], recipes: Mapping[str, Config]) -> list[str]:
    """A line for each method that differs from the first in several things and has no control among the recipes.

    Args:
      path, overrides: as in `recipes_of`.
      methods: the labels of the given methods.
      recipes: the result of `recipes_of` for them.
    """
    given = list(overrides)
    first, *others = methods
    lines = []
    for name in others:
        control = _control(recipes[name])
        if control is not None:
            matched = recipe_of(path, given, control)
            if not all(_differ(matched, other) for other in recipes.values()):
                continue
        found = _differ(recipes[first], recipes[name])
        if (count := len(without_repeats(found))) > 1:
            lines.append(f"{name} differs from {first} in {count} things: {in_a_line(found)}")
    return lines


def _control(config: Config) -> dict[str, Any] | None:
    options = {k: v for k, v in _mapping(config.variant).items() if k not in ("name", "source")}
    control = variants.control(config.method.variant.name, **options)
    return control and {"name": control[0], **control[1]}


def _differ(a: Config, b: Config) -> Differences:
    return differences(describe(a.method), describe(b.method))


def _mapping(variant: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"name": variant} if isinstance(variant, str) else dict(variant)


def recipe_of(path: str, overrides: Iterable[str], method: str | Mapping[str, Any]) -> Config:
    """A recipe for single updates by a method: a name, or a mapping with its options.

    If the recipe has the variant of that name, its options there are used, otherwise the variant's defaults. Every
    update is the run's first, at the full learning rate, and nothing is filtered, evaluated or tracked. The reference
    of a method that has one is the model that the run starts from. A section for the recipe's own variant (critic,
    rollout.sample_allocation, rollout.retire without a share) goes with that variant only.

    Raises:
      UserError: the recipe has an environment: what is measured is of completions of one turn.
    """
    given = recipe.load(path, overrides)
    if given.environment is not None:
        raise UserError(
            "environment: displacement is measured on completions of one turn; set environment=null, and leave out the "
            "reward 'environment'"
        )
    own, variant = _mapping(given.variant), _mapping(method)
    is_own = own.get("name") == variant.get("name")
    if is_own and isinstance(method, str):
        variant = own
    mix = type(given.train).reference_mix
    one = {"ppo_epochs": 1, "minibatches": 1, "steps": 1, "tokens": None}
    train = dataclasses.replace(given.train, **one, reference_every=0, reference_mix=mix)
    optimizer = dataclasses.replace(given.optimizer, schedule="constant", warmup_steps=0, final_fraction=0.0)
    critic, rollout, retire = given.critic, dataclasses.replace(given.rollout, overlap=0.0), given.rollout.retire
    if not is_own:
        stays = retire is not None and retire.share is not None
        critic, rollout = None, dataclasses.replace(rollout, sample_allocation=None, retire=retire if stays else None)
    elif critic is not None:
        critic = dataclasses.replace(critic, warmup_steps=0)
    return dataclasses.replace(
        given,
        variant=variant,
        filter="none",
        critic=critic,
        rollout=rollout,
        train=train,
        optimizer=optimizer,
        data=dataclasses.replace(given.data, validation=None, test=None),
        tracking=TrackingConfig(samples=False, texts_every=0),
    )


def measure(
    recipes: Mapping[str, Config], *, questions: int, rollouts: int, devices: Sequence[jax.Device] | None = None
) -> QuestionUpdates:
    """Samples questions until enough of them have right and wrong samples, and updates on each of these by each method.

    Args:
      recipes: the recipe of each method (`recipe_of`); they differ only in the variant.
      questions: number of questions.
      rollouts: most rollouts that are drawn; if they do not have enough questions, fewer are taken.
      devices: devices to run on, whose batch shards divide a group; None takes all there are.

    Raises:
      UserError: no question has right and wrong samples.
    """
    chosen: list[Batch] = []
    gwhes, outcomes, displacement = np.zeros(0), np.zeros((0, 1)), {}
    for name, config in recipes.items():
        with tempfile.TemporaryDirectory() as folder:
            own = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=folder))
            with open_run(own, devices) as run:
                if not chosen:
                    chosen = list(_mixed(run, questions, rollouts))
                    gwhes = _gwhes(run, chosen)
                    outcomes = np.concatenate([_outcome(run, batch) for batch in chosen])
                displacement[name] = _displacement(run, chosen)
    return QuestionUpdates(
        uids=[batch.problems[0].uid for batch in chosen],
        right=np.nanmean(np.where(np.isfinite(outcomes), outcomes >= SUCCESS, np.nan), axis=1),
        gwhes=gwhes,
        displacement=displacement,
    )


def _outcome(run: Run, batch: Batch) -> Samples:
    return batch.by_name[run.config.method.deciding]


def _mixed(run: Run, questions: int, rollouts: int) -> Iterator[Batch]:
    """Questions with right and wrong samples, each as a batch of its own. A question drawn again is left out."""
    seen: set[int] = set()
    for number in range(1, rollouts + 1):
        state = dataclasses.replace(run.state, step=number - 1)
        batch = run.source.next(state, run.source.begin(state)).with_rewards()
        weights = np.asarray(diagnostics.gwhes_weights(_outcome(run, batch), success=SUCCESS))
        for i, problem in enumerate(batch.problems):
            if (weights[i] != 0).any() and problem.uid not in seen:
                seen.add(problem.uid)
                yield dataclasses.replace(_only(batch, i), dropped=np.zeros(1, bool))
                if len(seen) == questions:
                    return
    if not seen:
        raise UserError(
            f"no question of {rollouts} rollouts has both right and wrong samples: raise --rollouts or rollout.group"
        )


def _only(batch: Batch, i: int) -> Batch:
    """One group of a batch."""

    def cut(x: Any) -> Any:
        return x[i : i + 1] if isinstance(x, np.ndarray) else x

    fields: dict[str, Any] = {f.name: jax.tree.map(cut, getattr(batch, f.name)) for f in dataclasses.fields(batch)}
    fields["problems"] = batch.problems[i : i + 1]
    return dataclasses.replace(batch, **fields)


def _gwhes(run: Run, each: Sequence[Batch]) -> PerPrompt:
    """The mean of `grpojax.diagnostics.gwhes` over right samples, ``[Q]``."""
    longest = run.config.data.max_prompt_tokens
    influences = Influences(run.policy, temperature=run.config.rollout.temperature, longest_prompt=longest)
    means = []
    for batch in each:
        weights = np.asarray(diagnostics.gwhes_weights(_outcome(run, batch), success=SUCCESS))
        tokens, mask = batch.rollout.tokens, batch.sampled
        found = influences(
            policy_state.weights(run.state.networks),
            batch.problems,
            tokens,
            batch.rollout.lengths,
            mask,
            np.where(mask, weights[..., None], 0.0).astype(np.float32),
            most=1,
            tokens_at_once=tokens[0].size,
        )
        total = np.where(mask, found.scores, 0.0).sum(-1)
        means.append(total[weights < 0].mean())
    return np.array(means)


def _displacement(run: Run, each: Sequence[Batch]) -> PerPrompt:
    """Δ(x) of each question, ``[Q]``."""
    start, out = run.state, []
    fresh = {role: x for role, x in start.networks.items() if isinstance(x, TrainState)}  # all networks that learn
    for number, batch in enumerate(each):
        # An update takes over its input.
        networks = {**start.networks, **jax.tree.map(jnp.copy, fresh)}
        minis = learn.pack(run, batch)  # one minibatch, of one question
        minis, signals = learn.score(run, networks, minis)
        minis, _, _ = learn.weigh(run, networks, minis, batch, signals)

        before = _logps(run, networks, minis[0])
        state = dataclasses.replace(start, networks=networks, step=number - 1)
        state, _ = learn.update(run, state, minis)
        after = _logps(run, state.networks, minis[0])
        mask = batch.sampled
        outcome = _outcome(run, batch)
        out.append(float(diagnostics.likelihood_displacement(before, after, outcome, mask, success=SUCCESS)[0]))
    return np.array(out)


def _logps(run: Run, networks: Mapping[str, Any], mini: Minibatch) -> Tokens:
    """Log-probs ``[1, G, T]`` under the policy."""
    device, weights = run.policy.device, policy_state.weights(networks)
    rows = device.call(run.programs.score, weights, mini.rows.bare).logps
    return batch_shards.gather_groups(mini.layout.unpack(device.get(rows)), 1)


def format_table(found: QuestionUpdates, *, epsilon: float, top: int | None = None) -> str:
    """A line for each question, and for each method the share of questions that it displaced.

    Args:
      found: the result of `measure`.
      epsilon: Δ(x) up to which a question counts as displaced.
      top: number of questions in the compared rankings. More than a fifth of all questions is reduced to a fifth, and a
        line says so; None takes a fifth.
    """
    methods, count = list(found.displacement), len(found.uids)
    most = max(count // 5, 1)
    lines = ["question  right     GWHES  " + "  ".join(f"Δ {name:>10}" for name in methods)]
    for i in np.argsort(-found.gwhes):
        changes = "  ".join(f"{found.displacement[name][i]:>12.4f}" for name in methods)
        lines.append(f"{found.uids[i]:>8}  {found.right[i]:>5.2f}  {found.gwhes[i]:>8.4g}  {changes}")
    if top is not None and top > most:
        lines.append(f"only {count} questions were found: rankings are compared on {most} of them in place of {top}")
    top = min(top or most, most)
    for name in methods:
        delta = found.displacement[name]
        overlap = float(diagnostics.ranking_overlap(found.gwhes, delta, top))
        correlation = float(diagnostics.rank_correlation(found.gwhes, delta))
        lines.append(
            f"{name}: {np.mean(delta <= epsilon):.1%} of {count} questions displaced (Δ <= {epsilon:g}), "
            f"mean Δ {delta.mean():.4f}, {overlap:.0%} of the {top} with the highest GWHES among the {top} lowest Δ "
            f"({top / count:.0%} by chance), rank correlation of GWHES and -Δ {correlation:.2f} (0 by chance)"
        )
    return "\n".join(lines)


def to_json(found: QuestionUpdates) -> dict[str, Any]:
    """The measurements as plain data.

    Example:
      >>> one = np.array([0.5])
      >>> to_json(QuestionUpdates(uids=[7], right=one, gwhes=one, displacement={"grpo": one}))
      {'uids': [7], 'right': [0.5], 'gwhes': [0.5], 'displacement': {'grpo': [0.5]}}
    """
    return {
        "uids": list(found.uids),
        "right": found.right.tolist(),
        "gwhes": found.gwhes.tolist(),
        "displacement": {name: values.tolist() for name, values in found.displacement.items()},
    }


def step_of(optimizer: OptimizerConfig) -> str:
    """A line that says which step every Δ is of.

    Example:
      >>> step_of(OptimizerConfig(name="sgd", learning_rate=0.1, b1=0.0, grad_clip=0.0))
      "each Δ is of one step of the question's gradient times 0.1"
    """
    rate, clip = f"{optimizer.learning_rate:g}", optimizer.grad_clip
    clipped = f", clipped at a norm of {clip:g}," if clip else ""
    if optimizer.name == "sgd":
        return f"each Δ is of one step of the question's gradient{clipped} times {rate}"
    return (
        f"each Δ is of one AdamW step from zero moments at a rate of {rate}: about the sign of each weight's gradient "
        f"times {rate}, whatever its size, and not the gradient step of the paper's theory; for that set "
        "optimizer.name=sgd and a rate for it"
    )
