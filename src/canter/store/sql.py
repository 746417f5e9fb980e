"""The store over SQLAlchemy Core: writes go through one writer, reads have connections of their own.

What differs between databases (connections, locking, settings) is made by the module of each, e.g. `sqlite`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from sqlalchemy import Connection, Engine, and_, func, select
from sqlalchemy.exc import DBAPIError

from canter.errors import NotFound, StoreError
from canter.store import Key, Started
from canter.store import schema as t
from canter.store.bodies import decode
from canter.store.keys import digest
from canter.store.lifecycle import Cancel, Draft, End, Invalidate, Score, SetProcess, Transition
from canter.store.records import call_conflict, count_attempts, count_calls, count_rollouts
from canter.store.rows import (
    attempt_of,
    call_of,
    engine_of,
    event_of,
    key_of,
    reward_of,
    rollout_of,
    to_json,
    version_of,
)
from canter.store.watch import Watch
from canter.store.writer import ReadOnly, Writer
from canter.types import (
    Attempt,
    Call,
    CallBodies,
    EngineRecord,
    Event,
    KeyKind,
    Outcome,
    PolicyVersion,
    Reason,
    Reward,
    Rollout,
    RolloutState,
)

T = TypeVar("T")

_CHUNK = 500  # ids in one IN (…): databases bound the number of parameters


class SqlStore:
    """Implements `Store`. `engine` is for reading and hands out connections in autocommit; `on_close` comes last."""

    def __init__(self, engine: Engine, writer: Writer | ReadOnly, watch: Watch, on_close: Callable[[], None]) -> None:
        self._engine = engine
        self._writer = writer
        self._watch = watch
        self._on_close = on_close
        self._closed = False
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="canter-reader")

    # -- rollouts and their lifecycle --

    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        wanted = list(rollouts)
        return await self._writer.submit(lambda tx: tx.create_rollouts(wanted))

    async def rollout(self, rollout_id: str) -> Rollout:
        return self._now(lambda c: _rollout(c, rollout_id))

    async def rollouts(
        self,
        *,
        states: Sequence[RolloutState] = (),
        group: str | None = None,
        ids: Sequence[str] = (),
        after: str | None = None,
        limit: int = 1000,
    ) -> list[Rollout]:
        query = select(t.rollouts).order_by(t.rollouts.c.id).limit(limit)
        if states:
            query = query.where(t.rollouts.c.state.in_([state.value for state in states]))
        if group is not None:
            query = query.where(t.rollouts.c.group == group)
        if after is not None:
            query = query.where(t.rollouts.c.id > after)

        def read(c: Connection) -> list[Rollout]:
            found: list[Rollout] = []
            for part in _chunks(sorted(set(ids))) if ids else [None]:
                narrowed = query if part is None else query.where(t.rollouts.c.id.in_(part))
                found += (rollout_of(row) for row in c.execute(narrowed).mappings())
                if len(found) >= limit:
                    break
            return found[:limit]

        return await self._read(read)

    async def start_attempt(self, rollout_id: str, number: int) -> Started:
        return await self._writer.submit(lambda tx: tx.start_attempt(rollout_id, number))

    async def set_process(self, rollout_id: str, number: int, process: Mapping[str, Any]) -> Attempt:
        change = await self._writer.submit(lambda tx: tx.transition(rollout_id, SetProcess(number, dict(process))))
        assert change.attempt is not None
        return change.attempt

    async def end_attempt(
        self,
        rollout_id: str,
        number: int,
        outcome: Outcome,
        *,
        exit_code: int | None = None,
        reason: Reason | None = None,
        message: str = "",
    ) -> Rollout:
        return await self._apply(rollout_id, End(number, outcome, exit_code, reason, message))

    async def post_reward(self, reward: Reward) -> Rollout:
        return await self._apply(reward.rollout_id, Score(reward))

    async def invalidate(self, rollout_id: str, number: int, reason: Reason, message: str = "") -> Rollout:
        return await self._apply(rollout_id, Invalidate(number, reason, message))

    async def cancel(self, rollout_id: str, message: str = "") -> Rollout:
        return await self._apply(rollout_id, Cancel(message))

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        query = select(t.attempts).where(t.attempts.c.rollout_id == rollout_id).order_by(t.attempts.c.number)

        def read(c: Connection) -> list[Attempt]:
            _rollout(c, rollout_id)
            return [attempt_of(row) for row in c.execute(query).mappings()]

        return self._now(read)

    async def open_attempts(self) -> list[Attempt]:
        current = and_(t.attempts.c.rollout_id == t.rollouts.c.id, t.attempts.c.number == t.rollouts.c.attempt)
        states = [RolloutState.RUNNING.value, RolloutState.GRADING.value]
        query = select(t.attempts).join(t.rollouts, current).where(t.rollouts.c.state.in_(states))
        ordered = query.order_by(t.attempts.c.rollout_id)
        return await self._read(lambda c: [attempt_of(row) for row in c.execute(ordered).mappings()])

    async def reward(self, rollout_id: str) -> Reward | None:
        query = select(t.rewards).where(t.rewards.c.rollout_id == rollout_id)

        def read(c: Connection) -> Reward | None:
            _rollout(c, rollout_id)
            row = c.execute(query).mappings().one_or_none()
            return None if row is None else reward_of(row)

        return self._now(read)

    # -- calls --

    async def append_call(self, call: Call, bodies: CallBodies) -> None:
        await self._writer.submit(lambda tx: tx.append_call(call, bodies), conflict=call_conflict(call))

    async def calls(self, rollout_ids: Sequence[str], *, attempt: int | None = None) -> list[Call]:
        query = select(t.calls).order_by(t.calls.c.rollout_id, t.calls.c.ordinal, t.calls.c.seq)
        if attempt is None:
            current = and_(t.calls.c.rollout_id == t.rollouts.c.id, t.calls.c.attempt == t.rollouts.c.attempt)
            query = query.join(t.rollouts, current)
        else:
            query = query.where(t.calls.c.attempt == attempt)

        def read(c: Connection) -> list[Call]:
            parts = _chunks(sorted(set(rollout_ids)))
            queries = (query.where(t.calls.c.rollout_id.in_(part)) for part in parts)
            return [call_of(row) for q in queries for row in c.execute(q).mappings()]

        return await self._read(read)

    async def bodies(self, call_id: str) -> CallBodies:
        return await self._read(lambda c: _bodies(c, call_id))

    # -- keys --

    async def issue_key(self, kind: KeyKind) -> str:
        return await self._writer.submit(lambda tx: tx.issue_key(kind))

    async def grader_key(self, rollout_id: str, number: int) -> str:
        return await self._writer.submit(lambda tx: tx.grader_key(rollout_id, number))

    async def key(self, secret: str) -> Key | None:
        hashed = digest(secret)
        live = self._writer.live_keys.get(hashed)
        if live is not None:
            return live
        row = self._now(lambda c: c.execute(select(t.keys).where(t.keys.c.hash == hashed)).mappings().one_or_none())
        return None if row is None else key_of(row)

    # -- engines, policy versions, run-wide facts --

    async def set_engine(self, engine: EngineRecord) -> None:
        await self._writer.submit(lambda tx: tx.set_engine(engine))

    async def remove_engine(self, url: str) -> None:
        await self._writer.submit(lambda tx: tx.remove_engine(url))

    async def engines(self) -> list[EngineRecord]:
        query = select(t.engines).order_by(t.engines.c.url)
        return self._now(lambda c: [engine_of(row) for row in c.execute(query).mappings()])

    async def add_version(self, version: PolicyVersion) -> None:
        await self._writer.submit(lambda tx: tx.add_version(version))

    async def versions(self) -> list[PolicyVersion]:
        query = select(t.versions).order_by(t.versions.c.version)
        return self._now(lambda c: [version_of(row) for row in c.execute(query).mappings()])

    async def set_fact(self, name: str, value: Any) -> None:
        text = to_json(value)
        await self._writer.submit(lambda tx: tx.set_fact(name, text))

    async def fact(self, name: str) -> Any:
        query = select(t.facts.c.value).where(t.facts.c.name == name)
        text = self._now(lambda c: c.execute(query).scalar_one_or_none())
        return None if text is None else orjson.loads(text)

    # -- events --

    async def add_event(
        self,
        kind: str,
        *,
        rollout_id: str | None = None,
        attempt: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> Event:
        draft = Draft(kind, rollout_id, attempt, data or {})
        return await self._writer.submit(lambda tx: tx.add_event(draft))

    async def events(self, after: int, *, timeout_s: float = 0, limit: int = 1000) -> list[Event]:
        if not await self._watch.beyond(after, timeout_s):
            return []
        query = select(t.events).where(t.events.c.seq > after).order_by(t.events.c.seq).limit(limit)
        return await self._read(lambda c: [event_of(row) for row in c.execute(query).mappings()])

    async def counts(self) -> dict[str, int]:
        of_rollouts = select(t.rollouts.c.state, t.rollouts.c.reason, func.count())
        rollouts = of_rollouts.group_by(t.rollouts.c.state, t.rollouts.c.reason)
        ends = (t.attempts.c.outcome, t.attempts.c.exit_code)
        attempts = select(*ends, func.count()).group_by(*ends)
        kinds = (t.calls.c.status, t.calls.c.untrainable, t.calls.c.fork)
        calls = select(*kinds, func.count()).group_by(*kinds)

        def read(c: Connection) -> dict[str, int]:
            by_state = count_rollouts((state, reason, n) for state, reason, n in c.execute(rollouts))
            by_end = count_attempts((outcome, code, n) for outcome, code, n in c.execute(attempts))
            return by_state | by_end | count_calls((status, why, fork, n) for status, why, fork, n in c.execute(calls))

        return await self._read(read)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        await self._writer.close()
        await asyncio.to_thread(self._readers.shutdown)
        self._engine.dispose()
        self._on_close()

    # -- inside --

    async def _apply(self, rollout_id: str, transition: Transition) -> Rollout:
        change = await self._writer.submit(lambda tx: tx.transition(rollout_id, transition))
        return change.rollout

    def _now(self, query: Callable[[Connection], T]) -> T:
        """A read of a few rows by their key, which takes less than handing it to a thread would."""
        if self._closed:
            raise StoreError("the store is closed")
        try:
            with self._engine.connect() as connection:
                return query(connection)
        except DBAPIError as error:
            raise StoreError(f"cannot read {self._engine.url.database}: {error.orig}") from error

    async def _read(self, query: Callable[[Connection], T]) -> T:
        """A read in a thread of its own."""
        if self._closed:
            raise StoreError("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._now, query)


def _chunks(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK)]


def _rollout(connection: Connection, rollout_id: str) -> Rollout:
    row = connection.execute(select(t.rollouts).where(t.rollouts.c.id == rollout_id)).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no rollout {rollout_id}")
    return rollout_of(row)


def _bodies(connection: Connection, call_id: str) -> CallBodies:
    """Follows the links back to a keyframe, then undoes them forward."""
    seq = connection.execute(select(t.calls.c.seq).where(t.calls.c.id == call_id)).scalar_one_or_none()
    if seq is None:
        raise NotFound(f"no call {call_id}")
    links: list[tuple[bytes, bytes]] = []
    while seq is not None:
        row = connection.execute(select(t.bodies).where(t.bodies.c.seq == seq)).one()
        links.append((row.request, row.reply))
        seq = row.base
    request = reply = b""
    for request_link, reply_link in reversed(links):
        request, reply = decode(request_link, request), decode(reply_link, reply)
    return CallBodies(request, reply)
