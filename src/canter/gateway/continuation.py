"""What a Responses request leaves to the server: the history behind `previous_response_id`, and items by their ids.

Both are put into the request before it is parsed, so that everything behind sees a request that is complete. Stored is
what the attempt was answered before (`store: false` excepted): the record of its calls, nothing besides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from canter.errors import BadRequest, PayloadTooLarge
from canter.gateway.dialects.responses import Responses
from canter.gateway.dialects.responses_input import is_reference, items_of, origin
from canter.gateway.http import json_object
from canter.types import Call, CallBodies, CallStatus

_KEEP = 4
"""So many histories are at hand, of the responses that were made or used last; others are read from the store."""

Read = Callable[[str], Awaitable[CallBodies]]
"""The bodies of a recorded call."""


def refers_back(dialect: str, body: Mapping[str, Any]) -> bool:
    """Whether a request leaves something to the server."""
    if dialect != Responses.name:
        return False
    return body.get("previous_response_id") is not None or any(True for _ in _references(body))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A response as it is stored, with its request."""

    request: Mapping[str, Any]
    output: list[Any]


class Answered:
    """The stored responses of one attempt."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._histories: OrderedDict[str, bytes] = OrderedDict()

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._ids

    @property
    def size(self) -> int:
        """Bytes of memory, roughly."""
        return sum(map(len, self._histories.values())) + 120 * len(self._ids)

    def add(self, call_id: str, body: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        """Takes a reply that is committed; `body` is its complete request. With `store: false` it is forgotten."""
        if body.get("store") is not False:
            self._ids.add(call_id)
            self._hold(call_id, orjson.dumps([*items_of(body), *reply["output"]]))

    async def complete(self, body: Mapping[str, Any], read: Read, *, max_bytes: int) -> tuple[dict[str, Any], int]:
        """A request with what it left to the server, and how many bytes of JSON came in. Raises `BadRequest` for what
        is not stored, and `PayloadTooLarge` over `max_bytes`."""
        items, size = await self._resolved(body, read), 0
        previous = body.get("previous_response_id")
        if previous is not None:
            history = await self._history(self._known(previous), read)
            size = len(history)
            if size > max_bytes:
                raise PayloadTooLarge(
                    f"the history behind {previous!r} is {size} bytes long; requests may have {max_bytes}"
                )
            items = [*orjson.loads(history), *items]
        return {**body, "input": items}, size

    def _known(self, response_id: object) -> str:
        if not isinstance(response_id, str) or response_id not in self._ids:
            raise BadRequest(
                f"Previous response with id {str(response_id)[:80]!r} not found: it must be one of this attempt, and "
                "not one that was made with store: false; send the whole input otherwise",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return response_id

    async def _history(self, response_id: str, read: Read) -> bytes:
        """All items before and of a response, as JSON. What is not at hand is read, one call for each response."""
        missing: list[tuple[str, _Stored]] = []
        at: str | None = response_id
        while at is not None and at not in self._histories:
            stored = _stored(await read(at))
            missing.append((at, stored))
            at = stored.request.get("previous_response_id")
        items = orjson.loads(self._histories[at]) if at is not None else []
        for _, stored in reversed(missing):
            items += [*await self._resolved(stored.request, read), *stored.output]
        if missing:
            self._hold(response_id, orjson.dumps(items))
        self._histories.move_to_end(response_id)
        return self._histories[response_id]

    async def _resolved(self, body: Mapping[str, Any], read: Read) -> list[Any]:
        """The items of a request with those in place that it only names."""
        items = list(items_of(body))
        outputs: dict[str, list[Any]] = {}
        for place, response_id, index in _references(body):
            if response_id in self._ids:
                if response_id not in outputs:
                    outputs[response_id] = _stored(await read(response_id)).output
                _put(items, place, outputs[response_id], index)
        return items

    def _hold(self, response_id: str, history: bytes) -> None:
        self._histories[response_id] = history
        while len(self._histories) > _KEEP:
            self._histories.popitem(last=False)


def complete_recorded(calls: Sequence[tuple[Call, CallBodies]], answered: Answered) -> list[tuple[Call, CallBodies]]:
    """The recorded calls of an attempt, in their order, with complete requests, as they were when they were answered;
    `answered` takes their replies."""
    requests = {call.id: json_object(bodies.request) for call, bodies in calls if call.dialect == Responses.name}
    wanted = {request.get("previous_response_id") for request in requests.values()}
    referred = {id_ for request in requests.values() for _, id_, _ in _references(request)}
    histories: dict[str, list[Any]] = {}
    outputs: dict[str, list[Any]] = {}
    done: list[tuple[Call, CallBodies]] = []
    for call, bodies in calls:
        if call.id not in requests:
            done.append((call, bodies))
            continue
        body = requests.pop(call.id)
        whole = _completed(body, histories, outputs)
        done.append((call, bodies if whole is body else replace(bodies, request=orjson.dumps(whole))))
        if call.status is CallStatus.OK:
            reply = json_object(bodies.reply)
            answered.add(call.id, whole, reply)
            if call.id in wanted:
                histories[call.id] = [*items_of(whole), *reply["output"]]
            if call.id in referred:
                outputs[call.id] = reply["output"]
    return done


def _completed(
    body: dict[str, Any], histories: Mapping[str, list[Any]], outputs: Mapping[str, list[Any]]
) -> dict[str, Any]:
    if not refers_back(Responses.name, body):
        return body
    items = list(items_of(body))
    for place, response_id, index in _references(body):
        _put(items, place, outputs.get(response_id, []), index)
    return {**body, "input": [*histories.get(body.get("previous_response_id") or "", []), *items]}


def _references(body: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """Items that are only named: their place in the input, the response, and the place in its output."""
    items = body.get("input")
    for place, item in enumerate(items if isinstance(items, list) else []):
        if is_reference(item):
            named = origin(item.get("id"))
            if named is not None:
                yield place, Responses.id_prefix + named[0], named[1]


def _put(items: list[Any], place: int, output: Sequence[Any], index: int) -> None:
    """Puts the output's item in one place, if it is the one that is named there."""
    if index < len(output) and output[index].get("id") == items[place].get("id"):
        items[place] = output[index]


def _stored(bodies: CallBodies) -> _Stored:
    return _Stored(json_object(bodies.request), json_object(bodies.reply)["output"])
