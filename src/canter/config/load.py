"""Reading the tree: TOML, then `section.key=value` overrides, then validation with errors that name the nearest key."""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from canter.config.tree import Config
from canter.errors import ConfigError


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The settings of a TOML file with overrides applied. Raises ConfigError."""
    file = Path(path)
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; pass the path of a run's TOML file") from error
    except (RecursionError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError | tomllib.TOMLDecodeError):
            raise _unreadable(file, error) from error
        raise ConfigError(f"{file} cannot be read as settings: {error}") from error
    return resolve(tree, overrides, base=file.resolve().parent)


def resolve(tree: Mapping[str, Any], overrides: Sequence[str] = (), *, base: Path = Path(".")) -> Config:
    """Validates a parsed tree with overrides applied. Raises ConfigError naming every fault."""
    merged = json.loads(json.dumps(tree, default=str))
    if "base" in merged:
        raise ConfigError("unknown setting 'base'; known sections: " + ", ".join(_fields(Config)))
    for override in overrides:
        _apply(merged, override)
    try:
        return Config.model_validate({**merged, "base": base})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def to_toml(config: Config) -> str:
    """The resolved tree as TOML that `load` reads back; unset fields are left out."""
    lines: list[str] = []
    for section in _fields(Config):
        value = getattr(config, section)
        lines.append(f"[{section}]")
        tables: list[str] = []
        for name, item in value:
            if isinstance(item, dict):
                if item:
                    tables += [f"[{section}.{name}]", *(f"{_key(k)} = {_toml(v)}" for k, v in item.items())]
            elif item is not None:
                lines.append(f"{name} = {_toml(item)}")
            elif type(value).model_fields[name].default is not None:
                lines.append(f'{name} = "none"')
        lines += [*tables, ""]
    return "\n".join(lines)


def _unreadable(file: Path, error: UnicodeDecodeError | tomllib.TOMLDecodeError) -> ConfigError:
    if isinstance(error, UnicodeDecodeError):
        return ConfigError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}")
    return ConfigError(f"{file} is not valid TOML: {error}")


def _fields(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if not field.exclude]


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        # TOML basic strings are JSON strings, but for DEL, which TOML forbids unescaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _apply(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"override {override!r} must be section.key=value, e.g. trainer.steps=10")
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {key} is a value, not a section")
    node[keys[-1]] = _parse(text, takes_text=_takes_text(keys))


def _parse(text: str, *, takes_text: bool) -> Any:
    """A TOML value where the text is one; else the text itself, so that `model.path=abc` needs no quotes."""
    if takes_text and not text.lstrip().startswith(('"', "'")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _takes_text(keys: Sequence[str]) -> bool:
    model: Any = Config
    for key in keys:
        if not (isinstance(model, type) and issubclass(model, BaseModel)) or key not in model.model_fields:
            return False
        model = model.model_fields[key].annotation
    options = typing.get_args(model) if isinstance(model, types.UnionType) else (model,)
    return str in options


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    given = error.get("input")
    if error["type"] == "extra_forbidden":
        return f"unknown setting {where!r}{_nearest(where)}"
    if error["type"] == "missing":
        return f"{where} is missing; every run needs it (see docs/configuration.md)"
    message = error["msg"].removeprefix("Value error, ")
    got = f" (got {given!r})" if where and not isinstance(given, dict) else ""
    return f"{where}: {message}{got}".lstrip(": ")


def _nearest(where: str) -> str:
    names = list(_names(Config))
    same_leaf = [n for n in names if n.rsplit(".", 1)[-1] == where.rsplit(".", 1)[-1]]
    close = same_leaf or difflib.get_close_matches(where, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "; `canter train FILE --dry-run` prints all settings"


def _names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name in _fields(model):
        kind = model.model_fields[name].annotation
        yield prefix + name
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _names(kind, f"{prefix}{name}.")
