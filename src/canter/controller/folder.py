"""The folder of an attempt: what is put there before it runs, what is read from there after, when it goes.

<run>/attempts/<rollout>/<attempt>/
    task.json                the public task
    work/  home/  tmp/       working folder, HOME and TMPDIR of the harness
    stdout.txt  stderr.txt   what it printed, cut in the middle if long
    keeper.json  exit.json   written by the keeper: who keeps it, how it ended
    grading/<n>/             the same for the n-th run of the grader
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from canter.controller.exit import Exit
from canter.controller.keeper import EXIT_FILE, KEEPER_FILE
from canter.errors import LaunchError
from canter.types import Outcome

MESSAGE_BYTES = 4096
LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class KeptBy:
    """Who keeps a folder's process: `start` in clock ticks since `boot`."""

    pid: int
    start: int
    boot: str


def attempt_folder(run: Path, rollout_id: str, attempt: int) -> Path:
    """Raises LaunchError for a rollout id that makes no file name."""
    name = quote(rollout_id, safe="")
    if len(name) > LONGEST_NAME or name in ("", ".", ".."):
        raise LaunchError(f"rollout id {rollout_id!r} makes no folder name; use a shorter, plain one")
    return run / "attempts" / name / str(attempt)


def attempts(run: Path) -> Iterator[tuple[str, int]]:
    """The rollouts and attempts that have a folder."""
    for name in _names(run / "attempts"):
        for number in _names(run / "attempts" / name):
            if number.isdigit():
                yield unquote(name), int(number)


def grading_folder(attempt: Path, grading: int) -> Path:
    return attempt / "grading" / str(grading)


def gradings(attempt: Path) -> int:
    """The number of the last run of the grader, 0 before the first."""
    return max((int(name) for name in _names(attempt / "grading") if name.isdigit()), default=0)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def prepare(folder: Path, task: Mapping[str, Any], files: Mapping[str, Path]) -> None:
    """Makes the folder with the task's and the run's files in `work/`. Raises LaunchError."""
    make(folder)
    (folder / "work").mkdir()
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    for name, source in files.items():
        target = _inside(folder / "work", name)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    for name, text in _task_files(task).items():
        _inside(folder / "work", name).write_text(text, encoding="utf-8")


def make(folder: Path) -> None:
    """Makes a fresh folder with `home/` and `tmp/`, closed to other users. Raises LaunchError if it exists."""
    try:
        folder.mkdir(mode=0o700, parents=True)
        (folder / "home").mkdir()
        (folder / "tmp").mkdir()
    except FileExistsError as error:
        raise LaunchError(f"{folder} exists already; a run folder belongs to one store") from error


def _task_files(task: Mapping[str, Any]) -> Mapping[str, str]:
    """`input.files` of a task, `{"name": "text"}`, are put into the working folder; other shapes are the harness's."""
    files = task["input"].get("files")
    if isinstance(files, dict) and all(isinstance(text, str) for text in files.values()):
        return files
    return {}


def _inside(work: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise LaunchError(f"{name!r} is no path inside the working folder")
    target = work / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def read_keeper(folder: Path) -> KeptBy | None:
    """Who keeps the process of this folder; None if none was ever started."""
    try:
        return KeptBy(**json.loads((folder / KEEPER_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def read_exit(folder: Path) -> Exit:
    """How the process of this folder ended; `Outcome.LOST` if its keeper could not say."""
    try:
        row = json.loads((folder / EXIT_FILE).read_text(encoding="utf-8"))
        found = Exit(Outcome(row["outcome"]), row["exit_code"], row["message"])
    except FileNotFoundError:
        return Exit(
            Outcome.LOST, message="it and its keeper are gone and left no exit code: killed, or the machine restarted"
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Exit(Outcome.LOST, message=f"{folder / EXIT_FILE} cannot be read: {error}")
    if found.message or found.clean:
        return found
    return Exit(found.outcome, found.exit_code, last_line(folder / "stderr.txt"))


def last_line(file: Path) -> str:
    """The last line with text of a log, "" without one."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - MESSAGE_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def remove(folder: Path) -> None:
    """Removes an attempt's folder, and its rollout's if that was the last; what cannot be removed stays."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # a harness may have taken its own rights away from a folder in it
        folder.chmod(stat.S_IRWXU)
        for parent, names, _ in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    os.chmod(os.path.join(parent, name), stat.S_IRWXU, follow_symlinks=False)
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
