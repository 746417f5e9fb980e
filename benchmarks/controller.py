"""Rollouts per second without a model: 100 no-op rollouts from queued to scored, everything else as in a run.

Gateway with a durable store (SQLite, `synchronous=FULL`) in one process, the controller in another, every harness and
every grader a process of its own below a keeper. Cases: a Python function in a fork of the warmed launcher; a command,
`python -c pass`; and the unmodified mini-SWE-agent with a one-turn rollout, if it is installed. Agent Lightning's
local controller takes 39 s for 100 no-op commands with its default poll, and 0.37 CPU-s for each.

    python benchmarks/controller.py [--json] [--rollouts N] [--case function|command|mini]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from canter.client import Client
from canter.config import Config, resolve
from canter.controller.loop import run_controller
from canter.engine.openai import OpenAIEngine
from canter.gateway.app import create_app
from canter.gateway.passthrough import UpstreamSource
from canter.gateway.serve import serve
from canter.store import open_store
from canter.types import KeyKind, Rollout, RolloutState, Task

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
OVER = frozenset(state.value for state in RolloutState if state.terminal)
BARS_S = {"function": 5.0, "command": 20.0}
MINI = """
agent: {system_template: "Do it.", instance_template: "{{task}}", step_limit: 1, cost_limit: 0}
model: {action_regex: "(?s)RUN (.*)"}
environment: {environment_class: local}
"""
HARNESSES: dict[str, dict[str, Any]] = {
    "function": {"function": "controller:nothing"},
    "command": {"command": [sys.executable, "-c", "pass"]},
    "mini": {"use": "mini-swe-agent", "args": {"config": "mini.yaml"}},
}


def nothing(task: dict[str, Any]) -> None:
    """The harness of the case `function`."""


def settings(case: str, base: Path = HERE) -> Config:
    tree = {"model": {"path": "none"}, "tasks": {"train": "none.jsonl"}, "harness": HARNESSES[case]}
    # the answer is what was printed: nothing, which is right; so that every grader does its whole work
    grader = {"use": "regex", "answer": "stdout"}
    return resolve({**tree, "grader": grader, "runner": {"keep_dirs": "all"}}, base=base)


# -- the processes --


async def gateway(folder: Path, upstream: str) -> None:
    config = settings("function")
    store = open_store(folder / "canter.db")
    source = UpstreamSource(config, OpenAIEngine(upstream, model="none", version=0))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with serve(create_app(config, store, source), config.gateway, grace_s=1) as url:
        print(json.dumps({"url": url, "key": await store.issue_key(KeyKind.SERVICE)}), flush=True)
        await stop.wait()
    await source.close()
    await store.close()


async def controller(folder: Path, url: str, key: str, case: str) -> None:
    base = HERE
    if case == "mini":
        base = folder
        (folder / "mini.yaml").write_text(MINI)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with Client(url, key) as client:
        with contextlib.suppress(asyncio.CancelledError):
            await run_controller(settings(case, base), client, folder, url)


@contextlib.contextmanager
def process(*argv: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """This file in another role, ended at the end."""
    child = subprocess.Popen([sys.executable, __file__, *argv], text=True, **options)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(timeout=30)


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[str]:
    """An OpenAI-compatible server that answers every chat with one command and its token ids."""

    async def chat(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "RUN true"}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "stop",
            "token_ids": [1, 2],
            "logprobs": {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": []}] * 2},
        }
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        reply = {"id": "c", "object": "chat.completion", "created": 0, "model": "none", "choices": [choice]}
        return web.json_response({**reply, "usage": usage, "prompt_token_ids": [1, 2, 3]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


# -- the measurement --


def cpu_s(pid: int) -> float:
    """User and system time of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def until_over(client: Client, ids: Sequence[str]) -> list[Rollout]:
    left, after = set(ids), 0
    while left:
        for event in await client.events(after, timeout_s=60):
            after = event.seq
            if event.kind in OVER:
                left.discard(event.rollout_id or "")
    return await client.rollouts(ids=ids)


