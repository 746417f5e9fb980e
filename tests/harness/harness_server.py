"""A model server and an HTTP proxy in one, for trying real harness programs: it asks for one shell command and ends.

It speaks Chat Completions, Responses and Messages, streamed or not, and keeps every request. Whatever a program wants
from another host reaches it as `CONNECT host:port`, where the program is told to use it as its proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COMMAND = "env > seen; echo one"
DONE = "All done."
SHELLS = {"exec_command": "cmd", "shell_command": "command", "Bash": "command", "bash": "command"}
"""The shell tools of the harnesses, and what each calls its command."""
READ_S = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class ModelServer:
    """`url` is its base URL, without `/v1`."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)

    @property
    def asked(self) -> list[Request]:
        """Those for the model."""
        return [request for request in self.requests if request.method == "POST"]

    @property
    def elsewhere(self) -> list[str]:
        """The hosts that were asked for besides."""
        return [request.path for request in self.requests if request.method == "CONNECT"]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                while await self._one(reader, writer):
                    pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        async with asyncio.timeout(READ_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ", 2)
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append(Request(method, path, headers, json.loads(body) if body else None))
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
            return False
        kind, payload = answer(path.partition("?")[0], json.loads(body)) if body else ("text/plain", b"")
        top = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(payload)}\r\n\r\n"
        writer.write(top.encode() + (b"" if method == "HEAD" else payload))
        await writer.drain()
        return True


@contextlib.asynccontextmanager
async def model_server() -> AsyncIterator[ModelServer]:
    server = ModelServer()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=2**24)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield server


def answer(path: str, body: Mapping[str, Any]) -> tuple[str, bytes]:
    """Content type and bytes of the reply."""
    made = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}[path](body)
    whole, events = made
    if not body.get("stream"):
        return "application/json", json.dumps(whole).encode()
    lines = [(f"event: {e['type']}\n" if "type" in e else "") + f"data: {json.dumps(e)}\n\n" for e in events]
    end = "data: [DONE]\n\n" if path.endswith("completions") else ""
    return "text/event-stream", ("".join(lines) + end).encode()


Made = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]


def shell(names: Sequence[str]) -> tuple[str, dict[str, str]] | None:
    """The shell tool among these, with its arguments."""
    return next(((name, {SHELLS[name]: COMMAND, "description": "Look"}) for name in names if name in SHELLS), None)


def chat(body: Mapping[str, Any]) -> Made:
    tool = shell([tool["function"]["name"] for tool in body.get("tools", ())])
    message: dict[str, Any] = {"role": "assistant", "content": DONE}
    if tool is not None and not any(m["role"] == "tool" for m in body["messages"]):
        call = {"index": 0, "id": "call_1", "type": "function"}
        call["function"] = {"name": tool[0], "arguments": json.dumps(tool[1])}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    end = "tool_calls" if "tool_calls" in message else "stop"
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    base = {"id": "c", "created": 1, "model": body["model"]}
    whole = {**base, "object": "chat.completion", "usage": usage}
    part = {**base, "object": "chat.completion.chunk"}
    chunks: list[Mapping[str, Any]] = [
        {**part, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {**part, "choices": [{"index": 0, "delta": {}, "finish_reason": end}]},
        {**part, "choices": [], "usage": usage},
    ]
    return {**whole, "choices": [{"index": 0, "message": message, "finish_reason": end}]}, chunks


def responses(body: Mapping[str, Any]) -> Made:
    tool = shell([tool.get("name", "") for tool in body.get("tools", ())])
    text = {"type": "output_text", "text": DONE, "annotations": []}
    item: dict[str, Any] = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    if tool is not None and not any(i.get("type") == "function_call_output" for i in body["input"]):
        item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": tool[0], "status": "completed"}
        item["arguments"] = json.dumps(tool[1])
    usage = {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    whole = {"id": "resp_1", "object": "response", "created_at": 0, "status": "completed", "model": body["model"]}
    whole |= {"output": [item], "usage": {**usage, **details}}
    events: list[Mapping[str, Any]] = [
        {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    return whole, [{**event, "sequence_number": number} for number, event in enumerate(events)]


def messages(body: Mapping[str, Any]) -> Made:
    tool = shell([tool.get("name", "") for tool in body.get("tools", ())])
    blocks = [block for m in body["messages"] if isinstance(m["content"], list) for block in m["content"]]
    done = tool is None or any(block.get("type") == "tool_result" for block in blocks)
    block: dict[str, Any] = {"type": "text", "text": ""}
    delta = {"type": "text_delta", "text": DONE}
    if tool is not None and not done:
        block = {"type": "tool_use", "id": "toolu_1", "name": tool[0], "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(tool[1])}
    end = {"stop_reason": "end_turn" if done else "tool_use", "stop_sequence": None}
    whole = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"]}
    whole |= {"usage": {"input_tokens": 5, "output_tokens": 3}, **end}
    full = {**block, "text": DONE} if done else {**block, "input": tool[1] if tool else {}}
    events: list[Mapping[str, Any]] = [
        {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    ]
    return {**whole, "content": [full]}, events
