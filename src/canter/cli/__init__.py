"""The command line. Commands import what they need when they run, so that `canter --help` stays quick.

Exit codes: 0 done · 1 the run failed · 2 bad usage or settings · 3 stopped because too many rollouts were dropped ·
130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from canter import __version__
from canter.errors import CanterError, ConfigError, LaunchError, NotFound, TooManyDrops

COMMANDS = {
    "train": ("canter.cli.train", "Train a policy inside a harness: gateway, controller and trainer on this machine."),
    "serve": (
        "canter.cli.serve",
        "Run the gateway and the controller; a trainer or an engine connects from elsewhere.",
    ),
    "rollouts": ("canter.cli.rollouts", "List the rollouts of a run, or show one with its calls."),
    "samples": (
        "canter.cli.samples",
        "Build the training samples of a run and report what was trained and what dropped.",
    ),
    "harness": ("canter.cli.harness", "List the harnesses that have a recipe, install one, or check one."),
    "doctor": ("canter.cli.doctor", "Check this machine: versions, cores, memory, disk, what each part still needs."),
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when the command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="canter")
def cli() -> None:
    """Reinforcement learning for LLM agents inside the harness they ship with."""


def main(argv: list[str] | None = None) -> None:
    """Entry point: runs a command and turns Canter's errors into a message and an exit code."""
    sys.exit(run(argv))


def run(argv: list[str] | None = None) -> int:
    try:
        result: Any = cli.main(args=argv, prog_name="canter", standalone_mode=False)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return 2
    except BrokenPipeError:
        return 1
    except CanterError as error:
        click.echo(f"canter: {error}", err=True)
        return exit_code(error)
    return result if isinstance(result, int) else 0


def exit_code(error: CanterError) -> int:
    if isinstance(error, ConfigError | NotFound | LaunchError):
        return 2
    return 3 if isinstance(error, TooManyDrops) else 1
