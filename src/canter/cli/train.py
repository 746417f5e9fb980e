"""`canter train`: one machine, one command."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from canter.cli import options
from canter.config import Config, load, to_toml
from canter.errors import ConfigError
from canter.runs import RunFolder

RESUMABLE = frozenset(
    {
        "trainer.steps",
        "trainer.max_invalid",
        "trainer.step_timeout_s",
        "trainer.checkpoint_every",
        "trainer.keep_checkpoints",
        "runner.concurrency",
        "runner.max_attempts",
        "runner.retry_delay_s",
    }
)
"""Settings that may change when a run is resumed: none of them alters what was recorded or learned so far."""


@click.command("train")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), required=False)
@options.overrides
@click.option("--dry-run", is_flag=True, help="Print the resolved settings, check the files they name, and stop.")
@click.option("--resume", metavar="RUN", help="Go on with this run folder (path, name, or `latest`) and its settings.")
def command(file: Path | None, overrides: tuple[str, ...], dry_run: bool, resume: str | None) -> int:
    """Train by the settings in FILE, with overrides such as trainer.steps=10.

    Makes a run folder under `run.dir` and prints its path. Interrupt it, or lose power, at any point: `--resume RUN`
    goes on where the last committed call was; FILE may then be left out.
    """
    if resume:
        run = resumed(resume, file, overrides)
        if complete(run):
            click.echo(f"already complete: all of its trainer.steps = {load(run.config).trainer.steps} are done")
            click.echo(f"next: canter train --resume {run.path} trainer.steps=N    to go on, or open {run.report}")
            return 0
    else:
        if file is None:
            raise click.UsageError("give the TOML file of the run, or --resume RUN")
        config = load(file, overrides)
        if config.engine.use == "openai":
            raise ConfigError("engine.use = 'openai' cannot be trained: its weights are out of reach; use 'local'")
        if dry_run:
            click.echo(to_toml(config), nl=False)
            check_inputs(config)
            return 0
        run = started(config)
    from canter.cli.supervise import train

    return asyncio.run(train(run))


def started(config: Config) -> RunFolder:
    """A new run folder with the resolved settings and the first part of the manifest."""
    from canter.cli.manifest import describe, save_settings
    from canter.cli.supervise import model_folder

    check_inputs(config)
    model_folder(config)
    run = RunFolder.create(Path(config.run.dir), config.run.name)
    run.update_manifest(describe(config, run))
    save_settings(run, config)  # last: a folder with config.toml can be resumed
    click.echo(f"run folder: {run.path}")
    return run


def resumed(name: str, file: Path | None, overrides: tuple[str, ...]) -> RunFolder:
    """The folder of an earlier run. Its own settings hold, but for overrides of `RESUMABLE` ones."""
    from canter.cli.manifest import save_settings
    from canter.cli.supervise import load_run

    given = load(file) if file is not None else None
    run = RunFolder.find(name, Path(given.run.dir) if given else Path("runs"))
    if refused := sorted({override.partition("=")[0] for override in overrides} - RESUMABLE):
        raise ConfigError(
            f"--resume goes on with the settings in {run.config}, so {', '.join(refused)} cannot change; these can: "
            + ", ".join(sorted(RESUMABLE))
        )
    click.echo(f"resuming {run.path}")
    own = load_run(run)
    if overrides:
        own = load(run.config, overrides).model_copy(update={"base": own.base})
        save_settings(run, own)
        run.update_manifest({"settings": json.loads(own.model_dump_json()), "resumed_with": list(overrides)})
    if given and (names := different(given, own)):
        click.echo(f"note: {file} now has other {', '.join(names)}; the run keeps the settings it began with", err=True)
    return run


def complete(run: RunFolder) -> bool:
    """Whether the last process of this run wrote its manifest and report after the last of its steps."""
    from canter.trainer.metrics import read_metrics

    rows = read_metrics(run.metrics)
    finished = run.manifest().get("finished_at")
    if not rows or finished is None or not run.report.exists():
        return False
    last = max(rows, key=lambda row: int(row["step"]))
    # a run that went on with more steps has a later row until it is finished again
    return bool(last["step"] >= load(run.config).trainer.steps and run.report.stat().st_mtime >= last["time"])


def different(one: Config, other: Config) -> list[str]:
    """Names of the settings in which two trees differ; those that may change on resume, and the folder, aside."""
    return [
        f"{section}.{name}"
        for section in Config.model_fields
        if section != "base"
        for name in type(getattr(one, section)).model_fields
        if f"{section}.{name}" not in RESUMABLE | {"run.dir"}
        and getattr(getattr(one, section), name) != getattr(getattr(other, section), name)
    ]


def check_inputs(config: Config) -> None:
    """Fails early where a file that the run needs is missing or malformed, or the harness. Raises ConfigError."""
    from canter.harness import recipe
    from canter.trainer.data import read_tasks

    names = [("tasks.train", config.tasks.train)] + ([("tasks.eval", config.tasks.eval)] if config.tasks.eval else [])
    for setting, name in names:
        if not config.path(name).is_file():
            raise ConfigError(f"{setting}: no file {config.path(name)}; paths are relative to the TOML file")
        read_tasks(config.path(name))
    template = config.chat_template_file
    if template is not None and not template.is_file():
        raise ConfigError(f"model.chat_template: no file {template}")
    for target, source in config.harness.files.items():
        if not config.path(source).exists():
            raise ConfigError(f"harness.files.{target}: no file {config.path(source)}")
    recipe(config)
