"""Recipes: how a harness is launched for one attempt.

A recipe turns a `Seat` (what one attempt is given) into a `Program` (what runs in its process). `recipe(config)` finds
the one that the settings name; `docs/harnesses.md` describes each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from canter.config import Config


@dataclass(frozen=True, slots=True)
class Seat:
    """What one attempt is given. `task` is the public part; `gateway` is a URL without `/v1`; `folder` is the
    attempt's, `work` the working folder in it."""

    rollout_id: str
    attempt: int
    task: Mapping[str, Any]
    model: str
    gateway: str
    key: str = field(repr=False)
    folder: Path = Path()

    @property
    def work(self) -> Path:
        return self.folder / "work"


@dataclass(frozen=True, slots=True)
class Program:
    """Either an argv to execute, or a Python function `module:function` to call with `argument` (JSON values).

    `env` is what the recipe adds to the environment that every harness gets.
    """

    argv: tuple[str, ...] = ()
    function: str | None = None
    argument: Any = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.argv) == bool(self.function):
            raise ValueError("a program is either an argv or a function")


class Recipe(Protocol):
    """One harness. `modules` are imported by the launcher before it forks, with `launcher_env` in its environment."""

    @property
    def modules(self) -> tuple[str, ...]: ...

    def launcher_env(self, private: Path) -> Mapping[str, str]:
        """`private` is a folder of the run that no attempt uses."""
        ...

    def program(self, seat: Seat) -> Program: ...


def recipe(config: Config) -> Recipe:
    """The recipe that `[harness]` names. Raises ConfigError for a name or a setting that does not exist."""
    from canter.harness import command, function, mini_swe_agent

    harness = config.harness
    if harness.command:
        return command.Command(tuple(harness.command), config.base.resolve())
    if harness.function:
        return function.Function(harness.function)
    return mini_swe_agent.from_config(config)
