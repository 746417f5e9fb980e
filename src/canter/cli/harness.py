"""`canter harness`: which harnesses have a recipe, putting them on this machine, and checking one."""

from __future__ import annotations

from typing import Any

import click

from canter.cli import check, options
from canter.harness import Entry
from canter.harness.catalogue import ENTRIES, entry
from canter.harness.install import install
from canter.harness.installed import installations, version_here


@click.group("harness")
def command() -> None:
    """The harnesses that have a recipe (`harness.use`)."""


@command.command("list")
@options.as_json
def list_(as_json: bool) -> None:
    """List them: what each is, what it speaks, which versions are known to work, which are installed."""
    rows = [_row(one) for one in ENTRIES.values()]
    if as_json:
        options.print_json({"harnesses": rows})
        return
    for row in rows:
        click.echo(f"{row['name']}: {row['about']}")
        click.echo(f"    speaks {', '.join(row['dialects'])}; known to work: {', '.join(row['known'])}")
        missing = f"not installed: canter harness install {row['name']}"
        click.echo(f"    {'installed: ' + ', '.join(row['installed']) if row['installed'] else missing}")


command.add_command(check.command)


@command.command("install")
@click.argument("name")
@click.option("--version", help="Version to install; default: the first that is known to work.")
@click.option("--python", metavar="PROGRAM", help="Python for a harness that is a Python library.")
def install_(name: str, version: str | None, python: str | None) -> None:
    """Install the harness NAME under ~/.cache/canter/harnesses; nothing happens if it is there."""
    install(entry(name), click.echo, version=version, python=python)


def _row(one: Entry) -> dict[str, Any]:
    beside = version_here(one)
    return {
        "name": one.name,
        "about": one.about,
        "dialects": list(one.dialects),
        "known": list(one.install.versions),
        "installed": [found.version for found in installations(one)] + ([beside] if beside else []),
    }
