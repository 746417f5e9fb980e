"""The lifecycle routes under `/api`, for the controller, the trainer, graders and tools; see `docs/api.md`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from canter import wire
from canter.errors import BadRequest, NotFound
from canter.gateway.attempts import Conversations
from canter.gateway.auth import AttemptRef, check_grader
from canter.gateway.dialects.routes import BY_NAME
from canter.gateway.gate import Gate
from canter.gateway.http import HttpError, Reply, json_object
from canter.gateway.labels import MAIN
from canter.gateway.outage import Outage, Uptime, outage
from canter.gateway.source import Source
from canter.gateway.visit import (
    NewAttempt,
    NewEnd,
    NewEngine,
    NewInvalid,
    NewKey,
    NewReward,
    NewRollouts,
    NewVersion,
    Visit,
    Why,
)
from canter.store import Store
from canter.types import Attempt, Call, CallStatus, EngineRecord, KeyKind, PolicyVersion, Reward, Rollout, RolloutState

_MAX_ROWS = 10_000


class Api:
    """The handlers. All writes go through the store, which refuses what the lifecycle forbids."""

    def __init__(self, store: Store, source: Source, gate: Gate, conversations: Conversations, uptime: Uptime) -> None:
        self._store = store
        self._source = source
        self._gate = gate
        self._conversations = conversations
        self._uptime = uptime
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Lets those who wait for events go."""
        self._closing.set()

    # -- rollouts --

    async def create_rollouts(self, visit: Visit) -> Reply:
        asked = visit.read(NewRollouts)
        rollouts = [
            Rollout(r.id, r.group, r.task, r.split, r.step, r.index, r.seed, max_attempts=r.max_attempts)
            for r in asked.rollouts
        ]
        return _rollouts(await self._store.create_rollouts(rollouts))

    async def list_rollouts(self, visit: Visit) -> Reply:
        try:
            states = [RolloutState(name) for name in visit.query.get("state", ())]
        except ValueError as error:
            raise BadRequest(f"{error}; states are {', '.join(RolloutState)}", param="state") from error
        found = await self._store.rollouts(
            states=states,
            group=visit.one("group"),
            ids=visit.query.get("id", ()),
            after=visit.one("after"),
            limit=visit.integer("limit", 1000, high=_MAX_ROWS),
        )
        return _rollouts(found, hidden=_wants_hidden(visit))

    async def get_rollout(self, visit: Visit) -> Reply:
        rollout_id = visit.params["id"]
        rollout = await self._store.rollout(rollout_id)
        return Reply.json(
            {
                "rollout": rollout if _wants_hidden(visit) else _public(rollout),
                "attempts": await self._store.attempts(rollout_id),
                "reward": await self._store.reward(rollout_id),
            }
        )

    async def cancel(self, visit: Visit) -> Reply:
        rollout = await self._store.cancel(visit.params["id"], visit.read(Why).message)
        return self._changed(rollout)

    # -- attempts --

    async def start_attempt(self, visit: Visit) -> Reply:
        started = await self._store.start_attempt(visit.params["id"], visit.read(NewAttempt).number)
        return Reply.json({"attempt": started.attempt, "agent_key": started.agent_key})

    async def set_process(self, visit: Visit) -> Reply:
        ref = visit.attempt()
        attempt = await self._store.set_process(ref.rollout_id, ref.number, json_object(visit.body))
        return Reply.json({"attempt": attempt})

    async def end_attempt(self, visit: Visit) -> Reply:
        """Notes how a harness ended. One that may have failed for want of the model is not graded: see `outage`."""
        ref, end = visit.attempt(), visit.read(NewEnd)
        reason, message = end.reason, end.message
        if reason is None and (missing := await self._outage(ref, end)) is not None:
            reason = missing.reason
            message = f"{missing.message}; its last words: {end.message}" if end.message else missing.message
        rollout = await self._store.end_attempt(
            ref.rollout_id, ref.number, end.outcome, exit_code=end.exit_code, reason=reason, message=message
        )
        return self._changed(rollout)

    async def _outage(self, ref: AttemptRef, end: NewEnd) -> Outage | None:
        attempt = await self._attempt(ref)
        if attempt is None:
            return None  # the store refuses that
        calls = await self._store.calls([ref.rollout_id], attempt=ref.number)
        return outage(attempt, end.outcome, end.exit_code, calls, self._uptime.since)

    async def _attempt(self, ref: AttemptRef) -> Attempt | None:
        return next((a for a in await self._store.attempts(ref.rollout_id) if a.number == ref.number), None)

    async def invalidate(self, visit: Visit) -> Reply:
        ref, why = visit.attempt(), visit.read(NewInvalid)
        return self._changed(await self._store.invalidate(ref.rollout_id, ref.number, why.reason, why.message))

    async def grader_key(self, visit: Visit) -> Reply:
        ref = visit.attempt()
        return Reply.json({"grader_key": await self._store.grader_key(ref.rollout_id, ref.number)})

    async def post_reward(self, visit: Visit) -> Reply:
        ref = visit.attempt()
        check_grader(visit.key, ref)
        given = visit.read(NewReward)
        try:
            reward = Reward(ref.rollout_id, ref.number, given.value, given.source, given.details)
        except ValueError as error:
            raise HttpError(422, "unprocessable", str(error)) from error
        return self._changed(await self._store.post_reward(reward))

    async def grading(self, visit: Visit) -> Reply:
        """What a grader needs. `calls` counts the finished calls, `last_message` is the main agent's last text."""
        ref = visit.attempt()
        check_grader(visit.key, ref)
        rollout = await self._store.rollout(ref.rollout_id)
        attempt = await self._attempt(ref)
        if attempt is None:
            raise NotFound(f"rollout {ref.rollout_id} has no attempt {ref.number}")
        calls = await self._store.calls([ref.rollout_id], attempt=ref.number)
        finished = [call for call in calls if call.status is CallStatus.OK]
        return Reply.json(
            {
                "task": rollout.task,
                "outcome": attempt.outcome,
                "exit_code": attempt.exit_code,
                "process": dict(attempt.process),
                "last_message": await self._last_message(finished),
                "calls": len(finished),
            }
        )

    async def _last_message(self, calls: Sequence[Call]) -> str | None:
        last = next((call for call in reversed(calls) if call.label == MAIN.name), calls[-1] if calls else None)
        if last is None:
            return None
        reply = (await self._store.bodies(last.id)).reply
        return BY_NAME[last.dialect].message(json_object(reply)).content

    async def open_attempts(self, visit: Visit) -> Reply:
        return Reply.json({"attempts": await self._store.open_attempts()})

    # -- events and counters --

    async def events(self, visit: Visit) -> Reply:
        after = visit.integer("after", 0, high=2**63 - 1)
        limit = visit.integer("limit", 1000, high=_MAX_ROWS)
        timeout_s = visit.seconds("timeout_s")
        waiting = asyncio.ensure_future(self._store.events(after, timeout_s=timeout_s, limit=limit))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({waiting, closing}, return_when=asyncio.FIRST_COMPLETED)
            return Reply.json({"events": waiting.result() if waiting.done() else []})
        finally:
            waiting.cancel()
            closing.cancel()

    async def stats(self, visit: Visit) -> Reply:
        return Reply.json({"counts": await self._store.counts()})

    # -- calls --

    async def calls(self, visit: Visit) -> Reply:
        attempt = visit.integer("attempt", 0, high=2**31) if visit.one("attempt") is not None else None
        calls = await self._store.calls(visit.query.get("rollout", ()), attempt=attempt)
        body = wire.pack({"calls": [wire.call_to_map(call) for call in calls]})
        return Reply(200, body, wire.CONTENT_TYPE.encode())

    async def bodies(self, visit: Visit) -> Reply:
        bodies = await self._store.bodies(visit.params["id"])
        return Reply(200, b'{"request":%b,"reply":%b}' % (bodies.request or b"null", bodies.reply or b"null"))

    # -- keys, engines, versions, facts --

    async def issue_key(self, visit: Visit) -> Reply:
        kind = visit.read(NewKey).kind
        if kind not in (KeyKind.SERVICE, KeyKind.ADMIN):
            raise BadRequest(f"{kind} keys belong to an attempt; issue service or admin keys here", param="kind")
        return Reply.json({"key": await self._store.issue_key(kind)})

    async def set_engine(self, visit: Visit) -> Reply:
        asked = visit.read(NewEngine)
        record = EngineRecord(asked.url, asked.model, asked.version, time.time())
        await self._source.register(record, asked.key)
        await self._store.set_engine(record)
        return Reply.json({})

    async def remove_engine(self, visit: Visit) -> Reply:
        url = visit.one("url")
        if not url:
            raise BadRequest("name the engine: DELETE /api/engines?url=URL", param="url")
        await self._source.remove(url)
        await self._store.remove_engine(url)
        return Reply.json({})

    async def engines(self, visit: Visit) -> Reply:
        return Reply.json({"engines": await self._store.engines()})

    async def add_version(self, visit: Visit) -> Reply:
        asked = visit.read(NewVersion)
        await self._store.add_version(PolicyVersion(asked.version, asked.step, asked.path))
        return Reply.json({})

    async def versions(self, visit: Visit) -> Reply:
        return Reply.json({"versions": await self._store.versions()})

    async def pause(self, visit: Visit) -> Reply:
        self._gate.pause()
        return Reply.json({"paused": True})

    async def resume(self, visit: Visit) -> Reply:
        self._gate.resume()
        return Reply.json({"paused": False})

    async def set_fact(self, visit: Visit) -> Reply:
        body = json_object(visit.body)
        if "value" not in body:
            raise BadRequest('the body must be {"value": …}', param="value")
        await self._store.set_fact(visit.params["name"], body["value"])
        return Reply.json({})

    async def fact(self, visit: Visit) -> Reply:
        return Reply.json({"value": await self._store.fact(visit.params["name"])})

    def _changed(self, rollout: Rollout) -> Reply:
        """After a change of state the attempt's conversation is not needed in memory any more."""
        self._conversations.forget(AttemptRef(rollout.id, rollout.attempt))
        return Reply.json({"rollout": _public(rollout)})


def _wants_hidden(visit: Visit) -> bool:
    return visit.one("hidden") == "1"


def _public(rollout: Rollout) -> Rollout:
    return replace(rollout, task=replace(rollout.task, hidden={}))


def _rollouts(rollouts: Sequence[Rollout], *, hidden: bool = False) -> Reply:
    return Reply.json({"rollouts": [rollout if hidden else _public(rollout) for rollout in rollouts]})
