"""The engine protocol over HTTP: `serve_engine` puts it in front of any engine, `HttpEngine` is its client.

The routes are those of "Engine protocol" in `docs/api.md`. An error travels as `{"error": {"type", "message", …}}` and
is raised again on the other side as what it was.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar, cast

import aiohttp
import orjson
from aiohttp import web

from canter.engine import Engine, Health, PauseMode
from canter.errors import (
    BadRequest,
    CanterError,
    ConfigError,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    Unauthorized,
)
from canter.types import Generation, Ids, Sampling
from canter.wire import (
    CONTENT_TYPE,
    generation_from_map,
    generation_to_map,
    ids_from_bytes,
    ids_to_bytes,
    pack,
    sampling_from_map,
    sampling_to_map,
    unpack,
)

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
CONTROL_TIMEOUT_S = 30.0
"""Deadline of the routes that answer at once (abort, resume, health)."""

PAUSE_MODES = ("keep", "wait", "abort")

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """A running server; `close` ends it (not the engine behind it)."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner

    async def close(self) -> None:
        """Stops listening and cancels the requests in flight, which aborts them on the engine."""
        await self._runner.cleanup()


async def serve_engine(engine: Engine, key: str, host: str = "127.0.0.1", port: int = 0) -> tuple[str, EngineServer]:
    """Serves `engine` from the running event loop; returns its base URL and the server. Port 0 picks a free one.

    Speaks plain HTTP, so it binds to loopback only. Raises ConfigError.
    """
    if not key:
        raise ConfigError("the engine's server needs a key that is not empty")
    if not _is_loopback(host):
        raise ConfigError(f"the engine's server speaks plain HTTP and binds to loopback only; got host {host!r}")
    # a client that hangs up cancels its handler, and with it the generation
    runner = web.AppRunner(_create_app(engine, key), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"cannot bind the engine's server to {host}:{port}: {error.strerror}") from error
    bound = runner.addresses[0]
    shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
    return f"http://{shown}:{bound[1]}", EngineServer(runner)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _create_app(engine: Engine, key: str) -> web.Application:
    expected = f"Bearer {key}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, expected):
                raise Unauthorized("this engine wants its own key as Authorization: Bearer KEY")
            return await handler(request)
        except web.HTTPException as error:
            return _error_reply(error.status, "bad_request", error.reason)
        except CanterError as error:
            return _reply_of(error)
        except Exception as error:
            logger.exception("the engine failed a request")
            return _reply_of(EngineError(f"{type(error).__name__}: {error}"))

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
    routes = _Routes(engine)
    app.add_routes(
        [
            web.post("/generate", routes.generate),
            web.post("/abort", routes.abort),
            web.post("/pause", routes.pause),
            web.post("/resume", routes.resume),
            web.post("/weights", routes.weights),
            web.get("/health", routes.health),
        ]
    )
    return app


class _Routes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: web.Request) -> web.Response:
        try:
            body = unpack(await request.read())
            prompt = ids_from_bytes(body["prompt"])
            sampling = sampling_from_map(body["sampling"])
            request_id, cache_salt = str(body["request_id"]), str(body.get("cache_salt", ""))
        except (ValueError, KeyError, TypeError) as error:
            raise BadRequest(f"malformed /generate body: {type(error).__name__}: {error}") from error
        generation = await self._engine.generate(prompt, sampling, request_id=request_id, cache_salt=cache_salt)
        return web.Response(body=pack(generation_to_map(generation)), content_type=CONTENT_TYPE)

    async def abort(self, request: web.Request) -> web.Response:
        await self._engine.abort(str(_field(await _json(request), "request_id", str)))
        return _json_reply({})

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await _json(request)).get("mode", "keep")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode must be one of {', '.join(PAUSE_MODES)}; got {mode!r}", param="mode")
        await self._engine.pause(cast(PauseMode, mode))
        return _json_reply({})

    async def resume(self, request: web.Request) -> web.Response:
        await self._engine.resume()
        return _json_reply({})

    async def weights(self, request: web.Request) -> web.Response:
        body = await _json(request)
        path = body.get("path")
        if path is not None and not isinstance(path, str):
            raise BadRequest(f"path must be a string or null; got {path!r}", param="path")
        await self._engine.load_weights(_field(body, "version", int), path)
        return _json_reply({})

    async def health(self, request: web.Request) -> web.Response:
        return _json_reply(asdict(await self._engine.health()))


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read() or b"{}")
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"not a JSON body: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"expected a JSON object, got {type(body).__name__}")
    return body


