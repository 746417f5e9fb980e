"""`harness.use = "claude-code"`: the unmodified Claude Code (npm `@anthropic-ai/claude-code-…`), one `claude -p` per
attempt.

Its events are the attempt's `stdout.txt`. The prompt comes through standard input, so that it may begin with anything
and be of any length. All names that it has for models are the run's model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from canter.config import Config
from canter.errors import ConfigError
from canter.harness import Entry, Npm, Program, Seat, Standalone
from canter.harness.arguments import arguments, text_of, timer_ms
from canter.harness.installed import Installed
from canter.harness.installed import program as find

NAME = "claude-code"

_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
    "CLAUDE_CODE_WORKFLOW_SUBAGENT_MODEL",
)

_PATIENCE = (
    "API_TIMEOUT_MS",
    "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS",
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS",
    "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS",
)
"""What it bounds its waiting for a reply with."""

_ALWAYS = {
    "IS_SANDBOX": "1",  # as root it skips no permissions without it
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_GROWTHBOOK": "1",
    "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL": "1",
}
"""No other host is asked."""

_QUIET = {
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # no line of billing in the system prompt
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "DISABLE_PROMPT_CACHING": "1",
    "CLAUDE_CODE_DISABLE_THINKING": "1",
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
    "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
}
"""What it says to its own service, and what nobody waits for in one rollout."""


_MEMORY = ("CLAUDE.md", "CLAUDE.local.md", "AGENTS.md", ".claude/**")
"""What it reads of a folder and of all above."""


_SMALLEST_WINDOW = 32_768
"""Tokens. It keeps some 23,000 of a window free, and takes a smaller one for full before it has asked anything; there
it learns from the gateway's refusal that a prompt is too long."""


class Settings(Installed):
    """`harness.args`; unset ones are left to Claude Code."""

    max_turns: int | None = Field(default=None, ge=1)
    """Most turns of the main agent."""
    tools: list[str] | None = None
    """The built-in tools to offer, e.g. `["Bash", "Edit", "Read"]`; an empty list for none."""
    system_prompt: str | None = None
    """A text file, relative to the TOML file, that replaces its system prompt."""
    append_system_prompt: str | None = None
    """A text file that is added to its system prompt."""
    settings: str | None = None
    """A JSON file of its settings."""
    bare: bool = False
    """Its minimal mode: no hooks, skills, plugins, memory files or automatic context."""
    quiet: bool = True
    """Leave out what is meant for its own service: billing line, experimental betas, cache marks, thinking budget."""
    compact: bool = True
    """Whether it may compact a long history by itself."""


@dataclass(frozen=True, slots=True)
class ClaudeCode(Standalone):
    """Claude Code with the run's settings."""

    executable: Path
    settings: Settings
    prompts: Mapping[str, str]
    """Name of the file in its home → text, of those that were given."""
    user_settings: str | None
    context_tokens: int | None
    max_tokens: int
    timeout_s: float

    def files(self, seat: Seat) -> Mapping[str, str]:
        # it looks up to the root, and what lies around the run folder is not the task's
        settings = {"claudeMdExcludes": [str(parent / name) for parent in seat.work.parents for name in _MEMORY]}
        files = {".claude/settings.json": json.dumps(settings, indent=2) + "\n"}
        if self.user_settings is not None:
            files[".claude/recipe.json"] = self.user_settings
        return {**files, **{f".claude/{name}": text for name, text in self.prompts.items()}}

    def program(self, seat: Seat) -> Program:
        return Program(argv=tuple(self._argv(seat)), env=self._env(seat), stdin=str(seat.task["prompt"]))

    def _argv(self, seat: Seat) -> list[str]:
        settings, home = self.settings, seat.folder / "home" / ".claude"
        argv = [str(self.executable), "-p", "--output-format", "stream-json", "--verbose"]
        argv += ["--dangerously-skip-permissions"]
        if settings.bare:
            argv += ["--bare"]
        if settings.max_turns is not None:
            argv += ["--max-turns", str(settings.max_turns)]
        if settings.tools is not None:
            argv += ["--tools", ",".join(settings.tools)]
        for name in self.prompts:
            argv += [f"--{name.removesuffix('.md').replace('_', '-')}-file", str(home / name)]
        if self.user_settings is not None:
            argv += ["--settings", str(home / "recipe.json")]
        return argv

    def _env(self, seat: Seat) -> dict[str, str]:
        env = {**dict.fromkeys(_MODELS, seat.model), **_ALWAYS, **(_QUIET if self.settings.quiet else {})}
        env["CLAUDE_CONFIG_DIR"] = str(seat.folder / "home" / ".claude")
        env |= dict.fromkeys(_PATIENCE, str(timer_ms(self.timeout_s)))
        env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(self.max_tokens)
        if self.context_tokens is not None and self.context_tokens >= _SMALLEST_WINDOW:
            env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(self.context_tokens)
        if not self.settings.compact:
            env["DISABLE_AUTO_COMPACT"] = "1"
        return env


def from_config(config: Config) -> ClaudeCode:
    """The recipe with the settings of `harness.args`. Raises ConfigError."""
    settings = arguments(config, NAME, Settings)
    given = {"system_prompt": settings.system_prompt, "append_system_prompt": settings.append_system_prompt}
    prompts = {f"{name}.md": text for name, file in given.items() if (text := text_of(config, name, file)) is not None}
    return ClaudeCode(
        executable=find(config, ENTRY, settings),
        settings=settings,
        prompts=prompts,
        user_settings=_json_object(text_of(config, "settings", settings.settings)),
        context_tokens=config.model.context_tokens,
        max_tokens=config.sampling.max_tokens,
        timeout_s=config.harness.timeout_s,
    )


def _json_object(text: str | None) -> str | None:
    """The text, which must be a JSON object: Claude Code ignores one that is not without a word."""
    if text is None:
        return None
    try:
        good = isinstance(json.loads(text), dict)
    except ValueError:
        good = False
    if not good:
        raise ConfigError("harness.args.settings: the file is no JSON object")
    return text


ENTRY = Entry(
    name=NAME,
    about="Claude Code, Anthropic's coding agent",
    dialects=("messages",),
    install=Npm(
        package="@anthropic-ai/claude-code-{platform}@{version}",
        program="@anthropic-ai/claude-code-{platform}/claude",
        command="claude",
        versions=("2.1.332", "2.1.197"),
        variants=("musl",),
    ),
    settings=Settings,
    build=from_config,
)
