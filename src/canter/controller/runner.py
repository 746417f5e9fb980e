"""Runs attempts and gradings as processes of this machine, and finds them again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from canter.config import Config
from canter.controller import folder as folders
from canter.controller import procfs
from canter.controller.environment import check_names, grader_environment, harness_environment
from canter.controller.exit import Exit
from canter.controller.spawner import Pending, Setup, Spawner, launcher_environment
from canter.errors import ConfigError, LaunchError
from canter.graders.run import Assignment
from canter.harness import Recipe, Seat, recipe
from canter.types import Outcome, Rollout

GRACE_S = 1.0
"""Between SIGTERM and SIGKILL for a harness whose time is over."""
LOG_BYTES = 16 * 2**20
"""Most of standard output, and of standard error, that is kept of an attempt."""
LOCK_S = 30.0
"""Deadline for the launchers of a controller that died to let go."""


class Process:
    """A keeper that lives, or has just died, as a descriptor that no later process can be mistaken for."""

    def __init__(self, folder: Path, pidfd: int) -> None:
        self.folder = folder
        self._pidfd = pidfd

    @classmethod
    def find(cls, folder: Path) -> Process | None:
        """The live keeper of a folder, None if it has ended or there never was one."""
        kept = folders.read_keeper(folder)
        if kept is None or kept.boot != procfs.boot_id():
            return None
        try:
            pidfd = os.pidfd_open(kept.pid)
        except ProcessLookupError:
            return None
        if procfs.alive(kept.pid, kept.start):
            return cls(folder, pidfd)
        os.close(pidfd)
        return None

    async def exited(self) -> Exit:
        """Waits for the keeper's end (an event, however long that takes) and says how its process ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        return read_exit(self.folder)

    def stop(self) -> None:
        """Asks the keeper to end its process tree."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Launched:
    """A process whose keeper waits for `go`; `record` is what the store keeps of it, `grading` 0 for a harness."""

    process: Process
    record: Mapping[str, Any]
    pending: Pending
    grading: int = 0


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process that a controller that died has left: the harness (`grading` 0) or grader of an attempt."""

    rollout_id: str
    attempt: int
    grading: int
    process: Process


