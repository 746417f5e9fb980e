"""One write transaction over SQL, and what its writer remembers from one to the next.

A write decides first (reads, pure functions that may raise `Refused` or `NotFound`) and changes rows afterwards, so
that one that is refused leaves nothing behind in a transaction that it shares with others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import zstandard
from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.exc import DBAPIError

from canter.errors import NotFound
from canter.store import Key, Started
from canter.store import schema as t
from canter.store.bodies import KEYFRAME_EVERY, Head, Heads, encode
from canter.store.keys import digest, new_secret
from canter.store.lifecycle import Change, Draft, Start, Transition, apply, check_call, check_grading
from canter.store.records import admit, admit_version, call_event, key_event
from canter.store.rows import (
    attempt_of,
    attempt_row,
    call_row,
    engine_of,
    engine_row,
    event_row,
    key_of,
    key_row,
    progress_row,
    reward_row,
    rollout_of,
    rollout_row,
    version_of,
    version_row,
)
from canter.store.watch import Watch
from canter.types import Attempt, Call, CallBodies, EngineRecord, Event, KeyKind, PolicyVersion, Rollout, RolloutState

_CHUNK = 500  # ids in one IN (…): databases bound the number of parameters


class Ledger:
    """The write connection with what is cheaper to remember than to read again; belongs to one thread.

    `live_keys` are the keys that are not revoked, by hash; other threads may read it, it changes with commits only.
    """

    def __init__(self, connection: Connection, watch: Watch, cache_bytes: int) -> None:
        self._connection = connection
        self._watch = watch
        self.event_seq = self.call_seq = 0
        self.current: dict[str, tuple[Rollout, Attempt | None]] = {}
        self.heads = Heads(cache_bytes)
        self.inserts = {
            table: str(insert(table).compile(dialect=connection.dialect)) for table in (t.calls, t.bodies, t.events)
        }
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.live_keys: dict[bytes, Key] = {}
        with connection.begin():
            self._recall()
            for row in connection.execute(select(t.keys).where(~t.keys.c.revoked)).mappings():
                self.live_keys[row["hash"]] = key_of(row)
        watch.advance(self.event_seq)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Commits at the end of the block, or rolls all of it back where it raises."""
        tx = Transaction(self._connection, self)
        try:
            with self._connection.begin():
                yield tx
                tx.flush()
        except BaseException:
            self._forget()
            raise
        self.live_keys.update(tx.issued)
        for hashed in tx.revoked:
            self.live_keys.pop(hashed, None)
        if self.event_seq > self._watch.seq:
            self._watch.advance(self.event_seq)

    def _forget(self) -> None:
        """After a rollback: what was remembered may never have been committed."""
        self.current.clear()
        self.heads.clear()
        with self._connection.begin():
            self._recall()

    def _recall(self) -> None:
        self.event_seq = self._connection.execute(select(func.max(t.events.c.seq))).scalar() or 0
        self.call_seq = self._connection.execute(select(func.max(t.calls.c.seq))).scalar() or 0


