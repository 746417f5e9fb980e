"""`harness.use = "mini-swe-agent"`: the unmodified mini-SWE-agent (PyPI `mini-swe-agent` 2.4) through its own command.

`mini` is called in a fork of a launcher that has imported it (litellm alone costs seconds), with the argv that one
would type in a shell. Its trajectory goes to `traj.json` in the attempt's folder, outside the working folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from canter.config import Config
from canter.config.tree import Section
from canter.errors import ConfigError
from canter.harness import Entry, Pip, Program, Seat, Standalone
from canter.harness.arguments import arguments

NAME = "mini-swe-agent"
_RUN = "canter.harness.mini_process:run"

_ENVIRONMENT = {
    "MSWEA_CONFIGURED": "true",  # no first-start wizard
    "MSWEA_SILENT_STARTUP": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",  # the policy has no price
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download of the price list
    "LITELLM_MODE": "PRODUCTION",  # litellm looks for no .env file
}


class Settings(Section):
    """`harness.args`; unset ones are left to mini-SWE-agent."""

    config: str = "mini_textbased"
    """Its YAML file, relative to the TOML file, or the name of one that it brings."""
    model_class: str = "litellm_textbased"
    """How it asks the model: `litellm_textbased`, `litellm` (tool calls), `litellm_response` (Responses), …"""
    agent_class: str | None = None
    """`interactive` (its default) or `default`."""
    step_limit: int | None = Field(default=None, ge=0)
    """Most model calls; 0 for no limit."""
    cost_limit: float | None = Field(default=None, ge=0)
    """Most it may spend by its own price list, in which the policy has no price; 0 for no limit."""


@dataclass(frozen=True, slots=True)
class MiniSweAgent(Standalone):
    """mini-SWE-agent with the run's settings, in a fork of a launcher that has imported it."""

    settings: Settings
    config: str
    """As in the settings, with the path of a file made absolute."""

    @property
    def modules(self) -> tuple[str, ...]:
        return (_RUN,)

    def launcher_env(self, private: Path) -> Mapping[str, str]:
        # read when it is imported; its own folder, so that nothing of the user's configuration gets in
        return {**_ENVIRONMENT, "MSWEA_GLOBAL_CONFIG_DIR": str(private / "mini-swe-agent"), "HOME": str(private)}

    def program(self, seat: Seat) -> Program:
        settings = self.settings
        specs = [self.config, f"model.model_kwargs.api_base={seat.gateway}/v1"]
        if settings.step_limit is not None:
            specs.append(f"agent.step_limit={settings.step_limit}")
        if settings.cost_limit is not None:
            specs.append(f"agent.cost_limit={settings.cost_limit}")
        argv = ["-y", "--exit-immediately", "-m", f"openai/{seat.model}", "--model-class", settings.model_class]
        if settings.agent_class is not None:
            argv += ["--agent-class", settings.agent_class]
        argv += ["-t", str(seat.task["prompt"]), "-o", str(seat.folder / "traj.json")]
        for spec in specs:
            argv += ["-c", spec]
        return Program(function=_RUN, argument=argv, env=_ENVIRONMENT)


def from_config(config: Config) -> MiniSweAgent:
    """The recipe with the settings of `harness.args`. Raises ConfigError for a setting that does not exist."""
    settings = arguments(config, NAME, Settings)
    local = config.path(settings.config)
    if local.is_file():
        return MiniSweAgent(settings, str(local))
    if settings.config.endswith(".yaml"):
        raise ConfigError(f"harness.args.config: {local} does not exist")
    return MiniSweAgent(settings, settings.config)


ENTRY = Entry(
    name=NAME,
    about="mini-SWE-agent, a small agent that works through bash",
    dialects=("chat", "responses"),
    install=Pip(("mini-swe-agent=={version}",), ("2.4.6",), own=False),
    settings=Settings,
    build=from_config,
)
