"""Starting, killing and reading whole runs of `canter train`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from canter.cli.reading import all_rollouts
from canter.runs import RunFolder
from canter.store import open_store
from canter.types import Call, Rollout

FINISH_S = 240


@dataclass
class WholeRun:
    """One run folder's life over several processes of `canter train`."""

    folder: Path
    file: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self, *overrides: str) -> None:
        """Starts it, or goes on with it where there is a run already."""
        runs = sorted(self.folder.glob("runs/*/config.toml"))
        more = ["--resume", str(runs[-1].parent)] if runs else list(overrides)
        with (self.folder / "output.txt").open("ab") as output:
            command = [sys.executable, "-m", "canter.cli", "train", str(self.file), *more]
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def finish(self, timeout_s: float = FINISH_S) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill_all(self) -> None:
        """SIGKILL to every process of the run: supervisor, gateway, controller, trainer, launchers, harnesses."""
        assert self.process is not None
        for _ in range(2):  # a second look for what was being forked during the first
            for process in self.processes():
                process.kill()
        self.process.wait(10)

    def kill_one(self, name: str) -> bool:
        """SIGKILL to `gateway`, `controller` or `trainer`; False where it does not run just now."""
        found = [p for p in self.processes() if "canter.cli.processes" in p.cmdline() and name in p.cmdline()]
        for process in found:
            process.kill()
        return bool(found)

    def processes(self) -> Iterator[psutil.Process]:
        """By ancestry, and by the run's folder in arguments or environment (harnesses are nobody's children)."""
        assert self.process is not None
        for process in psutil.process_iter():
            try:
                parents = [p.pid for p in process.parents()]
                mine = process.pid == self.process.pid or self.process.pid in parents
                marks = [*process.cmdline(), *process.environ().values()]
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if process.pid != os.getpid() and (mine or any(str(self.folder) in mark for mark in marks)):
                yield process

    @property
    def run(self) -> RunFolder:
        return RunFolder(sorted(self.folder.glob("runs/*/config.toml"))[-1].parent)

    def rows(self) -> list[dict[str, Any]]:
        if not list(self.folder.glob("runs/*/config.toml")):
            return []
        file = self.run.metrics
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def received(self) -> set[str]:
        """Ids of the calls whose replies a harness has read to the end."""
        file = self.folder / "received.txt"
        return set(file.read_text().split()) if file.exists() else set()

    def recorded(self) -> tuple[list[Rollout], list[Call]]:
        """All rollouts, and the calls of all their attempts."""

        async def read() -> tuple[list[Rollout], list[Call]]:
            store = open_store(self.run.store, read_only=True)
            try:
                rollouts = await all_rollouts(store)
                calls = [
                    call
                    for r in rollouts
                    for number in range(1, r.attempt + 1)
                    for call in await store.calls([r.id], attempt=number)
                ]
            finally:
                await store.close()
            return rollouts, calls

        return asyncio.run(read())

    def verify(self) -> None:
        """`canter samples --verify` finds every committed call trained once, or not with a reason."""
        command = [sys.executable, "-m", "canter.cli", "samples", str(self.run.path), "--verify", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        assert json.loads(done.stdout)["faults"] == []

    def output(self) -> str:
        logs = "\n".join(f"== {f.name}\n{f.read_text()[-2000:]}" for f in sorted(self.run.logs.glob("*.log")))
        return (self.folder / "output.txt").read_text()[-3000:] + logs

    def stop(self) -> None:
        if self.running():
            assert self.process is not None
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill_all()


def wait_until(condition: Any, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False
