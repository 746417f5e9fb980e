"""The ASGI application: which handler a path leads to, who may use it, and how what goes wrong is told."""

from __future__ import annotations

import logging

from canter import __version__
from canter.config import Config
from canter.errors import BadRequest, CanterError, Forbidden, Refused, StoreError
from canter.gateway.api import Api
from canter.gateway.attempts import Conversations
from canter.gateway.auth import agent_of, identify
from canter.gateway.calls import ModelCalls
from canter.gateway.dialects import Dialect
from canter.gateway.dialects.routes import BY_PATH, COUNTS
from canter.gateway.gate import Gate
from canter.gateway.http import ClientGone, Receive, Reply, Request, Scope, Send
from canter.gateway.models import anthropic_model, anthropic_models, openai_model, openai_models
from canter.gateway.openapi import document
from canter.gateway.outage import Uptime
from canter.gateway.problems import Shape, reply_to, status_and_kind
from canter.gateway.redact import loggable
from canter.gateway.routes import find, no_route
from canter.gateway.source import Source
from canter.gateway.stream import Timing, carry
from canter.store import Key, Store

logger = logging.getLogger(__name__)

_MODELS = "/v1/models"
_RESPONSES = "/v1/responses/"
_DOCUMENT = "/openapi.json"
_ALIVE = frozenset({("HEAD", "/"), ("GET", "/"), ("GET", "/healthz"), ("HEAD", "/healthz"), ("HEAD", "/api/hello")})


def create_app(
    config: Config, store: Store, source: Source, *, timing: Timing | None = None, memory_bytes: int = 256 * 2**20
) -> App:
    """The gateway over a store and a source of replies; it closes neither of them. `memory_bytes` is about what the
    conversations of the attempts that call now may take; the rest is read back from the store when it is needed."""
    return App(config, store, source, timing or Timing(), memory_bytes)


class App:
    """An ASGI application. `close` lets its waiting requests go, and ends what is in flight."""

    def __init__(self, config: Config, store: Store, source: Source, timing: Timing, memory_bytes: int) -> None:
        self._store = store
        self._models = tuple(dict.fromkeys((config.model.name, *config.model.aliases)))
        self._max_tokens = config.sampling.max_tokens
        self._max_body_bytes = config.gateway.max_body_bytes
        self._timing = timing
        self._uptime = Uptime()
        gate = Gate()
        conversations = Conversations(store, source.make_tree, source.recall, max_bytes=memory_bytes)
        self.calls = ModelCalls(
            store,
            source,
            gate,
            conversations,
            models=self._models,
            hold_s=config.engine.timeout_s,
            max_body_bytes=config.gateway.max_body_bytes,
        )
        self._api = Api(store, source, gate, conversations, self._uptime)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive, send)
        key: Key | None = None
        try:
            request.check_headers()
            if (request.method, request.path) in _ALIVE:
                await request.reply(Reply(200, b'{"status":"ok"}'))
                return
            if (request.method, request.path) == ("GET", _DOCUMENT):
                await request.reply(Reply.json(document(__version__, self._models)))
                return
            key = await identify(request, self._store)
            await self._serve(request, key)
        except ClientGone as error:
            logger.info("%s %s %s: %s", request.id, request.method, loggable(request.path), error)
        except CanterError as error:
            await self._tell(request, key, error)
        except Exception:
            logger.exception("%s %s %s failed", request.id, request.method, loggable(request.path))
            await self._tell(request, key, CanterError("the gateway failed this request; its log says why"))

    async def close(self) -> None:
        self._api.close()
        await self.calls.close()

    async def _serve(self, request: Request, key: Key) -> None:
        dialect = BY_PATH.get(request.path)
        if dialect is not None:
            await self._model_call(request, key, dialect)
        elif request.path in COUNTS:
            await self._count(request, key, COUNTS[request.path])
        elif request.path.startswith(_RESPONSES):
            await self._stored(request, key)
        elif request.path.startswith("/api/"):
            await self._api_call(request, key)
        elif request.path == _MODELS or request.path.startswith(f"{_MODELS}/"):
            agent_of(key)
            await request.reply(self._list_models(request))
        else:
            raise no_route(request, ())

    async def _model_call(self, request: Request, key: Key, dialect: Dialect) -> None:
        if request.method != "POST":
            raise no_route(request, ("POST",))
        ref = agent_of(key)
        raw = await self._body(request)
        boarding = await self.calls.board(ref, dialect, request.headers, raw)
        await carry(request, self.calls, dialect, boarding, self._timing)

    async def _count(self, request: Request, key: Key, dialect: Dialect) -> None:
        if request.method != "POST":
            raise no_route(request, ("POST",))
        tokens = await self.calls.count(agent_of(key), dialect, await self._body(request))
        told = {"object": "response.input_tokens"} if dialect.name == "responses" else {}
        await request.reply(Reply.json({**told, "input_tokens": tokens}))

    async def _stored(self, request: Request, key: Key) -> None:
        """A response that was given before, to the attempt that got it."""
        segments = request.segments()[2:]
        if len(segments) != 1 or request.method != "GET":
            raise no_route(request, ("GET",) if len(segments) == 1 else ())
        if request.query().get("stream", ["false"])[-1] != "false":
            raise BadRequest("stream is not supported here: a stored response is sent whole", param="stream")
        await request.reply(Reply(200, await self.calls.stored(agent_of(key), segments[0])))

    async def _api_call(self, request: Request, key: Key) -> None:
        route = find(request)
        route.check(key)
        body = await self._body(request)
        await request.reply(await route.call(self._api, key, request.query(), body))

    async def _body(self, request: Request) -> bytes:
        return await request.body(limit=self._max_body_bytes, deadline_s=self._timing.body_s)

    def _list_models(self, request: Request) -> Reply:
        if request.method != "GET":
            raise no_route(request, ("GET",))
        anthropic = _is_anthropic(request)
        if request.path == _MODELS:
            if anthropic:
                return Reply.json(anthropic_models(self._models, self._max_tokens, request.query()))
            return Reply.json(openai_models(self._models))
        name = "/".join(request.segments()[2:])
        self.calls.check_model(name)
        return Reply.json(anthropic_model(name, self._max_tokens) if anthropic else openai_model(name))

    async def _tell(self, request: Request, key: Key | None, error: CanterError) -> None:
        """Answers with an error, and logs it. Once a stream has begun it is left without its end, so that the server
        breaks the connection and no client takes the half for the whole."""
        status, kind = status_and_kind(error)
        if isinstance(error, StoreError):
            self._uptime.interrupted()
        rollout = key.rollout_id if key is not None else None
        level = logging.WARNING if isinstance(error, Forbidden | Refused) or status >= 500 else logging.INFO
        logger.log(
            level,
            "%s %s %s (rollout %s): %d %s: %s",
            request.id,
            request.method,
            loggable(request.path),
            rollout or "-",
            status,
            kind,
            loggable(str(error)),
        )
        if not request.started:
            if status not in (408, 431):  # those close the connection on the rest
                await request.discard_body()
            await request.reply(reply_to(error, _shape_of(request), request.id))


def _shape_of(request: Request) -> Shape:
    """The shape of errors for a request."""
    path = request.path
    dialect = BY_PATH.get(path) or COUNTS.get(path)
    if dialect is not None:
        return dialect.shape
    if not path.startswith("/v1/"):
        return "canter"
    return "anthropic" if path.startswith("/v1/messages/") or _is_anthropic(request) else "openai"


def _is_anthropic(request: Request) -> bool:
    """Whether a client of Anthropic's asks, on a path that both families have: those alone send this header."""
    return b"anthropic-version" in request.headers
