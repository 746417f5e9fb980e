"""Writes docs/configuration.md and docs/harness-settings.md from the settings in the code; `--check` only says whether
they are up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from canter.config import Config
from canter.harness import Npm
from canter.harness.catalogue import ENTRIES

HEAD = """# Settings

One TOML file, plus overrides on the command line: `canter train run.toml trainer.steps=20 engine.dtype=bfloat16`.
`--dry-run` prints the resolved tree; the run folder keeps it as `config.toml`. Unknown names are refused with the
nearest right one. Paths are relative to the TOML file. `"none"` unsets an optional setting.

This page is generated from the code (`make docs`).
"""

HARNESS_HEAD = """# Settings of the harnesses

`harness.args` of each recipe: `args = { max_turns = 20 }` in `[harness]`, or `harness.args.max_turns=20` on the command
line. Unknown names are refused with the nearest right one. [Harnesses](harnesses.md) says how each is run.

This page is generated from the code (`make docs`).
"""


def page() -> str:
    return "\n".join([HEAD, *(part for name, part in sections())]) + "\n"


def harness_page() -> str:
    parts = [HARNESS_HEAD]
    for entry in ENTRIES.values():
        how = entry.install
        package = how.package.rpartition("@")[0] if isinstance(how, Npm) else how.packages[0].partition("==")[0]
        source = f"{'npm' if isinstance(how, Npm) else 'PyPI'} `{package.replace('@{version}', '')}`"
        known = ", ".join(how.versions)
        parts += [f"## `{entry.name}`", ""]
        parts += [f"{entry.about} ({source}). Speaks {', '.join(entry.dialects)}. Known to work: {known}.", ""]
        parts += ["| setting | type | default | |", "|---|---|---|---|"]
        parts += [*(row(key, item) for key, item in entry.settings.model_fields.items()), ""]
    return "\n".join(parts)


PAGES = {"configuration.md": page, "harness-settings.md": harness_page}


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
    for name, made in PAGES.items():
        target = Path(__file__).with_name(name)
        if "--check" not in sys.argv:
            target.write_text(made(), encoding="utf-8")
        elif not target.is_file() or target.read_text(encoding="utf-8") != made():
            sys.exit(f"{name} is out of date; run `make docs`")
