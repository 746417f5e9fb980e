"""Carries a reply to its client, whole or as events, and knows whether it arrived."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from canter.errors import CanterError
from canter.gateway.calls import Boarding, Finished, ModelCalls
from canter.gateway.dialects import Dialect
from canter.gateway.http import ClientGone, HttpError, Reply, Request
from canter.gateway.problems import body_of


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines and intervals towards clients, in seconds.

    `body_s`: to send a request body. `headers_after_s`: how long a stream's status line waits for the generation, so
    that a failure can still have a status of its own. `keep_alive_s`: between signs of life after that.
    """

    body_s: float = 60.0
    headers_after_s: float = 10.0
    keep_alive_s: float = 5.0


async def carry(request: Request, calls: ModelCalls, dialect: Dialect, boarding: Boarding, timing: Timing) -> None:
    """Waits for the flight and sends its reply. Raises what the flight raised while the status line is still free;
    `ClientGone` where the client has left, and then the flight is left, too."""
    gone = asyncio.ensure_future(request.gone())
    arrived = False
    try:
        asked = boarding.asked
        if asked.stream:
            await _stream(request, dialect, boarding, gone, timing)
        else:
            await _whole(request, boarding, gone)
        arrived = True
    finally:
        gone.cancel()
        if arrived:
            calls.delivered(boarding)
        else:
            calls.leave(boarding)


async def _whole(request: Request, boarding: Boarding, gone: asyncio.Future[None]) -> None:
    await _landing(boarding, gone, None)
    await request.reply(Reply(200, _finished(boarding).body))


async def _stream(
    request: Request, dialect: Dialect, boarding: Boarding, gone: asyncio.Future[None], timing: Timing
) -> None:
    task = boarding.flight.task
    timeout_s, signs = timing.headers_after_s, 0
    while True:
        await _landing(boarding, gone, timeout_s)
        if task.done():
            break
        if not request.started:
            await request.start_stream()
        await request.write(dialect.keep_alive(boarding.asked, boarding.start, signs))
        signs += 1
        timeout_s = timing.keep_alive_s
    await _send_events(request, dialect, boarding, gone, signs)


async def _send_events(
    request: Request, dialect: Dialect, boarding: Boarding, gone: asyncio.Future[None], signs: int
) -> None:
    """Everything before the terminal event may be lost; whether the client is there for that one decides."""
    try:
        finished = _finished(boarding)
    except CanterError as error:
        if request.started:  # too late for a status: say so in the stream, which then ends without its terminal event
            body = body_of(error, dialect.shape, request.id)
            await request.write(dialect.failure(boarding.asked, boarding.start, body, signs))
        raise
    if not request.started:
        await request.start_stream()
    events = list(dialect.events(boarding.asked, finished.reply, signs))
    await request.write(b"".join(events[:-1]))
    await asyncio.sleep(0)  # lets a hang-up that has already been noticed be told
    _check(gone)
    await request.write(events[-1], last=True)


async def _landing(boarding: Boarding, gone: asyncio.Future[None], timeout_s: float | None) -> None:
    """Waits for the flight, at most `timeout_s`. Raises `ClientGone`."""
    waits: set[asyncio.Future[Any]] = {boarding.flight.task, gone}
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    _check(gone)


def _finished(boarding: Boarding) -> Finished:
    """What the flight gave. Raises what it raised, and 503 where the gateway is shutting down."""
    if boarding.flight.task.cancelled():
        raise HttpError(503, "shutting_down", "the gateway is shutting down; try again when it is back")
    return boarding.flight.task.result()


def _check(gone: asyncio.Future[None]) -> None:
    if gone.done():
        raise ClientGone("the client closed the connection before its reply was ready")
