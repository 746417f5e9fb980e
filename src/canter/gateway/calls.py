"""One model call, from its canonical request to the committed reply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from canter.errors import CanterError, EngineError
from canter.gateway.attempts import Conversations
from canter.gateway.auth import AttemptRef
from canter.gateway.dialects import Dialect
from canter.gateway.dialects.canonical import Asked, Chat, Start
from canter.gateway.engines import Running
from canter.gateway.gate import Gate
from canter.gateway.http import HttpError, json_object, new_id
from canter.gateway.identity import request_digest
from canter.gateway.labels import classify
from canter.gateway.problems import status_and_kind
from canter.gateway.replay import Flight, Flights
from canter.gateway.source import Sampled, Source, Ticket
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

_LARGE_BYTES = 2**20
"""Requests from so many bytes on are read in a thread: about 20 ms of work."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A committed call's reply: as JSON, and as the bytes that are sent and recorded."""

    reply: dict[str, Any]
    body: bytes


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request that is to be answered. `headers` have lower-case names."""

    ref: AttemptRef
    dialect: Dialect
    headers: Mapping[bytes, bytes]
    asked: Asked
    digest: bytes
    raw: bytes


@dataclass(frozen=True, slots=True)
class Boarding:
    """A client's place on the flight that answers its request; another client may have started it."""

    asked: Asked
    key: tuple[AttemptRef, bytes]
    flight: Flight[Finished]

    @property
    def start(self) -> Start:
        return self.flight.start


def _read(dialect: Dialect, raw: bytes) -> tuple[Asked, bytes]:
    """A request, and its digest."""
    asked = dialect.parse(json_object(raw))
    return asked, request_digest(asked)


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
    ) -> None:
        self._store = store
        self._source = source
        self._gate = gate
        self._conversations = conversations
        self._models = models
        self._hold_s = hold_s
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
        asked, digest = await self._read(dialect, raw)
        incoming = Incoming(ref, dialect, headers, asked, digest, raw)
        start = Start(new_id(dialect.id_prefix), int(time.time()))
        flight = self._flights.board((ref, digest), start, lambda flight: self._answer(incoming, flight))
        return Boarding(asked, (ref, digest), flight)

    async def count(self, ref: AttemptRef, dialect: Dialect, raw: bytes) -> int:
        """Tokens of the prompt that the engine would see for a request now; nothing is sampled or recorded."""
        asked, _ = await self._read(dialect, raw)
        async with self._conversations.use(ref) as conversation:
            return await self._source.count(asked, conversation, len(raw))

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

    async def _read(self, dialect: Dialect, raw: bytes) -> tuple[Asked, bytes]:
        if len(raw) < _LARGE_BYTES:
            asked, digest = _read(dialect, raw)
        else:
            asked, digest = await asyncio.to_thread(_read, dialect, raw)
        self.check_model(asked.model)
        return asked, digest

    async def _answer(self, incoming: Incoming, flight: Flight[Finished]) -> Finished:
        ref, raw, asked = incoming.ref, incoming.raw, incoming.asked
        async with self._conversations.use(ref) as conversation:
            running = Running(flight.start.id)
            flight.abort = running.abort
            ticket = Ticket(
                flight.start,
                conversation.take_ordinal(),
                time.time(),
                asked,
                incoming.digest,
                len(raw),
                incoming.dialect,
                conversation,
                running,
                classify(incoming.headers, asked, tools_seen=conversation.tools_seen),
            )
            if isinstance(asked.prompt, Chat) and asked.prompt.tools:
                conversation.tools_seen = True
            sampled = await self._sample(ticket, raw, flight)
            flight.sampled = not flight.abandoned
            body = orjson.dumps(sampled.reply)
            if flight.abandoned:
                call = _call(ticket, sampled, CallStatus.CANCELLED, Reason.CLIENT_GONE)
            else:
                call = _call(ticket, sampled, CallStatus.OK, why_untrainable(sampled.generation))
            await self._store.append_call(call, CallBodies(raw, body))
            if call.status is CallStatus.OK:
                async with conversation.planning:
                    sampled.remember()
            if call.untrainable is not None:
                logger.warning("call %s of attempt %s will not be trained: %s", call.id, ref, call.untrainable)
            return Finished(sampled.reply, body)

    async def _sample(self, ticket: Ticket, raw: bytes, flight: Flight[Finished]) -> Sampled:
        """Samples once the gate is open. What fails for no fault of the harness, or is not wanted any more, is recorded
        as such before the harness hears of it."""
        try:
            await self._gate.passed(self._hold_s)
            return await self._source.sample(ticket)
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
