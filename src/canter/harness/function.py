"""`harness.function`: a Python function, called in a fork of a launcher that has imported its module once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from canter.harness import Program, Seat


@dataclass(frozen=True, slots=True)
class Function:
    """Calls `name` (`module:function`, plain or async) with the public task `{"id", "prompt", "input"}`.

    It runs in the attempt's working folder with the environment that every harness gets. What it returns is ignored;
    an exception is exit code 1. `atexit` handlers do not run.
    """

    name: str

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.name,)

    def launcher_env(self, private: Path) -> Mapping[str, str]:
        return {}

    def files(self, seat: Seat) -> Mapping[str, str]:
        return {}

    def program(self, seat: Seat) -> Program:
        return Program(function=self.name, argument=dict(seat.task))
