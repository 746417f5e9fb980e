"""Recipes as values: what runs for a seat. The real harness is launched in `test_mini_swe_agent.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from canter.config import Config, resolve
from canter.errors import ConfigError
from canter.harness import Program, Seat, recipe

TASK = {"id": "t-1", "prompt": "say {model}", "input": {"n": 1}}
SEAT = Seat("r", 1, TASK, "policy", "http://127.0.0.1:1", "secret-key", Path("/run/attempts/r/1"))


def config(harness: dict[str, Any], base: Path = Path("/base")) -> Config:
    tree = {"model": {"path": "m"}, "tasks": {"train": "t"}, "harness": harness, "grader": {"use": "exact"}}
    return resolve(tree, base=base)


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
        ({"args": {"step_limit": "3"}}, "harness.args.step_limit = '3' has the wrong type"),
        ({"args": {"step_limit": True}}, "has the wrong type"),
        ({"args": {"config": "absent.yaml"}}, "absent.yaml does not exist"),
    ],
)
def test_wrong_settings_are_named(harness: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(config({"use": "mini-swe-agent", **harness}))


def test_a_recipe_imports_no_harness() -> None:
    """The controller, which makes programs, stays without litellm; only the launcher pays for it."""
    recipe(config({"use": "mini-swe-agent"})).program(SEAT)
    assert "litellm" not in sys.modules
    assert "minisweagent" not in sys.modules
