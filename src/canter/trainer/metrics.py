"""Where the numbers of each step go: a file, the terminal, TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from canter.runs import write_atomically

Row = Mapping[str, Any]
"""One step as JSON values. `step` is always there; the loop's `row_of` makes the rest."""


class Tracker(Protocol):
    """Takes one row a step, in order. After a resume, rows of replayed steps come again."""

    def record(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def record(self, row: Row) -> None:
        for tracker in self._trackers:
            tracker.record(row)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


class MetricsFile:
    """`metrics.jsonl`, one line a step. A step that stands there already is not written again."""

    def __init__(self, path: Path) -> None:
        rows = read_metrics(path)
        self.rows = {int(row["step"]): row for row in rows}
        if path.exists() and not path.read_text(encoding="utf-8").endswith("\n"):  # a crash has torn the last line
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = path.open("a", encoding="utf-8")

    def record(self, row: Row) -> None:
        if row["step"] not in self.rows:
            self.rows[row["step"]] = row
            self._file.write(json.dumps(_plain(row)) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics file; none if there is no file. A torn last line is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Terminal:
    """Progress, the last step's numbers and the reward curve, redrawn in place (else one line a step)."""

    def __init__(self, console: Console, steps: int, earlier: Iterable[Row] = ()) -> None:
        self._console = console
        self._rewards = {int(row["step"]): row.get("reward_mean") for row in earlier}
        self._progress = Progress(
            TextColumn("[bold]train"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("train", total=steps)
        self._live = Live(self._progress, console=console, refresh_per_second=2) if console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def record(self, row: Row) -> None:
        self._rewards[row["step"]] = row.get("reward_mean")
        self._progress.update(self._task, completed=row["step"])
        line = describe(row)
        if self._live is None:
            self._console.print(line, highlight=False, soft_wrap=True)
            return
        rewards = [value for value in self._rewards.values() if value is not None]
        curve = f"reward {sparkline(rewards, self._console.width - 30)}"
        self._live.update(Group(self._progress, Text(line), Text(curve)), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


class TensorBoard:
    """Every number of a row as a scalar under its name. Needs the extra `quickstart`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def record(self, row: Row) -> None:
        for name, value in _scalars(row):
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


def describe(row: Row) -> str:
    """A step in one line."""
    parts = [f"step {row['step']}"]
    for name, label, form in (
        ("reward_mean", "reward", ".3f"),
        ("loss", "loss", ".4f"),
        ("grad_norm", "grad", ".3f"),
        ("entropy", "entropy", ".3f"),
        ("logprob_gap", "gap", ".1e"),
        ("trained_tokens", "tokens", "d"),
        ("collect_s", "collect", ".1f"),
        ("update_s", "update", ".1f"),
    ):
        value = row.get(name)
        if value is not None:
            parts.append(f"{label} {value:{form}}" + (" s" if name.endswith("_s") else ""))
    if dropped := row.get("dropped"):
        parts.append("dropped " + ", ".join(f"{reason} {count}" for reason, count in dropped.items()))
    return " · ".join(parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as a curve of block characters, with the first and last value."""
    shown = list(values)[-max(1, width) :]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    blocks = "".join("▁▂▃▄▅▆▇█"[min(7, int((value - low) / span * 8))] for value in shown)
    return f"{shown[0]:.2f} {blocks} {shown[-1]:.2f}"


def _scalars(row: Row, prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            found.append((prefix + name, float(value)))
    return found


def _plain(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
