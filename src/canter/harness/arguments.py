"""`harness.args`, read as the settings of one recipe."""

from __future__ import annotations

import difflib
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from canter.config import Config
from canter.config.tree import Section
from canter.errors import ConfigError

S = TypeVar("S", bound=Section)

_WRONG_TYPE = ("_type", "_parsing")
_LONGEST_TIMER_MS = 2**31 - 1


def arguments(config: Config, name: str, kind: type[S]) -> S:
    """The settings of the recipe `name`. Raises ConfigError naming every fault, with the nearest setting there is."""
    args = dict(config.harness.args)
    try:
        return kind.model_validate(args, strict=True)
    except ValidationError as error:
        faults = [_explain(str(e["loc"][0]), e["type"], e["msg"], args, name, kind) for e in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(faults))) from None


def text_of(config: Config, setting: str, name: str | None) -> str | None:
    """The text of a file that a setting names, relative to the TOML file. Raises ConfigError if it cannot be read."""
    if name is None:
        return None
    file = config.path(name)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"harness.args.{setting}: {file} cannot be read: {error}") from error


def program_at(config: Config, setting: str, name: str) -> Path:
    """The program that a setting names: a path, relative to the TOML file, or a name on `PATH`. Raises ConfigError."""
    if os.sep not in name:
        found = shutil.which(name)
        if found is None:
            raise ConfigError(f"harness.args.{setting} = {name!r}: not on PATH; give the path of the program")
        return Path(found).absolute()
    file = Path(os.path.abspath(config.base / name))  # a link stays: a venv's python is one
    if not file.is_file():
        raise ConfigError(f"harness.args.{setting}: {file} does not exist")
    if not os.access(file, os.X_OK):
        raise ConfigError(f"harness.args.{setting}: {file} cannot be executed; chmod +x it")
    return file


def timer_ms(seconds: float) -> int:
    """A time in milliseconds as JavaScript's timers take it: a longer one would end at once."""
    return min(math.ceil(seconds * 1000), _LONGEST_TIMER_MS)


def _explain(setting: str, fault: str, message: str, args: Mapping[str, object], name: str, kind: type[Section]) -> str:
    known = list(kind.model_fields)
    if fault == "extra_forbidden":
        close = difflib.get_close_matches(setting, known, n=1)
        return f"harness.args.{setting}: unknown; {name} takes {', '.join(close or known) or 'no settings'}"
    if fault.endswith(_WRONG_TYPE):
        return f"harness.args.{setting} = {args.get(setting)!r} has the wrong type: {message}"
    if fault == "missing":
        return f"harness.args.{setting} is missing; {name} needs it"
    return f"harness.args.{setting} = {args.get(setting)!r}: {message}"
