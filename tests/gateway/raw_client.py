"""Clients at the level of the socket, who read as little as they like and hang up when they like."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from typing import Any

from gateway_rig import Rig

from canter.gateway.dialects.routes import BY_PATH

MODEL_PATHS = sorted(BY_PATH)


def question(path: str, content: str = "hi") -> dict[str, Any]:
    """The smallest good request of the dialect of `path`."""
    asks: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": content}]},
        "/v1/completions": {"prompt": content},
        "/v1/responses": {"input": content},
        "/v1/messages": {"messages": [{"role": "user", "content": content}], "max_tokens": 100},
    }
    return {"model": "policy", **asks[path]}


class RawClient:
    """One connection. `hang_up` closes it, with a reset where `reset` is set."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def read_until(self, end: bytes, *, at_most: int = 2**20, seconds: float = 10) -> bytes:
        """What has come when `end` has."""
        loop = asyncio.get_running_loop()
        data = b""
        async with asyncio.timeout(seconds):
            while end not in data and len(data) < at_most:
                part = await loop.sock_recv(self.sock, 4096)
                assert part, f"the connection ended behind {data[-300:]!r}"
                data += part
        return data

    async def read_reply(self) -> tuple[bytes, bytes]:
        """Head and body of a reply that says its length."""
        head, _, body = (await self.read_until(b"\r\n\r\n")).partition(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        assert length is not None, head
        loop = asyncio.get_running_loop()
        while len(body) < int(length[1]):
            async with asyncio.timeout(10):
                body += await loop.sock_recv(self.sock, 4096)
        return head, body

    def hang_up(self, *, reset: bool = False) -> None:
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


async def ask(
    rig: Rig, path: str, body: dict[str, Any], *, receive_bytes: int | None = None, key: str | None = None
) -> RawClient:
    """Sends a request; `receive_bytes` bounds what the kernel takes in before the client reads."""
    host, port = rig.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key or rig.agent_key}\r\n"
    await loop.sock_sendall(sock, f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return RawClient(sock)


TERMINAL = {
    "/v1/chat/completions": b"data: [DONE]\n\n",
    "/v1/completions": b"data: [DONE]\n\n",
    "/v1/responses": b"event: response.completed\n",
    "/v1/messages": b'data: {"type":"message_stop"}\n\n',
}


def reply_id(path: str, data: bytes) -> str:
    """The id of the reply that some bytes of it, whole or streamed, belong to."""
    prefix = BY_PATH[path].id_prefix.encode()
    found = re.search(rb'"id":\s*"(' + re.escape(prefix) + rb'[^"]+)"', data)
    assert found is not None, f"no id of {path} in {data[:300]!r}"
    return found[1].decode()
