"""The thread that owns the local engine's model and batch.

Everything else, the event loop and the trainer's thread, reaches it by jobs that it runs between two steps: weights
never change within a step, and nothing needs a lock.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from canter.engine import PauseMode
from canter.engine.batcher import Batcher, Row
from canter.errors import BadRequest, EngineError, EngineUnavailable
from canter.types import Generation

logger = logging.getLogger(__name__)

T = TypeVar("T")
Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Request:
    row: Row
    done: Future[Generation]


class Sampler:
    """`post` and `call` may be used from any thread, `close` too; every other method only from jobs."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.paused: PauseMode | None = None
        self._requests: dict[str, _Request] = {}
        self._settling: list[Future[None]] = []
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="local-engine", daemon=True)
        self._thread.start()

    def post(self, job: Job) -> None:
        """Runs `job`, which must not raise, between two steps. Raises EngineUnavailable after `close`."""
        with self._gate:  # so that no job can come after the one that ends the thread
            if self._closed:
                raise EngineUnavailable("the local engine is closed")
            self._jobs.put(job)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` between two steps; the future has what it returns or raises."""
        future: Future[T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

        self.post(job)
        return future

    def close(self, timeout_s: float) -> None:
        """Ends what runs with EngineUnavailable, then the thread; waits for it."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join(timeout_s)

    def submit(self, row: Row, done: Future[Generation]) -> None:
        if row.request_id in self._requests:
            message = f"request {row.request_id!r} is already running; use a fresh id"
            _fail(done, BadRequest(message, param="request_id"))
            return
        self._requests[row.request_id] = _Request(row, done)
        self.batcher.submit(row)

    def abort(self, request_id: str) -> None:
        """Ends a generation with what there is."""
        if request_id in self._requests:
            self.batcher.remove(self._requests[request_id].row)
            self._deliver(request_id)

    def drop(self, row: Row) -> None:
        """Forgets a generation that nobody waits for any more."""
        request = self._requests.get(row.request_id)
        if request is not None and request.row is row:
            self.batcher.remove(row)
            del self._requests[row.request_id]

    def pause(self, mode: PauseMode, settled: Future[None]) -> None:
        """`settled` is done once nothing samples any more."""
        self.paused = mode
        if mode == "abort":
            for row in self.batcher.started:
                self.abort(row.request_id)
        self._settling.append(settled)

    def resume(self) -> None:
        self.paused = None

    def change_version(self, version: int, copy: Callable[[], None]) -> None:
        """Runs `copy`, which overwrites the model's weights, and continues under the new version."""
        copy()
        self.batcher.change_version(version)

    def _run(self) -> None:
        try:
            while self._run_jobs():
                if self._may_step():
                    self._step()
                self._settle()
        finally:
            with self._gate:
                self._closed = True
            self._give_up(EngineUnavailable("the local engine was closed"))
            self._settle()

    def _run_jobs(self) -> bool:
        """Runs the jobs that are there; waits for one where there is nothing else to do. False ends the thread."""
        block = not self._may_step()
        while True:
            try:
                job = self._jobs.get(block=block)
            except queue.Empty:
                return True
            if job is None:
                return False
            job()
            block = False

    def _may_step(self) -> bool:
        if self.paused == "keep":
            return False
        return bool(self.batcher.started or (self.batcher.waiting and self.paused is None))

    def _step(self) -> None:
        try:
            done = self.batcher.step(admit=self.paused is None)
        except Exception as error:  # whatever torch raises (out of memory, say): the next requests may fare better
            logger.exception("a step of the local engine failed; it gives up the generations in progress")
            self._give_up(EngineError(f"sampling failed: {type(error).__name__}: {error}"))
            return
        for row in done:
            self._deliver(row.request_id)

    def _settle(self) -> None:
        """Tells those who paused that it is quiet."""
        if self.paused in ("wait", "abort") and self.batcher.started:
            return
        for settled in self._settling:
            if settled.set_running_or_notify_cancel():
                settled.set_result(None)
        self._settling.clear()

    def _deliver(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        if request.row.error is not None:
            _fail(request.done, request.row.error)
        elif request.done.set_running_or_notify_cancel():
            request.done.set_result(request.row.generation())

    def _give_up(self, error: EngineError) -> None:
        self.batcher.clear()
        for request in self._requests.values():
            _fail(request.done, error)
        self._requests.clear()


def _fail(future: Future[Generation], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
