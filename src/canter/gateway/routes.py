"""Which handler a path under `/api` leads to, and who may use it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from canter.gateway.api import Api
from canter.gateway.auth import check_service
from canter.gateway.dialects.routes import BY_PATH, COUNTS
from canter.gateway.http import HttpError, Reply, Request
from canter.gateway.visit import Visit
from canter.store import Key

Handler = Callable[[Api, Visit], Awaitable[Reply]]


Rights = Literal["service", "admin", "handler"]

_ROUTES: tuple[tuple[str, str, Handler, Rights], ...] = (
    ("POST", "/api/rollouts", Api.create_rollouts, "service"),
    ("GET", "/api/rollouts", Api.list_rollouts, "service"),
    ("GET", "/api/rollouts/{id}", Api.get_rollout, "service"),
    ("POST", "/api/rollouts/{id}/cancel", Api.cancel, "service"),
    ("POST", "/api/rollouts/{id}/attempts", Api.start_attempt, "service"),
    ("PUT", "/api/rollouts/{id}/attempts/{n}/process", Api.set_process, "service"),
    ("POST", "/api/rollouts/{id}/attempts/{n}/end", Api.end_attempt, "service"),
    ("POST", "/api/rollouts/{id}/attempts/{n}/invalid", Api.invalidate, "service"),
    ("POST", "/api/rollouts/{id}/attempts/{n}/grader-key", Api.grader_key, "service"),
    ("POST", "/api/rollouts/{id}/attempts/{n}/reward", Api.post_reward, "handler"),
    ("GET", "/api/rollouts/{id}/attempts/{n}/grading", Api.grading, "handler"),
    ("GET", "/api/attempts", Api.open_attempts, "service"),
    ("GET", "/api/events", Api.events, "service"),
    ("GET", "/api/stats", Api.stats, "service"),
    ("GET", "/api/calls", Api.calls, "service"),
    ("GET", "/api/calls/{id}/bodies", Api.bodies, "service"),
    ("POST", "/api/keys", Api.issue_key, "admin"),
    ("PUT", "/api/engines", Api.set_engine, "service"),
    ("DELETE", "/api/engines", Api.remove_engine, "service"),
    ("GET", "/api/engines", Api.engines, "service"),
    ("POST", "/api/versions", Api.add_version, "service"),
    ("GET", "/api/versions", Api.versions, "service"),
    ("POST", "/api/pause", Api.pause, "service"),
    ("POST", "/api/resume", Api.resume, "service"),
    ("PUT", "/api/facts/{name}", Api.set_fact, "service"),
    ("GET", "/api/facts/{name}", Api.fact, "service"),
)


@dataclass(frozen=True, slots=True)
class Match:
    """A route that a path leads to. `rights`: `service`, `admin`, or `handler` where that checks the key itself."""

    handler: Handler
    params: Mapping[str, str]
    rights: Rights

    def check(self, key: Key) -> None:
        """Raises `Forbidden` or `Unauthorized` unless the key may use the route at all."""
        if self.rights != "handler":
            check_service(key, admin=self.rights == "admin")

    async def call(self, api: Api, key: Key, query: Mapping[str, Sequence[str]], body: bytes) -> Reply:
        return await self.handler(api, Visit(key, self.params, query, body))


def find(request: Request) -> Match:
    """The route of a request. Raises `HttpError` 404 or 405."""
    segments = request.segments()
    allowed: list[str] = []
    for method, pattern, handler, rights in _ROUTES:
        params = _params(pattern.split("/")[1:], segments)
        if params is not None and method == request.method:
            return Match(handler, params, rights)
        allowed += [method] if params is not None else []
    raise no_route(request, allowed)


def no_route(request: Request, allowed: Sequence[str]) -> HttpError:
    """404, or 405 where other methods are `allowed`."""
    if allowed:
        methods = ", ".join(sorted(allowed))
        return HttpError(
            405, "method_not_allowed", f"{request.path} takes {methods}, not {request.method}", {"allow": methods}
        )
    return HttpError(404, "not_found", f"no route {request.method} {request.path}; {_hint(request.path)}")


def _hint(path: str) -> str:
    """What to do about a path that leads nowhere: mostly it is a base URL with one `/v1` too few or too many."""
    for known in (*BY_PATH, *COUNTS):
        if path.rstrip("/").endswith(known.removeprefix("/v1")):
            return f"for {known} OpenAI's clients need a base URL that ends in /v1, Anthropic's one that does not"
    return "see docs/api.md"


def _params(pattern: Sequence[str], segments: Sequence[str]) -> dict[str, str] | None:
    if len(pattern) != len(segments):
        return None
    params: dict[str, str] = {}
    for wanted, segment in zip(pattern, segments, strict=True):
        if wanted.startswith("{"):
            params[wanted[1:-1]] = segment
        elif wanted != segment:
            return None
    return params
