"""Which harnesses are on this machine, and the program that a run starts.

`canter harness install NAME` puts a version under `${XDG_CACHE_HOME:-~/.cache}/canter/harnesses/NAME/VERSION`; what
lies there counts once `installed.json` stands in it, which is written last.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from canter.config import Config
from canter.config.tree import Section
from canter.errors import ConfigError
from canter.harness import Entry, Npm, Pip
from canter.harness.arguments import program_at

MARK = "installed.json"
"""`{"version", "program", "packages"}`: the program's path below the folder, and what else came with it."""


class Installed(Section):
    """The settings of every recipe whose program is not part of Canter's own environment."""

    path: str | None = None
    """The program, relative to the TOML file; default: what `canter harness install` has put there, else the one on
    `PATH`."""
    version: str | None = None
    """The installed version to use; default: the newest that is known to work, else the newest."""


@dataclass(frozen=True, slots=True)
class Installation:
    """One version of a harness: `program` is its executable, for a Python library the interpreter that has it."""

    version: str
    program: Path
    folder: Path


def folder_of(name: str) -> Path:
    """Where the versions of a harness lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "canter" / "harnesses" / name


def installations(entry: Entry) -> list[Installation]:
    """The versions that `canter harness install` has put on this machine, the one to use first."""
    place = folder_of(entry.name)
    names = os.listdir(place) if place.is_dir() else []
    found = [one for name in names if (one := read(place / name)) is not None]
    known = entry.install.versions
    return sorted(found, key=lambda one: (one.version in known, version_key(one.version)), reverse=True)


def read(folder: Path) -> Installation | None:
    """The installation in a folder, None if none was ever finished there."""
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        found = Installation(str(mark["version"]), folder / str(mark["program"]), folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.program.is_file() else None


def version_here(entry: Entry) -> str | None:
    """The version of a Python library in Canter's own environment, None if it has none."""
    if not isinstance(entry.install, Pip):
        return None
    try:
        return metadata.version(distribution(entry.install))
    except metadata.PackageNotFoundError:
        return None


def distribution(install: Pip) -> str:
    """The distribution whose version is the harness's."""
    return install.packages[0].partition("==")[0].partition("[")[0]


def program(config: Config, entry: Entry, settings: Installed) -> Path:
    """The program to start: the one that the settings name, else an installed one, else the one on `PATH`.

    Raises ConfigError that says how to install it.
    """
    if settings.path is not None:
        return program_at(config, "path", settings.path)
    found = installations(entry)
    if settings.version is not None:
        return _exact(entry, settings.version, found)
    if found:
        return found[0].program
    elsewhere = _elsewhere(entry)
    if elsewhere is None:
        raise ConfigError(
            f"harness.use = {entry.name!r}: {entry.name} is not on this machine; install it with "
            f"`canter harness install {entry.name}`, or name the program in harness.args.path"
        )
    return elsewhere


def mark_of(program: Path) -> Mapping[str, Any]:
    """What `installed.json` says of the installation that a program is part of; empty for one from elsewhere."""
    for folder in program.parents:
        if (folder / MARK).is_file():
            value: Mapping[str, Any] = json.loads((folder / MARK).read_text(encoding="utf-8"))
            return value
    return {}


def version_key(version: str) -> tuple[tuple[int, str], ...]:
    """Orders versions: numbers as numbers, everything else as text."""
    parts = version.replace("-", ".").split(".")
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def _exact(entry: Entry, version: str, found: list[Installation]) -> Path:
    for one in found:
        if one.version == version:
            return one.program
    have = ", ".join(one.version for one in found) or "none"
    raise ConfigError(
        f"harness.args.version = {version!r} is not installed (installed: {have}); "
        f"`canter harness install {entry.name} --version {version}`"
    )


def _elsewhere(entry: Entry) -> Path | None:
    if isinstance(entry.install, Npm):
        found = shutil.which(entry.install.command)
        return Path(found).absolute() if found else None
    return Path(sys.executable) if version_here(entry) is not None else None
