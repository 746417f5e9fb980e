"""The unmodified mini-SWE-agent against a scripted OpenAI-compatible server, launched as a run launches it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from canter.config import resolve
from canter.controller.folder import place, read_exit
from canter.controller.runner import process_runner
from canter.types import Rollout, Task

YAML = """
agent:
  system_template: Do it.
  instance_template: "{{task}}"
  step_limit: 3
  cost_limit: 0
model:
  action_regex: '(?s)RUN (.*)'
  observation_template: "{{output.output}}"
environment:
  environment_class: local
"""
SUBMIT = "RUN echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class Server:
    """Says `env > seen` and then submits; keeps keys and bodies."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.url = ""

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append((request.headers["authorization"], body))
        text = "RUN env > seen; submit" if len(body["messages"]) == 2 else SUBMIT
        message = {"role": "assistant", "content": text}
        reply = {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        return web.json_response(reply)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    script = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", script.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield script
    await runner.cleanup()


async def test_every_attempt_calls_with_its_own_key(server: Server, tmp_path: Path) -> None:
    """Two attempts from one warmed launcher: what litellm read when it was imported must not stick."""
    pytest.importorskip("dotenv", reason="mini-swe-agent is not installed")
    (tmp_path / "mini.yaml").write_text(YAML)
    submit = tmp_path / "submit"
    submit.write_text("#!/bin/sh\necho not yet\n")
    submit.chmod(0o755)
    harness = {"use": "mini-swe-agent", "args": {"config": "mini.yaml"}, "files": {"bin/submit": "submit"}}
    tree = {"model": {"path": "m"}, "tasks": {"train": "t"}, "harness": harness, "grader": {"use": "exact"}}
    run = tmp_path / "run"
    async with process_runner(resolve(tree, base=tmp_path), run, server.url) as processes:
        for name in ("a", "b"):
            task = Task("t", "--help me", hidden={"answer": "do not tell"})
            launched = await processes.launch(Rollout(name, "g", task), 1, f"key-{name}")
            await launched.pending.go()
            await asyncio.wait_for(launched.process.exited(), 60)
    for name in ("a", "b"):
        folder = run / "attempts" / name / "1"
        assert read_exit(place(run, name, 1)).clean, (folder / "stderr.txt").read_text()
        trajectory = json.loads((folder / "traj.json").read_text())
        assert trajectory["info"]["exit_status"] == "Submitted"
        assert trajectory["messages"][1]["content"] == "--help me"
        seen = (folder / "work" / "seen").read_text()
        assert f"OPENAI_API_KEY=key-{name}" in seen
        assert f"HOME={folder / 'home'}" in seen
        assert "do not tell" not in seen
    assert [key for key, _ in server.requests] == ["Bearer key-a"] * 2 + ["Bearer key-b"] * 2
    assert {body["model"] for _, body in server.requests} == {"policy"}
    assert server.requests[1][1]["messages"][-1]["content"] == "not yet\n"
    assert sorted(path.name for path in (run / "control").iterdir()) == [
        "attempts",
        "grader-launcher.log",
        "harness-launcher.log",
        "lock",
        "mini-swe-agent",
    ]
