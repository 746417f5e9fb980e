"""What turns a finished rollout into a reward, in a process of its own, outside the agent's reach.

A grader is a built-in match (`match`), a Python function `grade(grading: Grading) -> float`, or a command. `run` is the
process: it fetches the hidden part with its own key, computes, and posts. A grader that fails gives no reward at all
(`invalid`), never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from canter.types import Outcome, Task


@dataclass(frozen=True, slots=True)
class Grading:
    """One ended attempt, as a grader sees it.

    `task` is the whole row; `answer` the final answer (`grader.answer`), None where there is none; `dir` the working
    folder as the harness left it; `stdout` and `stderr` what it printed; `exit_code` is negative for a signal; `calls`
    counts its committed model calls. Everything in `dir` was written by the agent: read it as data.
    """

    task: Task
    answer: str | None
    dir: Path
    stdout: Path
    stderr: Path
    outcome: Outcome
    exit_code: int | None
    calls: int
    last_message: str | None = None

    @property
    def hidden(self) -> Mapping[str, Any]:
        return self.task.hidden


class GraderExit(IntEnum):
    """Exit codes of the grader process; any other one is a fault of the grader, too."""

    POSTED = 0
    FAILED = 65
    """The grader gave no finite number; the last line of its standard error says why."""
    NO_CALLS = 66
    """The harness failed before it made a model call: nothing to reward, nothing to train."""
    GATEWAY_UNAVAILABLE = 75
