"""What a run is between two steps: its networks, counts, the order of the problems, and a rollout in flight."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What a step takes and returns, and a checkpoint holds. All but the networks is JSON.

    Attributes:
      networks: by role, a `grpojax.types.TrainState` for networks that learn, such as ``policy``, and plain weights for
        others. A checkpoint has those that cannot be read or made again. An update takes over the memory of the arrays
        that it changes. After it, these arrays of the state before cannot be read any more.
      step: number of finished steps.
      rollouts: number of dispatched rollouts, including those that a filter asked for.
      updates: number of updates of the policy that were dispatched; it is the version of its weights. An update that
        changed nothing counts too, because its gradient was 0 or not finite; `TrainState.step` does not count it. A
        minibatch in which no token has a weight is not dispatched, and does not count.
      num_tokens: tokens of prompts and samples. A prompt counts once for each sample.
      sampled_tokens: tokens of samples only.
      skipped: number of updates in a row that changed nothing because their gradient was not finite.
      flops: useful FLOPs of all steps.
      budget: ``train.tokens`` of the run that saved it.
      entropy: the coefficient of an adaptive entropy bonus, and the one that the next step applies.
      alarm: the newest alarm and the checkpoint that is kept for it (`grpojax.run.watch.heed`).
      passes, solved: state of `grpojax.run.problem_order.ProblemOrder`, if solved prompts are left out.
      in_flight: the rollout that is drawn ahead (`grpojax.run.source.saved_of`).
      kept: by name, what parts keep from step to step, such as groups that go on in the next rollout.
    """

    networks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    step: int = 0
    rollouts: int = 0
    updates: int = 0
    num_tokens: int = 0
    sampled_tokens: int = 0
    skipped: int = 0
    flops: float = 0.0
    budget: int | None = None
    entropy: Mapping[str, float] | None = None
    alarm: Mapping[str, Any] | None = None
    passes: list[Any] | None = None
    solved: list[Any] | None = None
    in_flight: dict[str, Any] | None = None
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def saved(self) -> dict[str, Any]:
        """The state as JSON, without its networks and without what is None. What parts keep stands beside the rest.

        Example:
          >>> State.of(State(step=3, kept={"levels": {"1": 0.5}}).saved()).kept
          {'levels': {'1': 0.5}}
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("networks", "kept")}
        return {name: value for name, value in {**self.kept, **values}.items() if value is not None}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "State":
        """The state that `saved` was made from, without its networks."""
        return cls().having(saved)

    def having(self, values: Mapping[str, Any]) -> "State":
        """The state with these fields by name; what is no field is of a part (``kept``)."""
        names = {field.name for field in dataclasses.fields(self)}
        fields = {name: value for name, value in values.items() if name in names}
        kept = {name: value for name, value in values.items() if name not in names}
        return dataclasses.replace(self, **fields, kept={**self.kept, **kept})
