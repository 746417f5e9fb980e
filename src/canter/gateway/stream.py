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

_UNSENT_BYTES = 2**16
"""What the server takes in without waiting for the client."""
_END_BYTES = 256
"""Terminal events up to this stay whole; of a longer one only its blank line, which makes it an event, is the end."""
_TURNS = 4
"""Turns of the event loop in which a hang-up that the kernel knows of has been told."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines and intervals towards clients, in seconds.

    `body_s`: to send a request body. `headers_after_s`: how long a stream's status line waits for the generation, so
    that a failure can still have a status of its own. `engine_headers_s`: the same while no engine can be reached: all
    clients try again after a 503, few after an error inside a stream. `keep_alive_s`: between signs of life after that.
    `send_s`: how long a client may take in nothing of its reply.
    """

    body_s: float = 60.0
    headers_after_s: float = 10.0
    engine_headers_s: float = 60.0
    keep_alive_s: float = 5.0
    send_s: float = 60.0


async def carry(request: Request, calls: ModelCalls, dialect: Dialect, boarding: Boarding, timing: Timing) -> None:
    """Waits for the flight and sends its reply. Raises what the flight raised while the status line is still free;
    `ClientGone` where the client has left, and then the flight is left, too."""
    gone = asyncio.ensure_future(request.gone())
    arrived = False
    try:
        if boarding.asked.stream:
            await _stream(request, calls, dialect, boarding, gone, timing)
        else:
            await _whole(request, boarding, gone, timing)
        arrived = True
    finally:
        gone.cancel()
        if arrived:
            calls.delivered(boarding)
        else:
            calls.leave(boarding)


async def _whole(request: Request, boarding: Boarding, gone: asyncio.Future[None], timing: Timing) -> None:
    await _landing(boarding, gone, None)
    body = _finished(boarding).body
    if len(body) <= _UNSENT_BYTES:
        await _still_there(gone)
        await request.reply(Reply(200, body))
        return
    await request.start_reply(len(body))
    await _send(request, body[:-1], body[-1:], gone, timing)


async def _stream(
    request: Request,
    calls: ModelCalls,
    dialect: Dialect,
    boarding: Boarding,
    gone: asyncio.Future[None],
    timing: Timing,
) -> None:
    signs = await _keep_alive(request, calls, dialect, boarding, gone, timing)
    try:
        finished = _finished(boarding)
    except CanterError as error:
        if request.started:  # too late for a status: say so in the stream, which then ends without its terminal event
            body = body_of(error, dialect.shape, request.id)
            await _write(request, dialect.failure(boarding.asked, boarding.start, body, signs), timing)
        raise
    if not request.started:
        await _still_there(gone)
        await request.start_stream()
    *events, end = dialect.events(boarding.asked, finished.reply, signs)
    if len(end) > _END_BYTES:
        events.append(end[:-2])
        end = end[-2:]
    await _send(request, b"".join(events), end, gone, timing)


async def _keep_alive(
    request: Request,
    calls: ModelCalls,
    dialect: Dialect,
    boarding: Boarding,
    gone: asyncio.Future[None],
    timing: Timing,
) -> int:
    """Waits for the flight to land; the number of signs of life that the client got meanwhile."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    timeout_s, signs = timing.headers_after_s, 0
    while True:
        await _landing(boarding, gone, timeout_s)
        if boarding.flight.task.done():
            return signs
        timeout_s = timing.keep_alive_s
        if not request.started:
            left_s = began + timing.engine_headers_s - loop.time()
            if left_s > 0 and calls.engine_away:
                timeout_s = min(timeout_s, left_s)
                continue
            await request.start_stream()
        await _write(request, dialect.keep_alive(boarding.asked, boarding.start, signs), timing)
        signs += 1


async def _send(request: Request, data: bytes, end: bytes, gone: asyncio.Future[None], timing: Timing) -> None:
    """Sends the rest of a reply. It has arrived where the client is there when its `end` leaves; that of a long one
    waits until the client has taken what stands before it."""
    if len(data) > _UNSENT_BYTES:
        for start in range(0, len(data), _UNSENT_BYTES):
            await _write(request, data[start : start + _UNSENT_BYTES], timing)
        await _write(request, b"", timing)
        data = b""
    await _still_there(gone)
    await _write(request, data + end, timing, last=True)


async def _write(request: Request, data: bytes, timing: Timing, *, last: bool = False) -> None:
    """Sends a part of a reply once the client has taken most of what was sent before. Raises `ClientGone` where it
    takes in nothing."""
    try:
        async with asyncio.timeout(timing.send_s):
            await request.write(data, last=last)
    except TimeoutError as error:
        raise ClientGone(f"the client took in nothing of its reply for {timing.send_s:g} s") from error


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


async def _still_there(gone: asyncio.Future[None]) -> None:
    """Raises `ClientGone` where the client has hung up already, though nobody has been told yet."""
    for _ in range(_TURNS):
        if gone.done():
            break
        await asyncio.sleep(0)
    _check(gone)


def _check(gone: asyncio.Future[None]) -> None:
    if gone.done():
        raise ClientGone("the client closed the connection before it had its reply")