async def measure(case: str, rollouts: int) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="canter-benchmark-"))
    try:
        async with upstream() as engine:
            with process("gateway", str(folder), engine, stdout=subprocess.PIPE) as server:
                assert server.stdout is not None
                told = json.loads(server.stdout.readline())
                with process("controller", str(folder), told["url"], told["key"], case) as runner:
                    async with Client(told["url"], told["key"]) as client:
                        return await drive(
                            case, rollouts, client, folder, {"gateway": server.pid, "controller": runner.pid}
                        )
    finally:
        shutil.rmtree(folder)


async def drive(case: str, rollouts: int, client: Client, folder: Path, pids: dict[str, int]) -> dict[str, float]:
    task = Task("t", "do nothing", hidden={"answer": ""})
    began = time.monotonic()
    await client.create_rollouts([Rollout("first", "g", task)])
    await until_over(client, ["first"])
    ready_s = time.monotonic() - began
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    ids = [f"r{i:04d}" for i in range(rollouts)]
    began = time.monotonic()
    await client.create_rollouts([Rollout(id, "g", task) for id in ids])
    over = await until_over(client, ids)
    wall_s = time.monotonic() - began
    wrong = [rollout for rollout in over if (rollout.state, rollout.reward) != (RolloutState.SCORED, 1.0)]
    assert not wrong, f"not all were scored 1: {wrong[0]}"
    figures = {f"{case}_wall_s": wall_s, f"{case}_start_s": ready_s}
    for name, pid in pids.items():
        figures[f"{case}_{name}_cpu_ms"] = (cpu_s(pid) - before[name]) * 1000 / rollouts
    harness = [json.loads(file.read_text()) for file in folder.glob("control/attempts/r*/1/exit.json")]
    grader = [json.loads(file.read_text()) for file in folder.glob("control/attempts/r*/1/grading/1/exit.json")]
    for name, exits in (("harness", harness), ("grader", grader)):
        figures[f"{case}_{name}_cpu_ms"] = sum(e["cpu_s"] for e in exits) * 1000 / len(exits)
    figures[f"{case}_keeper_cpu_ms"] = sum(e["keeper_cpu_s"] for e in harness + grader) * 1000 / len(harness)
    return figures


def show(case: str, rollouts: int, figures: dict[str, float]) -> None:
    bar = f" (bar {BARS_S[case]:g} s)" if case in BARS_S and rollouts == 100 else ""
    wall_s, start_s = figures[f"{case}_wall_s"], figures[f"{case}_start_s"]
    print(f"{case}: {rollouts} rollouts in {wall_s:.2f} s{bar}; the first, with the start, {start_s:.2f} s")
    parts = ("gateway", "controller", "keeper", "harness", "grader")
    print("  CPU ms per rollout: " + ", ".join(f"{part} {figures[f'{case}_{part}_cpu_ms']:.1f}" for part in parts))


def main() -> None:
    if sys.argv[1:2] == ["gateway"]:
        return uvloop.run(gateway(Path(sys.argv[2]), sys.argv[3]))
    if sys.argv[1:2] == ["controller"]:
        return uvloop.run(controller(Path(sys.argv[2]), *sys.argv[3:6]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object of named figures with units")
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--case", choices=sorted(HARNESSES), action="append")
    options = parser.parse_args()
    with_mini = importlib.util.find_spec("minisweagent") is not None
    results: dict[str, float] = {}
    for case in options.case or ["function", "command", *(["mini"] if with_mini else [])]:
        figures = uvloop.run(measure(case, options.rollouts))
        show(case, options.rollouts, figures)
        results |= figures
    if options.json:
        units = {name: "ms" if name.endswith("_ms") else "s" for name in results}
        print(json.dumps({name: {"value": round(results[name], 3), "unit": units[name]} for name in results}))
    return None


if __name__ == "__main__":
    main()
