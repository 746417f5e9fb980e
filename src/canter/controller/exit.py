"""How a process ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from canter.types import Outcome

MESSAGE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Exit:
    """`exit_code` is negative for a signal; `message` is why it failed, or the last line of its standard error."""

    outcome: Outcome
    exit_code: int | None = None
    message: str = ""

    @property
    def clean(self) -> bool:
        return self.outcome is Outcome.EXITED and self.exit_code == 0

    @classmethod
    def read(cls, row: object) -> Exit:
        """What a keeper has written. Raises ValueError for anything that none would write."""
        if not isinstance(row, Mapping):
            raise ValueError(f"{row!r:.100} is no record of an end")
        outcome, code, message = row.get("outcome"), row.get("exit_code"), row.get("message")
        if code is not None and (type(code) is not int or not -128 <= code <= 255):
            raise ValueError(f"{code!r:.100} is no exit code")
        if not isinstance(outcome, str) or not isinstance(message, str):
            raise ValueError(f"{outcome!r:.100} with {message!r:.100} says of no end how it came")
        # half a surrogate pair cannot be sent on
        return cls(Outcome(outcome), code, message[:MESSAGE_CHARS].encode(errors="replace").decode())
