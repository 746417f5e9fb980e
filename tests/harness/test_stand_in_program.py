"""What a recipe asks for is there when its program starts: a script stands in for the harness."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from canter.config import resolve
from canter.controller.runner import process_runner
from canter.errors import LaunchError
from canter.types import Rollout, Task

SCRIPT = """#!/bin/sh
cat > prompt
cp "$CODEX_HOME/config.toml" .
git status > git-said 2>&1
git init -q . && git status --short > own-git-said 2>&1
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, timeout=30)
    return tmp_path


async def test_files_standard_input_and_no_repository(checkout: Path) -> None:
    tmp_path = checkout
    (tmp_path / "agent").write_text(SCRIPT)
    (tmp_path / "agent").chmod(0o755)
    harness = {"use": "codex", "args": {"path": "./agent"}}
    tree = {"model": {"path": "m"}, "tasks": {"train": "t"}, "harness": harness, "grader": {"use": "exact"}}
    prompts = {"a": "-x café\n" * 50_000, "b": "short"}
    async with process_runner(resolve(tree, base=tmp_path), tmp_path / "run", "http://127.0.0.1:1") as processes:
        for name, prompt in prompts.items():
            launched = await processes.launch(Rollout(name, "g", Task("t", prompt)), 1, "key")
            await launched.pending.go()
            ended = await asyncio.wait_for(launched.process.exited(), 30)
            assert ended.clean, ended
    for name, prompt in prompts.items():
        work = tmp_path / "run" / "attempts" / name / "1" / "work"
        assert (work / "prompt").read_text() == prompt
        assert 'base_url = "http://127.0.0.1:1/v1"' in (work / "config.toml").read_text()
        assert "not a git repository" in (work / "git-said").read_text()
        assert "prompt" in (work / "own-git-said").read_text()


async def test_a_prompt_that_is_no_text_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """A lone surrogate, which JSON allows, cannot be written as UTF-8."""
    (tmp_path / "agent").write_text("#!/bin/sh\n")
    (tmp_path / "agent").chmod(0o755)
    harness = {"use": "codex", "args": {"path": "./agent"}}
    tree = {"model": {"path": "m"}, "tasks": {"train": "t"}, "harness": harness, "grader": {"use": "exact"}}
    async with process_runner(resolve(tree, base=tmp_path), tmp_path / "run", "http://127.0.0.1:1") as processes:
        with pytest.raises(LaunchError, match="cannot prepare"):
            await processes.launch(Rollout("a", "g", Task("t", "\ud800")), 1, "key")
