"""A controller that is killed, and the one that comes after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from controller_rig import HERE, Rig, alive, eventually, rig, settings

from canter.types import KeyKind, Outcome, Reason, RolloutState

EXACT = {"use": "exact", "answer": "stdout"}


class Killable:
    """Controllers of a rig as processes: start one, kill it, start the next."""

    def __init__(self, run: Rig, key: str) -> None:
        self.run = run
        self.key = key
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        tree = self.run.config.model_dump(mode="json", include={"model", "tasks", "harness", "grader", "runner"})
        arguments = [self.run.url, self.key, str(self.run.run_dir), json.dumps(_without_none(tree))]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(HERE / "controller_process.py"), *arguments
        )

    async def kill(self) -> None:
        assert self.process is not None
        assert self.process.returncode is None, "the controller had ended by itself"
        self.process.kill()
        await self.process.wait()
        self.process = None

    async def end(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            await self.process.wait()


@contextlib.asynccontextmanager
async def controllers_of(run: Rig) -> AsyncIterator[Killable]:
    killable = Killable(run, await run.store.issue_key(KeyKind.SERVICE))
    try:
        yield killable
    finally:
        await killable.end()


def _without_none(tree: object) -> object:
    if isinstance(tree, dict):
        return {name: _without_none(value) for name, value in tree.items() if value is not None}
    return tree


async def up(run: Rig, go: Path) -> None:
    """Waits until a controller has looked at everything: it has started a rollout that came after all else."""
    await run.add("probe", input={"file": str(go)})
    await run.until(lambda rollout: rollout.attempt > 0, "probe")


@pytest.fixture
async def harness_waits(tmp_path: Path) -> AsyncIterator[tuple[Rig, Killable, Path]]:
    """A rollout whose harness runs, under a controller that can be killed, until the file `go` appears."""
    go = tmp_path / "go"
    config = settings(
        {"function": "harness_programs:wait_for"}, EXACT, runner={"retry_delay_s": 0.0, "keep_dirs": "all"}
    )
    async with rig(config, tmp_path / "run") as run, controllers_of(run) as killable:
        await killable.start()
        await run.add("r", max_attempts=2, input={"file": str(go)})
        await run.running("r")
        yield run, killable, go


async def test_the_next_controller_adopts_what_runs(harness_waits: tuple[Rig, Killable, Path]) -> None:
    run, killable, go = harness_waits
    keeper = json.loads((run.record("r") / "keeper.json").read_text())["pid"]
    await killable.kill()
    assert alive(keeper)
    await killable.start()
    await up(run, go)
    assert alive(keeper)
    go.touch()
    await run.done("probe")
    rollout = await run.done("r")
    assert (rollout.reward, rollout.attempt) == (1.0, 1)


async def test_an_end_while_nobody_was_there_is_found(harness_waits: tuple[Rig, Killable, Path]) -> None:
    run, killable, go = harness_waits
    await killable.kill()
    go.touch()
    await eventually((run.record("r") / "exit.json").exists)
    assert (await run.store.rollout("r")).state is RolloutState.RUNNING
    await killable.start()
    rollout = await run.done("r")
    assert (rollout.reward, rollout.attempt) == (1.0, 1)


async def test_a_harness_that_died_with_everything_is_lost(harness_waits: tuple[Rig, Killable, Path]) -> None:
    """As after a crash of the machine: the attempt is infrastructure's loss, and another one is made."""
    run, killable, go = harness_waits
    keeper = json.loads((run.record("r") / "keeper.json").read_text())["pid"]
    await killable.kill()
    os.kill(keeper, signal.SIGKILL)
    go.touch()
    await killable.start()
    rollout = await run.done("r")
    assert (rollout.reward, rollout.attempt) == (1.0, 2)
    first, _ = await run.store.attempts("r")
    assert (first.outcome, first.reason) == (Outcome.LOST, Reason.NODE_LOST)


async def test_a_cancel_while_nobody_was_there_is_carried_out(harness_waits: tuple[Rig, Killable, Path]) -> None:
    run, killable, _ = harness_waits
    keeper = json.loads((run.record("r") / "keeper.json").read_text())["pid"]
    await killable.kill()
    await run.store.cancel("r")
    await killable.start()
    await eventually(lambda: not alive(keeper))


async def test_a_grader_that_runs_is_adopted(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"while [ ! -e {go} ]; do sleep 0.02; done; echo 0.75"
    config = settings(
        {"function": "harness_programs:nothing"}, {"command": ["sh", "-c", script]}, runner={"keep_dirs": "all"}
    )
    async with rig(config, tmp_path / "run") as run, controllers_of(run) as killable:
        await killable.start()
        await run.add("r")
        await eventually((run.record("r") / "grading" / "1" / "command.txt").exists)
        await killable.kill()
        await killable.start()
        await up(run, go)
        go.touch()
        await run.done("probe")
        assert (await run.done("r")).reward == 0.75
        assert os.listdir(run.record("r") / "grading") == ["1"]


async def test_killed_again_and_again_it_still_finishes_everything(tmp_path: Path) -> None:
    """Whatever the moment: every rollout ends, and no harness has run twice for one attempt."""
    moments = random.Random(7)
    command = ["sh", "-c", "echo $$ >> started; sleep 0.1; echo 42"]
    config = settings({"command": command}, EXACT, runner={"concurrency": 3, "retry_delay_s": 0.0, "keep_dirs": "all"})
    async with rig(config, tmp_path / "run") as run, controllers_of(run) as killable:
        ids = [f"r{i}" for i in range(9)]
        await run.add(*ids, max_attempts=9)
        for _ in range(4):
            await killable.start()
            await run.until(lambda rollout: rollout.attempt > 0, moments.choice(ids), 30)
            await asyncio.sleep(moments.random() * 0.3)
            await killable.kill()
        await killable.start()
        for id in ids:
            rollout = await run.done(id, 30)
            assert rollout.reward == 1.0
            for number in range(1, rollout.attempt + 1):
                started = run.folder(id, number) / "work" / "started"
                assert not started.exists() or len(started.read_text().split()) == 1
