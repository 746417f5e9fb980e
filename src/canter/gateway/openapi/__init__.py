"""The model side of the gateway as an OpenAPI 3.1 document, served at `GET /openapi.json`.

It says what is accepted, not all that the vendors' own interfaces take: what a policy cannot be shown is refused, and
members that are not named are ignored. The tests hold the gateway to it: what the document allows is answered, apart
from what JSON Schema cannot say (each said in a description).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from canter.gateway.openapi import chat, messages, responses
from canter.gateway.openapi.shapes import Schema, array, choice, integer, nullable, record, ref, text

_JSON = "application/json"
_EVENTS = "text/event-stream"

_OPENAI_ERROR = record(
    {
        "error": record(
            {
                "message": text(),
                "type": choice("invalid_request_error", "permission_error", "rate_limit_error", "server_error"),
                "param": nullable(text()),
                "code": nullable(text()),
            },
            ["message", "type", "param", "code"],
        )
    },
    ["error"],
)
_ANTHROPIC_ERROR = record(
    {
        "type": choice("error"),
        "error": record({"type": text(), "message": text()}, ["type", "message"]),
        "request_id": text(),
    },
    ["type", "error", "request_id"],
)
_ERRORS = {
    "400": "The request cannot be honoured; the message names the field. Also: the prompt is too long.",
    "401": "There is no key, or it is not known.",
    "403": "The key is not that of a running attempt.",
    "404": "There is no such model.",
    "405": "The path takes other methods.",
    "408": "The body did not come in time.",
    "409": "The attempt has ended.",
    "413": "The body is too large.",
    "415": "The body is encoded (`content-encoding`).",
    "431": "The headers are too large.",
    "503": "There is no engine, or it failed; `retry-after` says when to come back.",
}


def document(version: str, models: Sequence[str]) -> dict[str, Any]:
    """The document of a run that serves its policy under the names `models`."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Canter gateway: the model side",
            "version": version,
            "description": (
                "Every reply is one sample of the policy that is trained. The run decides how it is sampled; what a "
                "request asks for is recorded. A request that comes again while its reply is on its way, or was never "
                "delivered, gets that reply. Integers are written without a fraction."
            ),
        },
        "security": [{"bearer": []}, {"key": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "The attempt's key."},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The attempt's key."},
            },
            "schemas": _schemas(models),
        },
    }


def _paths() -> dict[str, Any]:
    return {
        "/v1/chat/completions": _answer("chat", "OpenAI chat completions", "ChatRequest", "ChatReply"),
        "/v1/completions": _answer("completions", "OpenAI completions", "CompletionRequest", "CompletionReply"),
        "/v1/responses": _answer("responses", "OpenAI Responses", "ResponsesRequest", "ResponsesReply"),
        "/v1/responses/input_tokens": _answer(
            "responsesInputTokens", "Count the tokens of a prompt", "ResponsesRequest", "InputTokens", streams=False
        ),
        "/v1/responses/{id}": _get("response", "A response of this attempt", ref("ResponsesReply"), "id"),
        "/v1/messages": _answer("messages", "Anthropic Messages", "MessagesRequest", "MessagesReply", "AnthropicError"),
        "/v1/messages/count_tokens": _answer(
            "countTokens",
            "Count the tokens of a prompt",
            "CountTokensRequest",
            "TokenCount",
            "AnthropicError",
            streams=False,
        ),
        "/v1/models": _get(
            "models",
            "The names of the policy; in Anthropic's shape for requests with an `anthropic-version`",
            record({"data": array(record({"id": ref("ModelName")}, ["id"]))}, ["data"]),
        ),
        "/v1/models/{model}": _get("model", "One of those names", record({"id": ref("ModelName")}, ["id"]), "model"),
    }


def _schemas(models: Sequence[str]) -> dict[str, Schema]:
    return {
        "ModelName": choice(*models, about="The names under which this run serves its policy."),
        "OpenAIError": _OPENAI_ERROR,
        "AnthropicError": _ANTHROPIC_ERROR,
        **chat.SCHEMAS,
        **responses.SCHEMAS,
        **messages.SCHEMAS,
    }


def _answer(
    name: str, summary: str, request: str, reply: str, error: str = "OpenAIError", *, streams: bool = True
) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": ref(reply)}}
    if streams:
        content[_EVENTS] = {"schema": {"type": "string"}}
    body = {"required": True, "content": {_JSON: {"schema": ref(request)}}}
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "requestBody": body,
            "responses": {"200": {"description": "The reply.", "content": content}, **_errors(error)},
        }
    }


def _get(name: str, summary: str, reply: Schema, parameter: str | None = None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "As asked.", "content": {_JSON: {"schema": reply}}},
            **_errors("OpenAIError"),
        },
    }
    if parameter is not None:
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
    return {"get": operation}


def _errors(error: str) -> dict[str, Any]:
    content = {_JSON: {"schema": ref(error)}}
    told = {status: {"description": what, "content": content} for status, what in _ERRORS.items()}
    told["503"]["headers"] = {"retry-after": {"description": "Seconds.", "schema": integer(low=1)}}
    return told