class Transaction:
    """The writes of a store, inside one transaction. Calls and events are inserted together at its end."""

    def __init__(self, connection: Connection, ledger: Ledger) -> None:
        self._connection = connection
        self._ledger = ledger
        self._calls: list[dict[str, Any]] = []
        self._bodies: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self.issued: dict[bytes, Key] = {}
        self.revoked: list[bytes] = []

    def create_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        ids = [r.id for r in rollouts]
        known = self._rollouts(ids)
        fresh = admit(rollouts, known, time.time())
        if fresh:
            self._connection.execute(insert(t.rollouts), [rollout_row(r) for r in fresh])
        for rollout in fresh:
            known[rollout.id] = rollout
            self.add_event(Draft("queued", rollout.id))
        return [known[id] for id in ids]

    def transition(self, rollout_id: str, transition: Transition) -> Change:
        rollout, attempt = self._current(rollout_id)
        change = apply(rollout, attempt, transition, time.time())
        where = t.rollouts.c.id == rollout_id
        self._connection.execute(update(t.rollouts).where(where).values(progress_row(change.rollout)))
        if change.attempt is not None:
            self._put_attempt(change.attempt, new=isinstance(transition, Start))
        if change.reward is not None:
            self._connection.execute(insert(t.rewards), reward_row(change.reward))
        if change.revoked:
            self._revoke(rollout_id, change.rollout.attempt, change.revoked)
        self.add_event(change.event)
        if change.rollout.state in (RolloutState.RUNNING, RolloutState.GRADING):
            self._ledger.current[rollout_id] = (change.rollout, change.attempt)
        else:
            self._ledger.current.pop(rollout_id, None)
        return change

    def start_attempt(self, rollout_id: str, number: int) -> Started:
        attempt = self.transition(rollout_id, Start(number)).attempt
        assert attempt is not None
        return Started(attempt, self._issue(Key(KeyKind.AGENT, rollout_id, number)))

    def append_call(self, call: Call, bodies: CallBodies) -> None:
        rollout, _ = self._current(call.rollout_id)
        check_call(rollout, call.attempt)
        ledger = self._ledger
        ledger.call_seq = seq = ledger.call_seq + 1
        base = ledger.heads.base(call, bodies.request)
        link = base if base is not None and base.depth + 1 < KEYFRAME_EVERY else None
        against = link.bodies if link else _NOTHING
        request = encode(bodies.request, against.request, ledger.compressor)
        reply = encode(bodies.reply, against.reply, ledger.compressor)
        self._calls.append(call_row(seq, call, ledger.compressor))
        self._bodies.append({"seq": seq, "base": link and link.seq, "request": request, "reply": reply})
        self.add_event(call_event(call))
        ledger.heads.push(call, Head(call.id, seq, link.depth + 1 if link else 0, bodies), base)

    def issue_key(self, kind: KeyKind) -> str:
        key = Key(kind)
        self.add_event(key_event(key))
        return self._issue(key)

    def grader_key(self, rollout_id: str, number: int) -> str:
        check_grading(self._current(rollout_id)[0], number)
        self._revoke(rollout_id, number, frozenset({KeyKind.GRADER}))
        key = Key(KeyKind.GRADER, rollout_id, number)
        self.add_event(key_event(key))
        return self._issue(key)

    def set_engine(self, engine: EngineRecord) -> None:
        where = t.engines.c.url == engine.url
        row = self._connection.execute(select(t.engines).where(where)).mappings().one_or_none()
        known = row and engine_of(row)
        if known is None:
            self._connection.execute(insert(t.engines), engine_row(engine))
        else:
            self._connection.execute(update(t.engines).where(where).values(engine_row(engine)))
        if known is None or (known.model, known.version) != (engine.model, engine.version):
            data = {"url": engine.url, "model": engine.model, "version": engine.version}
            self.add_event(Draft("engine", data=data))

    def remove_engine(self, url: str) -> None:
        if self._connection.execute(delete(t.engines).where(t.engines.c.url == url)).rowcount:
            self.add_event(Draft("engine_removed", data={"url": url}))

    def add_version(self, version: PolicyVersion) -> None:
        rows = self._connection.execute(select(t.versions).order_by(t.versions.c.version)).mappings()
        fresh = admit_version(version, [version_of(row) for row in rows], time.time())
        if fresh is not None:
            self._connection.execute(insert(t.versions), version_row(fresh))
            data = {"version": fresh.version, "step": fresh.step, "path": fresh.path}
            self.add_event(Draft("version", data=data))

    def set_fact(self, name: str, value: str) -> None:
        """`value` is JSON."""
        if not self._connection.execute(update(t.facts).where(t.facts.c.name == name).values(value=value)).rowcount:
            self._connection.execute(insert(t.facts), {"name": name, "value": value})

    def add_event(self, draft: Draft) -> Event:
        self._ledger.event_seq = seq = self._ledger.event_seq + 1
        event = Event(seq, time.time(), draft.kind, draft.rollout_id, draft.attempt, draft.data)
        self._events.append(event_row(event))
        return event

    def flush(self) -> None:
        """Inserts what was gathered; called once, before the commit. Raises as SQLAlchemy does.

        The statements are compiled once and go to the driver itself: SQLAlchemy's way takes a quarter more CPU for the
        whole commit of a call.
        """
        driver_error = self._connection.dialect.loaded_dbapi.Error
        with closing(self._connection.connection.cursor()) as cursor:
            for table, rows in ((t.calls, self._calls), (t.bodies, self._bodies), (t.events, self._events)):
                if not rows:
                    continue
                statement = self._ledger.inserts[table]
                try:
                    cursor.executemany(statement, rows)
                except driver_error as error:
                    raise DBAPIError.instance(statement, rows, error, driver_error) from error

    # -- inside --

    def _rollouts(self, ids: Sequence[str]) -> dict[str, Rollout]:
        found: dict[str, Rollout] = {}
        for start in range(0, len(ids), _CHUNK):
            query = select(t.rollouts).where(t.rollouts.c.id.in_(ids[start : start + _CHUNK]))
            found |= {row["id"]: rollout_of(row) for row in self._connection.execute(query).mappings()}
        return found

    def _current(self, rollout_id: str) -> tuple[Rollout, Attempt | None]:
        """The rollout with its current attempt, remembered while it is running or graded."""
        remembered = self._ledger.current.get(rollout_id)
        if remembered is not None:
            return remembered
        rollout = self._rollouts([rollout_id]).get(rollout_id)
        if rollout is None:
            raise NotFound(f"no rollout {rollout_id}")
        query = select(t.attempts).where(t.attempts.c.rollout_id == rollout_id, t.attempts.c.number == rollout.attempt)
        row = self._connection.execute(query).mappings().one_or_none()
        attempt = None if row is None else attempt_of(row)
        if rollout.state in (RolloutState.RUNNING, RolloutState.GRADING):
            self._ledger.current[rollout_id] = (rollout, attempt)
        return rollout, attempt

    def _put_attempt(self, attempt: Attempt, *, new: bool) -> None:
        row = attempt_row(attempt)
        if new:
            self._connection.execute(insert(t.attempts), row)
        else:
            where = (t.attempts.c.rollout_id == attempt.rollout_id, t.attempts.c.number == attempt.number)
            self._connection.execute(update(t.attempts).where(*where).values(row))

    def _issue(self, key: Key) -> str:
        secret = new_secret(key.kind)
        hashed = digest(secret)
        self._connection.execute(insert(t.keys), key_row(hashed, key))
        self.issued[hashed] = key
        return secret

    def _revoke(self, rollout_id: str, attempt: int, kinds: frozenset[KeyKind]) -> None:
        where = (
            t.keys.c.rollout_id == rollout_id,
            t.keys.c.attempt == attempt,
            t.keys.c.kind.in_(sorted(kinds)),
        )
        self.revoked += self._connection.execute(select(t.keys.c.hash).where(*where)).scalars()
        self._connection.execute(update(t.keys).where(*where).values(revoked=True))


_NOTHING = CallBodies(b"", b"")
