"""The one table from `errors.py` to HTTP, and the shape of an error in each protocol."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from canter.errors import (
    BadRequest,
    CanterError,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    Forbidden,
    NotFound,
    PayloadTooLarge,
    Refused,
    StoreError,
    TemplateError,
    ThreadNotFound,
    Unauthorized,
)
from canter.gateway.http import HttpError, Reply
from canter.gateway.redact import redact

Shape = Literal["canter", "openai", "anthropic"]

_TABLE: tuple[tuple[type[CanterError], int, str], ...] = (
    (BadRequest, 400, "bad_request"),
    (TemplateError, 400, "bad_request"),
    (Unauthorized, 401, "unauthorized"),
    (Forbidden, 403, "forbidden"),
    (NotFound, 404, "not_found"),
    (Refused, 409, "refused"),
    (PayloadTooLarge, 413, "too_large"),
    (EngineUnavailable, 503, "engine_unavailable"),
    (EngineError, 503, "engine_error"),
    (StoreError, 503, "unavailable"),
)
"""First match counts: a subclass stands before its base."""

_RETRY_AFTER_S = 2
_LONGEST = 2000  # characters of a message

_OPENAI_CODES = {
    "bad_request": "invalid_request",
    "unauthorized": "invalid_api_key",
    "refused": "attempt_closed",
    "too_large": "request_too_large",
}
"""Codes of OpenAI's API where it has one for the same thing; ours elsewhere."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_OPENAI_TYPES = {403: "permission_error", 429: "rate_limit_error"}


def status_and_kind(error: CanterError) -> tuple[int, str]:
    """HTTP status and `type` of an error; what the table does not know is our own fault, 500."""
    if isinstance(error, HttpError):
        return error.status, error.code
    for kind, status, name in _TABLE:
        if isinstance(error, kind):
            return status, name
    return 500, "internal"


def reply_to(error: CanterError, shape: Shape, request_id: str) -> Reply:
    """The reply that tells a client of an error. Every 429 and 503 carries `Retry-After`."""
    status, _ = status_and_kind(error)
    return Reply(status, orjson.dumps(body_of(error, shape, request_id)), headers=_headers(error, status))


def body_of(error: CanterError, shape: Shape, request_id: str) -> dict[str, Any]:
    """The JSON of an error in the protocol's own shape."""
    status, kind = status_and_kind(error)
    message = _brief(str(error))
    if shape == "canter":
        return {"error": {"type": kind, "message": message}}
    if shape == "anthropic":
        if isinstance(error, ContextOverflow):  # in the words on which clients of this protocol compact
            message = f"prompt is too long: {error.prompt_tokens} tokens > {error.max_tokens} maximum"
        type_ = _ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
        told: dict[str, Any] = {"type": type_, "message": message}
        if isinstance(error, ThreadNotFound):  # upon which the SDK sends the whole conversation
            told["details"] = {"error_code": "thread_not_found"}
        return {"type": "error", "error": told, "request_id": request_id}
    param = error.param if isinstance(error, BadRequest) else None
    code = (error.code if isinstance(error, BadRequest) else None) or _OPENAI_CODES.get(kind, kind)
    type_ = _OPENAI_TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def _brief(text: str) -> str:
    """A message that may repeat what a client sent, however long that was."""
    shown = redact(text[:_LONGEST])
    return shown if len(text) <= _LONGEST else f"{shown}…"


def _headers(error: CanterError, status: int) -> tuple[tuple[bytes, bytes], ...]:
    headers = {}
    if isinstance(error, HttpError):
        headers.update(error.headers)
    if status in (429, 503):
        after_s = error.retry_after_s if isinstance(error, EngineUnavailable) else _RETRY_AFTER_S
        headers.setdefault("retry-after", str(max(1, after_s)))  # clients take 0 for "not given"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 409:
        headers["x-should-retry"] = "false"  # OpenAI's client retries a 409 otherwise
    if status == 408:
        headers["connection"] = "close"  # the rest of the body is not read
    return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())
