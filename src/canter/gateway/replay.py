"""One generation for one request: a repeat joins what is on its way and takes over what never arrived.

A harness repeats a request, byte for byte, when its connection broke or its patience ended. While the first is in
flight the repeat joins it; when it is finished but was never delivered, the repeat gets that reply. Once delivered,
the same body is a wish for another sample.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from canter.errors import CanterError
from canter.gateway.dialects.canonical import Start

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Flight(Generic[T]):
    """One request being answered, for one or more clients that wait for it."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.task: asyncio.Task[T]
        self.waiting = 0
        self.abandoned = False
        self.sampled = False
        """Set by the run once there is a reply: what is left is to commit it, and nobody's leaving stops that."""
        self.abort: Callable[[], Awaitable[bool]] | None = None
        """Ends it so that what there is is kept; false where there is nothing to keep."""


class Flights(Generic[T]):
    """The flights of all attempts, by (attempt, request). At most `keep` undelivered results are remembered."""

    def __init__(self, *, keep: int = 256, abort_grace_s: float = 10.0) -> None:
        self._flights: OrderedDict[Hashable, Flight[T]] = OrderedDict()
        self._keep = keep
        self._abort_grace_s = abort_grace_s
        self._aborting: dict[asyncio.Task[None], asyncio.Task[T]] = {}
        """What ends a flight that nobody waits for → what it ends."""

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def waiting(self) -> int:
        """Flights that somebody waits for. What was never delivered is kept, but nobody waits for it."""
        return sum(flight.waiting > 0 for flight in self._flights.values())

    def board(self, key: Hashable, start: Start, run: Callable[[Flight[T]], Coroutine[Any, Any, T]]) -> Flight[T]:
        """The flight for `key`: the one on its way or undelivered, else a new one that `run` answers as `start`.
        Pair with `delivered` or `leave`."""
        flight = self._flights.get(key)
        if flight is None or _failed(flight):
            flight = Flight(start)
            flight.task = asyncio.create_task(run(flight))
            flight.task.add_done_callback(_look)
            self._flights[key] = flight
        flight.waiting += 1
        return flight

    def delivered(self, key: Hashable, flight: Flight[T]) -> None:
        """A client has the whole reply: the next request with this key is a new one."""
        flight.waiting -= 1
        self._forget(key, flight)

    def leave(self, key: Hashable, flight: Flight[T]) -> None:
        """A client has gone without the reply. With nobody left a flight is aborted; a result is kept for a repeat."""
        flight.waiting -= 1
        if flight.waiting:
            return
        if not flight.task.done() and not flight.sampled:
            self._forget(key, flight)
            self._abandon(flight)
        elif _failed(flight):
            self._forget(key, flight)
        elif key in self._flights:
            self._flights.move_to_end(key)  # kept for a repeat
            self._trim()

    async def close(self) -> None:
        """Cancels what is in flight, also what nobody waits for, and waits until it has ended."""
        running: list[asyncio.Task[Any]] = [flight.task for flight in self._flights.values()]
        running += [*self._aborting, *self._aborting.values()]
        for task in running:
            if not task.cancelling():  # one that has been cancelled is recording that
                task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _forget(self, key: Hashable, flight: Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    def _trim(self) -> None:
        """Drops the oldest results that nobody came back for."""
        idle = [key for key, flight in self._flights.items() if not flight.waiting and flight.task.done()]
        for key in idle[: max(0, len(idle) - self._keep)]:
            del self._flights[key]

    def _abandon(self, flight: Flight[T]) -> None:
        flight.abandoned = True
        task = asyncio.create_task(self._end(flight))
        self._aborting[task] = flight.task
        task.add_done_callback(self._aborting.pop)

    async def _end(self, flight: Flight[T]) -> None:
        """Ends a flight that nobody waits for: gently where something would be lost, by force after a grace."""
        if flight.abort is not None:
            try:
                async with asyncio.timeout(self._abort_grace_s):
                    if await flight.abort():
                        await asyncio.wait({flight.task})
            except (CanterError, TimeoutError) as error:
                logger.warning("a generation that nobody waits for could not be aborted gently: %s", error)
        flight.task.cancel()
        await asyncio.wait({flight.task}, timeout=self._abort_grace_s)


def _look(task: asyncio.Task[T]) -> None:
    """Looks at a failure that perhaps nobody waits for any more."""
    if not task.cancelled() and task.exception() is not None:
        logger.debug("a model call failed: %s", task.exception())


def _failed(flight: Flight[T]) -> bool:
    return flight.task.done() and (flight.task.cancelled() or flight.task.exception() is not None)
