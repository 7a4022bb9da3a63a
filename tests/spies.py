"""Programs of a run under watch."""

import dataclasses

from grpojax.run import trainer


class Spy:
    """A program, with ``around(program, *args, **static)`` called in its place."""

    def __init__(self, program, around):
        self.program, self.around = program, around

    def __call__(self, *args, **static):
        return self.around(self.program, *args, **static)

    def __getattr__(self, name):
        return getattr(self.program, name)


def watched(made, around):
    """The same `grpojax.run.programs.Programs`, each with `Spy` before it."""
    new = {}
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if isinstance(value, dict):
            new[field.name] = {name: Spy(program, around) for name, program in value.items()}
        elif callable(value):  # an optimiser is none
            new[field.name] = Spy(value, around)
    return dataclasses.replace(made, **new)


def watch(monkeypatch, around):
    """Has the next trainers run their programs by ``around``."""
    make = trainer.make_programs  # or fakes, where a test has put them there
    monkeypatch.setattr(trainer, "make_programs", lambda learning: watched(make(learning), around))


def record(monkeypatch):
    """Names and arguments of all programs that the next trainers run: a list that grows."""
    seen = []

    def around(program, *args, **static):
        seen.append((program.__name__, args))
        return program(*args, **static)

    watch(monkeypatch, around)
    return seen


def update_by(trainer, function):
    """Has ``function(state, frozen, packed)`` stand in the place of a trainer's update; the update that it had."""
    made = trainer.learner.programs
    trainer.learner.programs = dataclasses.replace(made, update=Spy(made.update, lambda _, *args: function(*args)))
    return made.update
