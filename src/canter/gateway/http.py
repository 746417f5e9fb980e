"""HTTP over raw ASGI: a request to read, a reply to send, and the errors that belong to neither layer below."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

import orjson

from canter import wire
from canter.errors import BadRequest, CanterError, PayloadTooLarge

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
_NO_CACHE = (b"cache-control", b"no-cache")
_HEADER_BYTES = 64 * 2**10
_HEADER_COST = 32  # of a header beside its bytes, so that their number is bounded with them
_DISCARD_BYTES = 256 * 2**20
_DISCARD_S = 10.0

_PROCESS = secrets.token_hex(8)
_NUMBERS = itertools.count()


def new_id(prefix: str) -> str:
    """An id that no other request of this or any other process has."""
    return f"{prefix}{_PROCESS}{next(_NUMBERS):08x}"


class HttpError(CanterError):
    """A request that HTTP itself has an answer for: no such route, a method it does not take, a body that is late."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class ClientGone(CanterError):
    """The client closed its connection before it had the whole reply."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply; `headers` are beside content type, length and request id."""

    status: int = 200
    body: bytes = b""
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Reply:
        return cls(status, orjson.dumps(value))


class Request:
    """One HTTP request. `id` names it in logs and in `x-request-id`."""

    __slots__ = (
        "_arrived",
        "_header_bytes",
        "_held",
        "_http_version",
        "_receive",
        "_send",
        "_started",
        "headers",
        "id",
        "method",
        "path",
        "query_string",
        "raw_path",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_path: bytes = scope.get("raw_path") or self.path.encode()
        self.query_string: bytes = scope["query_string"]
        self._http_version: str = scope.get("http_version", "1.1")
        self._header_bytes = sum(len(name) + len(value) + _HEADER_COST for name, value in scope["headers"])
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.id = new_id("req_")
        self._receive = receive
        self._send = send
        self._started = False
        self._arrived = False
        self._held: list[bytes] | None = None

    @property
    def started(self) -> bool:
        """Whether the status line has left: too late for another one."""
        return self._started

    def check_headers(self) -> None:
        """Raises `HttpError` 431 for more headers than any client sends."""
        if self._header_bytes > _HEADER_BYTES:
            raise HttpError(
                431,
                "headers_too_large",
                f"the request's headers are over {_HEADER_BYTES} bytes ({_HEADER_COST} counted for each besides)",
                {"connection": "close"},
            )

    def segments(self) -> list[str]:
        """The parts of the path, each decoded by itself: an id may hold a slash as `%2F`."""
        return [unquote(part) for part in self.raw_path.decode("latin-1").split("/")[1:]]

    def query(self) -> dict[str, list[str]]:
        """Query parameters, each with all its values. Raises `BadRequest` on text that is no UTF-8."""
        found: dict[str, list[str]] = {}
        try:
            for name, value in parse_qsl(self.query_string.decode("ascii"), keep_blank_values=True, errors="strict"):
                found.setdefault(name, []).append(value)
        except ValueError as error:
            raise BadRequest(f"the query string is malformed: {error}") from error
        return found

    def key(self) -> str | None:
        """The key that the client shows, as `Authorization: Bearer` or `x-api-key`."""
        given = self.headers.get(b"authorization")
        if given is not None and given[:7].lower() == b"bearer ":
            return given[7:].strip().decode("latin-1") or None
        given = self.headers.get(b"x-api-key")
        return given.strip().decode("latin-1") or None if given is not None else None

    async def body(self, *, limit: int, deadline_s: float) -> bytes:
        """The whole body. Raises `PayloadTooLarge` over `limit` bytes, `HttpError` 408 after `deadline_s` or 415 for an
        encoding, `ClientGone`."""
        encoding = self.headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b""):
            raise HttpError(
                415,
                "unsupported_encoding",
                f"content-encoding {encoding.decode('latin-1')!r} is not supported; send the body as it is",
            )
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._read(limit)
        except TimeoutError as error:
            raise HttpError(
                408, "body_timeout", f"the request body was not complete after {deadline_s:g} s; send it faster"
            ) from error

    async def discard_body(self) -> None:
        """Lets what is left of the body pass, within bounds. A client that closes its connection after the reply sends
        the whole body first, and would see a reset in place of a reply that came earlier."""
        last = self._http_version == "1.0" or self.headers.get(b"connection", b"").lower() == b"close"
        if self._arrived or not last or b"expect" in self.headers:
            return
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while not self._arrived and size < _DISCARD_BYTES:
                    size += len((await self._next()).get("body", b""))

    async def _next(self) -> MutableMapping[str, Any]:
        """The next message; `_arrived` once there is nothing left of the body."""
        message = await self._receive()
        self._arrived = message["type"] != "http.request" or not message.get("more_body")
        return message

    async def _read(self, limit: int) -> bytes:
        message = await self._next()
        if message["type"] == "http.request" and not message.get("more_body"):
            whole: bytes = message.get("body", b"")
            if len(whole) > limit:
                raise _too_large(limit)
            return whole
        parts: list[bytes] = []
        size = 0
        while message["type"] == "http.request":
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            if not message.get("more_body"):
                return b"".join(parts)
            message = await self._next()
        raise ClientGone("the client closed the connection while it sent its request")

    async def gone(self) -> None:
        """Returns when the client has closed the connection. Call it after `body`, once."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(self, reply: Reply) -> None:
        """Sends a whole reply."""
        await self._start(
            reply.status, reply.content_type, (b"content-length", str(len(reply.body)).encode()), *reply.headers
        )
        await self._send({"type": "http.response.body", "body": reply.body})

    async def start_reply(self, length: int) -> None:
        """Sends the head of a JSON reply of `length` bytes, which `write` then sends in parts."""
        await self._start(200, JSON, (b"content-length", str(length).encode()))

    async def start_stream(self) -> None:
        """Sends the head of an event stream. HTTP/1.0 has no way to tell a whole stream from a broken one, so its
        clients get all of it at the end."""
        if self._http_version == "1.0":
            self._held = self._held or []
        else:
            await self._start(200, _EVENTS, _NO_CACHE)

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Sends a part of a stream; `last` ends it."""
        if self._held is not None:
            self._held.append(data)
            if not last:
                return
            data = b"".join(self._held)
            await self._start(200, _EVENTS, (b"content-length", str(len(data)).encode()), _NO_CACHE)
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _start(self, status: int, content_type: bytes, *headers: tuple[bytes, bytes]) -> None:
        self._started = True
        name = self.id.encode()  # OpenAI's clients look for the one header, Anthropic's for the other
        head = [(b"content-type", content_type), (b"x-request-id", name), (b"request-id", name), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds. Raises `BadRequest` on anything else."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, got {_kind(value)}", code="invalid_json")
    if wire.is_too_nested(value):
        raise BadRequest(f"the body is nested deeper than {wire.MAX_NESTING} levels", code="invalid_json")
    return value


def _kind(value: object) -> str:
    """JSON's word for the type of a value."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is over {limit} bytes (gateway.max_body_bytes)")
