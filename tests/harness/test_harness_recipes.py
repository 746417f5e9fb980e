"""Recipes as values: what runs for a seat. The real harness is launched in `test_mini_swe_agent.py`."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from canter.config import Config, resolve
from canter.errors import ConfigError
from canter.harness import TRAINED, Entry, Program, Seat, recipe, train_labels
from canter.harness.catalogue import ENTRIES

TASK = {"id": "t-1", "prompt": "say {model}", "input": {"n": 1}}
SEAT = Seat("r", 1, TASK, "policy", "http://127.0.0.1:1", "secret-key", Path("/run/attempts/r/1"))


def tree(harness: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"path": "m"}, "tasks": {"train": "t"}, "harness": harness, "grader": {"use": "exact"}}


def config(harness: dict[str, Any], base: Path = Path("/base")) -> Config:
    return resolve(tree(harness), base=base)


def test_a_command_has_its_placeholders_replaced_once() -> None:
    argv = [
        "{base}/agent",
        "--task={task.prompt}",
        "{task.id}",
        "{model}",
        "{dir}",
        '{"json": {}}',
        "{task.hidden}",
        "{}",
    ]
    program = recipe(config({"command": argv})).program(SEAT)
    assert program.argv == (
        "/base/agent",
        "--task=say {model}",  # the task's text is text, not a template
        "t-1",
        "policy",
        "/run/attempts/r/1/work",
        '{"json": {}}',
        "{task.hidden}",
        "{}",
    )
    assert program.function is None


def test_a_function_gets_the_public_task() -> None:
    found = recipe(config({"function": "agent:run"}))
    assert found.modules == ("agent:run",)
    assert found.program(SEAT) == Program(function="agent:run", argument=TASK)


def test_a_program_is_one_of_the_two() -> None:
    for wrong in ({}, {"argv": ("a",), "function": "b:c"}):
        with pytest.raises(ValueError, match="either an argv or a function"):
            Program(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only an argv reads standard input"):
        Program(function="b:c", stdin="text")


def test_a_seat_does_not_print_its_key() -> None:
    assert "secret-key" not in repr(SEAT)


def test_mini_swe_agent_gets_the_argv_of_its_own_command(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text("agent: {}")
    args = {"config": "short.yaml", "step_limit": 3, "cost_limit": 0.5}
    found = recipe(config({"use": "mini-swe-agent", "args": args}, tmp_path))
    argv = found.program(SEAT).argument
    assert argv == [
        *("-y", "--exit-immediately"),
        *("-m", "openai/policy"),
        *("--model-class", "litellm_textbased"),
        *("-t", "say {model}"),
        *("-o", "/run/attempts/r/1/traj.json"),
        *("-c", str(tmp_path / "short.yaml")),
        *("-c", "model.model_kwargs.api_base=http://127.0.0.1:1/v1"),
        *("-c", "agent.step_limit=3"),
        *("-c", "agent.cost_limit=0.5"),
    ]
    assert "secret-key" not in str(found.program(SEAT))
    env = found.launcher_env(tmp_path / "control")
    assert env["MSWEA_GLOBAL_CONFIG_DIR"] == str(tmp_path / "control" / "mini-swe-agent")


def test_mini_swe_agents_own_settings_are_the_default() -> None:
    argv = recipe(config({"use": "mini-swe-agent"})).program(SEAT).argument
    assert argv[argv.index("-c") + 1] == "mini_textbased"
    assert "step_limit" not in str(argv)


@pytest.mark.parametrize(
    ("harness", "message"),
    [
        ({"use": "mini-swe-agnet"}, "did you mean 'mini-swe-agent'"),
        ({"args": {"steplimit": 1}}, "harness.args.steplimit: unknown; mini-swe-agent takes step_limit"),
        (
            {"args": {"step_limit": "3"}},
            "harness.args.step_limit = '3' has the wrong type: Input should be a",
        ),
        ({"args": {"step_limit": -1}}, "harness.args.step_limit = -1: Input should be greater than or equal to 0"),
        ({"args": {"a": 1, "b": 2}}, r"harness.args.a: unknown; .*\nharness.args.b: unknown"),
        ({"use": "nothing-like-it"}, "there are mini-swe-agent, codex, .*any other is a harness.command"),
        ({"args": {"step_limit": True}}, "has the wrong type"),
        ({"args": {"config": "absent.yaml"}}, "absent.yaml does not exist"),
    ],
)
def test_wrong_settings_are_named(harness: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(config({"use": "mini-swe-agent", **harness}))


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """A file that is no harness, for recipes that only need to know where theirs is."""
    (tmp_path / "stand-in").write_text("#!/bin/sh\n")
    (tmp_path / "stand-in").chmod(0o755)
    return "./stand-in"


CONTEXT = {"model": {"path": "m", "context_tokens": 32_768}, "sampling": {"max_tokens": 2048}}


def test_codex_gets_its_file_and_the_prompt_through_standard_input(stand_in: str, tmp_path: Path) -> None:
    (tmp_path / "system.md").write_text('Say "yes".')
    args = {
        "path": stand_in,
        "instructions": "system.md",
        "disable": ["goals"],
        "enable": ["apps"],
        "config": ["a.b=1"],
    }
    found = recipe(resolve({**tree({"use": "codex", "args": args, "timeout_s": 60}), **CONTEXT}, base=tmp_path))
    program = found.program(SEAT)
    assert program.argv == (
        *(str(tmp_path / "stand-in"), "exec", "--skip-git-repo-check"),
        *("--dangerously-bypass-approvals-and-sandbox", "-c", "a.b=1", "--json", "-"),
    )
    assert program.stdin == "say {model}"
    assert program.env == {"CODEX_HOME": "/run/attempts/r/1/home/.codex"}
    files = found.files(SEAT)
    assert files[".codex/instructions.md"] == 'Say "yes".'
    written = tomllib.loads(files[".codex/config.toml"])
    assert written["model"] == "policy"
    assert written["model_context_window"] == 32_768
    assert written["model_auto_compact_token_limit"] == 32_768 - 2048 - 3276
    assert written["features"]["apps"] is True
    assert written["features"]["goals"] is written["features"]["plugins"] is False
    assert written["features"]["view_image"] is False, "the policy reads text, and a picture would be left out"
    provider = written["model_providers"][written["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:1/v1"
    assert provider["env_key"] == "OPENAI_API_KEY"
    assert provider["stream_idle_timeout_ms"] == 60_000
    assert "secret-key" not in str(files) + str(program)


def test_claude_code_is_not_told_of_a_window_that_it_takes_for_full(stand_in: str, tmp_path: Path) -> None:
    settings = tree({"use": "claude-code", "args": {"path": stand_in}})
    found = recipe(resolve({**settings, "model": {"path": "m", "context_tokens": 4096}}, base=tmp_path))
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in found.program(SEAT).env


def test_claude_code_calls_every_model_by_the_name_of_the_runs(stand_in: str, tmp_path: Path) -> None:
    (tmp_path / "more.md").write_text("Be kind.")
    args = {"path": stand_in, "tools": [], "max_turns": 3, "append_system_prompt": "more.md", "compact": False}
    found = recipe(resolve({**tree({"use": "claude-code", "args": args}), **CONTEXT}, base=tmp_path))
    program = found.program(SEAT)
    assert program.argv[1:] == (
        *("-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"),
        *("--max-turns", "3", "--tools", ""),
        *("--append-system-prompt-file", "/run/attempts/r/1/home/.claude/append_system_prompt.md"),
    )
    models = {value for name, value in program.env.items() if "MODEL" in name}
    assert models == {"policy"}
    assert program.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    assert program.env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "2048"
    assert program.env["DISABLE_AUTO_COMPACT"] == "1"
    files = found.files(SEAT)
    assert files[".claude/append_system_prompt.md"] == "Be kind."
    excluded = json.loads(files[".claude/settings.json"])["claudeMdExcludes"]
    assert {"/CLAUDE.md", "/run/AGENTS.md", "/run/attempts/r/1/CLAUDE.md"} <= set(excluded)
    assert "/run/attempts/r/1/work/CLAUDE.md" not in excluded
    assert "secret-key" not in str(files) + str(program)


@pytest.mark.parametrize(("timeout_s", "timer"), [(0.0015, 2), (60, 60_000), (2_592_000, 2**31 - 1)])
def test_the_longest_attempt_overflows_no_timer(stand_in: str, tmp_path: Path, timeout_s: float, timer: int) -> None:
    """JavaScript's timers hold 31 bits of milliseconds, 25 days; a longer one ends at once."""
    harness: dict[str, Any] = {"args": {"path": stand_in}, "timeout_s": timeout_s}
    claude = recipe(config({"use": "claude-code", **harness}, tmp_path)).program(SEAT)
    assert {value for name, value in claude.env.items() if name.endswith("TIMEOUT_MS")} == {str(timer)}
    files = recipe(config({"use": "opencode", **harness}, tmp_path)).files(SEAT)
    written = json.loads(files[".config/opencode/opencode.json"])
    assert written["provider"]["canter"]["options"]["chunkTimeout"] == timer


