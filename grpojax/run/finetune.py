"""Supervised runs: the loop of ``grpojax sft`` and ``grpojax dpo``. It reads from top to bottom.

The policy's model, state, checkpoints, signals and metrics are those of a run by reinforcement; what differs between
completions and pairs is a `grpojax.run.teaching.Teaching`. On an accelerator the metrics of an update are read after
the next one has been dispatched, so that it always has work.
"""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from grpojax import data
from grpojax.host import peers, processes
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.models import flops, hf
from grpojax.programs.policy import Policy
from grpojax.programs.state import abstract_state, beside, decoder_network, init_state, place_rows
from grpojax.records import metrics
from grpojax.run import recorder, scoring, step_metrics, teaching
from grpojax.run.finetune_recipe import DPOConfig, SFTConfig
from grpojax.run.programs import make_supervised_programs
from grpojax.run.run_state import RunState
from grpojax.run.session import Session, enough_memory
from grpojax.run.teaching import Shapes
from grpojax.run.today import with_day

BEST = "-eval/loss"  # what the best checkpoint is told by: the largest


REMEDIES = (
    "raise train.microbatches, set model.remat=layer, or spread over more devices (mesh.fsdp); in a new run lower "
    "train.batch_size or data.max_tokens"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pending:
    """An update in flight: what is already known of the step, and the metrics that the device still owes."""

    number: int
    known: dict[str, float]
    owed: dict[str, Any]
    tokens: int
    flops: float


class FineTune:
    """A supervised run of ``config``, new or resumed from its directory.

    Args:
      config: the recipe; its class says what is taught.
      devices: what to run on; None takes all there are.
      take_over: break another process's claim on a run directory in a bucket.

    Raises:
      UserError: the directory holds a run of another config, or the data or the sizes do not go with it.

    Attributes:
      weights: of the policy, a `grpojax.types.TrainState`.
      state: what a checkpoint has of the run besides them.
      steps: updates of the whole run.
    """

    def __init__(
        self, config: SFTConfig | DPOConfig, devices: Sequence[jax.Device] | None = None, *, take_over: bool = False
    ):
        self.config, self._take_over = config, take_over
        self.teaching = teaching.teaching_of(config)
        self.state = RunState()
        with (
            contextlib.ExitStack() as held,
            peers.telling(),
            enough_memory(lambda: self.done, REMEDIES),
        ):  # let go of if what follows raises
            with processes.AllOrNone():
                self._prepare(held, devices)
            self._open(held)
            self._held = held.pop_all()

    def _prepare(self, held: contextlib.ExitStack, devices: Sequence[jax.Device] | None) -> None:
        """All that one process does by itself."""
        tokenizer = hf.load_tokenizer(str(data.locate(self.config.model.path)))
        self.config = config = with_day(self.config, tokenizer, self.config.run.dir)
        train = config.train
        self.session = Session(config, take_over=self._take_over)
        if config.mesh.rollout:
            raise UserError(f"mesh.rollout={config.mesh.rollout}: nothing is sampled here; leave it out")
        tokenize = data.Tokenize(tokenizer, config.data.questions())
        self.policy = policy = Policy(config.model, config.mesh, devices, tokenizer=tokenizer)
        # Of several that end a sample, the one that ends a message of the chat, or else the tokenizer's.
        own = (hf.turn_end(tokenizer) if tokenize.chat else None, tokenizer.eos_token_id, *policy.eos_ids)
        end = next((token for token in own if token is not None), None)
        if end is None:
            raise UserError(f"model.path={config.model.path!r} names no token that ends an answer (eos_token_id)")
        if len(policy.eos_ids) > 1:
            log.info("answers end with %r", tokenizer.convert_ids_to_tokens(end))
        self.parts, known = dict[str, data.Answers](), data.Known()
        for name in ("test", "validation", "train"):
            if (given := getattr(config.data, name)) is None:
                continue
            loaded = self.parts[name] = self.teaching.answers(given, tokenize, config.data, end, known)
            known = known.and_those_of(loaded.kept)
            for line in loaded.notes(name, config.data):
                log.info("%s", line)
            for line in loaded.warnings(name):
                log.warning("%s", line)
        self.answers, self.held_out = self.parts["train"], self.parts.get("validation")
        self.shapes = _shapes(config, policy, [entry for part in self.parts.values() for entry in part.kept])
        count = len(self.answers.kept)
        if train.batch_size > count:
            raise UserError(f"train.batch_size={train.batch_size} is more than the {count} entries of the data")
        many: Any = self.answers.kept
        self.batches = data.Batches(many, train.batch_size, train.seed, self.answers.weights)
        self.steps = train.updates(count)
        fingerprints = dict.fromkeys(("train", "validation", "test")) | {
            name: part.fingerprint for name, part in self.parts.items()
        }
        self.session.claim(held, fingerprints)

    def _open(self, held: contextlib.ExitStack) -> None:
        """The run's state, new or restored."""
        config, policy = self.config, self.policy
        self.session.open(held, BEST if self.held_out else None)
        loss = self.teaching.objective(policy.graph, policy.compute)
        made = make_supervised_programs(policy.graph, policy.compute, loss, config.optimizer, self.steps)
        self.optimizer, self.update = made.optimizer, made.update
        self.scorer = scoring.Scorer(policy, made.score, self.shapes, config.train.batch_size)
        kept = {name: self.parts[name].kept if name in self.parts else () for name in ("train", "validation", "test")}
        if self.teaching.needs_reference:
            self.reference = self.scorer.reference(kept, self.session.directory / "reference.npz")
        else:
            self.reference = {x: np.zeros((len(entries), self.shapes.group), np.float32) for x, entries in kept.items()}
        _, network = decoder_network(policy.config, self.optimizer, policy.mesh)
        restored = self.session.restore(abstract_state({"policy": network}, policy.mesh))
        params, policy.params = policy.params, None
        if restored is None:
            self.weights = init_state(params, self.optimizer, policy.mesh)
        else:
            self.weights, self.state = restored[0]["policy"], restored[1]
        self.weights = beside(self.weights, params, policy.mesh)
        self._saved = self.done
        if self.done > self.steps:
            raise UserError(f"{self.steps} steps: the run in {config.run.dir} is at step {self.done} already")
        self.pending: list[_Pending] = []
        self.ahead = int(jax.default_backend() != "cpu")  # a CPU has nothing to gain, and its times would mix
        with processes.AllOrNone():  # the first writes these files anew, once all have read them
            lines = metrics.read_metrics(self.session.directory)
        at = [x["step"] for x in lines if x["step"] <= self.done and "eval/loss" in x]
        self._evaluated = max(at, default=-1)
        self._tested = any("test/problems" in x and x["step"] == self.done for x in lines)
        self.metrics = recorder.Recorder(self.session.directory, self.done, config.tracking)
        held.callback(self.metrics.close)
        self.since = time.perf_counter()
        self.table = metrics.Table(self.steps, columns=self.teaching.columns)
        self.session.settle(finished=self.done == self.steps)

    @property
    def done(self) -> int:
        """Steps behind the run."""
        return self.state.step

    # ------------------------------------------------------------------------------------------ the loop

    def run(self) -> bool:
        """Trains to the end; False if it was told to stop before (the state is saved either way)."""
        try:
            with peers.telling(), enough_memory(lambda: self.done, REMEDIES):
                with self.session.conduct(self._rescue) as outcome:
                    self._loop()
                return outcome.finished
        finally:
            self.close()

    def _rescue(self) -> int:
        """Whatever ends a run must not cost what was learned. The step that is saved."""
        with contextlib.suppress(UserError):
            while self.pending:
                self._finish()
        if self.done != self._saved:
            self._save()
        return self.done

    def close(self) -> None:
        """Gives back what the run holds: files, the directory's lock."""
        self._held.close()

    def _loop(self) -> None:
        train, control, watchdog = self.config.train, self.session.control, self.session.watchdog
        # Of a run that was stopped, the evaluation that was due after its last step.
        if self.done == 0 or (self.held_out is not None and self._evaluates() and self._evaluated < self.done):
            self._evaluate()
        self.since = time.perf_counter()
        while self.done < self.steps:
            watchdog.begin(self.done + 1)
            control.sync()
            self.session.profile.begin(self.done + 1, self.weights)
            self.pending.append(self._step())
            self.state.step += 1
            self.session.profile.end(self.done, self.weights)
            if len(self.pending) > self.ahead:
                self._finish()
            saves = self.done == self.steps or (train.checkpoint_every and self.done % train.checkpoint_every == 0)
            saves, evaluates = saves or control.due, self._evaluates()
            if evaluates or saves:
                self._finish()
            watchdog.end()
            if saves:  # first, as an evaluation takes long and may fail
                self._save()
            if evaluates:
                self._evaluate()
            if evaluates or saves:
                self.since = time.perf_counter()
        if "test" not in self.parts and self.held_out is not None:
            log.info("no data.test: the held-out figures are of data.validation, by which checkpoints are picked")
        elif "test" in self.parts and not self._tested:
            self._test()

    def _evaluates(self) -> bool:
        every = self.config.train.eval_every
        return self.done == self.steps or (every > 0 and self.done % every == 0)

    def _step(self) -> _Pending:
        """Dispatches the next update."""
        entries: Any = self.batches[self.done]
        batch = teaching.to_batch(entries, self.shapes)
        part, layout = self.teaching.part(batch, self.shapes, self.reference["train"][[e.uid for e in entries]])
        prompts, tokens = int(batch.prompts.lengths.sum()), int(batch.lengths.sum())
        self.weights, owed = self.update(self.weights, None, place_rows(part, self.policy.mesh))
        _ready(self.policy, self.weights)
        self.state.num_tokens += prompts + tokens
        known = {
            "epoch": (self.done + 1) * self.config.train.batch_size / len(self.answers.kept),
            "num_tokens": float(self.state.num_tokens),
            "useful_token_fraction": layout.useful,
        }
        work = 3 * flops.forward_flops(self.policy.config, batch.prompts.lengths, batch.lengths)
        return _Pending(number=self.done + 1, known=known, owed=owed, tokens=tokens, flops=work)

    def _finish(self) -> None:
        """Waits for the oldest update in flight and records its metrics."""
        if not self.pending:
            return
        pending = self.pending.pop(0)
        owed = jax.device_get(pending.owed)
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        train, number = self.config.train, pending.number
        values = pending.known | step_metrics.of_updates([owed])
        self.state.skipped = self.state.skipped + 1 if owed["skipped"] else 0
        values |= {"skipped_updates": float(owed["skipped"]), "time/step_s": seconds}
        values["time/checkpoint_s"], self.session.save_s = self.session.save_s, 0.0
        values["tokens_per_s"] = pending.tokens / seconds
        if peak := flops.PEAK_FLOPS.get(jax.devices()[0].device_kind):
            values["utilisation"] = pending.flops / seconds / peak / (self.policy.mesh.size if self.policy.mesh else 1)
        self.metrics.write(number, values)
        if number % train.log_every == 0:
            self.table.row(number, values)
        if owed["skipped"]:
            log.warning("step %d: the update was skipped, its gradient is not finite", number)
        if self.state.skipped >= train.max_skipped:
            raise UserError(
                f"step {number}: {self.state.skipped} updates in a row had a gradient that is not finite; the "
                "weights before them are saved\nlower optimizer.learning_rate or optimizer.grad_clip"
            )

    def _save(self) -> None:
        self._saved = self.done
        self.metrics.flush()
        self.session.save({"policy": self.weights}, self.state)

    # ------------------------------------------------------------------------------------------ scoring

    def _evaluate(self) -> None:
        """Records what the policy as it is makes of the held-out answers."""
        if self.held_out is None:
            return
        # Or `Stopped`, and this one is made up for when the run goes on.
        logps, lengths = self.scorer.sums(self.held_out.kept, self.weights.params, self.session.control.sync)
        values = self.teaching.held_out(logps, lengths, self.reference["validation"])
        self.metrics.write(self.done, values)
        self.session.score(self.done, {BEST: -values["eval/loss"]})
        log.info("step %d  held-out loss %.4f of %d prompts", self.done, values["eval/loss"], len(logps))

    def _test(self) -> None:
        """Records what the final policy makes of the test set. A run that is stopped in it does so when it goes on."""
        entries = self.parts["test"].kept
        log.info("data.test is read now, once, with the final weights: %d prompts", len(entries))
        logps, lengths = self.scorer.sums(entries, self.weights.params, self.session.control.sync)
        values = self.teaching.held_out(logps, lengths, self.reference["test"])
        named = {name.replace("eval/", "test/", 1): value for name, value in values.items()}
        self.metrics.write(self.done, named | {"test/problems": float(len(entries))})
        self._tested = True
        log.info("test loss %.4f of %d prompts, read once with the final weights", named["test/loss"], len(entries))


def _ready(policy: Policy, state: Any) -> None:
    """On several CPU devices programs in flight take each other's messages."""
    if jax.default_backend() == "cpu" and policy.mesh is not None:
        jax.block_until_ready(state)


def _shapes(config: SFTConfig | DPOConfig, policy: Policy, entries: Sequence[data.Answered]) -> Shapes:
    """What all batches have in common; raises `UserError` where they do not fit the devices or the model."""
    size, parts = config.train.batch_size, config.train.microbatches
    if size % (policy.shards * parts):
        raise UserError(
            f"train.batch_size={size} does not divide over {policy.shards} batch shards with "
            f"train.microbatches={parts} each: make it a multiple of {policy.shards * parts}"
        )
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
        microbatches=parts,
        gather=policy.compute.needs_gather,
    )
