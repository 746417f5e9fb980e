"""`harness.function`: a Python function, called in a fork of a launcher that has imported its module once."""

from __future__ import annotations

from dataclasses import dataclass

from canter.harness import Program, Seat, Standalone


@dataclass(frozen=True, slots=True)
class Function(Standalone):
    """Calls `name` (`module:function`, plain or async) with the public task `{"id", "prompt", "input"}`.

    It runs in the attempt's working folder with the environment that every harness gets. What it returns is ignored;
    an exception is exit code 1. `atexit` handlers do not run.
    """

    name: str

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.name,)

    def program(self, seat: Seat) -> Program:
        return Program(function=self.name, argument=dict(seat.task))
