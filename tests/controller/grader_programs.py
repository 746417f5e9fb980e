"""Graders that tests name as functions."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

from canter.graders import Grading


def full(grading: Grading) -> float:
    return 1.0


def by_exit_code(grading: Grading) -> dict[str, object]:
    return {"value": 1.0 if grading.exit_code == 0 else 0.25, "outcome": grading.outcome.value, "calls": grading.calls}


def by_file(grading: Grading) -> float:
    return float((grading.dir / "result").read_text())


def not_a_number(grading: Grading) -> float:
    return math.nan


def nothing(grading: Grading) -> None:
    return None


def crash(grading: Grading) -> float:
    raise KeyError("no such case")


def disappear(grading: Grading) -> float:
    os._exit(0)


def slow(grading: Grading) -> float:
    time.sleep(60)
    return 1.0


def second_time(grading: Grading) -> float:
    """Fails when it is first asked."""
    mark = Path(grading.task.input["mark"])
    if not mark.exists():
        mark.touch()
        raise ValueError("not yet")
    return 0.5


def surroundings(grading: Grading) -> dict[str, object]:
    return {"value": 1, "environ": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd()}
