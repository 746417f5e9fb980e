"""Posts to one HTTP/1.1 server over connections that stay open.

Every call of a harness is one request here, and a general client took a quarter of all the CPU that a call costs the
gateway. So this knows no redirects, no cookies, no compression and no proxies: an inference server needs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import httptools
from yarl import URL

from canter.errors import ConfigError

CONNECT_S = 10.0
"""Deadline of opening a connection."""


@dataclass(frozen=True, slots=True)
class Response:
    """A whole reply; names of `headers` are in lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class Origin:
    """The server at `url` (scheme, host and port; the path does not count), to which `headers` go with every request.

    A connection that was idle for `idle_s` is not used again: what lies between may have forgotten it. Raises
    `ConfigError` for a URL that is not http or https with a host.
    """

    def __init__(self, url: URL, headers: Mapping[str, str], *, idle_s: float = 15.0) -> None:
        if url.scheme not in ("http", "https") or not url.host or not url.port:
            raise ConfigError(f"{str(url)!r} is no URL of a server; write it like http://127.0.0.1:8000/v1")
        self._host, self._port, self._tls = url.host, url.port, url.scheme == "https"
        self._name = str(url.origin())
        lines = (f"{name}: {value}\r\n" for name, value in {"host": url.host_port_subcomponent, **headers}.items())
        self._head = "".join(lines)
        self._idle_s = idle_s
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> Response:
        """Sends a request and waits for the whole reply. Cancelling hangs up.

        Raises `TimeoutError` after `timeout_s`, `ConnectionError` or another `OSError` where the server cannot be
        reached or breaks off.
        """
        head = f"POST {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        async with asyncio.timeout(timeout_s):
            connection = self._take_idle() or await self._connect()
            try:
                response = await connection.ask(head.encode("latin-1") + body)
            except BaseException:
                connection.close()
                raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> _Connection | None:
        """The connection that was used last, if it still stands."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_s < self._idle_s:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._name), self._host, self._port, ssl=self._tls or None
                )
        except TimeoutError as error:
            raise ConnectionError(f"no connection to {self._name} within {CONNECT_S:g} s") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection with one request at a time; also what its parser calls back (the methods `on_…`)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._transport: asyncio.Transport
        self._reply: asyncio.Future[Response] | None = None
        self._keep_alive = True
        self._idle_since = 0.0

    @property
    def reusable(self) -> bool:
        """Whether another request can follow."""
        return self._keep_alive and not self._transport.is_closing()

    @property
    def idle_s(self) -> float:
        return self._loop.time() - self._idle_since

    def ask(self, request: bytes) -> asyncio.Future[Response]:
        self._parser = httptools.HttpResponseParser(self)
        self._until_close = False
        self._reply = self._loop.create_future()
        self._transport.write(request)
        return self._reply

    def close(self) -> None:
        self._transport.close()

    # -- what the event loop calls --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():  # nobody asked: it cannot belong to what comes next
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"{self._name} does not answer in HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._reply is not None and self._until_close:
            self.on_message_complete()
        self._fail(f"{self._name} closed the connection before its reply was complete", error)

    # -- what the parser calls --

    def on_message_begin(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._reply is not None
        answered = self._reply.done()  # then this is a second reply, to nothing
        self._keep_alive = self._parser.should_keep_alive() and not answered
        self._until_close = not self._headers.keys() & {b"content-length", b"transfer-encoding"}

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        assert self._reply is not None
        status = self._parser.get_status_code()
        if status >= 200 and not self._reply.done():  # below 200 it is an interim answer: the reply comes after it
            self._idle_since = self._loop.time()
            self._reply.set_result(Response(status, self._headers, b"".join(self._body)))

    def _fail(self, message: str, cause: Exception | None = None) -> None:
        if self._reply is not None and not self._reply.done():
            error = ConnectionError(message)
            error.__cause__ = cause
            self._reply.set_exception(error)
