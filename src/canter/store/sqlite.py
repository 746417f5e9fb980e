"""The store in one SQLite file: write-ahead log, `synchronous=FULL`, one writing process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError

from canter.errors import StoreError
from canter.store.lock import WriterLock
from canter.store.migrations import migrate, require_newest
from canter.store.sql import SqlStore
from canter.store.transaction import Ledger
from canter.store.watch import Watch
from canter.store.writer import ReadOnly, Writer

CACHE_BYTES = 64 * 2**20
"""Raw bodies kept in memory to store the next ones against."""

_WRITER_PRAGMAS = (
    "journal_mode = wal",
    "synchronous = full",
    "foreign_keys = on",
    "journal_size_limit = 67108864",
)
_READER_PRAGMAS = ("query_only = on",)


def open_sqlite(path: str | Path, *, cache_bytes: int = CACHE_BYTES) -> SqlStore:
    """Opens or makes the store at `path`, as its only writer.

    Raises `StoreError` where another process has it open, its schema is newer than this code, or it cannot be read.
    """
    file = Path(path).resolve()
    lock = WriterLock(file)
    watch = Watch()

    @contextmanager
    def ledger() -> Iterator[Ledger]:
        with _writing(file) as connection:
            yield Ledger(connection, watch, cache_bytes)

    try:
        writer = Writer(ledger)
    except (DBAPIError, StoreError) as error:
        lock.release()
        raise _explained(error, file) from error
    return SqlStore(_engine(file, _READER_PRAGMAS), writer, watch, lock.release)


def read_sqlite(path: str | Path) -> SqlStore:
    """Opens the store at `path` for reading, also while another process writes to it.

    `events` answers at once with what there is: nothing here hears of commits. Raises `StoreError` where there is no
    store of this version.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise StoreError(f"there is no store at {file}")
    engine = _engine(file, _READER_PRAGMAS)
    try:
        with engine.connect() as connection:
            require_newest(connection)
    except (DBAPIError, StoreError) as error:
        engine.dispose()
        raise _explained(error, file) from error
    return SqlStore(engine, ReadOnly(str(file)), Watch(sys.maxsize), lambda: None)


@contextmanager
def _writing(file: Path) -> Iterator[Connection]:
    """The write connection to a database of the newest schema; its transactions take the write lock when they begin."""
    engine = _engine(file, _WRITER_PRAGMAS)
    event.listen(engine, "begin", _begin_immediate)
    try:
        with engine.connect() as connection:
            with connection.begin():
                migrate(connection)
            yield connection
    finally:
        engine.dispose()


def _engine(file: Path, pragmas: tuple[str, ...]) -> Engine:
    url = URL.create("sqlite", database=str(file))
    engine = create_engine(url, paramstyle="named", connect_args={"timeout": 30}, pool_size=4)

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # no BEGIN that the driver makes up
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}").close()

    return engine


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _explained(error: DBAPIError | StoreError, file: Path) -> StoreError:
    return error if isinstance(error, StoreError) else StoreError(f"cannot open {file}: {error.orig}")
