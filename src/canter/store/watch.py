"""Wakes coroutines when the store's event log grows."""

from __future__ import annotations

import asyncio
import threading


class Watch:
    """The number of the last committed event, and whoever waits for a later one.

    `advance` may be called from any thread, `beyond` from any event loop.
    """

    def __init__(self, seq: int = 0) -> None:
        self._seq = seq
        self._closed = False
        self._lock = threading.Lock()
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()

    @property
    def seq(self) -> int:
        return self._seq

    def advance(self, seq: int) -> None:
        """Sets the last committed number and wakes all who wait."""
        with self._lock:
            self._seq = seq
        self._wake_all()

    def close(self) -> None:
        """Wakes all who wait, and lets nobody wait any more."""
        self._closed = True
        self._wake_all()

    def _wake_all(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, set()
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # its loop was closed while it waited: nobody is left to wake
                continue

    async def beyond(self, after: int, timeout_s: float) -> bool:
        """Waits at most `timeout_s` for an event later than `after`; says whether there is one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._seq <= after and not self._closed:
            waiter = (loop, loop.create_future())
            with self._lock:
                if self._seq > after or self._closed:
                    break
                self._waiters.add(waiter)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiter[1]
            except TimeoutError:
                break
            finally:
                with self._lock:
                    self._waiters.discard(waiter)
        return self._seq > after


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
