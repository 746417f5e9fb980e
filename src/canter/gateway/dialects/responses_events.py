"""The events of a Responses stream: numbered without a gap, each named by its `event:` line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from canter.gateway.dialects.chat import pieces

_Event = tuple[str, dict[str, Any]]

OPENING = ("response.created", "response.in_progress")
"""What a stream opens with; the second is repeated as a sign of life."""


def number_after(signs: int) -> int:
    """The number of the event behind `signs` signs of life, the first of which opens the stream with two events."""
    return signs + 1 if signs else 0


def event(type_: str, number: int, fields: Mapping[str, Any]) -> bytes:
    data = orjson.dumps({"type": type_, "sequence_number": number, **fields})
    return b"event: " + type_.encode() + b"\ndata: " + data + b"\n\n"


def opening(skeleton: Mapping[str, Any]) -> bytes:
    return b"".join(event(type_, number, {"response": skeleton}) for number, type_ in enumerate(OPENING))


def reply_events(reply: Mapping[str, Any]) -> Iterator[_Event]:
    """Type and fields of the events that carry the items of a reply, and of the one that ends it."""
    for index, item in enumerate(reply["output"]):
        at = {"output_index": index}
        yield "response.output_item.added", {**at, "item": _begun(item)}
        for type_, fields in _inside(item):
            yield type_, {"item_id": item["id"], **at, **fields}
        yield "response.output_item.done", {**at, "item": item}
    yield f"response.{reply['status']}", {"response": reply}


def _begun(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item before there is anything in it."""
    begun = {**item, "status": "in_progress"}
    empty: dict[str, Any] = {"summary": [], "content": [], "encrypted_content": None, "arguments": "", "input": ""}
    return begun | {name: value for name, value in empty.items() if name in item}


def _inside(item: Mapping[str, Any]) -> Iterator[_Event]:
    match item["type"]:
        case "reasoning":
            for index, part in enumerate(item["summary"]):
                yield from _part("summary_index", index, part, "reasoning_summary_part", "reasoning_summary_text", {})
            for index, part in enumerate(item["content"]):
                yield from _part("content_index", index, part, "content_part", "reasoning_text", {})
        case "message":
            for index, part in enumerate(item["content"]):
                extra = {"logprobs": part["logprobs"]}
                yield from _part("content_index", index, part, "content_part", "output_text", extra)
        case "function_call":
            for piece in pieces(item["arguments"]):
                yield "response.function_call_arguments.delta", {"delta": piece}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", done
        case "custom_tool_call":
            for piece in pieces(item["input"]):
                yield "response.custom_tool_call_input.delta", {"delta": piece}
            yield "response.custom_tool_call_input.done", {"input": item["input"]}


def _part(
    index_name: str, index: int, part: Mapping[str, Any], part_event: str, text_event: str, extra: Mapping[str, Any]
) -> Iterator[_Event]:
    """A part with a text. What is `extra` goes whole with the first delta, and with what is done."""
    at = {index_name: index}
    empty = {**part, "text": ""} | {name: [] for name in extra}
    yield f"response.{part_event}.added", {**at, "part": empty}
    first = True
    for piece in pieces(part["text"]):
        beside = extra if first else {name: [] for name in extra}
        yield f"response.{text_event}.delta", {**at, "delta": piece, **beside}
        first = False
    yield f"response.{text_event}.done", {**at, "text": part["text"], **extra}
    yield f"response.{part_event}.done", {**at, "part": part}
