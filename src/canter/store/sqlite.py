"""The store in one SQLite file: write-ahead log, `synchronous=FULL`, one writing process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError

from canter.errors import StoreError
from canter.store.lock import WriterLock
from canter.store.migrations import migrate
from canter.store.sql import SqlStore
from canter.store.transaction import Ledger
from canter.store.watch import Watch
from canter.store.writer import Writer

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

    def open_ledger() -> Ledger:
        engine = _engine(file, _WRITER_PRAGMAS, begin=True)
        return Ledger(_prepared(engine), watch, cache_bytes, engine.dispose)

    try:
        writer = Writer(open_ledger)
    except DBAPIError as error:
        lock.release()
        raise StoreError(f"cannot open {file}: {error.orig}") from error
    except BaseException:
        lock.release()
        raise
    return SqlStore(_engine(file, _READER_PRAGMAS, begin=False), writer, watch, lock.release)


def _engine(file: Path, pragmas: tuple[str, ...], *, begin: bool) -> Engine:
    """With `begin`, transactions take the write lock when they start, so that they never have to upgrade a read one."""
    engine = create_engine(f"sqlite:///{file}", connect_args={"timeout": 30}, pool_size=4)

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # no BEGIN that the driver makes up
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}").close()

    if begin:

        @event.listens_for(engine, "begin")
        def begun(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _prepared(engine: Engine) -> Connection:
    """A connection to a database of the newest schema."""
    connection = engine.connect()
    try:
        with connection.begin():
            migrate(connection)
    except BaseException:
        connection.close()
        engine.dispose()
        raise
    return connection
