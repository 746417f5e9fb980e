"""`harness.use = "openhands"`: the unmodified OpenHands agent of `openhands-sdk`, with the SDK's own tools.

A driver of a few lines (`openhands_driver.py`) is run by the Python that has the SDK, which needs Python 3.12 or newer
and so an environment of its own.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from canter.config import Config
from canter.harness import Entry, Pip, Program, Seat, Standalone
from canter.harness.arguments import arguments, text_of
from canter.harness.installed import Installed
from canter.harness.installed import program as find

NAME = "openhands"
DRIVER = Path(__file__).with_name("openhands_driver.py")

_ENVIRONMENT = {
    "OPENHANDS_SUPPRESS_BANNER": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download of the price list
    "LITELLM_MODE": "PRODUCTION",  # litellm looks for no .env file
    "LITELLM_TELEMETRY": "False",
    "OTEL_SDK_DISABLED": "true",
    "PYTHONUTF8": "1",
}


class Settings(Installed):
    """`harness.args`; unset ones are left to the SDK. `path` is the Python that has it."""

    api: Literal["chat", "responses", "messages"] = "chat"
    """How it asks the model: OpenAI's Chat Completions or Responses, or Anthropic's Messages."""
    max_iterations: int = Field(default=100, ge=1)
    """Most steps of the agent."""
    system_prompt: str | None = None
    """A text file, relative to the TOML file, that replaces its system prompt; how to use each tool stays behind it."""
    browser: bool = False
    """Whether it gets the browser tools, which need a browser on this machine."""
    sub_agents: bool = False
    """Whether it gets the tool that starts sub-agents."""


@dataclass(frozen=True, slots=True)
class OpenHands(Standalone):
    """OpenHands with the run's settings; `system_prompt` is the text that replaces its own, if any."""

    python: Path
    settings: Settings
    system_prompt: str | None
    context_tokens: int | None
    max_tokens: int
    timeout_s: float

    def program(self, seat: Seat) -> Program:
        messages = self.settings.api == "messages"
        context = self.context_tokens
        told: dict[str, Any] = {
            # the part before the slash is litellm's choice of a client, not sent
            "model": f"{'anthropic' if messages else 'openai'}/{seat.model}",
            "base_url": seat.gateway if messages else f"{seat.gateway}/v1",
            "api": "responses" if self.settings.api == "responses" else "chat",
            "cli_mode": not self.settings.browser,
            "sub_agents": self.settings.sub_agents,
            "system_prompt": self.system_prompt,
            "max_iterations": self.settings.max_iterations,
            "timeout_s": math.ceil(self.timeout_s),
            "max_input_tokens": None if context is None else max(1, context - self.max_tokens),
            "max_output_tokens": self.max_tokens,
        }
        # -P: no import from the folder of the driver; -s: nor from the user's own packages
        argv = (str(self.python), "-P", "-s", str(DRIVER), json.dumps(told))
        # its terminal is tmux where there is one; a path too long for a socket makes it use /tmp after all
        return Program(argv=argv, env={**_ENVIRONMENT, "TMUX_TMPDIR": str(seat.folder / "tmp")})


def from_config(config: Config) -> OpenHands:
    """The recipe with the settings of `harness.args`. Raises ConfigError."""
    settings = arguments(config, NAME, Settings)
    return OpenHands(
        python=find(config, ENTRY, settings),
        settings=settings,
        system_prompt=text_of(config, "system_prompt", settings.system_prompt),
        context_tokens=config.model.context_tokens,
        max_tokens=config.sampling.max_tokens,
        timeout_s=config.harness.timeout_s,
    )


ENTRY = Entry(
    name=NAME,
    about="OpenHands, the agent of openhands-sdk with terminal and file editor",
    dialects=("chat", "responses", "messages"),
    install=Pip(("openhands-sdk=={version}", "openhands-tools=={version}"), ("1.58.2",), python=(3, 12)),
    settings=Settings,
    build=from_config,
)
