"""The store in memory: the semantics of the durable one without the disk, for tests.

Nothing is awaited inside a method, so each is atomic.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import orjson

from canter.errors import NotFound, Refused
from canter.store import Key, Started
from canter.store.keys import digest, new_secret
from canter.store.lifecycle import (
    Cancel,
    Change,
    Draft,
    End,
    Invalidate,
    Score,
    SetProcess,
    Start,
    Transition,
    apply,
    check_call,
    check_grading,
)
from canter.store.records import (
    admit,
    admit_version,
    call_conflict,
    call_event,
    count_attempts,
    count_calls,
    count_rollouts,
    key_event,
)
from canter.store.watch import Watch
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


class MemoryStore:
    """Implements `Store`; what it holds is gone with the process."""

    def __init__(self) -> None:
        self._rollouts: dict[str, Rollout] = {}
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._rewards: dict[str, Reward] = {}
        self._calls: dict[str, tuple[Call, CallBodies]] = {}
        self._keys: dict[bytes, Key] = {}
        self._engines: dict[str, EngineRecord] = {}
        self._versions: list[PolicyVersion] = []
        self._facts: dict[str, bytes] = {}
        self._events: list[Event] = []
        self._watch = Watch()

    # -- rollouts and their lifecycle --

    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        now = time.time()
        known = {r.id: self._rollouts[r.id] for r in rollouts if r.id in self._rollouts}
        for fresh in admit(rollouts, known, now):
            self._rollouts[fresh.id] = fresh
            self._add(Draft("queued", fresh.id))
        return [self._rollouts[r.id] for r in rollouts]

    async def rollout(self, rollout_id: str) -> Rollout:
        return self._rollout(rollout_id)

    async def rollouts(
        self,
        *,
        states: Sequence[RolloutState] = (),
        group: str | None = None,
        ids: Sequence[str] = (),
        after: str | None = None,
        limit: int = 1000,
    ) -> list[Rollout]:
        def matches(r: Rollout) -> bool:
            return (
                (not states or r.state in states)
                and (group is None or r.group == group)
                and (not ids or r.id in ids)
                and (after is None or r.id > after)
            )

        return [r for _, r in sorted(self._rollouts.items()) if matches(r)][:limit]

    async def start_attempt(self, rollout_id: str, number: int) -> Started:
        change = self._apply(rollout_id, Start(number))
        assert change.attempt is not None
        return Started(change.attempt, self._issue(Key(KeyKind.AGENT, rollout_id, number)))

    async def set_process(self, rollout_id: str, number: int, process: Mapping[str, Any]) -> Attempt:
        attempt = self._apply(rollout_id, SetProcess(number, dict(process))).attempt
        assert attempt is not None
        return attempt

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
        return self._apply(rollout_id, End(number, outcome, exit_code, reason, message)).rollout

    async def post_reward(self, reward: Reward) -> Rollout:
        return self._apply(reward.rollout_id, Score(reward)).rollout

    async def invalidate(self, rollout_id: str, number: int, reason: Reason, message: str = "") -> Rollout:
        return self._apply(rollout_id, Invalidate(number, reason, message)).rollout

    async def cancel(self, rollout_id: str, message: str = "") -> Rollout:
        return self._apply(rollout_id, Cancel(message)).rollout

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        last = self._rollout(rollout_id).attempt
        return [self._attempts[rollout_id, number] for number in range(1, last + 1)]

    async def open_attempts(self) -> list[Attempt]:
        open_states = (RolloutState.RUNNING, RolloutState.GRADING)
        return [self._attempts[r.id, r.attempt] for _, r in sorted(self._rollouts.items()) if r.state in open_states]

    async def reward(self, rollout_id: str) -> Reward | None:
        self._rollout(rollout_id)
        return self._rewards.get(rollout_id)

    # -- calls --

    async def append_call(self, call: Call, bodies: CallBodies) -> None:
        check_call(self._rollout(call.rollout_id), call.attempt)
        if call.id in self._calls or (call.parent_id is not None and call.parent_id not in self._calls):
            raise Refused(call_conflict(call))
        self._calls[call.id] = (call, bodies)
        self._add(call_event(call))

    async def calls(self, rollout_ids: Sequence[str], *, attempt: int | None = None) -> list[Call]:
        known = (self._rollouts[id] for id in rollout_ids if id in self._rollouts)
        wanted = {(r.id, r.attempt if attempt is None else attempt) for r in known}
        found = (call for call, _ in self._calls.values() if (call.rollout_id, call.attempt) in wanted)
        return sorted(found, key=lambda call: (call.rollout_id, call.ordinal))

    async def bodies(self, call_id: str) -> CallBodies:
        if call_id not in self._calls:
            raise NotFound(f"no call {call_id}")
        return self._calls[call_id][1]

    # -- keys --

    async def issue_key(self, kind: KeyKind) -> str:
        key = Key(kind)
        self._add(key_event(key))
        return self._issue(key)

    async def grader_key(self, rollout_id: str, number: int) -> str:
        check_grading(self._rollout(rollout_id), number)
        self._revoke(rollout_id, number, {KeyKind.GRADER})
        key = Key(KeyKind.GRADER, rollout_id, number)
        self._add(key_event(key))
        return self._issue(key)

    async def key(self, secret: str) -> Key | None:
        return self._keys.get(digest(secret))

    # -- engines, policy versions, run-wide facts --

    async def set_engine(self, engine: EngineRecord) -> None:
        known = self._engines.get(engine.url)
        self._engines[engine.url] = engine
        if known is None or (known.model, known.version) != (engine.model, engine.version):
            self._add(Draft("engine", data={"url": engine.url, "model": engine.model, "version": engine.version}))

    async def remove_engine(self, url: str) -> None:
        if self._engines.pop(url, None) is not None:
            self._add(Draft("engine_removed", data={"url": url}))

    async def engines(self) -> list[EngineRecord]:
        return [engine for _, engine in sorted(self._engines.items())]

    async def add_version(self, version: PolicyVersion) -> None:
        fresh = admit_version(version, self._versions, time.time())
        if fresh is not None:
            self._versions.append(fresh)
            self._add(Draft("version", data={"version": fresh.version, "step": fresh.step, "path": fresh.path}))

    async def versions(self) -> list[PolicyVersion]:
        return list(self._versions)

    async def set_fact(self, name: str, value: Any) -> None:
        self._facts[name] = orjson.dumps(value)

    async def fact(self, name: str) -> Any:
        return orjson.loads(self._facts[name]) if name in self._facts else None

    # -- events --

    async def add_event(
        self,
        kind: str,
        *,
        rollout_id: str | None = None,
        attempt: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> Event:
        return self._add(Draft(kind, rollout_id, attempt, data or {}))

    async def events(self, after: int, *, timeout_s: float = 0, limit: int = 1000) -> list[Event]:
        await self._watch.beyond(after, timeout_s)
        start = max(after, 0)  # event number n is at index n - 1
        return self._events[start : start + limit]

    async def counts(self) -> dict[str, int]:
        rollouts = Counter((r.state.value, r.reason and r.reason.value) for r in self._rollouts.values())
        calls = Counter(
            (c.status.value, c.untrainable and c.untrainable.value, c.fork and c.fork.value)
            for c, _ in self._calls.values()
        )
        attempts = Counter((a.outcome and a.outcome.value, a.exit_code) for a in self._attempts.values())
        return count_rollouts(_flat(rollouts)) | count_attempts(_flat(attempts)) | count_calls(_flat(calls))

    async def close(self) -> None:
        self._watch.close()

    # -- inside --

    def _rollout(self, rollout_id: str) -> Rollout:
        try:
            return self._rollouts[rollout_id]
        except KeyError:
            raise NotFound(f"no rollout {rollout_id}") from None

    def _apply(self, rollout_id: str, transition: Transition) -> Change:
        rollout = self._rollout(rollout_id)
        attempt = self._attempts.get((rollout_id, rollout.attempt))
        change = apply(rollout, attempt, transition, time.time())
        self._rollouts[rollout_id] = change.rollout
        if change.attempt is not None:
            self._attempts[rollout_id, change.attempt.number] = change.attempt
        if change.reward is not None:
            self._rewards[rollout_id] = change.reward
        self._revoke(rollout_id, rollout.attempt, change.revoked)
        self._add(change.event)
        return change

    def _issue(self, key: Key) -> str:
        secret = new_secret(key.kind)
        self._keys[digest(secret)] = key
        return secret

    def _revoke(self, rollout_id: str, attempt: int, kinds: Set[KeyKind]) -> None:
        if not kinds:
            return
        for hashed, key in self._keys.items():
            if (key.rollout_id, key.attempt) == (rollout_id, attempt) and key.kind in kinds:
                self._keys[hashed] = replace(key, revoked=True)

    def _add(self, draft: Draft) -> Event:
        event = Event(len(self._events) + 1, time.time(), draft.kind, draft.rollout_id, draft.attempt, draft.data)
        self._events.append(event)
        self._watch.advance(event.seq)
        return event


def _flat(counter: Counter[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """`(*key, count)` rows, as SQL's GROUP BY gives them."""
    return ((*key, count) for key, count in counter.items())
