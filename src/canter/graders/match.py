"""Built-in matches of a final answer against `hidden.answer`: 1.0 or 0.0. Pure.

No answer at all is 0.0, the agent's own failure; a task without `hidden.answer` is a GraderError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from canter.errors import GraderError

_NUMBER = re.compile(r"[-+−]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def match(use: str, answer: str | None, hidden: Mapping[str, Any], *, tolerance: float) -> float:
    """The reward by `grader.use`: `exact`, `regex` or `numeric`. Raises GraderError where a task cannot be graded."""
    if "answer" not in hidden:
        raise GraderError(f"grader.use = {use!r} needs hidden.answer in every task row; this one has {sorted(hidden)}")
    expected = hidden["answer"]
    if answer is None:
        return 0.0
    if use == "exact":
        return exact(answer, expected)
    if use == "regex":
        return regex(answer, str(expected))
    return numeric(answer, expected, tolerance)


def exact(answer: str, expected: Any) -> float:
    """Whether the texts are equal but for space around them; `expected` may be a list of right answers."""
    right = expected if isinstance(expected, list) else [expected]
    return float(answer.strip() in {str(one).strip() for one in right})


def regex(answer: str, pattern: str) -> float:
    """Whether the pattern is found anywhere in the answer."""
    try:
        return float(re.search(pattern, answer) is not None)
    except re.error as error:
        raise GraderError(f"hidden.answer {pattern!r} is no regular expression: {error}") from error


def numeric(answer: str, expected: Any, tolerance: float) -> float:
    """Whether the last number in the answer is within `tolerance` of the expected one."""
    try:
        target = float(str(expected).replace(",", ""))
    except ValueError:
        target = math.nan
    if not math.isfinite(target):
        raise GraderError(f"hidden.answer must be a finite number for grader.use = 'numeric', got {expected!r}")
    found = last_number(answer)
    return float(found is not None and abs(found - target) <= tolerance)


def last_number(text: str) -> float | None:
    """The last number written in the text (`1,234.5`, `-3`, `2e-4`), None without one."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    value = float(found[-1].replace(",", "").replace("−", "-"))
    return value if math.isfinite(value) else None
