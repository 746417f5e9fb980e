"""OpenAI chat completions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from canter.errors import BadRequest
from canter.gateway.dialects import fields
from canter.gateway.dialects.canonical import Answer, Asked, Chat, Start, TokenLogprob
from canter.gateway.dialects.chat_tools import read_tools
from canter.gateway.problems import Shape
from canter.gateway.sampling import requested
from canter.tokens.messages import Message, Role, ToolCall, ToolSpec, arrange

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
KEEP_ALIVE = b": keep-alive\n\n"
"""An event stream's comment: clients wait for bytes, not for events."""
_CHUNK_CHARACTERS = 1024
_FORMATS = ("text", "json_object", "json_schema")
_WORST_LOGPROB = -9999.0  # what OpenAI sends for "as good as impossible"


class ChatCompletions:
    """`POST /v1/chat/completions`."""

    name = "chat"
    id_prefix = "chatcmpl-"
    shape: Shape = "openai"
    tool_call_prefix = "call"

    def parse(self, body: Mapping[str, Any]) -> Asked:
        model = fields.string(body, "model")
        messages = parse_messages(body)
        tools = read_tools(body)
        fields.check_sampling(body)
        _check_response_format(fields.mapping(body, "response_format"))
        _check_modalities(body.get("modalities"))
        fields.integer(body, "top_logprobs", low=0, high=20)
        limits = [fields.integer(body, name, low=1) for name in ("max_tokens", "max_completion_tokens")]
        return Asked(
            dialect=self.name,
            model=model,
            prompt=Chat(messages, tools.shown),
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            stop=fields.stop_strings(body),
            stream=fields.boolean(body, "stream"),
            include_usage=fields.boolean(fields.mapping(body, "stream_options"), "include_usage"),
            logprobs=fields.boolean(body, "logprobs"),
            body=body,
            requested=requested(body) | ({"tools_left_out": list(tools.left_out)} if tools.left_out else {}),
        )

    def reply(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        message = answer.message
        wire: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning is not None:
            wire["reasoning_content"] = message.reasoning
        if message.tool_calls:
            wire["content"] = message.content or None
            wire["tool_calls"] = _wire_calls(message.tool_calls)
        choice = {
            "index": 0,
            "message": wire,
            "logprobs": None if answer.logprobs is None else {"content": _logprobs(answer.logprobs), "refusal": None},
            "finish_reason": answer.finish_reason.value,
        }
        return {
            "id": answer.start.id,
            "object": "chat.completion",
            "created": answer.start.created,
            "model": answer.model,
            "system_fingerprint": answer.fingerprint,
            "choices": [choice],
            "usage": usage(answer),
        }

    def keep_alive(self, asked: Asked, start: Start, number: int) -> bytes:
        return KEEP_ALIVE

    def events(self, asked: Asked, reply: Mapping[str, Any], signs: int) -> Iterator[bytes]:
        choice = reply["choices"][0]
        message = choice["message"]
        base = {
            "id": reply["id"],
            "object": "chat.completion.chunk",
            "created": reply["created"],
            "model": reply["model"],
            "system_fingerprint": reply.get("system_fingerprint"),
        }
        if asked.include_usage:
            base["usage"] = None
        for delta, logprobs, finish_reason in _deltas(message, choice.get("logprobs"), choice["finish_reason"]):
            part = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
            yield event({**base, "choices": [part]})
        if asked.include_usage:
            yield event({**base, "choices": [], "usage": reply.get("usage")})
        yield b"data: [DONE]\n\n"

    def message(self, reply: Mapping[str, Any]) -> Message:
        return _assistant(reply["choices"][0]["message"], "reply.", None)

    def failure(self, asked: Asked, start: Start, error: Mapping[str, Any], signs: int) -> bytes:
        return event(error)


def wire_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Canonical messages as this protocol writes them."""
    return [_wire_message(message) for message in messages]


def wire_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]


def _wire_message(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = _wire_calls(message.tool_calls)
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        wire["name"] = message.name
    return wire


def _wire_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": answer.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def finite_logprob(value: float) -> float:
    """A logprob that JSON can hold."""
    return value if math.isfinite(value) else _WORST_LOGPROB


def pieces(text: str) -> Iterator[str]:
    """A long text in parts, none of them empty."""
    for start in range(0, len(text), _CHUNK_CHARACTERS):
        yield text[start : start + _CHUNK_CHARACTERS]


def _logprobs(tokens: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    """`top_logprobs` stays empty: the engine gives the sampled token's only."""
    return [
        {
            "token": t.token,
            "logprob": finite_logprob(t.logprob),
            "bytes": None if t.utf8 is None else list(t.utf8),
            "top_logprobs": [],
        }
        for t in tokens
    ]


_Delta = tuple[dict[str, Any], Any, str | None]


def _deltas(message: Mapping[str, Any], logprobs: Any, finish_reason: str) -> Iterator[_Delta]:
    """(delta, logprobs, finish reason) of each chunk. All logprobs go with the first; tool calls are whole."""
    yield {"role": "assistant", "content": "", "refusal": None}, logprobs, None
    for part in pieces(message.get("reasoning_content") or ""):
        yield {"reasoning_content": part}, None, None
    for part in pieces(message.get("content") or ""):
        yield {"content": part}, None, None
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield {"tool_calls": [{"index": index, **call}]}, None, None
    yield {}, None, finish_reason


def _check_response_format(format_: Mapping[str, Any]) -> None:
    """The format is recorded, not enforced; one that nobody could enforce is refused."""
    if not format_:
        return
    type_ = fields.string(format_, "type", at="response_format.")
    if type_ not in _FORMATS:
        raise BadRequest(
            f"response_format.type {type_!r} is none of {', '.join(_FORMATS)}",
            param="response_format.type",
            code="invalid_value",
        )
    if type_ == "json_schema":
        at = "response_format.json_schema."
        schema = fields.mapping(format_, "json_schema", at="response_format.")
        fields.string(schema, "name", at=at)
        fields.mapping(schema, "schema", at=at)


def _check_modalities(modalities: object) -> None:
    """Refuses to be asked for more than text, which a client would wait for in vain."""
    other = [kind for kind in modalities if kind != "text"] if isinstance(modalities, list) else []
    if other:
        raise fields.unsupported("modalities", f"modalities hold {other[0]!r}; the policy writes text only")


def parse_messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    messages = fields.array(body, "messages")
    if not messages:
        raise BadRequest("messages is missing or empty", param="messages", code="missing_required_parameter")
    return arrange([_message(raw, f"messages[{i}].") for i, raw in enumerate(messages)])


def _message(raw: object, at: str) -> Message:
    if not isinstance(raw, Mapping):
        raise fields.wrong(at[:-1], "an object", raw)
    role_name = fields.string(raw, "role", at=at)
    role = _ROLES.get(role_name)
    if role is None:
        raise BadRequest(
            f"{at}role {role_name!r} is none of {', '.join(_ROLES)}", param=f"{at}role", code="invalid_value"
        )
    name = fields.optional_string(raw, "name", at=at)
    if role == "assistant":
        return _assistant(raw, at, name)
    if role == "tool":
        content = raw.get("content")
        text = "" if content is None else text_content(content, f"{at}content", role)
        return Message(role, text, tool_call_id=fields.string(raw, "tool_call_id", at=at), name=name)
    return Message(role, text_content(raw.get("content"), f"{at}content"), name=name)


def _assistant(raw: Mapping[str, Any], at: str, name: str | None) -> Message:
    for field in ("function_call", "audio"):
        if raw.get(field) is not None:
            raise fields.unsupported(f"{at}{field}", f"{at}{field} is not supported; send tool_calls and text")
    content = raw.get("content")
    if content is None:
        content = raw.get("refusal") or ""
    reasoning = fields.optional_string(raw, "reasoning_content", at=at)
    if reasoning is None:
        reasoning = raw.get("reasoning") if isinstance(raw.get("reasoning"), str) else None
    calls = fields.array(raw, "tool_calls", at=at)
    return Message(
        "assistant",
        text_content(content, f"{at}content", "assistant"),
        reasoning=reasoning or None,
        tool_calls=tuple(_tool_call(call, f"{at}tool_calls[{i}].") for i, call in enumerate(calls)),
        name=name,
    )


def text_content(content: object, at: str, role: Role = "user") -> str:
    """Content as one text: a string, or text parts, which are joined with newlines as inference servers do."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.wrong(at, "a string or an array of content parts", content)
    return "\n".join(_part(part, f"{at}[{i}]", role) for i, part in enumerate(content))


def _part(part: object, at: str, role: Role) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise fields.wrong(at, "a content part", part)
    type_ = fields.string(part, "type", at=f"{at}.")
    if type_ == "text":
        return fields.string(part, "text", at=f"{at}.")
    if type_ == "refusal" and role == "assistant":
        return fields.string(part, "refusal", at=f"{at}.")
    if role == "tool" and (text := fields.left_out(type_)) is not None:
        return text
    raise BadRequest(
        f"{at} is a part of type {type_!r}; the policy reads text only", param=at, code="unsupported_content"
    )


def _tool_call(raw: object, at: str) -> ToolCall:
    if not isinstance(raw, Mapping):
        raise fields.wrong(at[:-1], "an object", raw)
    if raw.get("type") not in (None, "function"):
        raise fields.unsupported(f"{at}type", f"{at}type {raw['type']!r} is not supported; only function calls are")
    function = fields.mapping(raw, "function", at=at)
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):  # some harnesses send the parsed object back
        arguments = orjson.dumps(arguments).decode()
    if arguments is not None and not isinstance(arguments, str):
        raise fields.wrong(f"{at}function.arguments", "a string of JSON", arguments)
    return ToolCall(
        fields.string(raw, "id", at=at), fields.string(function, "name", at=f"{at}function."), arguments or ""
    )
