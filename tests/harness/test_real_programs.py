"""The real Codex, Claude Code and OpenCode, launched as a run launches them, against a scripted model server.

Each is taken from where `canter harness install` puts it, or from PATH; without it its tests are skipped with that
reason. The run folder lies in a repository full of traps, as it does in a user's checkout.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from harness_server import ModelServer, model_server

from canter.config import Config, resolve
from canter.controller.exit import Exit
from canter.controller.runner import process_runner
from canter.errors import ConfigError
from canter.harness import recipe
from canter.types import Outcome, Rollout, Task

PROGRAMS = ("codex", "claude-code", "opencode")
TRAPS = (
    "AGENTS.md",
    "CLAUDE.md",
    "CLAUDE.local.md",
    "CONTEXT.md",
    ".claude/CLAUDE.md",
    ".claude/rules/x.md",
    "TRAP.md",
)
PROMPT = "--help me, as a first line with a dash\n" + "and much text that is no argument. " * 6000
ATTEMPT_S = 100.0


def settings(name: str, base: Path, args: Mapping[str, Any] | None = None, **sections: Mapping[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": "m", "name": "org/pol icy"},
        "tasks": {"train": "t"},
        "grader": {"use": "exact"},
        "harness": {"use": name, "args": dict(args or {}), "timeout_s": ATTEMPT_S},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return resolve(tree, base=base)


@pytest.fixture(params=PROGRAMS)
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found: str = request.param
    try:
        recipe(settings(found, tmp_path))
    except ConfigError as error:
        pytest.skip(str(error))
    return found


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with model_server() as found:
        yield found


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with files that harnesses read in the folders above the one they work in."""
    for trap in TRAPS:
        (tmp_path / trap).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / trap).write_text("TRAP: this is the user's", encoding="utf-8")
    (tmp_path / "opencode.json").write_text('{"instructions": ["TRAP.md"]}', encoding="utf-8")
    (tmp_path / ".opencode").mkdir()
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "-A"), (*author, "commit", "-qm", "TRAP")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=30)
    (tmp_path / "task.md").write_text("OWN: of the task", encoding="utf-8")
    return tmp_path


async def attempt(config: Config, run: Path, url: str, prompt: str = PROMPT) -> Exit:
    async with process_runner(config, run, url) as processes:
        launched = await processes.launch(Rollout("a", "g", Task("t", prompt)), 1, "key-of-a")
        await launched.pending.go()
        return await asyncio.wait_for(launched.process.exited(), ATTEMPT_S + 20)


def snapshot(folder: Path) -> dict[str, float]:
    """Every file below, but for those of the run, with its time of change."""
    files = (Path(top, name) for top, _, names in os.walk(folder) for name in names)
    return {str(f): f.lstat().st_mtime for f in files if folder / "run" not in f.parents}


async def test_it_works_in_its_own_folder_with_its_own_key(name: str, server: ModelServer, checkout: Path) -> None:
    proxy = {"HTTPS_PROXY": server.url, "HTTP_PROXY": server.url, "NO_PROXY": "127.0.0.1"}
    files = {"AGENTS.md": "task.md", "CLAUDE.md": "task.md"}
    own = {"env": {**proxy, **{k.lower(): v for k, v in proxy.items()}}, "files": files}
    config = settings(name, checkout)
    config = config.model_copy(update={"harness": config.harness.model_copy(update=own)})
    before = snapshot(checkout)
    ended = await attempt(config, checkout / "run", server.url)
    folder = checkout / "run" / "attempts" / "a" / "1"
    assert (ended.outcome, ended.exit_code) == (Outcome.EXITED, 0), (folder / "stderr.txt").read_text()

    assert f"HOME={folder / 'home'}" in (folder / "work" / "seen").read_text()  # its tool ran, in `work`
    assert "All done." in (folder / "stdout.txt").read_text()
    assert server.elsewhere == []
    assert snapshot(checkout) == before

    for request in server.asked:
        assert request.body["model"] == "org/pol icy"
        key = request.headers.get("x-api-key") or request.headers["authorization"].removeprefix("Bearer ")
        assert key == "key-of-a"
    sent = [str(request.body) for request in server.asked]
    assert "TRAP" not in "".join(sent)
    last = sent[-1].replace("\\n", "\n")
    assert "--help me, as a first line with a dash\nand much text" in last
    assert last.count("and much text that is no argument.") == 6000
    assert "OWN: of the task" in last


