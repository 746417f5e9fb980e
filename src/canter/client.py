"""The HTTP client of the gateway, for the controller, the trainer, graders and tools.

`Client` has the methods of the `Store` protocol that make sense from outside, with the same arguments and results, so
code written against one runs on the other. Two differences: rollouts come without `task.hidden` unless asked for (so
that a process that launches harnesses never holds it), and while the gateway is unreachable (it may be restarting) a
request is tried again until `retry_s` have passed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import aiohttp
import orjson
from pydantic import TypeAdapter
from yarl import URL

from canter import wire
from canter.errors import (
    BadRequest,
    CanterError,
    EngineError,
    EngineUnavailable,
    Forbidden,
    GatewayUnavailable,
    NotFound,
    PayloadTooLarge,
    Refused,
    StoreError,
    Unauthorized,
)
from canter.store import Started
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

_ROLLOUT = TypeAdapter(Rollout)
_ROLLOUTS = TypeAdapter(list[Rollout])
_ATTEMPT = TypeAdapter(Attempt)
_ATTEMPTS = TypeAdapter(list[Attempt])
_REWARD = TypeAdapter(Reward)
_EVENTS = TypeAdapter(list[Event])
_ENGINES = TypeAdapter(list[EngineRecord])
_VERSIONS = TypeAdapter(list[PolicyVersion])

_ERRORS: dict[str, type[CanterError]] = {
    "bad_request": BadRequest,
    "unauthorized": Unauthorized,
    "forbidden": Forbidden,
    "not_found": NotFound,
    "refused": Refused,
    "too_large": PayloadTooLarge,
    "unprocessable": BadRequest,
    "engine_error": EngineError,
    "engine_unavailable": EngineUnavailable,
    "unavailable": StoreError,
}

_IDS_PER_REQUEST = 200  # keeps a request line under 16 kB
_LONGEST_WAIT_S = 30.0  # of one long poll; longer waits are several


class Client:
    """One gateway, one key. Use as an async context manager, inside one event loop.

    Raises the exceptions of `canter.errors` that the gateway answered with, and `GatewayUnavailable` when it did not
    answer within `retry_s`. A request that may have been carried out (the connection broke after it was sent) is
    repeated only if repeating it is harmless; otherwise that, too, is `GatewayUnavailable`, and the caller looks at the
    state again.
    """

    def __init__(self, base_url: str, key: str, *, retry_s: float = 60, timeout_s: float = 60) -> None:
        self._base = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"}
        self._retry_s = retry_s
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=64))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    # -- rollouts and their lifecycle --

    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        reply = await self._json("POST", "/api/rollouts", {"rollouts": list(rollouts)}, repeatable=True)
        return _ROLLOUTS.validate_python(reply["rollouts"])

    async def rollout(self, rollout_id: str, *, hidden: bool = False) -> Rollout:
        query = [("hidden", "1")] if hidden else []
        reply = await self._json("GET", _rollout(rollout_id), query=query)
        return _ROLLOUT.validate_python(reply["rollout"])

    async def rollouts(
        self,
        *,
        states: Sequence[RolloutState] = (),
        group: str | None = None,
        ids: Sequence[str] = (),
        after: str | None = None,
        limit: int = 1000,
        hidden: bool = False,
    ) -> list[Rollout]:
        query = [("state", state.value) for state in states] + [("limit", str(limit))]
        query += [("hidden", "1")] if hidden else []
        query += [("group", group)] if group is not None else []
        query += [("after", after)] if after is not None else []
        found: list[Rollout] = []
        for some in _batches(sorted(set(ids))):
            reply = await self._json("GET", "/api/rollouts", query=query + [("id", rollout_id) for rollout_id in some])
            found += _ROLLOUTS.validate_python(reply["rollouts"])
        return found[:limit]

    async def start_attempt(self, rollout_id: str, number: int) -> Started:
        reply = await self._json("POST", f"{_rollout(rollout_id)}/attempts", {"number": number})
        return Started(_ATTEMPT.validate_python(reply["attempt"]), reply["agent_key"])

    async def set_process(self, rollout_id: str, number: int, process: Mapping[str, Any]) -> Attempt:
        path = f"{_attempt(rollout_id, number)}/process"
        return _ATTEMPT.validate_python((await self._json("PUT", path, dict(process)))["attempt"])

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
        body = {"outcome": outcome, "exit_code": exit_code, "reason": reason, "message": message}
        return await self._change(f"{_attempt(rollout_id, number)}/end", body)

    async def post_reward(self, reward: Reward) -> Rollout:
        body = {"value": reward.value, "source": reward.source, "details": dict(reward.details)}
        return await self._change(f"{_attempt(reward.rollout_id, reward.attempt)}/reward", body)

    async def invalidate(self, rollout_id: str, number: int, reason: Reason, message: str = "") -> Rollout:
        body = {"reason": reason, "message": message}
        return await self._change(f"{_attempt(rollout_id, number)}/invalid", body)

    async def cancel(self, rollout_id: str, message: str = "") -> Rollout:
        return await self._change(f"{_rollout(rollout_id)}/cancel", {"message": message})

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        return _ATTEMPTS.validate_python((await self._json("GET", _rollout(rollout_id)))["attempts"])

    async def open_attempts(self) -> list[Attempt]:
        return _ATTEMPTS.validate_python((await self._json("GET", "/api/attempts"))["attempts"])

    async def reward(self, rollout_id: str) -> Reward | None:
        row = (await self._json("GET", _rollout(rollout_id)))["reward"]
        return None if row is None else _REWARD.validate_python(row)

    async def grading(self, rollout_id: str, attempt: int) -> dict[str, Any]:
        """What a grader needs: `task` (with `hidden`), `outcome`, `exit_code`, `process`, `last_message`, `calls`."""
        return await self._json("GET", f"{_attempt(rollout_id, attempt)}/grading")

    # -- calls --

    async def calls(self, rollout_ids: Sequence[str], *, attempt: int | None = None) -> list[Call]:
        query = [("attempt", str(attempt))] if attempt is not None else []
        found: list[Call] = []
        for some in _batches(sorted(set(rollout_ids))) if rollout_ids else []:
            body = await self._send("GET", "/api/calls", query=query + [("rollout", r) for r in some], repeatable=True)
            found += [wire.call_from_map(row) for row in wire.unpack(body)["calls"]]
        return found

    async def bodies(self, call_id: str) -> CallBodies:
        reply = await self._json("GET", f"/api/calls/{quote(call_id, safe='')}/bodies")
        return CallBodies(orjson.dumps(reply["request"]), orjson.dumps(reply["reply"]))

    # -- keys, engines, policy versions, facts --

    async def issue_key(self, kind: KeyKind) -> str:
        """A new service or admin key; needs an admin key."""
        key: str = (await self._json("POST", "/api/keys", {"kind": kind}))["key"]
        return key

    async def grader_key(self, rollout_id: str, number: int) -> str:
        path = f"{_attempt(rollout_id, number)}/grader-key"
        key: str = (await self._json("POST", path, {}, repeatable=True))["grader_key"]
        return key

    async def set_engine(self, url: str, model: str, version: int, key: str = "") -> None:
        """Registers an engine or refreshes it; `key` is what the gateway shows to the engine."""
        await self._json("PUT", "/api/engines", {"url": url, "model": model, "version": version, "key": key})

    async def remove_engine(self, url: str) -> None:
        await self._json("DELETE", "/api/engines", query=[("url", url)])

    async def engines(self) -> list[EngineRecord]:
        return _ENGINES.validate_python((await self._json("GET", "/api/engines"))["engines"])

    async def pause(self) -> None:
        """Holds new generations at the gateway until `resume`."""
        await self._json("POST", "/api/pause", {}, repeatable=True)

    async def resume(self) -> None:
        await self._json("POST", "/api/resume", {}, repeatable=True)

    async def add_version(self, version: PolicyVersion) -> None:
        body = {"version": version.version, "step": version.step, "path": version.path}
        await self._json("POST", "/api/versions", body, repeatable=True)

    async def versions(self) -> list[PolicyVersion]:
        return _VERSIONS.validate_python((await self._json("GET", "/api/versions"))["versions"])

    async def set_fact(self, name: str, value: Any) -> None:
        await self._json("PUT", f"/api/facts/{quote(name, safe='')}", {"value": value})

    async def fact(self, name: str) -> Any:
        return (await self._json("GET", f"/api/facts/{quote(name, safe='')}"))["value"]

    # -- events --

    async def events(self, after: int, *, timeout_s: float = 0, limit: int = 1000) -> list[Event]:
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = min(_LONGEST_WAIT_S, max(0.0, deadline - time.monotonic()))
            query = [("after", str(after)), ("timeout_s", f"{wait_s:.3f}"), ("limit", str(limit))]
            rows = (await self._json("GET", "/api/events", query=query))["events"]
            if rows or time.monotonic() >= deadline:
                return _EVENTS.validate_python(rows)

    async def counts(self) -> dict[str, int]:
        counts: dict[str, int] = (await self._json("GET", "/api/stats"))["counts"]
        return counts

    # -- transport --

    async def _change(self, path: str, body: Mapping[str, Any]) -> Rollout:
        return _ROLLOUT.validate_python((await self._json("POST", path, body))["rollout"])

    async def _json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Sequence[tuple[str, str]] = (),
        repeatable: bool | None = None,
    ) -> dict[str, Any]:
        repeat = method in ("GET", "PUT", "DELETE") if repeatable is None else repeatable
        data = None if body is None else orjson.dumps(body)
        reply: dict[str, Any] = orjson.loads(await self._send(method, path, data, query=query, repeatable=repeat))
        return reply

    async def _send(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        query: Sequence[tuple[str, str]] = (),
        repeatable: bool,
    ) -> bytes:
        """Sends until there is an answer or `retry_s` have passed; back-off doubles from 50 ms to 1 s."""
        deadline = time.monotonic() + self._retry_s
        pause_s = 0.05
        while True:
            try:
                return await self._once(method, path, data, query)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                safe = repeatable or isinstance(error, aiohttp.ClientConnectorError)
                if not safe or time.monotonic() + pause_s >= deadline:
                    raise GatewayUnavailable(
                        f"{method} {self._base}{path}: {error or type(error).__name__}; is the gateway running there?"
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)

    async def _once(self, method: str, path: str, data: bytes | None, query: Sequence[tuple[str, str]]) -> bytes:
        if self._http is None:
            raise RuntimeError("use `async with Client(…)`: this client is not open")
        async with self._http.request(
            method,
            URL(self._base + path, encoded=True),
            params=list(query),
            data=data,
            headers={"content-type": "application/json"} if data is not None else None,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, connect=5),
        ) as response:
            body = await response.read()
            if response.status >= 400:
                raise _error(response.status, body, f"{method} {path}")
            return body


def _rollout(rollout_id: str) -> str:
    return f"/api/rollouts/{quote(rollout_id, safe='')}"


def _attempt(rollout_id: str, number: int) -> str:
    return f"{_rollout(rollout_id)}/attempts/{number}"


def _batches(ids: Sequence[T]) -> list[Sequence[T]]:
    """Runs of ids that fit one request line; no ids are one empty batch (which means: all)."""
    return [ids[i : i + _IDS_PER_REQUEST] for i in range(0, max(1, len(ids)), _IDS_PER_REQUEST)]


def _error(status: int, body: bytes, request: str) -> CanterError:
    """The exception that an error reply stands for."""
    try:
        error = orjson.loads(body)["error"]
        kind, message = error["type"], error["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        kind, message = "", body[:200].decode("utf-8", "replace")
    fallback = StoreError if status >= 500 else BadRequest
    return _ERRORS.get(kind, fallback)(f"{request}: {status} {message}")
