"""Listens for HTTP: a bind that is safe, uvicorn around the app, and an end with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from canter.config.tree import GatewayConfig
from canter.errors import ConfigError
from canter.gateway.http import HttpError, Receive, Scope, Send, new_id
from canter.gateway.problems import Shape, reply_to

_BACKLOG = 2048
_START_S = 30.0
_KEEP_ALIVE_S = 75  # longer than the pauses of a harness between two calls mostly are


def check_bind(config: GatewayConfig) -> None:
    """Raises `ConfigError` for plain HTTP beyond this machine, unless the settings insist."""
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("gateway.tls_cert and gateway.tls_key go together; set both or neither")
    if _is_loopback(config.host) or config.tls_cert or config.insecure:
        return
    raise ConfigError(
        f"gateway.host = {config.host!r} is reachable from other machines and keys would travel in the clear; set "
        "gateway.tls_cert and gateway.tls_key, or gateway.insecure = true if the network itself is trusted"
    )


class App(Protocol):
    """An ASGI application that can be told to let its waiting requests go."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def serve(
    app: App,
    config: GatewayConfig,
    *,
    port: int | None = None,
    sock: socket.socket | None = None,
    uds: str | None = None,
    grace_s: float = 5.0,
) -> AsyncIterator[str]:
    """Serves `app` for as long as the context is open; yields its base URL. `port` takes the place of `config.port`, a
    listening `sock` (see `bind`) that of both; with `uds` it listens on that unix socket as well.

    At the end it stops accepting, gives the requests in flight `grace_s` seconds, and closes. Raises `ConfigError`
    where it must not or cannot bind.
    """
    sockets = [bind(config, port) if sock is None else sock]
    if uds is not None:
        sockets.append(_bind_unix(uds))
    host, bound = sockets[0].getsockname()[:2]
    server = _Server(_settings(app, config, grace_s))
    task = asyncio.create_task(server.serve(sockets))
    try:
        await _listening(server, task, config)
        gc.collect()
        gc.freeze()  # what is loaded now stays: looking through it again and again took a quarter of a large call
        shown = f"[{host}]" if ":" in host else host
        yield f"{'https' if config.tls_cert else 'http'}://{shown}:{bound}"
        if task.done():
            task.result()
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=grace_s / 2)
        await app.close()
        await asyncio.wait({task}, timeout=grace_s)
        task.cancel()
        for sock in sockets:
            sock.close()


async def _listening(server: _Server, task: asyncio.Task[None], config: GatewayConfig) -> None:
    """Returns once it listens. Raises `ConfigError` where it ends before, which only bad TLS files make it do."""
    ready = asyncio.create_task(server.ready.wait())
    await asyncio.wait({ready, task}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if server.ready.is_set():
        return
    cause = task.exception() if task.done() and not task.cancelled() else None
    raise ConfigError(
        f"the gateway cannot serve with gateway.tls_cert = {config.tls_cert!r} and gateway.tls_key = "
        f"{config.tls_key!r}: {cause or f'not within {_START_S:g} s'}"
    ) from cause


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the process that runs it has its own. `ready` is set once it
    listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP, which tells of a malformed request as the app tells of errors: in the shape of the path's
    protocol, with a request id."""

    def send_400_response(self, msg: str) -> None:
        what = "the request is no valid HTTP/1.1: its method, a header or the framing of its body is malformed"
        error = HttpError(400, "invalid_http", what)
        request_id = new_id("req_")
        reply = reply_to(error, self._shape(), request_id)
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(reply.body)}\r\n"
            f"x-request-id: {request_id}\r\nrequest-id: {request_id}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + reply.body)
        self.transport.close()

    def _shape(self) -> Shape:
        path = getattr(self, "url", b"")
        if path.startswith(b"/v1/messages"):
            return "anthropic"
        return "openai" if path.startswith(b"/v1/") else "canter"


def _settings(app: App, config: GatewayConfig, grace_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=_Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="critical",  # the app logs what matters; a stream that is broken on purpose is no news
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(grace_s)),
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )


def bind(config: GatewayConfig, port: int | None = None) -> socket.socket:
    """A socket that listens where the settings say. Raises `ConfigError` where that is unsafe or not possible."""
    check_bind(config)
    host, port = config.host, config.port if port is None else port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, which the kernel knows anyway: asyncio turns Nagle's algorithm off for such sockets only, and with
    # it a reply on a connection that is kept alive waits 40 ms for its body.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"the gateway cannot listen on {host}:{port}: {error.strerror}; pass gateway.port=0 to pick a free port"
        ) from error
    sock.setblocking(False)
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"the gateway cannot listen on the unix socket {path}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
