"""The writer: one thread that commits writes in groups.

It takes whatever has been submitted since its last commit, runs it in one transaction and answers all of it after the
commit. A write that is refused leaves the others alone. Where the transaction as a whole fails (disk full, a violated
constraint), each of its writes is tried again by itself, so that exactly those fail that cannot be committed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from sqlalchemy.exc import DBAPIError, IntegrityError

from canter.errors import CanterError, Refused, StoreError
from canter.store import Key
from canter.store.transaction import Ledger, Transaction

log = logging.getLogger(__name__)

T = TypeVar("T")

OpenLedger = Callable[[], AbstractContextManager[Ledger]]

_GROUP = 256
"""Writes in one commit at most: bounds what is held in memory and the wait of the first."""


@dataclass(eq=False, slots=True)
class _Write(Generic[T]):
    """A submitted write. After the commit it has a result or an error."""

    run: Callable[[Transaction], T]
    conflict: str
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[T]
    result: T | None = None
    error: Exception | None = None

    def answer(self) -> None:
        """In its event loop: hands over the outcome, unless nobody waits any more."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]


class ReadOnly:
    """Stands in for the writer of a store that is open for reading."""

    live_keys: Mapping[bytes, Key] = {}

    def __init__(self, store: str) -> None:
        self._store = store

    async def submit(self, run: Callable[[Transaction], T], *, conflict: str = "") -> T:
        raise StoreError(f"{self._store} is open for reading only; write through its gateway")

    async def close(self) -> None:
        """There is nothing to end."""


class Writer:
    """Owns `open_ledger()`, which is entered and left in the writer's thread; `close` ends both.

    `timeout_s` bounds the wait for a commit.
    """

    def __init__(self, open_ledger: OpenLedger, *, timeout_s: float = 60) -> None:
        self._timeout_s = timeout_s
        self._queue: SimpleQueue[_Write[Any] | None] = SimpleQueue()
        self._closed = False
        opened: Future[Ledger] = Future()
        self._thread = threading.Thread(target=self._run, args=(open_ledger, opened), name="canter-writer", daemon=True)
        self._thread.start()
        self._ledger = opened.result()

    @property
    def live_keys(self) -> Mapping[bytes, Key]:
        """The keys that are not revoked, by hash."""
        return self._ledger.live_keys

    async def submit(self, run: Callable[[Transaction], T], *, conflict: str = "") -> T:
        """Runs a write and returns its result once it is committed.

        Raises what `run` raises, `Refused(conflict)` where it violates a constraint of the database, and `StoreError`
        where it could not be committed.
        """
        if self._closed:
            raise StoreError("the store is closed; nothing can be written any more")
        loop = asyncio.get_running_loop()
        write = _Write(run, conflict, loop, loop.create_future())
        self._queue.put(write)
        try:
            async with asyncio.timeout(self._timeout_s):
                result: T = await write.future
        except TimeoutError:
            raise StoreError(
                f"no commit within {self._timeout_s:g} s: the disk hangs, and the write may still be committed later"
            ) from None
        return result

    async def close(self) -> None:
        """Commits what was submitted and ends the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- in the writer's thread --

    def _run(self, open_ledger: OpenLedger, opened: Future[Ledger]) -> None:
        try:
            with open_ledger() as ledger:
                opened.set_result(ledger)
                while group := self._take():
                    self._commit(ledger, group)
                    _answer(group)
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)  # whoever makes the writer raises it

    def _take(self) -> list[_Write[Any]]:
        """Waits for a write and takes those that have queued up behind it; nothing at the end."""
        write = self._queue.get()
        group: list[_Write[Any]] = []
        while write is not None:
            group.append(write)
            if len(group) == _GROUP:
                return group
            try:
                write = self._queue.get_nowait()
            except Empty:
                return group
        if group:
            self._queue.put(None)  # the end comes after this group
        return group

    def _commit(self, ledger: Ledger, group: Sequence[_Write[Any]]) -> None:
        """Leaves a result or an error in each write."""
        try:
            with ledger.transaction() as tx:
                for write in group:
                    write.error = None
                    try:
                        write.result = write.run(tx)
                    except CanterError as error:
                        write.error = error
        except Exception as error:
            if len(group) == 1:
                group[0].error = _explain(error, group[0].conflict)
                return
            log.warning("a commit of %d writes failed, trying each by itself: %s", len(group), error)
            for write in group:
                self._commit(ledger, [write])


def _answer(group: Sequence[_Write[Any]]) -> None:
    """Hands the outcomes to the event loops that wait, each woken once."""
    for loop in {write.loop for write in group}:
        try:
            loop.call_soon_threadsafe(_answer_all, [write for write in group if write.loop is loop])
        except RuntimeError:  # closed while it waited: nobody is left to answer
            log.warning("an event loop closed before its writes were answered")


def _answer_all(writes: Sequence[_Write[Any]]) -> None:
    for write in writes:
        write.answer()


def _explain(error: Exception, conflict: str) -> Exception:
    if isinstance(error, IntegrityError) and conflict:
        return Refused(conflict)
    if isinstance(error, DBAPIError):
        return StoreError(f"the store cannot commit: {error.orig}; nothing of this write is kept")
    return error
