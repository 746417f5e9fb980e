"""The folders of an attempt: what is put there before it runs, what is read from there after, when they go.

<run>/attempts/<rollout>/<attempt>/             the harness's own: it can do with it whatever it likes
    task.json                                   the public task
    work/  home/  tmp/                          working folder, HOME and TMPDIR of the harness
    stdin.txt                                   what its recipe lets it read from standard input, if anything
    .git                                        a repository around the run folder ends here: it is not the task's
    stdout.txt  stderr.txt                      what it printed, cut in the middle if long
<run>/control/attempts/<rollout>/<attempt>/     the keeper's record
    keeper.json  exit.json                      who keeps it, how it ended
    grading/<n>/                                the same, home, tmp and what it printed, for the n-th run of the grader

Both can be written by every process of this user: nothing that is read from them is taken on trust.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from canter.controller.exit import Exit
from canter.controller.keeper import EXIT_FILE, KEEPER_FILE
from canter.controller.printed import last_line, open_regular
from canter.controller.removal import remove
from canter.errors import LaunchError
from canter.types import Outcome

log = logging.getLogger(__name__)

LONGEST_NAME = 200
STDIN_FILE = "stdin.txt"
NO_REPOSITORY = "gitdir: none\n"
"""What git and harnesses that look for a repository find above the working folder: one that is nowhere."""
RECORD_BYTES = 64 * 1024
LARGEST_PID = 2**22

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class KeptBy:
    """Who keeps a process: `start` in clock ticks since `boot`."""

    pid: int
    start: int
    boot: str

    @classmethod
    def read(cls, row: object) -> KeptBy:
        """What a keeper has written. Raises ValueError for anything that none would write."""
        if not isinstance(row, Mapping):
            raise ValueError(f"{row!r:.100} names no process")
        pid, start, boot = row.get("pid"), row.get("start"), row.get("boot")
        if type(pid) is not int or type(start) is not int or not isinstance(boot, str):
            raise ValueError(f"{row!r:.100} names no process")
        if not 1 <= pid <= LARGEST_PID or not 0 <= start < 2**63:
            raise ValueError(f"there is no process {pid} that started at {start}")
        return cls(pid, start, boot)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a harness or grader is: `parts` lead from `run` to its own folder, `record` to what its keeper writes."""

    run: Path
    parts: tuple[str, ...]
    record_parts: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.run.joinpath(*self.parts)

    @property
    def record(self) -> Path:
        return self.run.joinpath(*self.record_parts)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def grading(self, number: int) -> Place:
        """That of the `number`-th run of the grader of the attempt at this place."""
        parts = (*self.record_parts, "grading", str(number))
        return Place(self.run, parts, parts)

    def gradings(self) -> int:
        """The number of the last run of the grader, 0 before the first."""
        return max((int(name) for name in _names(self.record / "grading") if _NUMBER.fullmatch(name)), default=0)

    def remove(self) -> None:
        """Removes both folders; what cannot be removed stays, and is logged."""
        for parts in dict.fromkeys((self.parts, self.record_parts)):
            try:
                remove(self.run, *parts)
            except OSError as error:
                log.warning("%s stays: %s", self.run.joinpath(*parts), error)


def place(run: Path, rollout_id: str, attempt: int) -> Place:
    """The place of an attempt's harness. Raises LaunchError for a rollout id that makes no file name."""
    name = quote(rollout_id, safe="", errors="replace")
    if len(name) > LONGEST_NAME or name in ("", ".", ".."):
        raise LaunchError(f"rollout id {rollout_id!r:.80} makes no folder name; use a shorter, plain one")
    parts = ("attempts", name, str(attempt))
    return Place(run, parts, ("control", *parts))


def attempts(run: Path) -> Iterator[tuple[str, int]]:
    """The rollouts and attempts that a keeper was asked for."""
    records = run / "control" / "attempts"
    for name in _names(records):
        for number in _names(records / name):
            if _NUMBER.fullmatch(number) and quote(unquote(name), safe="") == name:
                yield unquote(name), int(number)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def prepare(
    folder: Path, task: Mapping[str, Any], files: Mapping[str, Path], home: Mapping[str, str], stdin: str
) -> None:
    """Makes the folder: the recipe's files in `home/`, the task's and the run's in `work/`. Raises LaunchError."""
    make(folder)
    (folder / ".git").write_text(NO_REPOSITORY, encoding="utf-8")
    for name, text in home.items():
        _inside(folder / "home", name).write_text(text, encoding="utf-8")
    if stdin:
        (folder / STDIN_FILE).write_text(stdin, encoding="utf-8")
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
    make_record(folder)
    (folder / "home").mkdir()
    (folder / "tmp").mkdir()


def make_record(folder: Path) -> None:
    """Makes a fresh folder, closed to other users. Raises LaunchError if it exists, or another would be made."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.parent.is_symlink():
            raise LaunchError(f"{folder.parent} has become a symbolic link")
        folder.mkdir(mode=0o700)
    except FileExistsError as error:
        raise LaunchError(f"{folder} exists already; a run folder belongs to one store") from error


def _task_files(task: Mapping[str, Any]) -> Mapping[str, str]:
    """`input.files` of a task, `{"name": "text"}`, are put into the working folder; other shapes are the harness's."""
    files = task["input"].get("files")
    if isinstance(files, dict) and all(isinstance(text, str) for text in files.values()):
        return files
    return {}


def _inside(folder: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise LaunchError(
            f"{name!r} is no path inside the {'working' if folder.name == 'work' else folder.name} folder"
        )
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def read_keeper(record: Path) -> KeptBy | None:
    """Who keeps the process of this record; None if none was ever started."""
    try:
        return KeptBy.read(_read(record / KEEPER_FILE))
    except (OSError, ValueError):
        return None


def read_exit(place: Place) -> Exit:
    """How the process of this place ended by the record of its keeper; `Outcome.LOST` if that could not say."""
    try:
        return explained(Exit.read(_read(place.record / EXIT_FILE)), place)
    except FileNotFoundError:
        return LOST
    except (OSError, ValueError) as error:
        return Exit(Outcome.LOST, message=f"{place.record / EXIT_FILE} cannot be read: {error}")


LOST = Exit(Outcome.LOST, message="it and its keeper are gone and left no exit code: killed, or the machine restarted")


def explained(exit: Exit, place: Place) -> Exit:
    """With the last line of standard error where a failure has no message."""
    if exit.message or exit.clean:
        return exit
    return Exit(exit.outcome, exit.exit_code, last_line(place.folder / "stderr.txt"))


def _read(file: Path) -> object:
    """Raises OSError and ValueError."""
    with open(open_regular(str(file), os.O_RDONLY), "rb") as record:
        text = record.read(RECORD_BYTES)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
