"""Supervised runs, ``grpojax sft`` and ``grpojax dpo``: a step takes a batch of the data and learns from it.

It runs in the loop of every run, `grpojax.run.loop.Loop`. A `grpojax.extensions.supervised.teaching.Teaching` has what
differs between completions and pairs.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from grpojax import data
from grpojax.extensions.supervised import scoring, teaching
from grpojax.extensions.supervised.answered import Answered, Answers
from grpojax.extensions.supervised.finetune_recipe import DPOConfig, SFTConfig
from grpojax.extensions.supervised.programs import learn, make_supervised_programs
from grpojax.extensions.supervised.teaching import Shapes
from grpojax.host import processes
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models import flops, hf
from grpojax.programs import policy_state
from grpojax.programs.policy import Policy, model_facts
from grpojax.programs.state import abstract_state, bound
from grpojax.run import checks
from grpojax.run.loop import Loop, Task, Updates
from grpojax.run.run_state import State

BEST = "-eval/loss"  # the metric of the best checkpoint: the largest


REMEDIES = (
    "raise train.microbatches, set model.remat=layer, or spread over more devices (mesh.fsdp); in a new run lower "
    "train.batch_size or data.max_tokens"
)


class FineTune(Task):
    """A supervised run of ``config``, new or resumed from its directory.

    Args:
      config: the recipe; its class says what kind of training it is.
      devices: devices to run on; None takes all there are.
      take_over: break another process's claim on a run directory in a bucket.

    Raises:
      UserError: the directory holds a run of another config, or the data or the sizes do not go with it.

    Attributes:
      steps: number of updates of the whole run.
    """

    def __init__(
        self, config: SFTConfig | DPOConfig, devices: Sequence[jax.Device] | None = None, *, take_over: bool = False
    ):
        self.teaching = teaching.teaching_of(config)
        # On a CPU an update ahead gains nothing, and the times of two updates would mix.
        ahead = int(jax.default_backend() != "cpu")
        self.loop = Loop(self, memory=REMEDIES, gradient=checks.SMALLER, take_over=take_over, ahead=ahead)
        with self.loop.opening() as held:
            with processes.AllOrNone():
                self._prepare(held, config, devices)
            self._open(held)

    def _prepare(
        self, held: contextlib.ExitStack, config: SFTConfig | DPOConfig, devices: Sequence[jax.Device] | None
    ) -> None:
        """The part of the preparation that each process does by itself."""
        tokenizer = hf.load_tokenizer(str(data.locate(config.model.path)))
        self.config = config = self.loop.prepare(config, tokenizer)
        train = config.train
        if config.mesh.rollout:
            raise UserError(f"mesh.rollout={config.mesh.rollout}: nothing is sampled here; leave it out")
        tokenize = data.Tokenize(tokenizer, config.data.questions())
        self.policy = policy = Policy(config.model, config.mesh, devices, tokenizer=tokenizer)
        checks.adapter(policy)
        policy.load()
        # If several tokens end a sample, this is the one that ends a message of the chat, or else the tokenizer's.
        own = (hf.turn_end(tokenizer) if tokenize.chat else None, tokenizer.eos_token_id, *policy.eos_ids)
        end = next((token for token in own if token is not None), None)
        if end is None:
            raise UserError(f"model.path={config.model.path!r} names no token that ends an answer (eos_token_id)")
        if len(policy.eos_ids) > 1:
            log.info("answers end with %r", tokenizer.convert_ids_to_tokens(end))
        self.parts, known = dict[str, Answers](), data.Known()
        for name in ("test", "validation", "train"):
            if (given := getattr(config.data, name)) is None:
                continue
            loaded = self.parts[name] = self.teaching.answers(given, tokenize, config.data, end, known)
            known = known.and_those_of(loaded.kept)
            for line in loaded.notes(name, config.data):
                log.info("%s", line)
            for line in loaded.warnings(name):
                log.warning("%s", line)
        self.answers = self.parts["train"]
        self.shapes = _shapes(config, policy, [entry for part in self.parts.values() for entry in part.kept])
        count = len(self.answers.kept)
        if train.batch_size > count:
            raise UserError(f"train.batch_size={train.batch_size} is more than the {count} entries of the data")
        many: Any = self.answers.kept
        self.batches = data.Batches(many, train.batch_size, train.seed, self.answers.weights)
        self.steps = train.updates(count)
        checks.warm_up(config.optimizer, self.steps)
        fingerprints = dict.fromkeys(("train", "validation", "test")) | {
            name: part.fingerprint for name, part in self.parts.items()
        }
        self.session.claim(held, fingerprints)

    def _open(self, held: contextlib.ExitStack) -> None:
        """The run's state, new or restored."""
        config, policy = self.config, self.policy
        loss = self.teaching.objective(policy.graph, policy.compute)
        self.programs = made = make_supervised_programs(policy.shape, loss, config.optimizer, self.steps)
        self.scorer = scoring.Scorer(policy, made.score, self.shapes, config.train.batch_size)
        kept = {name: self.parts[name].kept if name in self.parts else () for name in ("train", "validation", "test")}
        if self.teaching.needs_reference:
            weights = model_facts(config.resolved())["weights"]
            self.reference = self.scorer.reference(kept, self.session.directory / "reference.npz", weights)
        else:
            self.reference = {x: np.zeros((len(entries), self.shapes.group), np.float32) for x, entries in kept.items()}
        abstract = abstract_state(
            {"policy": policy_state.networks(policy.shape, made.optimizer)["policy"]}, policy.mesh
        )
        restored = self.loop.restore(held, abstract, best=BEST if "validation" in self.parts else None)
        params, policy.params = policy.params, None
        state = policy_state.start(
            policy, params, made.optimizer, seed=config.train.seed, restored=(restored or {}).get("policy")
        )
        self.loop.state = dataclasses.replace(self.state, networks=bound(state, policy.device))
        if self.done > self.steps:
            raise UserError(f"{self.steps} steps: the run in {config.run.dir} is at step {self.done} already")
        self.loop.start(held, self.steps, share=self.done / self.steps, columns=self.teaching.columns)

    def run(self) -> bool:
        """Trains to the end; False if it was stopped before (the state is saved either way)."""
        finished = super().run()
        if finished and "validation" in self.parts and "test" not in self.parts:
            log.info("no data.test: the held-out figures are of data.validation, which also chooses checkpoints")
        return finished

    def step(self, state: State) -> tuple[State, Updates]:
        """Takes the next batch of the data, and learns from it."""
        self.session.control.sync()
        number, entries = state.step + 1, cast(Any, self.batches[state.step])
        batch = teaching.to_batch(entries, self.shapes)
        part, layout = self.teaching.part(batch, self.shapes, self.reference["train"][[e.uid for e in entries]])
        prompts, tokens = int(batch.prompts.lengths.sum()), int(batch.samples.lengths.sum())
        networks, metrics = learn(self.programs, self.policy.device, state.networks, part)
        num_tokens = state.num_tokens + prompts + tokens
        known = {
            "epoch": number * self.config.train.batch_size / len(self.answers.kept),
            "num_tokens": float(num_tokens),
            "useful_token_fraction": layout.useful,
        }
        passes = 3 if self.policy.adapter is None else 2  # frozen weights get no gradient
        work = passes * flops.forward_flops(self.policy.config, batch.prompts.lengths, batch.samples.lengths)
        state = dataclasses.replace(state, networks=networks, step=number, num_tokens=num_tokens)
        return state, Updates(
            number=number, known=known, metrics=[metrics], tokens=tokens, flops=work, share=number / self.steps
        )

    @property
    def networks(self) -> dict[str, Any]:
        """The weights that are saved, by role."""
        return {"policy": self.state.networks["policy"]}

    # ------------------------------------------------------------------------------------------ held-out data

    def evaluate(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """Metrics of the policy on the validation set; its loss chooses the best checkpoint."""
        values, count = self._score("validation"), len(self.parts["validation"].kept)
        log.info("step %d  held-out loss %.4f of %d prompts", number, values["eval/loss"], count)
        return values, {BEST: -values["eval/loss"]}

    def test(self, number: int) -> dict[str, float] | None:
        """Metrics of the final policy on the test set; None without one."""
        if "test" not in self.parts:
            return None
        count = len(self.parts["test"].kept)
        log.info("evaluating data.test, once and with the final weights: %d prompts", count)
        values = {name.replace("eval/", "test/", 1): value for name, value in self._score("test").items()}
        log.info("test loss %.4f of %d prompts, read once with the final weights", values["test/loss"], count)
        return values | {"test/problems": float(count)}

    def _score(self, name: str) -> dict[str, float]:
        """The current policy's metrics on a part of the data. If it raises `Stopped`, the evaluation is done later."""
        logps, lengths = self.scorer.sums(
            self.parts[name].kept, policy_state.weights(self.state.networks), self.session.control.sync
        )
        return self.teaching.held_out(logps, lengths, self.reference[name])


def _shapes(config: SFTConfig | DPOConfig, policy: Policy, entries: Sequence[Answered]) -> Shapes:
    """The sizes that all batches share; raises `UserError` if they do not fit the devices or the model."""
    teaching.check_cut(config, policy.shards)
    prompt = max(len(entry.ids) for entry in entries)
    completion = max(len(ids) for entry in entries for ids in entry.completions)
    if prompt + completion > policy.config.max_positions:
        raise UserError(
            f"prompts of up to {prompt} tokens and answers of up to {completion} are over the model's "
            f"max_position_embeddings={policy.config.max_positions}: lower data.max_prompt_tokens or data.max_tokens"
        )
    return Shapes(
        group=max(len(entry.completions) for entry in entries),
        prompt=prompt,
        completion=completion,
        shards=policy.shards,
        microbatches=config.train.microbatches,
        gather=policy.compute.needs_gather,
    )
