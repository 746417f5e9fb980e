"""Writes docs/configuration.md from the tree of settings; `--check` only says whether it is up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from canter.config import Config

TARGET = Path(__file__).with_name("configuration.md")
HEAD = """# Settings

One TOML file, plus overrides on the command line: `canter train run.toml trainer.steps=20 engine.dtype=bfloat16`.
`--dry-run` prints the resolved tree; the run folder keeps it as `config.toml`. Unknown names are refused with the
nearest right one. Paths are relative to the TOML file. `"none"` unsets an optional setting.

This page is generated from the code (`make docs`).
"""


def page() -> str:
    return "\n".join([HEAD, *(part for name, part in sections())]) + "\n"


def sections() -> list[tuple[str, str]]:
    found = []
    for name, field in Config.model_fields.items():
        if field.exclude:
            continue
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        rows = [f"## `[{name}]`", "", "| setting | type | default | |", "|---|---|---|---|"]
        rows += [row(key, item) for key, item in model.model_fields.items()]
        found.append((name, "\n".join([*rows, ""])))
    return found


def row(name: str, field: Any) -> str:
    default = "required" if field.is_required() else f"`{json.dumps(value(field))}`"
    text = " ".join((field.description or "").split()).replace("|", "\\|")
    return f"| `{name}` | {kind(field.annotation)} | {default} | {text} |"


def value(field: Any) -> Any:
    found = field.get_default(call_default_factory=True)
    return None if found is PydanticUndefined else found


def kind(annotation: Any) -> str:
    options = [a for a in get_args(annotation) if a is not type(None)]
    if options and all(isinstance(o, str) for o in options):
        return " \\| ".join(f'`"{o}"`' for o in options)
    if getattr(annotation, "__name__", "") in ("list", "dict", "tuple") or not options:
        return getattr(annotation, "__name__", str(annotation))
    return " or ".join(kind(o) for o in options)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            0 if TARGET.read_text(encoding="utf-8") == page() else f"{TARGET.name} is out of date; run `make docs`"
        )
    TARGET.write_text(page(), encoding="utf-8")
