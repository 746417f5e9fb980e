"""One model call, from its canonical request to the committed reply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson

from canter.errors import CanterError, EngineError, NotFound, PayloadTooLarge
from canter.gateway.attempts import Conversations
from canter.gateway.auth import AttemptRef
from canter.gateway.continuation import refers_back
from canter.gateway.dialects import Dialect
from canter.gateway.dialects.canonical import Asked, Chat, Start
from canter.gateway.dialects.responses import Responses
from canter.gateway.engines import Running
from canter.gateway.gate import Gate
from canter.gateway.http import HttpError, json_object, new_id
from canter.gateway.identity import agent_of, request_digest
from canter.gateway.labels import classify
from canter.gateway.problems import status_and_kind
from canter.gateway.replay import Flight, Flights
from canter.gateway.source import Sampled, Source, Ticket
from canter.gateway.threads import check_known, complete, previous_message
from canter.store import Store
from canter.types import (
    NO_IDS,
    NO_LOGPROBS,
    Call,
    CallBodies,
    CallStatus,
    FinishReason,
    Generation,
    Reason,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LARGE_BYTES = 2**20
"""Requests from so many bytes on are read in a thread: about 20 ms of work."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A committed call's reply: as JSON, and as the bytes that are sent and recorded."""

    reply: dict[str, Any]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Read:
    """A request, read and complete, its digest, how many bytes of JSON it took, and the JSON to be recorded."""

    asked: Asked
    digest: bytes
    size: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request that is to be answered. `headers` have lower-case names; `raw` is what is recorded."""

    ref: AttemptRef
    dialect: Dialect
    headers: Mapping[bytes, bytes]
    raw: bytes
    read: _Read


@dataclass(frozen=True, slots=True)
class Boarding:
    """A client's place on the flight that answers its request; another client may have started it."""

    asked: Asked
    key: tuple[AttemptRef, bytes, tuple[bytes, ...]]
    flight: Flight[Finished]

    @property
    def start(self) -> Start:
        return self.flight.start


def _parse(dialect: Dialect, body: Mapping[str, Any]) -> tuple[Asked, bytes]:
    """A request, and its digest."""
    asked = dialect.parse(body)
    return asked, request_digest(asked)


