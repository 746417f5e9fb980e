"""`harness.use = "codex"`: the unmodified Codex CLI (npm `@openai/codex`), one `codex exec` per attempt.

Its configuration is `home/.codex/config.toml`, its events are the attempt's `stdout.txt`. The prompt comes through
standard input, so that it may begin with anything and be of any length.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from canter.config import Config
from canter.errors import ConfigError
from canter.harness import Entry, Npm, Program, Seat, Standalone
from canter.harness.arguments import arguments, text_of
from canter.harness.installed import Installed
from canter.harness.installed import program as find

NAME = "codex"
PROVIDER = "canter"

_OFF = (
    "apps",
    "browser_use",
    "computer_use",
    "image_generation",
    "in_app_browser",
    "plugins",
    "remote_plugin",
    "skill_mcp_dependency_install",
    "tool_suggest",
    "view_image",
)
"""Features that ask for something from elsewhere, offer what is not there without a desktop and an account, or show
pictures to a policy that reads text."""


class Settings(Installed):
    """`harness.args`; unset ones are left to Codex."""

    instructions: str | None = None
    """A text file, relative to the TOML file, that replaces its system prompt."""
    reasoning_effort: str | None = None
    """`minimal`, `low`, `medium`, `high`, … : asked for in its requests, which the gateway does not act on."""
    skills: bool = False
    """Whether it gets the skills that it brings, of which most need an account."""
    enable: list[str] = Field(default=[])
    """Its features to switch on (`codex features list`)."""
    disable: list[str] = Field(default=[])
    """Its features to switch off, besides those that need an account or a desktop."""
    config: list[str] = Field(default=[])
    """Further settings of its `config.toml`, as `key=value` with a TOML value; they win over the recipe's."""
    stream_idle_timeout_s: float | None = Field(default=None, gt=0)
    """Silence in a reply after which it asks again; default: the attempt's time."""


@dataclass(frozen=True, slots=True)
class Codex(Standalone):
    """Codex with the run's settings; `instructions` is its system prompt's text, if it is to be another."""

    executable: Path
    settings: Settings
    instructions: str | None
    context_tokens: int | None
    max_tokens: int
    timeout_s: float

    def files(self, seat: Seat) -> Mapping[str, str]:
        files = {".codex/config.toml": "\n".join(self._config(seat)) + "\n"}
        if self.instructions is not None:
            files[".codex/instructions.md"] = self.instructions
        return files

    def program(self, seat: Seat) -> Program:
        argv = [str(self.executable), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        for pair in self.settings.config:
            argv += ["-c", pair]
        env = {"CODEX_HOME": str(seat.folder / "home" / ".codex")}
        return Program(argv=(*argv, "--json", "-"), env=env, stdin=str(seat.task["prompt"]))

    def _config(self, seat: Seat) -> Iterator[str]:
        idle_s = self.settings.stream_idle_timeout_s or self.timeout_s
        yield f"model = {_toml(seat.model)}"
        yield f"model_provider = {_toml(PROVIDER)}"
        if self.settings.reasoning_effort is not None:
            yield f"model_reasoning_effort = {_toml(self.settings.reasoning_effort)}"
        if self.instructions is not None:
            yield f"model_instructions_file = {_toml(str(seat.folder / 'home' / '.codex' / 'instructions.md'))}"
        if self.context_tokens is not None:
            yield f"model_context_window = {self.context_tokens}"
            yield f"model_auto_compact_token_limit = {compact_at(self.context_tokens, self.max_tokens)}"
        yield "check_for_update_on_startup = false"
        yield 'web_search = "disabled"'
        for table in ("analytics", "feedback"):
            yield f"[{table}]"
            yield "enabled = false"
        yield '[history]\npersistence = "none"'
        if not self.settings.skills:
            yield "[skills.bundled]\nenabled = false"
        yield "[features]"
        yield from (f"{name} = false" for name in dict.fromkeys((*_OFF, *self.settings.disable)) if self._off(name))
        yield from (f"{name} = true" for name in dict.fromkeys(self.settings.enable))
        yield f"[model_providers.{PROVIDER}]"
        yield 'name = "Canter"'
        yield f"base_url = {_toml(seat.gateway + '/v1')}"
        yield 'env_key = "OPENAI_API_KEY"'
        yield 'wire_api = "responses"'
        yield "request_max_retries = 8"
        yield "stream_max_retries = 8"
        yield f"stream_idle_timeout_ms = {round(idle_s * 1000)}"
        yield "supports_websockets = false"

    def _off(self, name: str) -> bool:
        return name not in self.settings.enable


def compact_at(context_tokens: int, max_tokens: int) -> int:
    """Tokens of history at which a harness compacts it, so that a reply and its tools' output still fit."""
    return max(context_tokens // 2, context_tokens - max_tokens - context_tokens // 10)


def from_config(config: Config) -> Codex:
    """The recipe with the settings of `harness.args`. Raises ConfigError."""
    settings = arguments(config, NAME, Settings)
    _check_pairs(settings.config)
    if both := sorted({*settings.enable} & {*settings.disable}):
        raise ConfigError(f"harness.args.enable and .disable both name {both[0]!r}; remove it from one")
    return Codex(
        executable=find(config, ENTRY, settings),
        settings=settings,
        instructions=text_of(config, "instructions", settings.instructions),
        context_tokens=config.model.context_tokens,
        max_tokens=config.sampling.max_tokens,
        timeout_s=config.harness.timeout_s,
    )


def _check_pairs(pairs: Sequence[str]) -> None:
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            tomllib.loads(f"{key} = {value}")
            good = bool(equals and key.strip())
        except tomllib.TOMLDecodeError:
            good = False
        if not good:
            raise ConfigError(f"harness.args.config: {pair!r} must be key=value with a TOML value, e.g. 'a.b=\"text\"'")


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


ENTRY = Entry(
    name=NAME,
    about="Codex CLI, OpenAI's coding agent",
    dialects=("responses",),
    install=Npm(
        package="@openai/codex@{version}-{platform}",
        program="@openai/codex/vendor/*/bin/codex",
        command="codex",
        versions=("0.171.0",),
    ),
    settings=Settings,
    build=from_config,
)
