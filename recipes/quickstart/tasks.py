"""Makes the quickstart's tasks: one-line functions with one wrong operator, to be repaired with one shell command.

`python tasks.py` writes `train.jsonl` and `heldout.jsonl` beside this file, always the same bytes. What is held out is
held out twice: no held-out task shares its function name, nor its repair (wrong operator → right operator), with a
training task or with the worked examples of `chat_template.jinja`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "%": int.__mod__}

TRAIN_NAMES = {
    "+": ("plus", "add", "sum_of", "total"),
    "-": ("minus", "sub", "difference", "less"),
    "*": ("times", "mul", "product", "scale"),
    "%": ("mod", "rest", "remainder_of", "rem"),
}
HELDOUT_NAMES = {
    "+": ("sum_up", "addition"),
    "-": ("subtract", "take_away"),
    "*": ("multiply", "times_by"),
    "%": ("modulo", "remainder"),
}
HELDOUT_REPAIRS = {("-", "+"), ("*", "-"), ("%", "*"), ("+", "%")}
"""(wrong, right): each operator once on either side. The other eight are trained on."""

TRAIN_TASKS, HELDOUT_TASKS = 256, 64
HIDDEN_CASES = 6


def repairs(*, heldout: bool) -> list[tuple[str, str]]:
    """The (wrong, right) operators of one split."""
    return [(w, r) for w in OPERATORS for r in OPERATORS if w != r and ((w, r) in HELDOUT_REPAIRS) == heldout]


def make(split: str, count: int, *, heldout: bool, seed: int) -> Iterator[dict[str, Any]]:
    """`count` task rows that go round the split's repairs and names evenly; numbers are drawn by `seed`."""
    rng = random.Random(seed)
    names = HELDOUT_NAMES if heldout else TRAIN_NAMES
    bugs = [(name, wrong, right) for wrong, right in repairs(heldout=heldout) for name in names[right]]
    for index in range(count):
        name, wrong, right = bugs[index % len(bugs)]
        yield row(f"{split}-{index:03d}", name, wrong, right, rng)


def row(task_id: str, name: str, wrong: str, right: str, rng: random.Random) -> dict[str, Any]:
    """One task: the broken file and one expected value for the agent, more values for the grader alone."""
    source = f"def {name}(a, b): return a {wrong} b"
    (a, b, value), *hidden = cases(right, 1 + HIDDEN_CASES, rng)
    return {
        "id": task_id,
        "prompt": f"f.py is wrong: {source}\nExpected: {name}({a}, {b}) == {value}",
        "input": {"files": {"f.py": source + "\n"}},
        "hidden": {"name": name, "cases": hidden},
    }


def cases(operator: str, count: int, rng: random.Random) -> list[list[int]]:
    """Distinct `[a, b, a operator b]` on which no two operators agree, so that one value tells them apart."""
    found: list[list[int]] = []
    while len(found) < count:
        a, b = rng.randint(3, 12), rng.randint(2, 9)
        case = [a, b, OPERATORS[operator](a, b)]
        if case not in found and len({apply(a, b) for apply in OPERATORS.values()}) == len(OPERATORS):
            found.append(case)
    return found


def write(folder: Path) -> None:
    """Writes both splits into a folder."""
    splits = {
        "train.jsonl": make("train", TRAIN_TASKS, heldout=False, seed=0),
        "heldout.jsonl": make("heldout", HELDOUT_TASKS, heldout=True, seed=1),
    }
    for name, rows in splits.items():
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


if __name__ == "__main__":
    write(HERE)
