"""`canter train`: one machine, one command."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from canter.cli import options
from canter.config import Config, load, to_toml
from canter.errors import ConfigError
from canter.runs import RunFolder


@click.command("train")
@options.config_file
@options.overrides
@click.option("--dry-run", is_flag=True, help="Print the resolved settings and stop.")
@click.option(
    "--resume", metavar="RUN", help="Go on with this run folder (path, name, or `latest`) and its own settings."
)
def command(file: Path, overrides: tuple[str, ...], dry_run: bool, resume: str | None) -> int:
    """Train by the settings in FILE, with overrides such as trainer.steps=10.

    Makes a run folder under `run.dir` and prints its path. Interrupt it, or lose power, at any point: `--resume RUN`
    goes on where the last committed call was.
    """
    config = load(file, overrides)
    if dry_run:
        click.echo(to_toml(config), nl=False)
        return 0
    if config.engine.use == "openai":
        raise ConfigError("engine.use = 'openai' cannot be trained: its weights are out of reach; use 'local'")
    run = resumed(config, resume, overrides) if resume else started(config)
    from canter.cli.supervise import train

    return asyncio.run(train(run))


def started(config: Config) -> RunFolder:
    """A new run folder with the resolved settings and the first part of the manifest."""
    from canter.cli.manifest import describe, save_settings

    check_inputs(config)
    run = RunFolder.create(Path(config.run.dir), config.run.name)
    save_settings(run, config)
    run.update_manifest(describe(config, run))
    click.echo(f"run folder: {run.path}")
    return run


def resumed(config: Config, name: str, overrides: tuple[str, ...]) -> RunFolder:
    """The folder of an earlier run; its own settings hold, so overrides are refused."""
    run = RunFolder.find(name, Path(config.run.dir))
    if overrides:
        raise ConfigError(f"--resume goes on with the settings in {run.config}; leave out {' '.join(overrides)}")
    click.echo(f"resuming {run.path}")
    return run


def check_inputs(config: Config) -> None:
    """Fails early where a file that the run needs is missing or malformed. Raises ConfigError."""
    from canter.trainer.data import read_tasks

    names = [("tasks.train", config.tasks.train)] + ([("tasks.eval", config.tasks.eval)] if config.tasks.eval else [])
    for setting, name in names:
        if not config.path(name).is_file():
            raise ConfigError(f"{setting}: no file {config.path(name)}; paths are relative to the TOML file")
        read_tasks(config.path(name))
    for target, source in config.harness.files.items():
        if not config.path(source).exists():
            raise ConfigError(f"harness.files.{target}: no file {config.path(source)}")
