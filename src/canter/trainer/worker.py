"""Blocking work beside the event loop, and how long it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class InThread(Protocol):
    """Runs `work()` in the worker's thread and returns what it returns."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


@asynccontextmanager
async def worker() -> AsyncIterator[InThread]:
    """Runs blocking work in one thread of its own, so that torch's threads and state are always the same ones. What has
    begun is finished before the context ends: an update or a checkpoint is never left half way."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="trainer") as pool:

        async def in_thread(work: Callable[[], T]) -> T:
            return await loop.run_in_executor(pool, work)

        yield in_thread


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._at
        self._at = now

    def restart(self) -> dict[str, float]:
        """The laps since the last restart."""
        laps, self._laps = self._laps, {}
        return laps

    @property
    def total(self) -> float:
        return sum(self._laps.values())
