"""Recipes: how a harness is installed, and how it is launched for one attempt.

A recipe turns a `Seat` (what one attempt is given) into the files that its home begins with and a `Program` (what runs
in its process). `recipe(config)` makes the one that the settings name; `catalogue.py` lists those that have a name, one
module each; `docs/harnesses.md` describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from canter.config import Config
    from canter.config.tree import Section

TRAINED = ("main", "subagent")
"""Labels of the calls that train unless a recipe or the settings say otherwise: the agents, and none of the side
requests (titles, summaries)."""


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

    `env` is what the recipe adds to the environment that every harness gets; `stdin` is what an argv reads from its
    standard input.
    """

    argv: tuple[str, ...] = ()
    function: str | None = None
    argument: Any = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""

    def __post_init__(self) -> None:
        if bool(self.argv) == bool(self.function):
            raise ValueError("a program is either an argv or a function")
        if self.stdin and not self.argv:
            raise ValueError("only an argv reads standard input")


class Recipe(Protocol):
    """One harness. `modules` are imported by the launcher before it forks, with `launcher_env` in its environment."""

    @property
    def modules(self) -> tuple[str, ...]: ...

    def launcher_env(self, private: Path) -> Mapping[str, str]:
        """`private` is a folder of the run that no attempt uses."""
        ...

    def files(self, seat: Seat) -> Mapping[str, str]:
        """Path in the attempt's home → text, written before the program starts. No keys: those are in its
        environment."""
        ...

    def program(self, seat: Seat) -> Program: ...


class Standalone:
    """What most recipes have in common: the launcher imports nothing for them, and a home begins empty."""

    __slots__ = ()

    @property
    def modules(self) -> tuple[str, ...]:
        return ()

    def launcher_env(self, private: Path) -> Mapping[str, str]:
        return {}

    def files(self, seat: Seat) -> Mapping[str, str]:
        return {}


@dataclass(frozen=True, slots=True)
class Npm:
    """A harness that is one native program in an npm package; nothing of the package runs when it is installed.

    `package` is an npm specification in which `{version}` and `{platform}` (`linux-x64`, …) are replaced; `program` is
    a glob below `node_modules`, in which they are, too; `command` is the name that it has on `PATH`. `versions` are
    those known to work, the one to install first. `variants` (`baseline` for a processor without AVX2, `musl`) are the
    endings that its platforms have, in their order.
    """

    package: str
    program: str
    command: str
    versions: tuple[str, ...]
    variants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pip:
    """A harness that is a Python library.

    `packages` are requirements in which `{version}` is replaced; the first names the distribution whose version counts.
    `python` is the oldest Python that it takes. `own` says whether it gets an environment of its own; otherwise it is
    imported by the launcher, and so is installed beside Canter. `versions` as above.
    """

    packages: tuple[str, ...]
    versions: tuple[str, ...]
    python: tuple[int, int] = (3, 11)
    own: bool = True


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the catalogue. `dialects` are the gateway's that it speaks; `settings` is what `harness.args` may
    hold; `build` raises ConfigError; `train_labels` are the labels of the calls that train by default."""

    name: str
    about: str
    dialects: tuple[str, ...]
    install: Npm | Pip
    settings: type[Section]
    build: Callable[[Config], Recipe]
    train_labels: tuple[str, ...] = TRAINED


def recipe(config: Config) -> Recipe:
    """The recipe that `[harness]` names. Raises ConfigError for a name or a setting that does not exist."""
    from canter.harness import command, function
    from canter.harness.catalogue import entry

    harness = config.harness
    if harness.command:
        return command.Command(tuple(harness.command), config.base.resolve())
    if harness.function:
        return function.Function(harness.function)
    return entry(str(harness.use)).build(config)


def train_labels(config: Config) -> tuple[str, ...] | None:
    """The labels of the calls that train: `harness.train_labels`, else those of the recipe. None for all: what a
    command or a function of the user's asks for, only the user can tell. Raises ConfigError."""
    from canter.harness.catalogue import entry

    harness = config.harness
    if harness.train_labels is not None:
        return tuple(harness.train_labels)
    return entry(harness.use).train_labels if harness.use else None
