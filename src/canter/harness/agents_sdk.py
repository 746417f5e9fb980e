"""`harness.use = "openai-agents"`: an agent with a shell tool, of the unmodified OpenAI Agents SDK.

The SDK (PyPI `openai-agents`) is a library, so the agent is a driver of a few lines (`agents_sdk_driver.py`), run by
the Python that has it. An agent of your own runs as a `function` or a `command`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from canter.config import Config
from canter.errors import ConfigError
from canter.harness import Entry, Pip, Program, Seat, Standalone
from canter.harness.arguments import arguments, text_of
from canter.harness.installed import Installed
from canter.harness.installed import program as find

NAME = "openai-agents"
DRIVER = Path(__file__).with_name("agents_sdk_driver.py")
INSTRUCTIONS = (
    "You solve tasks on this computer with the shell tool. Your working folder is the current folder. When the task is "
    "done, answer with a short summary."
)

_ENVIRONMENT = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",  # else it uploads traces to OpenAI, whatever the base URL
    "OPENAI_AGENTS_DONT_LOG_MODEL_DATA": "1",
    "PYTHONUTF8": "1",
}


class Settings(Installed):
    """`harness.args`. `path` is the Python that has the SDK."""

    api: Literal["responses", "chat"] = "responses"
    """How it asks the model: OpenAI's Responses (the SDK's default) or Chat Completions."""
    stream: bool = False
    """Whether it streams replies."""
    previous_response: bool = False
    """Whether it sends only what is new, with `previous_response_id`; Responses only."""
    instructions: str | None = None
    """File with the agent's instructions, relative to the TOML file; default: two sentences about the shell."""
    max_turns: int = Field(default=50, ge=1)
    """Most turns of the agent."""
    shell_timeout_s: float = Field(default=120, gt=0)
    """Wall time of one shell command."""


@dataclass(frozen=True, slots=True)
class AgentsSdk(Standalone):
    """The SDK's agent with the run's settings; `instructions` is their text."""

    python: Path
    settings: Settings
    instructions: str
    timeout_s: float

    def program(self, seat: Seat) -> Program:
        told: dict[str, Any] = {
            "model": seat.model,
            "api": "responses" if self.settings.api == "responses" else "chat_completions",
            "stream": self.settings.stream,
            "previous_response": self.settings.previous_response,
            "instructions": self.instructions,
            "max_turns": self.settings.max_turns,
            "timeout_s": self.timeout_s,
            "shell_timeout_s": self.settings.shell_timeout_s,
        }
        # -P: no import from the folder of the driver; -s: nor from the user's own packages
        argv = (str(self.python), "-P", "-s", str(DRIVER), json.dumps(told))
        return Program(argv=argv, env=_ENVIRONMENT)


def from_config(config: Config) -> AgentsSdk:
    """The recipe with the settings of `harness.args`. Raises ConfigError."""
    settings = arguments(config, NAME, Settings)
    if settings.previous_response and settings.api != "responses":
        raise ConfigError("harness.args.previous_response needs harness.args.api = 'responses'")
    return AgentsSdk(
        python=find(config, ENTRY, settings),
        settings=settings,
        instructions=text_of(config, "instructions", settings.instructions) or INSTRUCTIONS,
        timeout_s=config.harness.timeout_s,
    )


ENTRY = Entry(
    name=NAME,
    about="An agent of the OpenAI Agents SDK with a shell tool",
    dialects=("responses", "chat"),
    install=Pip(("openai-agents=={version}",), ("0.24.0",), python=(3, 11)),
    settings=Settings,
    build=from_config,
)
