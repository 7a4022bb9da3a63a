"""Watches the programs of a run."""

import dataclasses

from grpojax.run import trainer


class Spy:
    """Stands in for a program and calls ``around(program, *args, **static)`` instead."""

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
    """Makes the next trainers run their programs through ``around``."""
    make = trainer.make_programs  # or fakes, where a test has put them there
    monkeypatch.setattr(trainer, "make_programs", lambda learning: watched(make(learning), around))


def record(monkeypatch):
    """A growing list of the names and arguments of all programs that the next trainers run."""
    seen = []

    def around(program, *args, **static):
        seen.append((program.__name__, args))
        return program(*args, **static)

    watch(monkeypatch, around)
    return seen


def update_by(trainer, function):
    """Replaces a trainer's update by ``function(state, frozen, packed)``; returns the previous update."""
    made = trainer.learner.programs
    trainer.learner.programs = dataclasses.replace(made, update=Spy(made.update, lambda _, *args: function(*args)))
    return made.update