def _field(body: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = body.get(name)
    if not isinstance(value, kind):
        raise BadRequest(f"{name} must be a {kind.__name__}; got {value!r}", param=name)
    return value


def _json_reply(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json", headers=headers)


def _error_reply(status: int, kind: str, message: str, **more: Any) -> web.Response:
    headers = {"Retry-After": str(more["retry_after_s"])} if "retry_after_s" in more else None
    return _json_reply({"error": {"type": kind, "message": message, **more}}, status, headers)


def _reply_of(error: CanterError) -> web.Response:
    """The error as a reply; `_raise_error` is its inverse."""
    message = str(error)
    match error:
        case ContextOverflow():
            counts = {"prompt_tokens": error.prompt_tokens, "max_tokens": error.max_tokens}
            return _error_reply(400, "context_overflow", message, **counts)
        case BadRequest():
            return _error_reply(400, "bad_request", message, param=error.param, code=error.code)
        case Unauthorized():
            return _error_reply(401, "unauthorized", message)
        case EngineUnavailable():
            return _error_reply(503, "unavailable", message, retry_after_s=error.retry_after_s)
        case _:
            return _error_reply(500, "engine_error", message)


def _raise_error(status: int, data: bytes) -> None:
    """Raises what `_reply_of` turned into this reply."""
    try:
        error = orjson.loads(data)["error"]
        kind, message = str(error["type"]), str(error["message"])
        if kind == "context_overflow":
            raise ContextOverflow(int(error["prompt_tokens"]), int(error["max_tokens"]))
        if kind == "unavailable":
            raise EngineUnavailable(message, retry_after_s=int(error["retry_after_s"]))
        if kind == "bad_request":
            raise BadRequest(message, param=error.get("param"), code=error.get("code"))
    except (ValueError, KeyError, TypeError) as fault:
        text = data[:200].decode(errors="replace")
        raise EngineError(f"the engine answered {status} with no error that Canter knows: {text}") from fault
    if status == 401:
        raise Unauthorized(message)
    raise EngineError(message)


class HttpEngine:
    """Client of a served engine. Cancelling `generate` closes its connection, which aborts it on the server.

    `timeout_s` is the deadline of a generation, of `pause` and of `load_weights`. Raises `EngineUnavailable` where the
    server cannot be reached or goes away, `EngineError` where it answers too late or nonsense, `Unauthorized`, and what
    the engine itself raised. Nothing is retried here.
    """

    def __init__(self, url: str, key: str, *, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, prompt: Ids, sampling: Sampling, *, request_id: str, cache_salt: str = "") -> Generation:
        body = {
            "request_id": request_id,
            "prompt": ids_to_bytes(prompt),
            "sampling": sampling_to_map(sampling),
            "cache_salt": cache_salt,
        }
        data = await self._send("POST", "/generate", pack(body), CONTENT_TYPE, self._timeout_s)
        try:
            return generation_from_map(unpack(data))
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{self.url}/generate answered a malformed body: {error}") from error

    async def abort(self, request_id: str) -> None:
        await self._send_json("/abort", {"request_id": request_id}, CONTROL_TIMEOUT_S)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._send_json("/pause", {"mode": mode}, self._timeout_s)

    async def resume(self) -> None:
        await self._send_json("/resume", {}, CONTROL_TIMEOUT_S)

    async def load_weights(self, version: int, path: str | None = None) -> None:
        await self._send_json("/weights", {"version": version, "path": path}, self._timeout_s)

    async def health(self) -> Health:
        data = await self._send("GET", "/health", None, None, CONTROL_TIMEOUT_S)
        try:
            return Health(**orjson.loads(data))
        except (ValueError, TypeError) as error:
            raise EngineError(f"{self.url}/health answered a malformed body: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _send_json(self, path: str, body: Mapping[str, Any], timeout_s: float) -> None:
        await self._send("POST", path, orjson.dumps(body), "application/json", timeout_s)

    async def _send(self, method: str, path: str, body: bytes | None, kind: str | None, timeout_s: float) -> bytes:
        headers = {**self._headers, "Content-Type": kind} if kind else self._headers
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._open_session().request(method, self.url + path, data=body, headers=headers) as reply,
            ):
                data = await reply.read()
        except TimeoutError as error:
            raise EngineError(f"{self.url}{path} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(
                f"the engine at {self.url} is not reachable: {error or type(error).__name__}"
            ) from error
        if reply.status != 200:
            _raise_error(reply.status, data)
        return data

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:  # made here because a session belongs to the loop that runs
            no_limit = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=no_limit, timeout=aiohttp.ClientTimeout(total=None))
        return self._session
