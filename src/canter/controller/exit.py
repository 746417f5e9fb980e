"""How a process ended."""

from __future__ import annotations

from dataclasses import dataclass

from canter.types import Outcome


@dataclass(frozen=True, slots=True)
class Exit:
    """`exit_code` is negative for a signal; `message` is why it failed, or the last line of its standard error."""

    outcome: Outcome
    exit_code: int | None = None
    message: str = ""

    @property
    def clean(self) -> bool:
        return self.outcome is Outcome.EXITED and self.exit_code == 0
