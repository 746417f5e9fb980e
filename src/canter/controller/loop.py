"""The controller: watches the store, lets `reconcile` decide, and carries out what it says.

It keeps nothing that a restart could lose: the store says what is wanted, the run folder who still runs. While the
gateway is away harnesses go on, and what their ends ask for is done once it is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from canter.config import Config
from canter.controller.board import Board
from canter.controller.exit import Exit
from canter.controller.reconcile import (
    Action,
    Adopt,
    Check,
    End,
    Fail,
    Forget,
    Grade,
    Limits,
    Score,
    Seen,
    Start,
    Stop,
    Wait,
    reconcile,
)
from canter.controller.runner import Launched, Process, ProcessRunner, process_runner
from canter.errors import CanterError, Forbidden, LaunchError, NotFound, Refused, Unauthorized
from canter.store import Started
from canter.types import Attempt, Event, Outcome, Reason, Reward, Rollout, RolloutState

log = logging.getLogger(__name__)

WATCH_S = 50.0
"""Longest wait for events in one request."""
PAUSE_S = 1.0
"""Wait before the store is asked again after it could not answer."""
FINISH_S = 10.0
"""On a stop: deadline for what is under way."""
KILLED_S = 40.0
"""On a stop that ends the harnesses, too: deadline for their process trees to be gone."""
REPORT_S = 5.0
"""Then: deadline for the store to hear of it."""
PAGE = 1000
MESSAGE_CHARS = 1000

_WANTED = (RolloutState.QUEUED, RolloutState.RUNNING, RolloutState.GRADING)

T = TypeVar("T")


class Lifecycle(Protocol):
    """The part of `Store`, and of `Client`, that a controller uses."""

    async def rollout(self, rollout_id: str) -> Rollout: ...

    async def rollouts(
        self,
        *,
        states: Sequence[RolloutState] = (),
        ids: Sequence[str] = (),
        after: str | None = None,
        limit: int = 1000,
    ) -> list[Rollout]: ...

    async def start_attempt(self, rollout_id: str, number: int) -> Started: ...

    async def grader_key(self, rollout_id: str, number: int) -> str: ...

    async def set_process(self, rollout_id: str, number: int, process: dict[str, Any]) -> Attempt: ...

    async def end_attempt(
        self,
        rollout_id: str,
        number: int,
        outcome: Outcome,
        *,
        exit_code: int | None = None,
        reason: Reason | None = None,
        message: str = "",
    ) -> Rollout: ...

    async def post_reward(self, reward: Reward) -> Rollout: ...

    async def invalidate(self, rollout_id: str, number: int, reason: Reason, message: str = "") -> Rollout: ...

    async def events(self, after: int, *, timeout_s: float = 0, limit: int = 1000) -> list[Event]: ...


async def run_controller(
    config: Config,
    client: Lifecycle,
    run_dir: Path,
    gateway_url: str,
    *,
    adopt: bool = True,
    stop_harnesses: bool = False,
) -> None:
    """Runs rollouts until it is cancelled. Harnesses that run then go on, for the next controller of this run folder to
    adopt, unless `stop_harnesses`; then their attempts are reported as interrupted.

    Without `adopt` that is also done with the attempts that it finds. It is for a run that had no gateway for a while,
    or has another now: what went on meanwhile could only fail, and not for a fault of its own.

    Raises ConfigError and LaunchError if the run cannot start (a recipe that does not exist, a module that cannot be
    imported, another controller on this run folder), Unauthorized or Forbidden if the store refuses the key.
    """
    runner = config.runner
    limits = Limits(runner.concurrency, runner.retry_delay_s, config.harness.timeout_reward)
    async with process_runner(config, run_dir, gateway_url) as processes:
        controller = Controller(client, processes, limits)
        try:
            await controller.run(adopt=adopt)
        finally:
            await controller.stop(kill=stop_harnesses)


class Controller:
    """One controller of one run. `run` is its life, `stop` its orderly end."""

    def __init__(self, client: Lifecycle, runner: ProcessRunner, limits: Limits) -> None:
        self._client = client
        self._runner = runner
        self._limits = limits
        self._board = Board()
        self._processes: dict[str, Process] = {}
        self._actions: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self, *, adopt: bool = True) -> None:
        after = await self._catch_up()
        if not adopt:
            await self._interrupt(self._board.running())
        self._task(self._follow(after), self._watchers)
        while self._failure is None:
            self._changed.clear()
            until: float | None = None
            for action in reconcile(self._board.view, time.monotonic(), self._limits):
                if isinstance(action, Wait):
                    until = action.until
                else:
                    self._begin(action)
            try:
                async with asyncio.timeout(None if until is None else max(0.0, until - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                continue
        raise self._failure

    async def stop(self, *, kill: bool) -> None:
        """Lets what is under way finish; with `kill` ends every harness and grader and waits until they are gone."""
        if kill:
            self._keep_survivors()
            self._stop_all()
        if self._actions:
            await asyncio.wait(self._actions, timeout=FINISH_S)
        await _cancel(self._actions)
        if kill:
            await self._interrupt([])
        await _cancel(self._watchers)

    def _stop_all(self) -> None:
        for rollout_id in self._processes:
            self._stop(rollout_id)

    async def _interrupt(self, also: Sequence[Rollout]) -> None:
        """Ends every harness and grader and waits until they are gone. What is killed so does not count, nor do the
        attempts of `also`, however they ended: there is one attempt, or one run of the grader, more.

        An attempt that the store does not hear of in time is one that a controller finds killed: it counts as lost.
        """
        self._stop_all()
        deadline = time.monotonic() + KILLED_S
        while self._processes and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait(self._watchers, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        killed = {id: seen for id, seen in self._board.seen.items() if seen.stopping and _killed(seen)}
        attempts = {rollout.id: rollout for rollout in also}
        for rollout in self._board.running():
            if rollout.id in killed and killed[rollout.id].attempt == rollout.attempt:
                attempts[rollout.id] = rollout
        reports = [self._give_back(rollout.id, rollout.attempt) for rollout in attempts.values()]
        try:
            async with asyncio.timeout(REPORT_S):
                await asyncio.gather(*reports)
        except TimeoutError:
            log.warning("the store does not hear of %d interrupted attempts, they count as lost", len(reports))
        for rollout_id, seen in killed.items():
            if seen.grading:
                await self._runner.forget_grading(rollout_id, seen.attempt, seen.grading)
                del self._board.seen[rollout_id]

    async def _give_back(self, rollout_id: str, attempt: int) -> None:
        exit = Exit(Outcome.KILLED, message="the run was stopped")
        try:
            self._take(await self._end(rollout_id, attempt, exit, Reason.INTERRUPTED))
        except CanterError as error:
            log.warning("attempt %d of rollout %s is interrupted: %s", attempt, rollout_id, error)
        else:
            await self._runner.tidy(rollout_id, attempt, scored=False)

    # -- watching the store --

    async def _catch_up(self) -> int:
        """Reads what is wanted and who still runs; returns the number of the last event from before that."""
        after = 0
        while events := await self._patiently(partial(self._client.events, after, limit=PAGE)):
            after = events[-1].seq
        last: str | None = None
        while page := await self._patiently(partial(self._client.rollouts, states=_WANTED, after=last, limit=PAGE)):
            for rollout in page:
                self._take(rollout)
            last = page[-1].id
        self._keep_survivors()
        return after

    def _keep_survivors(self) -> None:
        for left in self._runner.survivors(set(self._processes)):
            log.info("attempt %d of rollout %s still runs", left.attempt, left.rollout_id)
            self._keep(left.rollout_id, Seen(left.attempt, left.grading), left.process)

    async def _follow(self, after: int) -> None:
        while True:
            events = await self._patiently(partial(self._client.events, after, timeout_s=WATCH_S, limit=PAGE))
            if not events:
                continue
            after = events[-1].seq
            if ids := self._board.hear(events, time.monotonic()):
                for rollout in await self._patiently(partial(self._client.rollouts, ids=ids, limit=len(ids))):
                    self._take(rollout)
            self._changed.set()

    async def _patiently(self, request: Callable[[], Awaitable[T]]) -> T:
        """Repeats a reading request until the store answers."""
        while True:
            try:
                return await request()
            except (Unauthorized, Forbidden, NotFound):
                raise
            except CanterError as error:
                log.warning("the store does not answer, harnesses go on: %s", error)
                await asyncio.sleep(PAUSE_S)

    def _take(self, rollout: Rollout) -> None:
        self._board.take(rollout, time.monotonic())
        self._changed.set()

    # -- carrying out --

    def _begin(self, action: Action) -> None:
        if isinstance(action, Stop):
            self._stop(action.rollout_id)
        elif not isinstance(action, Wait):
            self._board.busy.add(action.rollout_id)
            self._task(self._perform(action.rollout_id, action), self._actions)

    def _stop(self, rollout_id: str) -> None:
        self._processes[rollout_id].stop()
        self._board.seen[rollout_id] = replace(self._board.seen[rollout_id], stopping=True)

    def _task(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
        def done(task: asyncio.Task[None]) -> None:
            among.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failure = error  # a refused key, or a fault of ours: the controller ends with it
            self._changed.set()

        task = asyncio.create_task(work)
        among.add(task)
        task.add_done_callback(done)

    async def _perform(self, rollout_id: str, action: Action) -> None:
        """Carries out one action. Where the store refuses it or is away, the rollout is read and decided anew."""
        try:
            await self._act(action)
        except (Unauthorized, Forbidden):
            raise
        except (Refused, NotFound) as error:
            log.info("%s", error)
            await self._reread(rollout_id)
        except CanterError as error:
            log.warning("%s of rollout %s: %s", type(action).__name__, rollout_id, error)
            await asyncio.sleep(PAUSE_S)
            await self._reread(rollout_id)
        except Exception as error:  # whatever is wrong with one rollout, the others go on
            log.exception("%s of rollout %s", type(action).__name__, rollout_id)
            await self._give_up(rollout_id, action, f"{type(action).__name__}: {type(error).__name__}: {error}")
        finally:
            self._board.busy.discard(rollout_id)
            self._board.settle(rollout_id)

    async def _give_up(self, rollout_id: str, action: Action, message: str) -> None:
        """Ends the attempt of a rollout that could not be handled; then what is left of its process is stopped."""
        reason = Reason.SPAWN_ERROR if isinstance(action, Start) else Reason.NODE_LOST
        try:
            rollout = await self._patiently(partial(self._client.rollout, rollout_id))
            if rollout.state is RolloutState.RUNNING:
                rollout = await self._end(rollout_id, rollout.attempt, Exit(Outcome.LOST, message=message), reason)
            elif rollout.state is RolloutState.GRADING:
                reason = Reason.GRADER_ERROR
                rollout = await self._client.invalidate(rollout_id, rollout.attempt, reason, message[:MESSAGE_CHARS])
            elif (seen := self._board.seen.get(rollout_id)) is not None and seen.exit is not None:
                del self._board.seen[rollout_id]
            self._take(rollout)
        except (Unauthorized, Forbidden):
            raise
        except CanterError as error:
            log.warning("rollout %s cannot be given up: %s", rollout_id, error)
            await asyncio.sleep(PAUSE_S)
            await self._reread(rollout_id)

    async def _reread(self, rollout_id: str) -> None:
        try:
            self._take(await self._patiently(partial(self._client.rollout, rollout_id)))
        except NotFound:
            self._board.drop(rollout_id)

    async def _act(self, action: Action) -> None:
        client = self._client
        match action:
            case Start(rollout_id, attempt):
                await self._start(rollout_id, attempt)
            case Adopt(rollout_id, attempt):
                self._adopt(rollout_id, attempt)
            case End(rollout_id, attempt, exit, reason):
                self._take(await self._end(rollout_id, attempt, exit, reason))
            case Score(rollout_id, attempt, value):
                self._take(await client.post_reward(Reward(rollout_id, attempt, value, source="timeout")))
            case Grade(rollout_id, attempt):
                await self._grade(rollout_id, attempt)
            case Check(rollout_id):
                self._take(await client.rollout(rollout_id))
                self._board.seen[rollout_id] = replace(self._board.seen[rollout_id], checked=True)
            case Fail(rollout_id, attempt, reason, message):
                log.warning("attempt %d of rollout %s: %s: %s", attempt, rollout_id, reason, message)
                self._take(await client.invalidate(rollout_id, attempt, reason, message[:MESSAGE_CHARS]))
            case Forget(rollout_id, attempt):
                rollout = self._board.rollout(rollout_id)
                scored = rollout is not None and rollout.state is RolloutState.SCORED and rollout.attempt == attempt
                if rollout is None or rollout.reason is not Reason.NO_CALLS:  # whose message names a file in there
                    await self._runner.tidy(rollout_id, attempt, scored=scored)
                del self._board.seen[rollout_id]

    async def _start(self, rollout_id: str, attempt: int) -> None:
        rollout = self._board.rollout(rollout_id)
        assert rollout is not None
        started = await self._client.start_attempt(rollout_id, attempt)
        self._take(replace(rollout, state=RolloutState.RUNNING, attempt=attempt))
        launched: Launched | None = None
        try:
            launched = await self._runner.launch(rollout, attempt, started.agent_key)
            await self._client.set_process(rollout_id, attempt, dict(launched.record))
            await launched.pending.go()
        except LaunchError as error:
            log.warning("attempt %d of rollout %s: %s", attempt, rollout_id, error)
            failed = Exit(Outcome.SPAWN_FAILED, message=str(error))
            await self._runner.tidy(rollout_id, attempt, scored=False)
            self._take(await self._end(rollout_id, attempt, failed, Reason.SPAWN_ERROR))
        except BaseException:  # the store refused or went away meanwhile, or this stops: without `go` nothing runs
            if launched is not None:
                launched.pending.abandon()
            await self._runner.tidy(rollout_id, attempt, scored=False)
            raise
        else:
            self._keep(rollout_id, Seen(attempt), launched.process)

    def _adopt(self, rollout_id: str, attempt: int) -> None:
        grading, found = self._runner.find(rollout_id, attempt)
        if isinstance(found, Process):
            self._keep(rollout_id, Seen(attempt, grading), found)
        else:
            self._board.seen[rollout_id] = Seen(attempt, grading, found)

    async def _end(self, rollout_id: str, attempt: int, exit: Exit, reason: Reason | None) -> Rollout:
        message = exit.message[:MESSAGE_CHARS]
        return await self._client.end_attempt(
            rollout_id, attempt, exit.outcome, exit_code=exit.exit_code, reason=reason, message=message
        )

    async def _grade(self, rollout_id: str, attempt: int) -> None:
        key = await self._client.grader_key(rollout_id, attempt)
        try:
            launched = await self._runner.grade(rollout_id, attempt, key)
            await launched.pending.go()
        except LaunchError as error:
            message = f"the grader: {error}"[:MESSAGE_CHARS]
            self._take(await self._client.invalidate(rollout_id, attempt, Reason.SPAWN_ERROR, message))
        else:
            self._keep(rollout_id, Seen(attempt, launched.grading), launched.process)

    def _keep(self, rollout_id: str, seen: Seen, process: Process) -> None:
        self._board.seen[rollout_id] = seen
        self._processes[rollout_id] = process
        self._task(self._watch(rollout_id, process), self._watchers)

    async def _watch(self, rollout_id: str, process: Process) -> None:
        try:
            exit = await process.exited()
        except (OSError, ValueError) as error:
            log.exception("the end of rollout %s", rollout_id)
            exit = Exit(Outcome.LOST, message=f"its end cannot be read: {error}")
        del self._processes[rollout_id]
        self._board.seen[rollout_id] = replace(self._board.seen[rollout_id], exit=exit)


def _killed(seen: Seen) -> bool:
    return seen.exit is not None and seen.exit.outcome is Outcome.KILLED


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels the tasks and waits for their end; a done one takes itself out of the set."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
