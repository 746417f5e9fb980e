"""The recipes of Python libraries as values; the real ones run in `tests/conformance/test_real_harnesses.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from canter.config import resolve
from canter.errors import ConfigError
from canter.harness import Program, Seat, recipe
from canter.harness.agents_sdk import INSTRUCTIONS

SEAT = Seat(
    "r", 1, {"id": "t", "prompt": "do", "input": {}}, "policy", "http://127.0.0.1:1", "secret-key", Path("/a/r/1")
)


def program(name: str, base: Path = Path("/"), args: dict[str, Any] | None = None, **sections: Any) -> Program:
    harness = {"use": name, "args": {"path": sys.executable, **(args or {})}, "timeout_s": 50.5}
    tree = {"model": {"path": "m"}, "tasks": {"train": "t"}, "grader": {"use": "exact"}, "harness": harness}
    found = recipe(resolve({**tree, **sections}, base=base))
    assert found.modules == ()
    assert found.files(SEAT) == {}
    return found.program(SEAT)


def told(made: Program) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(made.argv[-1])
    return value


@pytest.mark.parametrize(
    ("api", "model", "base_url", "mode"),
    [
        ("chat", "openai/policy", "http://127.0.0.1:1/v1", "chat"),
        ("responses", "openai/policy", "http://127.0.0.1:1/v1", "responses"),
        ("messages", "anthropic/policy", "http://127.0.0.1:1", "chat"),
    ],
)
def test_openhands_asks_as_it_is_told(api: str, model: str, base_url: str, mode: str) -> None:
    found = told(program("openhands", args={"api": api}))
    assert (found["model"], found["base_url"], found["api"]) == (model, base_url, mode)


def test_openhands_knows_the_limits_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "system.md").write_text("Be brief.", encoding="utf-8")
    sections = {"model": {"path": "m", "context_tokens": 8192}, "sampling": {"max_tokens": 512}}
    made = program("openhands", tmp_path, {"system_prompt": "system.md", "max_iterations": 7}, **sections)
    found = told(made)
    assert (found["max_input_tokens"], found["max_output_tokens"], found["timeout_s"]) == (7680, 512, 51)
    assert (found["system_prompt"], found["max_iterations"]) == ("Be brief.", 7)
    assert made.env["TMUX_TMPDIR"] == "/a/r/1/tmp"
    assert told(program("openhands"))["max_input_tokens"] is None


def test_the_agents_sdk_asks_as_it_is_told(tmp_path: Path) -> None:
    found = told(program("openai-agents"))
    assert (found["api"], found["stream"], found["previous_response"]) == ("responses", False, False)
    assert found["instructions"] == INSTRUCTIONS
    (tmp_path / "mine.md").write_text("Mine.", encoding="utf-8")
    found = told(program("openai-agents", tmp_path, {"api": "chat", "stream": True, "instructions": "mine.md"}))
    assert (found["api"], found["stream"], found["instructions"]) == ("chat_completions", True, "Mine.")


@pytest.mark.parametrize("name", ["openhands", "openai-agents"])
def test_no_key_stands_in_an_argument_and_nothing_is_reported_elsewhere(name: str) -> None:
    made = program(name)
    assert not any("secret-key" in part for part in (*made.argv, *made.env.values()))
    quiet = {"openhands": "LITELLM_LOCAL_MODEL_COST_MAP", "openai-agents": "OPENAI_AGENTS_DISABLE_TRACING"}[name]
    assert made.env[quiet]
    assert Path(made.argv[3]).is_file()


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("openhands", {"api": "completions"}, "'chat', 'responses' or 'messages'"),
        ("openhands", {"max_iterations": 0}, "greater than or equal to 1"),
        ("openhands", {"system_prompt": "none.md"}, "cannot be read"),
        ("openhands", {"iterations": 3}, "max_iterations"),
        ("openai-agents", {"api": "chat", "previous_response": True}, "needs harness.args.api = 'responses'"),
        ("openai-agents", {"stream": "yes"}, "wrong type"),
    ],
)
def test_settings_that_make_no_sense(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        program(name, args=args)
