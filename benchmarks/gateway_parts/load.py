"""A load generator for chat completions over HTTP/1.1 keep-alive, and what the kernel says of a process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
FILLER = "the quick brown fox jumps over the lazy dog; def f(x): return x+1\n"


@dataclass(frozen=True)
class Load:
    """What a run of requests took. Latencies in ms."""

    calls: int
    wall_s: float
    p50_ms: float
    p99_ms: float
    errors: int
    first_error: str

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.wall_s


def chat_body(model: str, size: int, prompt_tokens: int, tokens: int) -> bytes:
    """A request of about `size` bytes in 20 turns, whose reply the fake upstream makes as long as is said."""
    messages = [{"role": "system", "content": f"FAKE:p{prompt_tokens}:c{tokens} You are a helpful agent."}]
    per_turn = max(64, (size - 300) // 20)
    total = 0
    while total < size - 300:
        text = (FILLER * (per_turn // len(FILLER) + 1))[: min(per_turn, size - 300 - total)]
        messages.append({"role": ("user", "assistant")[len(messages) % 2 == 0], "content": text})
        total += len(text) + 40
    return json.dumps({"model": model, "messages": messages, "max_tokens": tokens, "logprobs": True}).encode()


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.buffer = bytearray()
        self.reply: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_lost(self, error: Exception | None) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(error or ConnectionError("closed"))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        length = LENGTH.search(self.buffer, 0, head + 2)
        assert length is not None, "the server must send a content length"
        if len(self.buffer) < head + 4 + int(length.group(1)) or self.reply is None:
            return
        status, body = int(self.buffer[9:12]), bytes(self.buffer[head + 4 :])
        self.buffer.clear()
        self.reply.set_result((status, body))

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        self.reply = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.reply


async def load(
    host: str, port: int, path: str, body: bytes, keys: Sequence[str], *, connections: int, calls: int
) -> Load:
    """Sends `calls` requests over so many connections, each under the next of the keys."""
    loop = asyncio.get_running_loop()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
    requests = [
        f"{head}authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body for key in keys
    ]
    latencies: list[float] = []
    errors: list[bytes] = []

    async def work(first: int) -> None:
        _, connection = await loop.create_connection(_Connection, host, port)
        for number in range(first, calls, connections):
            began = time.perf_counter()
            status, reply = await asyncio.wait_for(connection.ask(requests[number % len(requests)]), 120)
            latencies.append(time.perf_counter() - began)
            if status != 200:
                errors.append(reply[:200])
        connection.transport.close()

    began = time.perf_counter()
    await asyncio.gather(*(work(first) for first in range(min(connections, calls))))
    wall_s = time.perf_counter() - began
    latencies.sort()
    return Load(
        len(latencies),
        wall_s,
        1000 * latencies[len(latencies) // 2],
        1000 * latencies[int(0.99 * (len(latencies) - 1))],
        len(errors),
        errors[0].decode(errors="replace") if errors else "",
    )


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_kb(pid: int) -> int:
    """Resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1))
