"""Brings a database to the schema of this code.

A new database gets all tables of `schema.py` at once. An older one gets the numbered steps that it lacks: a change of
`schema.py` comes with the next number in `STEPS`, which makes the same change to what exists. Either way it is one
transaction. A database of a later version is refused, because this code could misread it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy import Connection, insert, inspect, select, update

from canter.errors import StoreError
from canter.store.schema import metadata, schema_version

Step = Callable[[Connection], None]

STEPS: Mapping[int, Step] = {}
"""Version → what brings a database of the version before to it. Version 1 is the first."""


def migrate(connection: Connection, steps: Mapping[int, Step] = STEPS) -> None:
    """Brings the database to the newest version, in the caller's transaction. Raises `StoreError`."""
    newest = max(steps, default=1)
    found = version(connection)
    if found is None:
        metadata.create_all(connection)
        connection.execute(insert(schema_version).values(version=newest))
        return
    if found > newest:
        raise StoreError(
            f"{_name(connection)} has schema version {found}, this canter knows {newest}; use a newer canter"
        )
    for number in range(found + 1, newest + 1):
        steps[number](connection)
        connection.execute(update(schema_version).values(version=number))


def require_newest(connection: Connection, steps: Mapping[int, Step] = STEPS) -> None:
    """Raises `StoreError` unless the database has the newest version."""
    found, newest = version(connection), max(steps, default=1)
    if found != newest:
        raise StoreError(
            f"{_name(connection)} has {'no schema' if found is None else f'schema version {found}'}, this canter reads "
            f"{newest}; open it once for writing to bring an older one up to date"
        )


def version(connection: Connection) -> int | None:
    """The schema version of the database, `None` of a new one."""
    if not inspect(connection).has_table(schema_version.name):
        return None
    return int(connection.execute(select(schema_version.c.version)).scalar_one())


def _name(connection: Connection) -> str | None:
    return connection.engine.url.database
