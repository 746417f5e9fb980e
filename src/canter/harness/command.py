"""`harness.command`: any program, by its argv."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from canter.harness import Program, Seat, Standalone

_PLACEHOLDER = re.compile(r"\{(task\.prompt|task\.id|model|dir|base)\}")


@dataclass(frozen=True, slots=True)
class Command(Standalone):
    """Runs `argv` without a shell. `{task.prompt}`, `{task.id}`, `{model}`, `{dir}` (the working folder) and `{base}`
    (the folder of the TOML file) are replaced; other braces stay."""

    argv: tuple[str, ...]
    base: Path

    def program(self, seat: Seat) -> Program:
        values = {
            "task.prompt": str(seat.task["prompt"]),
            "task.id": str(seat.task["id"]),
            "model": seat.model,
            "dir": str(seat.work),
            "base": str(self.base),
        }
        # one pass: a placeholder inside the task's own text is text
        return Program(argv=tuple(_PLACEHOLDER.sub(lambda match: values[match[1]], part) for part in self.argv))
