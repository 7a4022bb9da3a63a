"""Watches the programs of a run, where a device calls them."""

import functools

from grpojax import device


def watch(monkeypatch, around):
    """Makes the devices of the next runs call ``around(program, call, *args)``; ``call(*args)`` runs the program."""
    kind = device.Real  # or a fake, where a test has put it there
    plain = kind.call

    def call(self, program, *args):
        return around(program, functools.partial(plain, self, program), *args)

    monkeypatch.setattr(kind, "call", call)


def record(monkeypatch):
    """A growing list of the names and arguments of all programs that the next runs call."""
    seen = []

    def around(program, call, *args):
        seen.append((program.name, args))
        return call(*args)

    watch(monkeypatch, around)
    return seen


def update_by(trainer, function):
    """Replaces a trainer's update by ``function(state, frozen, packed)``; returns the previous update."""
    of_run, update = trainer.policy.device, trainer.programs.update
    plain = of_run.call

    def call(program, *args):
        return function(*args) if program is update else plain(program, *args)

    of_run.call = call
    return functools.partial(plain, update)