LOUD = {
    **dict.fromkeys(
        (
            "ANTHROPIC_MODEL",
            "ANTHROPIC_SMALL_FAST_MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL",
            "ANTHROPIC_DEFAULT_SONNET_MODEL",
            "ANTHROPIC_DEFAULT_OPUS_MODEL",
            "ANTHROPIC_DEFAULT_FABLE_MODEL",
            "CLAUDE_CODE_SUBAGENT_MODEL",
            "CLAUDE_CODE_WORKFLOW_SUBAGENT_MODEL",
        ),
        "policy",
    ),
    **dict.fromkeys(
        (
            "API_TIMEOUT_MS",
            "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS",
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS",
            "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS",
        ),
        "60000",
    ),
    **dict.fromkeys(
        (
            "IS_SANDBOX",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
            "DISABLE_AUTOUPDATER",
            "DISABLE_TELEMETRY",
            "DISABLE_ERROR_REPORTING",
            "DISABLE_GROWTHBOOK",
            "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL",
        ),
        "1",
    ),
    "CLAUDE_CONFIG_DIR": "/run/attempts/r/1/home/.claude",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2048",
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "32768",
}
QUIET = {
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "DISABLE_PROMPT_CACHING": "1",
    "CLAUDE_CODE_DISABLE_THINKING": "1",
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
    "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
}


