"""A fake OpenAI-compatible server that answers at once, as vLLM would: token ids, logprobs, text.

How long the reply is, is read from the request: a message that begins with `FAKE:p30000:c500` gets 30,000 prompt ids
and 500 sampled tokens. Raw asyncio, so that it costs as little as possible beside what is measured.

    python benchmarks/gateway_parts/upstream.py      prints its port and serves until it is stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from functools import cache
from typing import cast

import uvloop

MARK = re.compile(rb"FAKE:p(\d+):c(\d+)")
LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength:[ \t]*(\d+)")


@cache
def answer(prompt_tokens: int, tokens: int) -> bytes:
    """The whole HTTP reply."""
    rng = random.Random(prompt_tokens)
    logprobs = [
        {"token": "tok ", "logprob": round(-3 * rng.random(), 7), "bytes": [116, 111, 107, 32], "top_logprobs": []}
        for _ in range(tokens)
    ]
    body = json.dumps(
        {
            "id": "chatcmpl-fake",
            "object": "chat.completion",
            "created": 1700000000,
            "model": "fake-model",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "tok " * tokens, "tool_calls": []},
                    "logprobs": {"content": logprobs},
                    "finish_reason": "stop",
                    "token_ids": [rng.randrange(1000, 151000) for _ in range(tokens)],
                }
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": tokens,
                "total_tokens": prompt_tokens + tokens,
            },
            "prompt_token_ids": [rng.randrange(1000, 151000) for _ in range(prompt_tokens)],
        },
        separators=(",", ":"),
    ).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class Connection(asyncio.Protocol):
    """Answers requests in the order they come in."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.request_end()) is not None:
            found = MARK.search(self.buffer, 0, end)
            self.transport.write(answer(*map(int, found.groups())) if found else answer(64, 16))
            del self.buffer[:end]

    def request_end(self) -> int | None:
        """Where the first whole request in the buffer ends."""
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return None
        length = LENGTH.search(self.buffer, 0, head)
        end = head + 4 + (int(length.group(1)) if length else 0)
        return end if len(self.buffer) >= end else None


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main())
