"""Checkpoints: written whole or not at all, proven complete before they are used.

`checkpoints/step-00010/` holds what the backend wrote, `state.json` (where the loop stood) and `files.json` (size and
SHA-256 of every other file). It is written under a hidden name, synced to the disk and renamed, so that a folder with a
checkpoint's name is a checkpoint, whatever happened meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.errors import CheckpointError

_FILES = "files.json"
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint on the disk; `state` is what `save` was given."""

    path: Path
    step: int
    state: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of a run, of which the newest `keep` are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, or None. Raises CheckpointError where a file is missing or is not what was written."""
        paths = self._paths()
        if not paths:
            return None
        path = paths[-1]
        try:
            _verify(path)
            state: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            older = f" to resume from {paths[-2].name}" if len(paths) > 1 else " to start from the model as given"
            raise CheckpointError(f"checkpoint {path} is damaged: {error}; remove this folder{older}") from error
        return Checkpoint(path, _step(path), state)

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
        """Makes the checkpoint of `step` from what `write(folder)` writes, then removes those beyond `keep`.

        Raises CheckpointError (disk full, say) and then leaves the older checkpoints as they are.
        """
        final = self._folder / f"step-{step:05d}"
        work = self._folder / f".{final.name}.part"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            write(work)
            (work / _STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
            _seal(work)
            if final.exists():
                shutil.rmtree(final)
            work.rename(final)
            _sync(self._folder)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(work, ignore_errors=True)
            raise CheckpointError(self._complaint(step, error)) from error
        for path in self._paths()[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)
        return final

    def _paths(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("step-*") if path.is_dir())

    def _complaint(self, step: int, error: Exception) -> str:
        older = self._paths()
        stays = f"the checkpoint {older[-1].name} stays" if older else "there is no older one"
        try:
            free = f", where {shutil.disk_usage(self._folder).free / 2**20:.0f} MiB are free"
        except OSError:
            free = ""
        return (
            f"cannot write the checkpoint of step {step} in {self._folder}{free}: {error}; {stays}; make room there "
            "and resume the run"
        )


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _seal(folder: Path) -> None:
    """Lists every file with its size and hash, and brings everything to the disk."""
    listed = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        listed[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        _sync(path)
    (folder / _FILES).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    _sync(folder / _FILES)
    _sync(folder)


def _verify(folder: Path) -> None:
    """Raises ValueError or OSError unless the folder holds what `_seal` listed."""
    listed = json.loads((folder / _FILES).read_text(encoding="utf-8"))
    for name, known in listed.items():
        path = folder / name
        if path.stat().st_size != known["bytes"]:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, {known['bytes']} were written")
        if _sha256(path) != known["sha256"]:
            raise ValueError(f"{name} is not what was written")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
