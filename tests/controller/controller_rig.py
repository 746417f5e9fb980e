"""A run for tests: a real gateway over a store, a controller on it, and ways to wait for what they do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from canter.client import Client
from canter.config import Config, resolve
from canter.controller.loop import run_controller
from canter.gateway.app import create_app
from canter.gateway.serve import serve
from canter.store import Store
from canter.store.memory import MemoryStore
from canter.types import Call, CallBodies, EngineRecord, KeyKind, Rollout, RolloutState, Task, as_ids

HERE = Path(__file__).parent


class NoEngine:
    """A source that samples nothing: these tests put calls into the store themselves."""

    async def sample(self, ticket: object) -> NoReturn:
        raise AssertionError("no test of the controller calls the model through this source")

    def make_tree(self) -> None:
        return None

    def recall(self, conversation: object, call: Call, bodies: CallBodies) -> None:
        raise AssertionError("nothing was called")

    async def register(self, record: EngineRecord, key: str) -> None: ...

    async def remove(self, url: str) -> None: ...

    async def close(self) -> None: ...


def settings(harness: Mapping[str, Any], grader: Mapping[str, Any], base: Path = HERE, **sections: Any) -> Config:
    """`harness_programs.py` and `grader_programs.py` beside this file can be named as functions."""
    tree = {"model": {"path": "unused"}, "tasks": {"train": "unused.jsonl"}, "harness": harness, "grader": grader}
    return resolve({**tree, **sections}, base=base)


@dataclass
class Rig:
    store: Store
    client: Client
    url: str
    run_dir: Path
    config: Config
    controller: asyncio.Task[None] | None = None
    started: list[str] = field(default_factory=list)

    def start(self, *, adopt: bool = True, stop_harnesses: bool = True) -> None:
        running = run_controller(
            self.config, self.client, self.run_dir, self.url, adopt=adopt, stop_harnesses=stop_harnesses
        )
        self.controller = asyncio.create_task(running)

    async def stop(self) -> None:
        if self.controller is not None:
            self.controller.cancel()
            await asyncio.wait({self.controller}, timeout=60)
            if not self.controller.cancelled() and (error := self.controller.exception()) is not None:
                raise error
            self.controller = None

    async def add(self, *ids: str, max_attempts: int = 1, **task: Any) -> None:
        rollouts = [
            Rollout(id, group="g", task=Task(**{"id": "t", "prompt": "do", "hidden": {"answer": "42"}, **task}))
            for id in ids
        ]
        await self.store.create_rollouts([_with_attempts(r, max_attempts) for r in rollouts])

    async def until(self, check: Callable[[Rollout], bool], rollout_id: str, timeout_s: float = 20) -> Rollout:
        """Waits for a state of a rollout; a controller that fails meanwhile fails the test."""
        after, deadline = 0, time.monotonic() + timeout_s
        while not check(rollout := await self.store.rollout(rollout_id)):
            left = deadline - time.monotonic()
            assert left > 0, f"{rollout_id} is still {rollout}"
            if self.controller is not None and self.controller.done():
                self.controller.result()
            if events := await self.store.events(after, timeout_s=min(left, 0.5)):
                after = events[-1].seq
        return rollout

    async def done(self, rollout_id: str, timeout_s: float = 20) -> Rollout:
        return await self.until(lambda rollout: rollout.state.terminal, rollout_id, timeout_s)

    async def running(self, rollout_id: str) -> Path:
        """Waits until the harness runs; returns the attempt's folder."""
        rollout = await self.until(lambda rollout: rollout.state is RolloutState.RUNNING, rollout_id)
        folder = self.folder(rollout_id, rollout.attempt)
        await eventually((folder / "stdout.txt").exists)
        return folder

    def folder(self, rollout_id: str, attempt: int = 1) -> Path:
        return self.run_dir.resolve() / "attempts" / rollout_id / str(attempt)

    def record(self, rollout_id: str, attempt: int = 1) -> Path:
        return self.run_dir.resolve() / "control" / "attempts" / rollout_id / str(attempt)


def _with_attempts(rollout: Rollout, attempts: int) -> Rollout:
    return Rollout(rollout.id, rollout.group, rollout.task, max_attempts=attempts)


@contextlib.asynccontextmanager
async def rig(config: Config, run_dir: Path, store: Store | None = None) -> AsyncIterator[Rig]:
    """The gateway runs until the end; start the controller with `Rig.start`."""
    store = store or MemoryStore()
    key = await store.issue_key(KeyKind.SERVICE)
    async with serve(create_app(config, store, NoEngine()), config.gateway) as url, Client(url, key) as client:
        running = Rig(store, client, url, run_dir, config)
        try:
            yield running
        finally:
            await running.stop()
    await store.close()


async def add_call(store: Store, rollout_id: str, attempt: int = 1, text: str = "42") -> None:
    """A committed model call whose reply is `text`."""
    call = Call(
        f"call-{rollout_id}-{attempt}", rollout_id, attempt, 0, None, 0, as_ids([1]), as_ids([2]), *_NO_LOGPROBS
    )
    reply = b'{"choices":[{"message":{"role":"assistant","content":"%s"}}]}' % text.encode()
    await store.append_call(call, CallBodies(b"{}", reply))


_NO_LOGPROBS = (as_ids([]).astype("float32"), ())


async def eventually(check: Callable[[], object], timeout_s: float = 10) -> None:
    """For what only the file system or `/proc` tells."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it never came to be"
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def pids_in(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if entry)