class ProcessRunner:
    """Harnesses and graders of one run, forked from two launchers: what a grader's module holds never is in the memory
    of a harness."""

    def __init__(self, config: Config, run: Path, gateway: str, recipe: Recipe, lock: int) -> None:
        self._config = config
        self._run = run
        self._gateway = gateway
        self._recipe = recipe
        self._files = {name: config.path(source) for name, source in config.harness.files.items()}
        self._private = run / "control"
        self.harnesses = Spawner(self._setup("harness", recipe.modules, recipe.launcher_env(self._private)), lock)
        grader = (config.grader.function,) if config.grader.function else ()
        self.graders = Spawner(self._setup("grader", ("canter.graders.run:main", *grader), {}), lock)

    def _setup(self, name: str, modules: tuple[str, ...], env: Mapping[str, str]) -> Setup:
        warm = tuple(self._config.harness.warm) if name == "harness" else ()
        return Setup(
            name=name,
            modules=tuple(dict.fromkeys((*warm, *modules))),
            path=(str(self._config.base.resolve()),),
            env=launcher_environment(env),
            log=self._private / f"{name}-launcher.log",
        )

    async def start(self) -> None:
        """Warms both launchers. Raises ConfigError for files that are missing, LaunchError for imports that fail."""
        check_names(self._config.harness)
        for name, source in self._files.items():
            if not source.exists():
                raise ConfigError(f"harness.files.{name}: {source} does not exist")
        await asyncio.gather(self.harnesses.start(), self.graders.start())

    async def close(self) -> None:
        await asyncio.gather(self.harnesses.close(), self.graders.close())

    # -- harnesses --

    async def launch(self, rollout: Rollout, attempt: int, key: str) -> Launched:
        """Makes the attempt's folder and a keeper for its harness. Raises LaunchError; then nothing runs."""
        folder = folders.attempt_folder(self._run, rollout.id, attempt)
        seat = Seat(rollout.id, attempt, rollout.task.public(), self._config.model.name, self._gateway, key, folder)
        program = self._recipe.program(seat)
        spec = {
            "folder": str(folder),
            "cwd": str(seat.work),
            "env": harness_environment(seat, program, self._config.harness, os.environ),
            "argv": list(program.argv),
            "function": program.function,
            "argument": program.argument,
            "base": str(self._config.base.resolve()),
            "timeout_s": self._config.harness.timeout_s,
            "grace_s": GRACE_S,
            "log_bytes": LOG_BYTES,
        }
        try:
            await asyncio.to_thread(folders.prepare, folder, seat.task, self._files)
        except OSError as error:
            raise LaunchError(f"cannot prepare {folder}: {error}") from error
        return await self._spawn(self.harnesses, folder, spec)

    # -- graders --

    async def grade(self, rollout_id: str, attempt: int, key: str) -> Launched:
        """The next run of the grader of an ended attempt. Raises LaunchError; then nothing runs."""
        folder = folders.attempt_folder(self._run, rollout_id, attempt)
        grading = folders.gradings(folder) + 1
        private = folders.grading_folder(folder, grading)
        try:
            folders.make(private)
        except OSError as error:
            raise LaunchError(f"cannot grade attempt {attempt} of {rollout_id}: {error}") from error
        grader = self._config.grader
        told = Assignment(
            gateway=self._gateway,
            key=key,
            rollout_id=rollout_id,
            attempt=attempt,
            folder=str(folder),
            private=str(private),
            base=str(self._config.base.resolve()),
            answer=grader.answer,
            tolerance=grader.tolerance,
            retry_s=grader.timeout_s / 2,  # so that it can still say that the gateway was away
            use=grader.use,
            function=grader.function,
            command=grader.command or (),
        )
        spec = {
            "folder": str(private),
            "cwd": str(folder / "work"),
            "env": grader_environment(private, os.environ),
            "function": "canter.graders.run:main",
            "argument": asdict(told),
            "timeout_s": grader.timeout_s,
            "grace_s": 0.0,
            "log_bytes": LOG_BYTES,
        }
        return replace(await self._spawn(self.graders, private, spec), grading=grading)

    # -- both --

    async def _spawn(self, spawner: Spawner, folder: Path, spec: Mapping[str, Any]) -> Launched:
        pending = await spawner.spawn(spec)
        process = Process.find(folder)
        if process is None:
            pending.abandon()
            raise LaunchError(f"the keeper of {folder} (process {pending.pid}) died before it started anything")
        return Launched(process, {"pid": pending.pid, "start": pending.start, "dir": str(folder)}, pending)

    def find(self, rollout_id: str, attempt: int) -> tuple[int, Process | Exit]:
        """What a controller that died has left of an attempt: the number of the last run of its grader (0: the harness)
        and its live process, or how that ended."""
        grading, folder = self._last(rollout_id, attempt)
        return grading, Process.find(folder) or read_exit(folder)

    def survivors(self, known: Set[str]) -> Iterator[Survivor]:
        """Every live process of this run folder, whatever the store wants of its rollout by now, except those of the
        rollouts `known`."""
        for rollout_id, attempt in folders.attempts(self._run):
            if rollout_id in known:
                continue
            grading, folder = self._last(rollout_id, attempt)
            if (process := Process.find(folder)) is not None:
                yield Survivor(rollout_id, attempt, grading, process)

    def _last(self, rollout_id: str, attempt: int) -> tuple[int, Path]:
        folder = folders.attempt_folder(self._run, rollout_id, attempt)
        grading = folders.gradings(folder)
        return grading, folders.grading_folder(folder, grading) if grading else folder

    async def forget_grading(self, rollout_id: str, attempt: int, grading: int) -> None:
        """Removes the folder of a run of the grader, which then never was."""
        folder = folders.attempt_folder(self._run, rollout_id, attempt)
        await asyncio.to_thread(folders.remove, folders.grading_folder(folder, grading))

    async def tidy(self, rollout_id: str, attempt: int, *, scored: bool) -> None:
        """Removes the folder, unless `runner.keep_dirs` wants it."""
        folder = folders.attempt_folder(self._run, rollout_id, attempt)
        keep = self._config.runner.keep_dirs
        if keep == "none" or (keep == "failed" and scored and read_exit(folder).clean):
            await asyncio.to_thread(folders.remove, folder)


def read_exit(folder: Path) -> Exit:
    """How a folder's process ended; what a dead keeper could not kill is killed now."""
    found = folders.read_exit(folder)
    if found.outcome is Outcome.LOST and folder.exists():
        procfs.kill_by_environment(f"HOME={folder / 'home'}".encode())
    return found


@contextlib.asynccontextmanager
async def process_runner(
    config: Config, run: Path, gateway: str, *, lock_s: float = LOCK_S
) -> AsyncIterator[ProcessRunner]:
    """The runner of a run folder, which only one controller may have. At the end its launchers end; harnesses go on.

    Raises ConfigError and LaunchError, the latter also where another controller has the folder after `lock_s`.
    """
    run = run.resolve()
    private = run / "control"
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(private / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await _take(lock, private / "lock", lock_s)
        runner = ProcessRunner(config, run, gateway.rstrip("/"), recipe(config), lock)
        try:
            await runner.start()
            yield runner
        finally:
            await runner.close()
    finally:
        os.close(lock)


async def _take(lock: int, file: Path, lock_s: float) -> None:
    """Takes the run's lock. Launchers of a dead controller hold it until none of their forks can start anything more,
    so whoever has it sees all that was ever started."""
    deadline = time.monotonic() + lock_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # rare and short; the kernel offers no other way to wait that can be cancelled
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{file} is held by another process; is another controller running for this run folder?"
                ) from None
            await asyncio.sleep(0.05)
        else:
            return