@pytest.mark.parametrize(("quiet", "expected"), [(False, LOUD), (True, {**LOUD, **QUIET})])
def test_claude_code_can_be_as_it_is_for_its_own_service(
    stand_in: str, tmp_path: Path, quiet: bool, expected: dict[str, str]
) -> None:
    harness = {"use": "claude-code", "args": {"path": stand_in, "quiet": quiet}, "timeout_s": 60}
    found = recipe(resolve({**tree(harness), **CONTEXT}, base=tmp_path))
    assert found.program(SEAT).env == expected


def test_opencode_is_told_what_the_run_allows(stand_in: str, tmp_path: Path) -> None:
    args = {"path": stand_in, "agent": "plan"}
    found = recipe(resolve({**tree({"use": "opencode", "args": args}), **CONTEXT}, base=tmp_path))
    program = found.program(SEAT)
    assert program.argv[1:] == ("run", "--format", "json", "--model", "canter/policy", "--agent", "plan")
    assert program.stdin == "say {model}"
    files = found.files(SEAT)
    written = json.loads(files[".config/opencode/opencode.json"])
    provider = written["provider"]["canter"]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:1/v1"
    assert provider["models"]["policy"]["limit"] == {"context": 32_768, "output": 2048}
    assert written["model"] == written["small_model"] == "canter/policy"
    assert "secret-key" not in str(files) + str(program)


@pytest.mark.parametrize(
    ("use", "args", "message"),
    [
        ("codex", {"instructions": "absent.md"}, r"harness.args.instructions: .*absent.md cannot be read"),
        ("codex", {"config": ["a.b"]}, "harness.args.config: 'a.b' must be key=value"),
        ("codex", {"config": ["a=b c"]}, "harness.args.config: 'a=b c' must be key=value"),
        ("codex", {"enable": ["x"], "disable": ["x"]}, "both name 'x'"),
        ("codex", {"enable": "x"}, "harness.args.enable = 'x' has the wrong type: Input should be a valid list"),
        ("codex", {"path": "absent"}, "harness.args.path = 'absent': not on PATH"),
        ("codex", {"path": "./absent"}, r"harness.args.path: .*absent does not exist"),
        ("codex", {"path": "./plain"}, r"harness.args.path: .*plain cannot be executed; chmod \+x it"),
        ("claude-code", {"settings": "plain"}, "harness.args.settings: the file is no JSON object"),
        ("claude-code", {"max_turns": 0}, "harness.args.max_turns = 0: Input should be greater than or equal to 1"),
        ("claude-code", {"model": "opus"}, "harness.args.model: unknown; claude-code takes"),
        ("opencode", {"agnet": "x"}, "harness.args.agnet: unknown; opencode takes agent"),
    ],
)
def test_wrong_settings_of_programs_are_named(
    use: str, args: dict[str, Any], message: str, stand_in: str, tmp_path: Path
) -> None:
    (tmp_path / "plain").write_text("[]")
    with pytest.raises(ConfigError, match=message):
        recipe(config({"use": use, "args": {"path": stand_in, **args}}, tmp_path))


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.name)
def test_an_entry_says_all_that_its_user_needs(entry: Entry) -> None:
    assert entry.about
    assert entry.install.versions
    assert set(entry.dialects) <= {"chat", "completions", "responses", "messages"}
    for name, field in entry.settings.model_fields.items():
        assert field.description, f"{entry.name}: {name} says nothing of itself"
        assert not field.is_required(), f"{entry.name} cannot be used without {name}"


def test_the_recipe_says_which_labels_train_unless_the_settings_do() -> None:
    assert train_labels(config({"use": "codex"})) == TRAINED == ("main", "subagent")
    assert train_labels(config({"use": "codex", "train_labels": ["title"]})) == ("title",)
    assert train_labels(config({"command": ["x"]})) is None
    with pytest.raises(ConfigError, match="train_labels"):
        config({"command": ["x"], "train_labels": []})


def test_a_recipe_imports_no_harness() -> None:
    """The controller, which makes programs, stays without litellm; only the launcher pays for it."""
    recipe(config({"use": "mini-swe-agent"})).program(SEAT)
    assert "litellm" not in sys.modules
    assert "minisweagent" not in sys.modules
