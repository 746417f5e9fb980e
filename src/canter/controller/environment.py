"""The environment of a harness and of a grader: exactly what is listed here, nothing of the controller's own. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from canter.config.tree import HarnessConfig
from canter.errors import ConfigError
from canter.harness import Program, Seat

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
RESERVED = frozenset(
    {
        "OPENAI_BASE_URL",
        "OPENAI_API_BASE",
        "OPENAI_API_KEY",
        "ANTHROPIC_BASE_URL",
        "ANTHROPIC_API_KEY",
        "CANTER_TASK",
        "CANTER_ROLLOUT_ID",
        "CANTER_MODEL",
        "HOME",
        "TMPDIR",
    }
)
"""Every attempt has its own values for these; a run cannot set them."""


def harness_environment(
    seat: Seat, program: Program, config: HarnessConfig, outer: Mapping[str, str]
) -> dict[str, str]:
    """Of the controller's environment `outer` only `PATH`, `LANG` and `harness.pass_env` pass."""
    environment = {
        **_basics(seat.folder, outer),
        **{name: outer[name] for name in config.pass_env if name in outer},
        **program.env,
        **config.env,
        "OPENAI_BASE_URL": f"{seat.gateway}/v1",
        "OPENAI_API_BASE": f"{seat.gateway}/v1",
        "OPENAI_API_KEY": seat.key,
        "ANTHROPIC_BASE_URL": seat.gateway,
        "ANTHROPIC_API_KEY": seat.key,
        "CANTER_TASK": str(seat.folder / "task.json"),
        "CANTER_ROLLOUT_ID": seat.rollout_id,
        "CANTER_MODEL": seat.model,
    }
    environment["PATH"] = f"{seat.work / 'bin'}:{environment['PATH']}"
    return environment


def grader_environment(private: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """Not the harness's `bin` folder on `PATH`, and no key: the grader is told that otherwise."""
    return _basics(private, outer)


def check_names(config: HarnessConfig) -> None:
    """Raises ConfigError where the settings name a variable that every attempt gets its own value for."""
    for setting, names in (("env", config.env), ("pass_env", config.pass_env)):
        if taken := RESERVED.intersection(names):
            name = sorted(taken)[0]
            raise ConfigError(
                f"harness.{setting} names {name}, of which every attempt gets its own value; remove it there"
            )


def _basics(folder: Path, outer: Mapping[str, str]) -> dict[str, str]:
    return {
        "PATH": outer.get("PATH") or DEFAULT_PATH,
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "LANG": outer.get("LANG") or "C.UTF-8",
    }
