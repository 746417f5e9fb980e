"""`canter serve`: gateway and controller, for trainers and engines that run elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from canter.cli import options
from canter.config import load, to_toml


@click.command("serve")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), required=False)
@options.overrides
@click.option("--dry-run", is_flag=True, help="Print the resolved settings and stop.")
@click.option("--resume", metavar="RUN", help="Serve this run folder again.")
def command(file: Path | None, overrides: tuple[str, ...], dry_run: bool, resume: str | None) -> int:
    """Run the gateway and the controller by the settings in FILE until interrupted (docs/serve.md).

    At the first start an admin key is made and shown this once; with it, create rollouts over HTTP (docs/api.md).
    """
    from canter.cli.supervise import serve
    from canter.cli.train import resumed, started

    if resume:
        return asyncio.run(serve(resumed(resume, file, overrides)))
    if file is None:
        raise click.UsageError("give the TOML file of the run, or --resume RUN")
    config = load(file, overrides)
    if dry_run:
        click.echo(to_toml(config), nl=False)
        return 0
    return asyncio.run(serve(started(config)))