async def test_a_run_that_the_model_fails_has_an_exit_code(name: str, tmp_path: Path) -> None:
    """Without one a rollout that was never answered would be graded as if it had been."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length:" in head:
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        body = b'{"type": "error", "error": {"type": "invalid_request_error", "code": "x", "message": "no"}}'
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(refuse, "127.0.0.1", 0, limit=2**24)
    async with listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ended = await attempt(settings(name, tmp_path), tmp_path / "run", url, "Look around.")
    assert ended.outcome is Outcome.EXITED
    assert ended.exit_code not in (0, None)


async def test_its_settings_reach_it(server: ModelServer, tmp_path: Path, name: str) -> None:
    """Every setting that this recipe has and that shows in a request."""
    (tmp_path / "system.md").write_text("SYSTEM: be brief.", encoding="utf-8")
    (tmp_path / "more.md").write_text("MORE: be kind.", encoding="utf-8")
    (tmp_path / "settings.json").write_text('{"env": {"FROM_SETTINGS": "yes"}}', encoding="utf-8")
    args: dict[str, Any] = {
        "codex": {
            "instructions": "system.md",
            "reasoning_effort": "high",
            "disable": ["goals"],
            "config": ['developer_instructions="MORE: be kind."', "features.multi_agent=false"],
        },
        "claude-code": {
            "system_prompt": "system.md",
            "append_system_prompt": "more.md",
            "settings": "settings.json",
            "tools": ["Bash", "Read"],
            "max_turns": 5,
            "bare": True,
            "compact": False,
        },
        "opencode": {"agent": "plan"},
    }[name]
    config = settings(name, tmp_path, args, model={"context_tokens": 50_000}, sampling={"max_tokens": 512})
    ended = await attempt(config, tmp_path / "run", server.url, "Look around.")
    folder = tmp_path / "run" / "attempts" / "a" / "1"
    assert ended.exit_code == 0, (folder / "stderr.txt").read_text()
    body = server.asked[-1].body
    tools = [tool.get("name") or tool["function"]["name"] for tool in body["tools"]]
    if name == "codex":
        assert "SYSTEM: be brief." in str(body["input"][0])
        assert "MORE: be kind." in str(body["input"])
        assert "You are a coding agent" not in str(body)
        assert body["reasoning"]["effort"] == "high"
        assert "create_goal" not in tools
        assert "multi_agent_v1" not in tools
    elif name == "claude-code":
        assert "SYSTEM: be brief." in str(body["system"])
        assert "MORE: be kind." in str(body["system"])
        assert tools == ["Bash", "Read"]
        assert body["max_tokens"] == 512
        assert "FROM_SETTINGS=yes" in (folder / "work" / "seen").read_text()
        assert '"contextWindow":50000' in (folder / "stdout.txt").read_text()
    else:
        assert body["max_tokens"] == 512
        assert "plan mode" in str(body["messages"]).lower()


async def test_codex_knows_every_setting_of_its_file(server: ModelServer, tmp_path: Path) -> None:
    """It ignores what it does not know, unless it is asked to be strict."""
    try:
        made = recipe(settings("codex", tmp_path))
    except ConfigError as error:
        pytest.skip(str(error))
    real = made.executable  # type: ignore[attr-defined]
    strict = tmp_path / "strict"
    strict.write_text(f'#!/bin/sh\nshift; exec "{real}" exec --strict-config "$@"\n')
    strict.chmod(0o755)
    (tmp_path / "system.md").write_text("Be brief.")
    args = {"path": str(strict), "instructions": "system.md", "reasoning_effort": "low", "enable": ["goals"]}
    config = settings("codex", tmp_path, args, model={"context_tokens": 50_000})
    ended = await attempt(config, tmp_path / "run", server.url, "Look around.")
    assert ended.exit_code == 0, (tmp_path / "run" / "attempts" / "a" / "1" / "stderr.txt").read_text()
