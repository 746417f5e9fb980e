"""`harness.use = "opencode"`: the unmodified OpenCode (npm `opencode-ai`), one `opencode run` per attempt.

Its configuration is `home/.config/opencode/opencode.json`, its events are the attempt's `stdout.txt`. The prompt comes
through standard input: an argument would reach the model in quotation marks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.config import Config
from canter.harness import Entry, Npm, Program, Seat, Standalone
from canter.harness.arguments import arguments, timer_ms
from canter.harness.installed import Installed
from canter.harness.installed import program as find

NAME = "opencode"
PROVIDER = "canter"
UNBOUNDED = 0
"""Its word for a context of unknown length, which it never compacts."""

_ENVIRONMENT = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",  # no list of models from models.dev
    "OPENCODE_DISABLE_SHARE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_EMBEDDED_WEB_UI": "1",
    "OPENCODE_DISABLE_TERMINAL_TITLE": "1",
    # it looks up to the root for configuration and AGENTS.md, and what lies around the run folder is not the task's
    "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
}

_FOLDER = ".config/opencode/"
_NO_PLUGINS = {
    _FOLDER + "node_modules/.keep": "",
    _FOLDER + "package-lock.json": '{"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}\n',
}
"""It takes what plugins of its own would be made with for installed, and does not fetch it from npm."""


class Settings(Installed):
    """`harness.args`; unset ones are left to OpenCode."""

    agent: str | None = None
    """Its agent to use, e.g. `build` (its default)."""


@dataclass(frozen=True, slots=True)
class OpenCode(Standalone):
    """OpenCode with the run's settings."""

    executable: Path
    settings: Settings
    context_tokens: int | None
    max_tokens: int
    timeout_s: float

    def files(self, seat: Seat) -> Mapping[str, str]:
        return {_FOLDER + "opencode.json": json.dumps(self._config(seat), indent=2) + "\n", **_NO_PLUGINS}

    def program(self, seat: Seat) -> Program:
        argv = [str(self.executable), "run", "--format", "json", "--model", f"{PROVIDER}/{seat.model}"]
        if self.settings.agent is not None:
            argv += ["--agent", self.settings.agent]
        return Program(argv=tuple(argv), env=_ENVIRONMENT, stdin=str(seat.task["prompt"]))

    def _config(self, seat: Seat) -> dict[str, Any]:
        limit = {"context": self.context_tokens or UNBOUNDED, "output": self.max_tokens}
        model = f"{PROVIDER}/{seat.model}"
        provider = {
            "npm": "@ai-sdk/openai-compatible",  # part of the program
            "name": "Canter",
            "options": {
                "baseURL": f"{seat.gateway}/v1",
                "apiKey": "{env:OPENAI_API_KEY}",
                "timeout": False,
                "headerTimeout": False,
                "chunkTimeout": timer_ms(self.timeout_s),
            },
            "models": {seat.model: {"name": seat.model, "tool_call": True, "limit": limit}},
        }
        return {
            "model": model,
            "small_model": model,
            "enabled_providers": [PROVIDER],
            "provider": {PROVIDER: provider},
            "instructions": [str(seat.work / "AGENTS.md")],  # the task's own, if it has one
            "permission": {"*": "allow"},
            "autoupdate": False,
            "share": "disabled",
        }


def from_config(config: Config) -> OpenCode:
    """The recipe with the settings of `harness.args`. Raises ConfigError."""
    settings = arguments(config, NAME, Settings)
    return OpenCode(
        executable=find(config, ENTRY, settings),
        settings=settings,
        context_tokens=config.model.context_tokens,
        max_tokens=config.sampling.max_tokens,
        timeout_s=config.harness.timeout_s,
    )


ENTRY = Entry(
    name=NAME,
    about="OpenCode, an open coding agent for any model",
    dialects=("chat",),
    install=Npm(
        package="opencode-{platform}@{version}",
        program="opencode-{platform}/bin/opencode",
        command="opencode",
        versions=("1.18.33",),
        variants=("baseline", "musl"),
    ),
    settings=Settings,
    build=from_config,
)
