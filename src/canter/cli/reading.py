"""Reading a run's store from the command line, also while the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from canter.errors import NotFound
from canter.runs import RunFolder
from canter.store import Store
from canter.types import Rollout, Split

T = TypeVar("T")


def read(run: RunFolder, work: Callable[[Store], Awaitable[T]]) -> T:
    """The result of `work` with the run's store opened for reading."""

    async def opened() -> T:
        async with store_of(run) as store:
            return await work(store)

    return asyncio.run(opened())


@contextlib.asynccontextmanager
async def store_of(run: RunFolder) -> AsyncIterator[Store]:
    from canter.store import open_store

    if not run.store.is_file():
        raise NotFound(f"{run.path} has no store yet; the run has not started")
    store = open_store(run.store, read_only=True)
    try:
        yield store
    finally:
        await store.close()


class Paged(Protocol):
    """A `Store`, or the `Client` of one."""

    async def rollouts(self, *, after: str | None = None) -> list[Rollout]: ...


async def all_rollouts(store: Paged) -> list[Rollout]:
    """Every rollout of the run, in order of id."""
    found: list[Rollout] = []
    while page := await store.rollouts(after=found[-1].id if found else None):
        found += page
    return found


async def trained_steps(store: Store) -> dict[int, list[Rollout]]:
    """The training rollouts by step."""
    steps: dict[int, list[Rollout]] = {}
    for rollout in await all_rollouts(store):
        if rollout.split is Split.TRAIN:
            steps.setdefault(rollout.step, []).append(rollout)
    return steps
