"""Sends requests to a real gateway and looks at every reply: its status, its shape, its types, its end."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import anthropic.types
import jsonschema_rs
import openai.types
import openai.types.chat
import openai.types.responses
import orjson
from mutants import Mutant
from pydantic import TypeAdapter

from canter.gateway.openapi import document

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
from gateway_rig import Rig

DOCUMENT = document("0", ["policy"])
AT_ONCE = 16

_TYPES: dict[str, Any] = {
    "/v1/chat/completions": openai.types.chat.ChatCompletion,
    "/v1/completions": openai.types.Completion,
    "/v1/responses": openai.types.responses.Response,
    "/v1/messages": anthropic.types.Message,
    "/v1/messages/count_tokens": anthropic.types.MessageTokensCount,
}
_EVENT_TYPES: dict[str, Any] = {
    "/v1/chat/completions": openai.types.chat.ChatCompletionChunk,
    "/v1/completions": openai.types.Completion,
    "/v1/responses": openai.types.responses.ResponseStreamEvent,
    "/v1/messages": anthropic.types.RawMessageStreamEvent,
}
REFUSALS = frozenset({400, 404, 405, 408, 413, 415, 431})
"""What a bad request may be answered with."""


@cache
def _adapter(path: str, *, event: bool = False) -> TypeAdapter[Any]:
    return TypeAdapter((_EVENT_TYPES if event else _TYPES)[path])


@cache
def validator(name: str) -> Any:
    """Checks values against a schema of the document."""
    return jsonschema_rs.validator_for(
        {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}, validate_formats=False
    )


def _schema_of(path: str, status: str) -> str:
    content = DOCUMENT["paths"][path]["post"]["responses"][status]["content"]
    return str(content["application/json"]["schema"]["$ref"].rpartition("/")[2])


@dataclass
class Seen:
    """What was answered: how often each status, and what was wrong with which reply."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


Expect = Callable[[int, bytes], bool]
"""Whether a reply, of a status and with a body, is one that there should be."""


async def send_all(rig: Rig, mutants: Iterable[Mutant], keys: list[str], expect: Expect | None = None) -> Seen:
    """Sends all of them, some at a time, each with one of `keys`, and checks the replies."""
    seen = Seen()
    queue = iter(mutants)
    connector = aiohttp.TCPConnector(limit=AT_ONCE)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(30)) as http:

        async def work() -> None:
            for mutant in queue:
                problem = await _send(rig, http, mutant, keys[mutant.number % len(keys)], seen, expect)
                if problem is not None:
                    seen.wrong.append(
                        f"{problem}\n  {mutant.path} #{mutant.number} {mutant.story} {mutant.body[:600]!r}"
                    )

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return seen


async def _send(
    rig: Rig, http: aiohttp.ClientSession, mutant: Mutant, key: str, seen: Seen, expect: Expect | None
) -> str | None:
    headers = {**mutant.headers, "authorization": f"Bearer {key}"}
    try:
        async with http.post(rig.url + mutant.path, data=mutant.body, headers=headers) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"no whole reply: {type(error).__name__}: {error}"
    seen.statuses[response.status] += 1
    if expect is not None and not expect(response.status, body):
        return f"{response.status}: {body[:500]!r}"
    try:
        check_reply(mutant.path, response.status, response.headers, body)
    except AssertionError as error:
        return f"{response.status} {str(error)[:500]}: {body[:300]!r}"
    except ValueError as error:  # pydantic's, orjson's and jsonschema's
        return f"{response.status} {type(error).__name__} {str(error)[:800]}: {body[:300]!r}"
    return None


def check_reply(path: str, status: int, headers: Any, body: bytes) -> None:
    """Raises AssertionError or ValueError for a reply that no client should get."""
    assert headers.get("x-request-id") == headers.get("request-id"), "two request ids"
    assert headers.get("request-id", "").startswith("req_"), "no request id"
    content_type = headers.get("content-type", "")
    if status == 200 and content_type.startswith("text/event-stream"):
        return check_stream(path, body)
    assert content_type == "application/json", content_type
    value = orjson.loads(body)
    if status == 200:
        validator(_schema_of(path, "200")).validate(value)
        if path in _TYPES:
            _adapter(path).validate_python(value)
        return None
    assert status in REFUSALS, "no status for a bad request"
    error = _schema_of(path, "400")
    validator(error).validate(value)
    return None


def check_stream(path: str, body: bytes) -> None:
    """Every event is of the vendor's types, they are in order, and the last one is the terminal one."""
    datas, names = [], []
    for block in body.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        for line in lines:
            name, _, value = line.partition(": ")
            assert name in ("event", "data"), line
            (names if name == "event" else datas).append(value)
    if path.endswith("completions"):
        assert datas.pop() == "[DONE]", "no [DONE] at the end"
    values = [orjson.loads(data) for data in datas]
    for value in values:
        _adapter(path, event=True).validate_python(value)
    if path == "/v1/responses":
        assert names == [value["type"] for value in values]
        assert [value["sequence_number"] for value in values] == list(range(len(values)))
        assert names[-1] in ("response.completed", "response.incomplete")
        validator("ResponsesReply").validate(values[-1]["response"])
    elif path == "/v1/messages":
        assert names == [value["type"] for value in values]
        assert (names[0], names[-1]) == ("message_start", "message_stop")
    else:
        assert [choice["finish_reason"] for value in values for choice in value["choices"]][-1] is not None


async def at_rest(rig: Rig) -> None:
    """Fails unless nothing is left of all requests: no held slot, an idle engine, and good requests are answered."""
    async with asyncio.timeout(10):
        while rig.app.calls.in_flight or (await rig.engine.health()).running:  # noqa: ASYNC110 - two conditions
            await asyncio.sleep(0.02)
    health = await rig.engine.health()
    assert (health.running, health.waiting) == (0, 0)
    assert (await rig.chat("are you well?"))[0] == 200


async def break_off(rig: Rig, mutant: Mutant, key: str) -> bytes:
    """Sends a request over a socket of its own and leaves somewhere on the way; what came until then."""
    rng = random.Random(mutant.number)
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST {mutant.path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        whole = f"{head}content-length: {len(mutant.body)}\r\n\r\n".encode() + mutant.body
        writer.write(whole[: rng.choice((10, len(head), rng.randint(0, len(whole)), len(whole), len(whole)))])
        await writer.drain()
        await asyncio.sleep(rng.choice((0, 0, 0.001, 0.01, 0.05)))
        async with asyncio.timeout(rng.choice((0.001, 0.02))):
            return await reader.read(rng.choice((1, 100, 100_000)))
    except (TimeoutError, ConnectionError):
        return b""
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()
