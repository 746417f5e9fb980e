"""Task rows and the order in which training visits them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.errors import ConfigError
from canter.trainer.seeds import stable_hash
from canter.types import Task

_FIELDS: Mapping[str, type] = {"id": str, "prompt": str, "input": dict, "hidden": dict}


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a JSONL file, one row `{"id", "prompt", "input", "hidden"}` a line; blank lines are skipped.

    Raises ConfigError naming file, line and field.
    """
    tasks: dict[str, Task] = {}
    lines: dict[str, int] = {}
    for number, text in _lines(path):
        task = _parse(text, f"{path}:{number}")
        if task.id in tasks:
            raise ConfigError(f"{path}:{number}: id {task.id!r} was used in line {lines[task.id]}; ids must differ")
        tasks[task.id], lines[task.id] = task, number
    if not tasks:
        raise ConfigError(f'{path} has no tasks; write one JSON object a line: {{"id": …, "prompt": …}}')
    return list(tasks.values())


def fingerprint(tasks: Sequence[Task]) -> str:
    """SHA-256 of the tasks and their order."""
    rows = [[t.id, t.prompt, t.input, t.hidden] for t in tasks]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """An endless sequence: pass after pass over `tasks`, each shuffled anew by `seed` unless `shuffle` is off.

    What stands at a position depends on nothing else, so a position is all that a resumed run needs.
    """

    tasks: Sequence[Task]
    seed: int
    shuffle: bool = True

    def take(self, start: int, count: int) -> list[Task]:
        """The tasks at positions `[start, start + count)`."""
        size = len(self.tasks)
        passes = {n: self._pass(n) for n in range(start // size, (start + count - 1) // size + 1)}
        return [self.tasks[passes[at // size][at % size]] for at in range(start, start + count)]

    def _pass(self, number: int) -> list[int]:
        indices = range(len(self.tasks))
        if not self.shuffle:
            return list(indices)
        return sorted(indices, key=lambda index: (stable_hash(self.seed, "order", number, index), index))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise ConfigError(f"cannot read the tasks in {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse(text: str, where: str) -> Task:
    try:
        row: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a task is a JSON object, got {type(row).__name__}")
    for name, value in row.items():
        kind = _FIELDS.get(name)
        if kind is None:
            raise ConfigError(f"{where}: unknown field {name!r}; a task has {', '.join(_FIELDS)}")
        if not isinstance(value, kind):
            raise ConfigError(f"{where}: field {name!r} must be {kind.__name__}, got {type(value).__name__}")
    for name in ("id", "prompt"):
        if not row.get(name):
            raise ConfigError(f"{where}: field {name!r} is missing or empty")
    return Task(**row)
