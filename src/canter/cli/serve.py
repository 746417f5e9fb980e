"""`canter serve`: gateway and controller, for trainers and engines that run elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from canter.cli import options
from canter.config import load, to_toml


@click.command("serve")
@options.config_file
@options.overrides
@click.option("--dry-run", is_flag=True, help="Print the resolved settings and stop.")
@click.option("--resume", metavar="RUN", help="Serve this run folder again.")
def command(file: Path, overrides: tuple[str, ...], dry_run: bool, resume: str | None) -> int:
    """Run the gateway and the controller by the settings in FILE until interrupted.

    At the first start an admin key is made and shown this once; with it, create rollouts over HTTP (docs/api.md).
    """
    config = load(file, overrides)
    if dry_run:
        click.echo(to_toml(config), nl=False)
        return 0
    from canter.cli.supervise import serve
    from canter.cli.train import resumed, started

    run = resumed(config, resume, overrides) if resume else started(config)
    return asyncio.run(serve(run))
