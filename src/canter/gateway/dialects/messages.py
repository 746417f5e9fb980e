"""Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from canter.errors import BadRequest
from canter.gateway.dialects import fields
from canter.gateway.dialects.canonical import Answer, Asked, Chat, Start
from canter.gateway.dialects.chat import pieces
from canter.gateway.dialects.messages_blocks import assistant, blocks_of, conversation, kept_out, read_blocks
from canter.gateway.dialects.messages_tools import Offered, check_tool_choice, parse_tools
from canter.gateway.problems import Shape
from canter.gateway.sampling import requested
from canter.tokens.messages import Message
from canter.types import FinishReason

_MAX_STOPS = 64
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
"""May come before `message_start`, which then still has the true usage. Claude Code gives up after 300 s without a
byte; pings and comments both keep it, measured with 2.1.332 for 520 s. Pings are what clients know from Anthropic."""
_ALSO_REQUESTED = ("stop_sequences", "thinking", "output_config", "speed")
_STOP_REASONS = {FinishReason.LENGTH: "max_tokens", FinishReason.TOOL_CALLS: "tool_use"}


class Messages:
    """`POST /v1/messages`."""

    name = "messages"
    id_prefix = "msg_"
    shape: Shape = "anthropic"
    tool_call_prefix = "toolu"

    def parse(self, body: Mapping[str, Any]) -> Asked:
        max_tokens = fields.integer(body, "max_tokens", low=1)
        if max_tokens is None:
            raise BadRequest("max_tokens is missing", param="max_tokens", code="missing_required_parameter")
        asked = _parse(body, max_tokens)
        if isinstance(asked.prompt, Chat) and asked.prompt.messages[-1].role == "assistant":
            raise BadRequest(
                "the last message is the assistant's: a reply cannot be prefilled, as the policy is trained on what it"
                " samples itself; let the conversation end with a user message",
                param="messages",
                code="unsupported_value",
            )
        return asked

    def reply(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        reason = _STOP_REASONS.get(answer.finish_reason, "end_turn")
        stopped = answer.stop if reason == "end_turn" else None
        return {
            "id": answer.start.id,
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": blocks_of(answer.message),
            "stop_reason": "stop_sequence" if stopped is not None else reason,
            "stop_sequence": stopped,
            "stop_details": None,
            "container": None,
            "usage": _usage(answer),
        }

    def keep_alive(self, asked: Asked, start: Start, number: int) -> bytes:
        return _PING

    def events(self, asked: Asked, reply: Mapping[str, Any], signs: int) -> Iterator[bytes]:
        usage = reply["usage"]
        nothing_yet: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, **_NO_OUTPUT},
        }
        yield _event({"type": "message_start", "message": {**reply, **nothing_yet}})
        for index, block in enumerate(reply["content"]):
            first, deltas = _parts(block)
            yield _event({"type": "content_block_start", "index": index, "content_block": first})
            for delta in deltas:
                yield _event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _event({"type": "content_block_stop", "index": index})
        delta = {name: reply[name] for name in ("stop_reason", "stop_sequence", "stop_details", "container")}
        total = {name: usage[name] for name in _COUNTS}
        yield _event({"type": "message_delta", "delta": delta, "usage": total})
        yield _event({"type": "message_stop"})

    def message(self, reply: Mapping[str, Any]) -> Message:
        return assistant(read_blocks(reply["content"], "reply.content"))

    def failure(self, asked: Asked, start: Start, error: Mapping[str, Any], signs: int) -> bytes:
        return _event(error)


class CountTokens(Messages):
    """`POST /v1/messages/count_tokens`: the same requests, of which only the prompt counts. A conversation may end with
    the assistant's message here, as nothing goes on from it."""

    def parse(self, body: Mapping[str, Any]) -> Asked:
        return _parse(body, fields.integer(body, "max_tokens", low=1))


_COUNTS = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
    "output_tokens_details",
)
_NO_OUTPUT = {"output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}


def _parse(body: Mapping[str, Any], max_tokens: int | None) -> Asked:
    model = fields.string(body, "model")
    offered = parse_tools(body)
    choice = check_tool_choice(body, offered)
    messages = conversation(body, offered.known)
    fields.number(body, "temperature", low=0, high=1)
    fields.number(body, "top_p", low=0, high=1)
    fields.integer(body, "top_k", low=0)
    return Asked(
        dialect=Messages.name,
        model=model,
        prompt=Chat(messages, () if choice == "none" else offered.listed),
        max_tokens=max_tokens,
        stop=_stop_sequences(body),
        stream=fields.boolean(body, "stream"),
        body=body,
        requested=_requested(body, offered, choice),
    )


def _stop_sequences(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = fields.array(body, "stop_sequences")
    if not all(isinstance(stop, str) for stop in stops):
        raise fields.wrong("stop_sequences", "an array of strings", next(s for s in stops if not isinstance(s, str)))
    if len(stops) > _MAX_STOPS or not all(stops):
        raise BadRequest(
            f"stop_sequences must be at most {_MAX_STOPS} strings, none of them empty",
            param="stop_sequences",
            code="invalid_value",
        )
    return tuple(stops)


def _requested(body: Mapping[str, Any], offered: Offered, choice: str) -> dict[str, Any]:
    """What the harness asked for; a choice of tools that asks for nothing special by its plain name."""
    found = {**requested(body), **{name: body[name] for name in _ALSO_REQUESTED if body.get(name) is not None}}
    if "tool_choice" in found and not found["tool_choice"].get("disable_parallel_tool_use") and choice != "tool":
        found["tool_choice"] = choice
    if offered.left_out:
        found["tools_left_out"] = list(offered.left_out)
    if types := kept_out(body):
        found["kept_out"] = types
    return found


def _usage(answer: Answer) -> dict[str, Any]:
    """True counts; there is no prompt cache that a client could save by."""
    return {
        "input_tokens": answer.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
    }


def _parts(block: Mapping[str, Any]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """A block as it begins, empty, and the deltas that fill it."""
    match block["type"]:
        case "thinking":
            return {**block, "thinking": "", "signature": ""}, _thinking_deltas(block)
        case "text":
            return {**block, "text": ""}, ({"type": "text_delta", "text": part} for part in pieces(block["text"]))
        case _:
            text = orjson.dumps(block["input"]).decode()
            return {**block, "input": {}}, ({"type": "input_json_delta", "partial_json": part} for part in pieces(text))


def _thinking_deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for part in pieces(block["thinking"]):
        yield {"type": "thinking_delta", "thinking": part}
    yield {"type": "signature_delta", "signature": block["signature"]}


def _event(data: Mapping[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: ".encode() + orjson.dumps(data) + b"\n\n"
