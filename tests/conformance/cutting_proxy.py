"""A proxy between harness and gateway that loses, cuts and multiplies what it carries, on plan.

One request a connection: both sides are told `connection: close`. A plan says what happens to the requests of a turn,
in their order; the turn is the number of tool results in a request. Requests without tools pass untouched.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

STORM = 30
_TERMINAL = (b"data: [DONE]\n\n", b"event: response.completed\n", b"event: message_stop\n")
_DEADLINE_S = 300.0


class Trouble(StrEnum):
    """What happens to a request."""

    REFUSE = "refuse"
    """The connection is reset before anything of the request is passed on."""
    DROP = "drop"
    """Both connections are reset while the reply is being made."""
    CUT = "cut"
    """Of the reply one half arrives, then both connections are reset."""
    CUT_END = "cut_end"
    """Everything but the terminal event (or the last byte of a JSON) arrives, then both connections are reset."""
    HANG_UP = "hang_up"
    """The whole reply arrives, then both connections are reset: the end of the HTTP body is never read."""
    STORM = "storm"
    """The request arrives thirty times; twenty-nine of the clients leave again."""


def turn_of(body: Mapping[str, Any]) -> int | None:
    """The number of tool results in a request of any protocol, `None` for one without tools."""
    if not body.get("tools"):
        return None
    items = body.get("input") if "input" in body else body.get("messages")
    if not isinstance(items, list):
        return 0
    blocks = [part for item in items if isinstance(item.get("content"), list) for part in item["content"]]
    return (
        sum(item.get("role") == "tool" for item in items)
        + sum(item.get("type") in ("function_call_output", "custom_tool_call_output") for item in items)
        + sum(isinstance(part, dict) and part.get("type") == "tool_result" for part in blocks)
    )


@dataclass
class CuttingProxy:
    """`plan`: turn → troubles of its requests, in order. `carried` is what came: (turn, trouble).

    `on_turn` is told of every request of a turn, before it is passed on.
    """

    plan: Mapping[int, Sequence[Trouble]]
    on_turn: Callable[[int], Coroutine[Any, Any, None]] | None = None
    carried: list[tuple[int, Trouble | None]] = field(default_factory=list)

    @asynccontextmanager
    async def between(self, url: str) -> AsyncIterator[str]:
        self._upstream = url.removeprefix("http://").split(":")
        self._left = {turn: list(troubles) for turn, troubles in self.plan.items()}
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with asyncio.timeout(_DEADLINE_S):
                if (request := await _read_request(reader)) is not None:
                    await self._carry(request, reader, writer)
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            _reset(writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _carry(self, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turn = _turn_in(request)
        trouble = None
        if turn is not None:
            left = self._left.get(turn)
            trouble = left.pop(0) if left else None
            self.carried.append((turn, trouble))
            if self.on_turn is not None:
                await self.on_turn(turn)
        if trouble is Trouble.REFUSE:
            _reset(writer)
            return
        if trouble is Trouble.STORM:
            for _ in range(STORM - 1):
                copy = asyncio.create_task(self._leave_early(request))
                self._tasks.add(copy)
                copy.add_done_callback(self._tasks.discard)
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        try:
            up_writer.write(request)
            await _relay(up_reader, reader, writer, trouble)
            if trouble in (Trouble.DROP, Trouble.CUT, Trouble.CUT_END, Trouble.HANG_UP):
                _reset(up_writer)
                _reset(writer)
        finally:
            up_writer.close()

    async def _leave_early(self, request: bytes) -> None:
        """The same request from a client that does not wait for the reply."""
        await asyncio.sleep(random.uniform(0, 0.1))
        _, writer = await asyncio.open_connection(*self._upstream)
        writer.write(request)
        await asyncio.sleep(random.uniform(0.01, 0.2))
        _reset(writer)


async def _relay(
    upstream: asyncio.StreamReader, client: asyncio.StreamReader, writer: asyncio.StreamWriter, trouble: Trouble | None
) -> None:
    """Passes the reply on, as much of it as there shall be; ends when the client has left, too."""
    left = asyncio.ensure_future(client.read(1))
    seen = b""
    try:
        while True:
            part = asyncio.ensure_future(upstream.read(2**16))
            timeout_s = 0.15 if trouble is Trouble.DROP else None
            await asyncio.wait({part, left}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not part.done():
                part.cancel()
                return
            data = part.result()
            if not data:
                return
            seen += data
            if (lost := _lost(seen, trouble)) is None:
                writer.write(data)
                await writer.drain()
                continue
            writer.write(data[: len(data) - lost])
            await writer.drain()
            await asyncio.sleep(0.1)  # so that it is read before the reset is
            return
    finally:
        left.cancel()


def _lost(seen: bytes, trouble: Trouble | None) -> int | None:
    """How many bytes of a reply, as far as it has come, are lost; `None` while it goes on."""
    head, _, body = seen.partition(b"\r\n\r\n")
    if trouble is Trouble.CUT and len(body) > 200:
        return len(body) // 2
    ends = [at for mark in _TERMINAL if (at := body.find(mark)) >= 0]
    whole = bool(ends) if b"event-stream" in head else body.rstrip().endswith(b"}")
    if not whole or trouble not in (Trouble.CUT_END, Trouble.HANG_UP):
        return None
    return 0 if trouble is Trouble.HANG_UP else len(body) - ends[0] if ends else 1


async def _read_request(reader: asyncio.StreamReader) -> bytes | None:
    """A whole request, changed so that it is the only one of its connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = head[:-4].split(b"\r\n")
    length = next((int(v) for k, _, v in (x.partition(b":") for x in lines) if k.lower() == b"content-length"), 0)
    body = await reader.readexactly(length)
    kept = [line for line in lines if not line.lower().startswith((b"connection:", b"expect:"))]
    return b"\r\n".join([*kept, b"connection: close", b"", b""]) + body


def _turn_in(request: bytes) -> int | None:
    body = request.partition(b"\r\n\r\n")[2]
    return turn_of(json.loads(body)) if body else None


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection with a reset."""
    sock = writer.get_extra_info("socket")
    if sock is not None and not writer.transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
