"""The lifecycle routes under `/api`, for the controller, the trainer, graders and tools; see `docs/api.md`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from canter import wire
from canter.errors import BadRequest, NotFound
from canter.gateway.attempts import Conversations
from canter.gateway.auth import AttemptRef, check_grader, check_service
from canter.gateway.dialects.routes import BY_NAME
from canter.gateway.gate import Gate
from canter.gateway.http import HttpError, Reply, Request, json_object
from canter.gateway.source import Source
from canter.store import Key, Store
from canter.types import (
    Call,
    CallStatus,
    EngineRecord,
    KeyKind,
    Outcome,
    PolicyVersion,
    Reason,
    Reward,
    Rollout,
    RolloutState,
    Split,
    Task,
)

LONGEST_WAIT_S = 60.0
_MAX_ROWS = 10_000

T = TypeVar("T")
Id = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class _NewRollout:
    id: Id
    group: Id
    task: Task
    split: Split = Split.TRAIN
    step: Count = 0
    index: Count = 0
    seed: int = 0
    max_attempts: Annotated[int, Field(ge=1)] = 3


@dataclass(frozen=True, slots=True)
class _NewRollouts:
    rollouts: list[_NewRollout]


@dataclass(frozen=True, slots=True)
class _Number:
    number: Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class _End:
    outcome: Outcome
    exit_code: int | None = None
    reason: Reason | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Invalid:
    reason: Reason
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Message:
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Value:
    value: float
    source: str = "grader"
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Engine:
    url: Id
    model: str
    version: Count
    key: str = ""


@dataclass(frozen=True, slots=True)
class _Version:
    version: Count
    step: Count
    path: str = ""


@dataclass(frozen=True, slots=True)
class _Kind:
    kind: KeyKind


_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    shape: TypeAdapter(shape)
    for shape in (_NewRollouts, _Number, _End, _Invalid, _Message, _Value, _Engine, _Version, _Kind)
}


@dataclass(frozen=True, slots=True)
class Visit:
    """A request under `/api` as a handler sees it: who asks, the path's parameters, the query and the body."""

    key: Key
    params: Mapping[str, str]
    query: Mapping[str, Sequence[str]]
    body: bytes

    def read(self, shape: type[T]) -> T:
        """The body as `shape`. Raises `BadRequest` that names the first wrong field."""
        try:
            value: T = _ADAPTERS[shape].validate_json(self.body or b"{}", strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the body"
            raise BadRequest(f"{where}: {first['msg']}", param=where) from error
        return value

    def attempt(self) -> AttemptRef:
        try:
            return AttemptRef(self.params["id"], int(self.params["n"]))
        except ValueError as error:
            raise NotFound(f"attempt {self.params['n']!r} is no number") from error

    def one(self, name: str) -> str | None:
        values = self.query.get(name)
        return values[-1] if values else None

    def integer(self, name: str, default: int, *, high: int) -> int:
        text = self.one(name)
        if text is None:
            return default
        if not text.isdecimal():
            raise BadRequest(f"{name} must be an integer from 0 up, got {text!r}", param=name)
        return min(int(text), high)

    def seconds(self, name: str) -> float:
        text = self.one(name) or "0"
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not value >= 0:
            raise BadRequest(f"{name} must be seconds from 0 up, got {text!r}", param=name)
        return min(value, LONGEST_WAIT_S)


class Api:
    """The handlers. All writes go through the store, which refuses what the lifecycle forbids."""

    def __init__(self, store: Store, source: Source, gate: Gate, conversations: Conversations) -> None:
        self._store = store
        self._source = source
        self._gate = gate
        self._conversations = conversations
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Lets those who wait for events go."""
        self._closing.set()

    # -- rollouts --

    async def create_rollouts(self, visit: Visit) -> Reply:
        asked = visit.read(_NewRollouts)
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
        rollout = await self._store.cancel(visit.params["id"], visit.read(_Message).message)
        return self._changed(rollout)

    # -- attempts --

    async def start_attempt(self, visit: Visit) -> Reply:
        started = await self._store.start_attempt(visit.params["id"], visit.read(_Number).number)
        return Reply.json(
            {"attempt": started.attempt, "agent_key": started.agent_key, "grader_key": started.grader_key}
        )

    async def set_process(self, visit: Visit) -> Reply:
        ref = visit.attempt()
        attempt = await self._store.set_process(ref.rollout_id, ref.number, json_object(visit.body))
        return Reply.json({"attempt": attempt})

    async def end_attempt(self, visit: Visit) -> Reply:
        ref, end = visit.attempt(), visit.read(_End)
        rollout = await self._store.end_attempt(
            ref.rollout_id, ref.number, end.outcome, exit_code=end.exit_code, reason=end.reason, message=end.message
        )
        return self._changed(rollout)

    async def invalidate(self, visit: Visit) -> Reply:
        ref, why = visit.attempt(), visit.read(_Invalid)
        return self._changed(await self._store.invalidate(ref.rollout_id, ref.number, why.reason, why.message))

    async def post_reward(self, visit: Visit) -> Reply:
        ref = visit.attempt()
        check_grader(visit.key, ref)
        given = visit.read(_Value)
        try:
            reward = Reward(ref.rollout_id, ref.number, given.value, given.source, given.details)
        except ValueError as error:
            raise HttpError(422, "unprocessable", str(error)) from error
        return self._changed(await self._store.post_reward(reward))

    async def grading(self, visit: Visit) -> Reply:
        """What a grader needs. `calls` counts the attempt's finished calls, `last_message` is the text of the last."""
        ref = visit.attempt()
        check_grader(visit.key, ref)
        rollout = await self._store.rollout(ref.rollout_id)
        attempt = next((a for a in await self._store.attempts(ref.rollout_id) if a.number == ref.number), None)
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
        if not calls:
            return None
        reply = (await self._store.bodies(calls[-1].id)).reply
        return BY_NAME[calls[-1].dialect].message(json_object(reply)).content

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
        kind = visit.read(_Kind).kind
        if kind not in (KeyKind.SERVICE, KeyKind.ADMIN):
            raise BadRequest(f"{kind} keys come with their attempt; issue service or admin keys here", param="kind")
        return Reply.json({"key": await self._store.issue_key(kind)})

    async def set_engine(self, visit: Visit) -> Reply:
        asked = visit.read(_Engine)
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
        asked = visit.read(_Version)
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


Handler = Callable[[Api, Visit], Awaitable[Reply]]


Rights = Literal["service", "admin", "handler"]

_ROUTES: tuple[tuple[str, str, Handler, Rights], ...] = (
    ("POST", "/api/rollouts", Api.create_rollouts, "service"),
    ("GET", "/api/rollouts", Api.list_rollouts, "service"),
    ("GET", "/api/rollouts/{id}", Api.get_rollout, "service"),
    ("POST", "/api/rollouts/{id}/cancel", Api.cancel, "service"),
    ("POST", "/api/rollouts/{id}/attempts", Api.start_attempt, "service"),
    ("PUT", "/api/rollouts/{id}/attempts/{n}/process", Api.set_process, "service"),
    ("POST", "/api/rollouts/{id}/attempts/{n}/end", Api.end_attempt, "service"),
    ("POST", "/api/rollouts/{id}/attempts/{n}/invalid", Api.invalidate, "service"),
    ("POST", "/api/rollouts/{id}/attempts/{n}/reward", Api.post_reward, "handler"),
    ("GET", "/api/rollouts/{id}/attempts/{n}/grading", Api.grading, "handler"),
    ("GET", "/api/attempts", Api.open_attempts, "service"),
    ("GET", "/api/events", Api.events, "service"),
    ("GET", "/api/stats", Api.stats, "service"),
    ("GET", "/api/calls", Api.calls, "service"),
    ("GET", "/api/calls/{id}/bodies", Api.bodies, "service"),
    ("POST", "/api/keys", Api.issue_key, "admin"),
    ("PUT", "/api/engines", Api.set_engine, "service"),
    ("DELETE", "/api/engines", Api.remove_engine, "service"),
    ("GET", "/api/engines", Api.engines, "service"),
    ("POST", "/api/versions", Api.add_version, "service"),
    ("GET", "/api/versions", Api.versions, "service"),
    ("POST", "/api/pause", Api.pause, "service"),
    ("POST", "/api/resume", Api.resume, "service"),
    ("PUT", "/api/facts/{name}", Api.set_fact, "service"),
    ("GET", "/api/facts/{name}", Api.fact, "service"),
)


@dataclass(frozen=True, slots=True)
class Match:
    """A route that a path leads to. `rights`: `service`, `admin`, or `handler` where that checks the key itself."""

    handler: Handler
    params: Mapping[str, str]
    rights: Rights

    def check(self, key: Key) -> None:
        """Raises `Forbidden` or `Unauthorized` unless the key may use the route at all."""
        if self.rights != "handler":
            check_service(key, admin=self.rights == "admin")

    async def call(self, api: Api, key: Key, query: Mapping[str, Sequence[str]], body: bytes) -> Reply:
        return await self.handler(api, Visit(key, self.params, query, body))


def find(request: Request) -> Match:
    """The route of a request. Raises `HttpError` 404 or 405."""
    segments = request.segments()
    allowed: list[str] = []
    for method, pattern, handler, rights in _ROUTES:
        params = _params(pattern.split("/")[1:], segments)
        if params is not None and method == request.method:
            return Match(handler, params, rights)
        allowed += [method] if params is not None else []
    raise no_route(request, allowed)


def no_route(request: Request, allowed: Sequence[str]) -> HttpError:
    """404, or 405 where other methods are `allowed`."""
    if allowed:
        methods = ", ".join(sorted(allowed))
        return HttpError(
            405, "method_not_allowed", f"{request.path} takes {methods}, not {request.method}", {"allow": methods}
        )
    return HttpError(404, "not_found", f"no route {request.method} {request.path}; see docs/api.md")


def _params(pattern: Sequence[str], segments: Sequence[str]) -> dict[str, str] | None:
    if len(pattern) != len(segments):
        return None
    params: dict[str, str] = {}
    for wanted, segment in zip(pattern, segments, strict=True):
        if wanted.startswith("{"):
            params[wanted[1:-1]] = segment
        elif wanted != segment:
            return None
    return params


def _wants_hidden(visit: Visit) -> bool:
    return visit.one("hidden") == "1"


def _public(rollout: Rollout) -> Rollout:
    return replace(rollout, task=replace(rollout.task, hidden={}))


def _rollouts(rollouts: Sequence[Rollout], *, hidden: bool = False) -> Reply:
    return Reply.json({"rollouts": [rollout if hidden else _public(rollout) for rollout in rollouts]})