async def _aside(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """Work on `size` bytes, in a thread where that takes long."""
    return work(*arguments) if size < _LARGE_BYTES else await asyncio.to_thread(work, *arguments)


class ModelCalls:
    """Answers model requests: plan, sample, check, commit; then the reply may leave."""

    def __init__(
        self,
        store: Store,
        source: Source,
        gate: Gate,
        conversations: Conversations,
        *,
        models: Sequence[str],
        hold_s: float,
        max_body_bytes: int,
    ) -> None:
        self._store = store
        self._source = source
        self._gate = gate
        self._conversations = conversations
        self._models = models
        self._hold_s = hold_s
        self._max_body_bytes = max_body_bytes
        self._flights: Flights[Finished] = Flights()

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return self._flights.waiting

    @property
    def engine_away(self) -> bool:
        """Whether there is nothing to sample with at the moment."""
        return self._source.away

    async def board(self, ref: AttemptRef, dialect: Dialect, headers: Mapping[bytes, bytes], raw: bytes) -> Boarding:
        """Starts to answer a request, or joins the same one. Raises `BadRequest`, or `HttpError` for a model that is
        not here, before anything is sampled."""
        read = await self._read(ref, dialect, raw)
        incoming = Incoming(ref, dialect, headers, read.raw, read)
        start = Start(new_id(dialect.id_prefix), int(time.time()))
        key = (ref, read.digest, agent_of(headers))
        flight = self._flights.board(key, start, lambda flight: self._answer(incoming, flight))
        return Boarding(read.asked, key, flight)

    async def count(self, ref: AttemptRef, dialect: Dialect, raw: bytes) -> int:
        """Tokens of the prompt that the engine would see for a request now; nothing is sampled or recorded."""
        read = await self._read(ref, dialect, raw)
        async with self._conversations.use(ref) as conversation:
            return await self._source.count(read.asked, conversation, read.size)

    async def stored(self, ref: AttemptRef, response_id: str) -> bytes:
        """The JSON of a reply that an attempt may refer to by its id. Raises `NotFound`."""
        async with self._conversations.use(ref) as conversation:
            if response_id not in conversation.answered:
                raise NotFound(f"Response with id {response_id[:80]!r} not found.")
        return (await self._store.bodies(response_id)).reply

    def delivered(self, boarding: Boarding) -> None:
        self._flights.delivered(boarding.key, boarding.flight)

    def leave(self, boarding: Boarding) -> None:
        self._flights.leave(boarding.key, boarding.flight)

    def check_model(self, name: str) -> None:
        if name not in self._models:
            raise HttpError(
                404, "model_not_found", f"The model {name!r} does not exist; this run serves {self._models[0]!r}."
            )

    async def close(self) -> None:
        await self._flights.close()

    async def _read(self, ref: AttemptRef, dialect: Dialect, raw: bytes) -> _Read:
        size = len(raw)
        body = await _aside(size, json_object, raw)
        if refers_back(dialect.name, body):
            async with self._conversations.use(ref) as conversation:
                body, more = await conversation.answered.complete(
                    body, self._store.bodies, max_bytes=self._max_body_bytes
                )
            size += more
        elif (previous := previous_message(dialect.name, body)) is not None:
            body, raw = await self._threaded(ref, body, previous)
            size = len(raw)
        asked, digest = await _aside(size, _parse, dialect, body)
        self.check_model(asked.model)
        return _Read(asked, digest, size, raw)

    async def _threaded(self, ref: AttemptRef, body: dict[str, Any], previous: str) -> tuple[dict[str, Any], bytes]:
        """A request that goes on from a reply, complete, and its JSON."""
        async with self._conversations.use(ref) as conversation:
            check_known(previous, conversation.tree)
        body = complete(body, await self._store.bodies(previous))
        raw = orjson.dumps(body)
        if len(raw) > self._max_body_bytes:
            raise PayloadTooLarge(f"the conversation behind {previous!r} is over {self._max_body_bytes} bytes")
        return body, raw

    async def _answer(self, incoming: Incoming, flight: Flight[Finished]) -> Finished:
        ref, raw, asked = incoming.ref, incoming.raw, incoming.read.asked
        async with self._conversations.use(ref) as conversation:
            unsent = conversation.unsent.take(incoming.read.digest)
            if unsent is not None:
                flight.sampled = True  # nobody's leaving throws it away
                flight.start = Start(unsent, flight.start.created)
                return await self._recorded(unsent)
            running = Running(flight.start.id)
            flight.abort = running.abort
            ticket = Ticket(
                flight.start,
                conversation.take_ordinal(),
                time.time(),
                asked,
                incoming.read.digest,
                incoming.read.size,
                incoming.dialect,
                conversation,
                running,
                classify(incoming.headers, asked, tools_seen=conversation.tools_seen),
            )
            if isinstance(asked.prompt, Chat) and asked.prompt.tools:
                conversation.tools_seen = True
            sampled, body = await self._sample(ticket, raw, flight)
            flight.sampled = not flight.abandoned
            if flight.abandoned:
                call = _call(ticket, sampled, CallStatus.CANCELLED, Reason.CLIENT_GONE)
            else:
                call = _call(ticket, sampled, CallStatus.OK, why_untrainable(sampled.generation))
            await self._store.append_call(call, CallBodies(raw, body))
            if call.status is CallStatus.OK:
                async with conversation.planning:
                    sampled.remember()
                conversation.unsent.arrived(call.parent_id, call.proposed_parent_id)
                if asked.dialect == Responses.name:
                    conversation.answered.add(call.id, asked.body, sampled.reply)
            if call.untrainable is not None:
                logger.warning("call %s of attempt %s will not be trained: %s", call.id, ref, call.untrainable)
            return Finished(sampled.reply, body)

    async def _recorded(self, call_id: str) -> Finished:
        """The reply of a call that was committed, and not sent as far as is known."""
        logger.info("call %s is sent again: an earlier gateway may not have done so", call_id)
        body = (await self._store.bodies(call_id)).reply
        return Finished(json_object(body), body)

    async def _sample(self, ticket: Ticket, raw: bytes, flight: Flight[Finished]) -> tuple[Sampled, bytes]:
        """Samples once the gate is open; also the reply's JSON as bytes. What fails for no fault of the harness, or is
        not wanted any more, is recorded as such before the harness hears of it."""
        try:
            await self._gate.passed(self._hold_s)
            sampled = await self._source.sample(ticket)
            return sampled, orjson.dumps(sampled.reply)
        except asyncio.CancelledError:
            if flight.abandoned:
                await self._record(ticket, raw, CallStatus.CANCELLED, Reason.CLIENT_GONE)
            else:  # this gateway ends
                await self._record(ticket, raw, CallStatus.ERROR, Reason.GATEWAY_UNAVAILABLE)
            raise
        except Exception as error:
            if (fault := infrastructure_fault(error)) is not None:
                await self._record(ticket, raw, CallStatus.ERROR, fault)
            raise

    async def _record(self, ticket: Ticket, raw: bytes, status: CallStatus, reason: Reason) -> None:
        """Commits a call of which no token is known. A lost record is logged: the first failure counts more."""
        try:
            await self._store.append_call(_call(ticket, _NOTHING, status, reason), CallBodies(raw, b""))
        except CanterError as error:
            logger.warning("call %s of attempt %s was not recorded: %s", ticket.call_id, ticket.conversation.ref, error)


_NOTHING = Sampled(
    reply={},
    generation=Generation(NO_IDS, NO_LOGPROBS, FinishReason.ABORT, ()),
    parent_id=None,
    prefix_len=0,
    suffix=NO_IDS,
    effective={},
    remember=lambda: None,
)
"""Of a call that gave no token that is known."""


def _call(ticket: Ticket, sampled: Sampled, status: CallStatus, untrainable: Reason | None) -> Call:
    """The record of a call."""
    ref, generation = ticket.conversation.ref, sampled.generation
    return Call(
        id=ticket.call_id,
        rollout_id=ref.rollout_id,
        attempt=ref.number,
        ordinal=ticket.ordinal,
        parent_id=sampled.parent_id,
        prefix_len=sampled.prefix_len,
        suffix=sampled.suffix,
        sampled=generation.ids,
        logprobs=generation.logprobs,
        versions=generation.versions,
        status=status,
        finish_reason=generation.finish_reason,
        untrainable=untrainable,
        label=ticket.label.name,
        dialect=ticket.asked.dialect,
        model=ticket.asked.model,
        fork=sampled.fork,
        proposed_parent_id=sampled.proposed_parent_id,
        fork_at=sampled.fork_at,
        requested=ticket.asked.requested,
        effective=sampled.effective,
        started_at=ticket.started_at,
        finished_at=time.time(),
    )


def infrastructure_fault(error: Exception) -> Reason | None:
    """Why a call failed that is answered with a 5xx, `None` where the request itself was wrong."""
    if isinstance(error, EngineError):
        return Reason.ENGINE_UNAVAILABLE
    refused = isinstance(error, CanterError) and status_and_kind(error)[0] < 500
    return None if refused else Reason.GATEWAY_UNAVAILABLE


def why_untrainable(generation: Generation) -> Reason | None:
    """What does not agree in a generation, `None` where its tokens may be trained."""
    count = len(generation.ids)
    if len(generation.logprobs) == 0:
        return Reason.MISSING_LOGPROBS
    if len(generation.logprobs) != count:
        return Reason.LENGTH_MISMATCH
    if not np.isfinite(generation.logprobs).all():
        return Reason.NOT_FINITE
    end = 0
    for span in sorted(generation.versions, key=lambda span: span.start):
        if span.start != end or span.end <= span.start:
            return Reason.MISSING_VERSION
        end = span.end
    return None if end == count else Reason.MISSING_VERSION
