"""Runs attempts and gradings as processes of this machine, and finds them again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import errno
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
from canter.controller.folder import Place
from canter.controller.spawner import Pending, Setup, Spawner, launcher_environment
from canter.errors import ConfigError, LaunchError
from canter.graders.run import Assignment
from canter.harness import Recipe, Seat, recipe
from canter.types import Outcome, Rollout

GRACE_S = 1.0
"""Between SIGTERM and SIGKILL for a harness whose time is over."""
LOG_BYTES = 16 * 2**20
"""Most of standard output, and of standard error, that is kept of an attempt."""
SWEEPS = 20
SWEEP_PAUSE_S = 0.02
"""Between looks for what is left of an attempt."""
LOCK_S = 30.0
"""Deadline for the launchers of a controller that died to let go."""


class Process:
    """A keeper that lives, or has just died, as a descriptor that no later process can be mistaken for.

    `pending` is its connection, `spawner` where it is from; one that another controller has started has neither.
    """

    def __init__(
        self, place: Place, pidfd: int, start: int, pending: Pending | None = None, spawner: Spawner | None = None
    ) -> None:
        self.place = place
        self._pidfd = pidfd
        self._start = start
        self._pending = pending
        self._spawner = spawner

    @classmethod
    def find(cls, place: Place) -> Process | None:
        """The live keeper of a place, None if it has ended or there never was one."""
        kept = folders.read_keeper(place.record)
        if kept is None or kept.boot != procfs.boot_id():
            return None
        return cls._open(place, kept.pid, kept.start)

    @classmethod
    def of(cls, place: Place, pending: Pending, spawner: Spawner) -> Process | None:
        """The keeper that waits for its start, None if it has ended."""
        return cls._open(place, pending.pid, pending.start, pending, spawner)

    @classmethod
    def _open(
        cls, place: Place, pid: int, start: int, pending: Pending | None = None, spawner: Spawner | None = None
    ) -> Process | None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):  # none, or a thread
                return None
            raise
        if procfs.alive(pid, start):
            return cls(place, pidfd, start, pending, spawner)
        os.close(pidfd)
        return None

    async def exited(self) -> Exit:
        """Waits for the keeper's end (an event, however long that takes) and says how its process ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        try:
            await ended.wait()
            return await self._end()
        finally:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            if self._pending is not None:
                self._pending.abandon()

    async def _end(self) -> Exit:
        """What the keeper says on its connection counts; only without one, what lies where a harness could write."""
        if self._pending is None:
            exit = folders.read_exit(self.place)
        else:
            word = await self._pending.last_word()
            try:
                exit = folders.LOST if word is None else folders.explained(Exit.read(word), self.place)
            except ValueError as error:
                exit = Exit(Outcome.LOST, message=f"its keeper ended with {word!r:.200}: {error}")
        if self._pending is None or exit.outcome is Outcome.LOST:
            if self._spawner is not None:
                await self._spawner.sweep()
            await asyncio.to_thread(sweep, self.place, self._start)
        return exit

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
        place = folders.place(self._run, rollout.id, attempt)
        seat = Seat(
            rollout.id, attempt, rollout.task.public(), self._config.model.name, self._gateway, key, place.folder
        )
        program = self._recipe.program(seat)
        prepared = (place.folder, seat.task, self._files, self._recipe.files(seat), program.stdin)
        spec = {
            "places": [str(place.folder)],
            "cwd": str(seat.work),
            "env": harness_environment(seat, program, self._config.harness, os.environ),
            "argv": list(program.argv),
            "function": program.function,
            "argument": program.argument,
            "stdin": str(place.folder / folders.STDIN_FILE) if program.stdin else None,
            "base": str(self._config.base.resolve()),
            "timeout_s": self._config.harness.timeout_s,
            "grace_s": GRACE_S,
        }
        try:
            await asyncio.to_thread(folders.prepare, *prepared)
            folders.make_record(place.record)
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot prepare {place.folder}: {error}") from error
        return await self._spawn(self.harnesses, place, spec)

    # -- graders --

    async def grade(self, rollout_id: str, attempt: int, key: str) -> Launched:
        """The next run of the grader of an ended attempt. Raises LaunchError; then nothing runs."""
        harness = folders.place(self._run, rollout_id, attempt)
        number = harness.gradings() + 1
        place = harness.grading(number)
        try:
            folders.make(place.folder)
        except OSError as error:
            raise LaunchError(f"cannot grade attempt {attempt} of {rollout_id}: {error}") from error
        grader = self._config.grader
        told = Assignment(
            gateway=self._gateway,
            key=key,
            rollout_id=rollout_id,
            attempt=attempt,
            folder=str(harness.folder),
            private=str(place.folder),
            base=str(self._config.base.resolve()),
            answer=grader.answer,
            tolerance=grader.tolerance,
            retry_s=grader.timeout_s / 2,  # so that it can still say that the gateway was away
            use=grader.use,
            function=grader.function,
            command=grader.command or (),
        )
        work = harness.folder / "work"
        spec = {
            "places": [str(harness.folder), str(place.folder)],
            # its harness may have removed it, or put a link to somewhere else there
            "cwd": str(work if work.resolve() == work and work.is_dir() else place.folder),
            "env": grader_environment(place.folder, os.environ),
            "function": "canter.graders.run:main",
            "argument": asdict(told),
            "timeout_s": grader.timeout_s,
            "grace_s": 0.0,
        }
        return replace(await self._spawn(self.graders, place, spec), grading=number)

    # -- both --

    async def _spawn(self, spawner: Spawner, place: Place, spec: Mapping[str, Any]) -> Launched:
        where = {"folder": str(place.folder), "record": str(place.record), "log_bytes": LOG_BYTES}
        pending = await spawner.spawn({**spec, **where})
        process = Process.of(place, pending, spawner)
        if process is None:
            pending.abandon()
            raise LaunchError(f"the keeper of {place.folder} (process {pending.pid}) died before it started anything")
        return Launched(process, {"pid": pending.pid, "start": pending.start, "dir": str(place.folder)}, pending)

    def find(self, rollout_id: str, attempt: int) -> tuple[int, Process | Exit]:
        """What a controller that died has left of an attempt: the number of the last run of its grader (0: the harness)
        and its live process, or how that ended."""
        try:
            grading, place = self._last(rollout_id, attempt)
        except LaunchError as error:
            return 0, Exit(Outcome.SPAWN_FAILED, message=str(error))
        return grading, Process.find(place) or ended(place)

    def survivors(self, known: Set[str]) -> Iterator[Survivor]:
        """Every live process of this run folder, whatever the store wants of its rollout by now, except those of the
        rollouts `known`."""
        for rollout_id, attempt in folders.attempts(self._run):
            if rollout_id in known:
                continue
            grading, place = self._last(rollout_id, attempt)
            if (process := Process.find(place)) is not None:
                yield Survivor(rollout_id, attempt, grading, process)

    def _last(self, rollout_id: str, attempt: int) -> tuple[int, Place]:
        place = folders.place(self._run, rollout_id, attempt)
        grading = place.gradings()
        return grading, place.grading(grading) if grading else place

    async def forget_grading(self, rollout_id: str, attempt: int, grading: int) -> None:
        """Removes the folder of a run of the grader, which then never was."""
        place = folders.place(self._run, rollout_id, attempt).grading(grading)
        await asyncio.to_thread(place.remove)

    async def tidy(self, rollout_id: str, attempt: int, *, scored: bool) -> None:
        """Removes the folders, unless `runner.keep_dirs` wants them."""
        try:
            place = folders.place(self._run, rollout_id, attempt)
        except LaunchError:
            return  # then there never was one
        keep = self._config.runner.keep_dirs
        if keep == "none" or (keep == "failed" and scored and folders.read_exit(place).clean):
            await asyncio.to_thread(place.remove)


def ended(place: Place) -> Exit:
    """How a process ended that another controller has started; what it or its keeper has left is killed now, of any age
    if it has spoilt the record of its keeper."""
    exit, kept = folders.read_exit(place), folders.read_keeper(place.record)
    if kept is None or kept.boot == procfs.boot_id():
        sweep(place, kept.start if kept is not None else 0)
    return exit


def sweep(place: Place, start: int) -> None:
    """Kills what a keeper that began at `start` has left at a place; in rounds, as one may fork meanwhile."""
    for _ in range(SWEEPS):
        if not procfs.sweep(str(place.home), [str(place.folder)], start):
            return
        time.sleep(SWEEP_PAUSE_S)


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
