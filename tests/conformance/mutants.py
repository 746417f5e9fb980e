"""Requests that went wrong on the way: recorded ones, broken in every place and manner that a client could think of.

Each mutant is made of a seed number alone, so that a failure names the request that caused it.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

SEEDS: dict[str, list[dict[str, Any]]] = orjson.loads((Path(__file__).parent / "fuzz_seeds.json").read_bytes())
"""Recorded requests of real harnesses, their texts and schemas cut short, by path."""

_RAW = "@@raw@@"
"""Marks a string of which the rest stands in the JSON as it is."""
JSON_WITHOUT_QUOTES = [
    "NaN", "-Infinity", "1e999", "-0", "01", "1.", "+1", "0x10", "1e400", "9" * 400, "tru", "nul", "'a'",
    "undefined", "\\u0000", "[1,]", '{"a":1,}', '{"a":1,"a":2}', "[" * 1000, "[" * 120 + "]" * 120,
    "[" * 129 + "]" * 129, '{"a":' * 400 + "1" + "}" * 400, '"\\ud800"', '"\\udc00\\ud800"', '"\\x41"', '"\x01"', '"',
    "/* */ 1", "",
]  # fmt: skip

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 1.0, 0.5, -0.0, 1e308, 5e-324, 2**31, 2**31 - 1, 2**53 + 1, 2**63 - 1, 2**63,
    2**64 - 1, -(2**63), 1e20, "", " ", "\n", "\x00", "a", "0", "null", "true", "\u2028", "\U0001f600", "\ufeff",
    "\ufdd0", "e\u0301", "x" * 5000, "../../etc/passwd", "<|im_end|>", "<|im_start|>assistant\n", "{{ 7 * 7 }}",
    "{%- for x in y %}", "<tool_call>\n{", "</think>", "%s%n", "\\ud800", "\r\nx: y", [], {}, [None], [[]], [{}],
    {"": ""}, {"type": None}, {"type": "text"}, {"type": "text", "text": None}, ["a", "b"], [0] * 300,
    {"a": {"b": {"c": [1, {"d": None}]}}}, {"__proto__": 1}, {"type": []}, {"type": {}}, [1, "a", None, [], {}],
    {"$ref": "#"}, {"type": "image_url", "image_url": {"url": "data:,"}},
]  # fmt: skip

TYPES = [
    "text", "input_text", "output_text", "refusal", "image_url", "input_image", "image", "input_audio", "document",
    "file", "input_file", "tool_use", "tool_result", "server_tool_use", "web_search_tool_result", "thinking",
    "redacted_thinking", "function", "custom", "namespace", "web_search", "message", "reasoning", "function_call",
    "function_call_output", "custom_tool_call", "custom_tool_call_output", "item_reference", "compaction", "mcp_call",
    "computer_call_output", "json_schema", "allowed_tools", "auto", "any", "none", "required", "tool",
    "bash_20250124", "tool_reference", "search_result", "hologram", "", "TEXT",
]  # fmt: skip
ROLES = ["system", "developer", "user", "assistant", "tool", "function", "model", "", "User", "root"]
NAMES = [
    "model", "messages", "input", "prompt", "content", "role", "type", "text", "tools", "tool_calls", "tool_call_id",
    "name", "id", "arguments", "function", "stop", "n", "seed", "temperature", "max_tokens", "stream", "logprobs",
    "system", "thinking", "metadata", "previous_response_id", "conversation", "background", "store", "include",
    "response_format", "tool_choice", "unknown", "constructor", "",
]  # fmt: skip

Node = dict[str, Any] | list[Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A request to send: its number, path, body and headers beside the key; `story` says what was done to it."""

    number: int
    path: str
    body: bytes
    headers: dict[str, str]
    story: tuple[str, ...]


def mutant(path: str, number: int, seeds: list[dict[str, Any]]) -> Mutant:
    """Mutant `number` of the requests of a path."""
    rng = random.Random(f"{path} {number}")
    body = copy.deepcopy(rng.choice(seeds))
    if rng.random() < 0.5:
        body["stream"] = not body.get("stream")
    story = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        change = rng.choice(_CHANGES)
        story.append(change.__name__[1:])
        change(rng, body, seeds)
    data = _json(body)
    headers = {"content-type": "application/json"}
    if rng.random() < 0.2:
        spoil = rng.choice(_SPOILERS)
        story.append(spoil.__name__[1:])
        data = spoil(rng, data, headers)
    if rng.random() < 0.1:
        name, value = rng.choice(_HEADERS)
        story.append(f"header {name}")
        headers[name] = value
    return Mutant(number, path, data, headers, tuple(story))


def _json(body: object) -> bytes:
    text = json.dumps(body, ensure_ascii=False)
    while (at := text.find(f'"{_RAW}')) >= 0:
        end = text.index(f'{_RAW}"', at + len(_RAW))
        inner = json.loads(text[at : end + len(_RAW) + 1])
        text = text[:at] + inner[len(_RAW) : -len(_RAW)] + text[end + len(_RAW) + 1 :]
    return text.encode("utf-8", "surrogatepass")


def _places(node: object, depth: int = 0) -> list[tuple[Node, Any]]:
    """Every place in a body: a container, and the key or index in it."""
    found: list[tuple[Node, Any]] = []
    if isinstance(node, dict | list) and depth < 40:
        for key, child in list(node.items()) if isinstance(node, dict) else enumerate(node):
            found.append((node, key))
            found += _places(child, depth + 1)
    return found


def _place(rng: random.Random, body: Node) -> tuple[Node, Any]:
    """Mostly near the top, where a change does not drown in tools."""
    places = _places(body)
    if not places:
        return {"x": 1}, "x"
    if isinstance(body, dict) and body and rng.random() < 0.3:
        return body, rng.choice(list(body))
    return rng.choice(places)


def _replace(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    node, key = _place(rng, body)
    node[key] = copy.deepcopy(rng.choice(VALUES))


def _write_raw(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    node, key = _place(rng, body)
    node[key] = f"{_RAW}{rng.choice(JSON_WITHOUT_QUOTES)}{_RAW}"


def _drop(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    node, key = _place(rng, body)
    node.pop(key)


def _rename(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    node, key = _place(rng, body)
    if isinstance(node, dict):
        node[rng.choice(NAMES)] = node.pop(key)


def _add(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    node, key = _place(rng, body)
    target = node[key] if isinstance(node[key], dict | list) else node
    value = copy.deepcopy(rng.choice(VALUES))
    if isinstance(target, dict):
        target[rng.choice(NAMES)] = value
    else:
        target.insert(rng.randint(0, len(target)), value)


def _repeat(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    node, key = _place(rng, body)
    if isinstance(node, list):
        node[key:key] = [copy.deepcopy(node[key]) for _ in range(rng.choice((1, 2, 20)))]


def _swap(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    node, _ = _place(rng, body)
    if isinstance(node, list) and len(node) > 1:
        i, j = rng.sample(range(len(node)), 2)
        node[i], node[j] = node[j], node[i]


def _graft(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    """A part of one request in the place of another."""
    node, key = _place(rng, body)
    other, place = _place(rng, rng.choice(seeds))
    node[key] = copy.deepcopy(other[place])


def _wrap(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    node, key = _place(rng, body)
    node[key] = [node[key]] if rng.random() < 0.5 else {rng.choice(NAMES): node[key]}


def _nest(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    node, key = _place(rng, body)
    for _ in range(rng.choice((10, 100, 121, 127, 200))):
        node[key] = [node[key]]


def _retype(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    places = [(node, key) for node, key in _places(body) if key in ("type", "role")]
    if places:
        node, key = rng.choice(places)
        node[key] = rng.choice(ROLES if key == "role" else TYPES)


def _empty(rng: random.Random, body: Node, seeds: list[dict[str, Any]]) -> None:
    node, key = _place(rng, body)
    node[key] = type(node[key])() if node[key] is not None else ""


Change = Callable[[random.Random, Any, list[dict[str, Any]]], None]
_CHANGES: list[Change] = [
    _replace, _replace, _replace, _write_raw, _drop, _rename, _add, _repeat, _swap, _graft, _graft, _wrap, _nest,
    _retype, _retype, _empty,
]  # fmt: skip


def _truncate(rng: random.Random, data: bytes, headers: dict[str, str]) -> bytes:
    return data[: rng.randint(0, len(data))]


def _flip(rng: random.Random, data: bytes, headers: dict[str, str]) -> bytes:
    at = rng.randrange(len(data) or 1)
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _append(rng: random.Random, data: bytes, headers: dict[str, str]) -> bytes:
    return data + rng.choice([b"}", b"\n", b" " * 1000, b"\x00", b"{}", data, b",", b"\xff"])


def _prepend(rng: random.Random, data: bytes, headers: dict[str, str]) -> bytes:
    return rng.choice([b"\xef\xbb\xbf", b"\n\n", b")]}'\n", b"data: ", b"\x00", b"[", b"<?xml?>"]) + data


def _encode(rng: random.Random, data: bytes, headers: dict[str, str]) -> bytes:
    encoding = rng.choice(["utf-16", "utf-32-le", "utf-7", "cp037"])
    headers["content-type"] = f"application/json; charset={encoding}"
    return data.decode("utf-8", "replace").encode(encoding, "replace")


def _compress(rng: random.Random, data: bytes, headers: dict[str, str]) -> bytes:
    """Said or not, true or not."""
    said = rng.choice(["gzip", "deflate", "br", "zstd", "identity", "GZIP, gzip", "", None])
    if said is not None:
        headers["content-encoding"] = said
    return rng.choice([gzip.compress, zlib.compress, bytes])(data)


def _substitute(rng: random.Random, data: bytes, headers: dict[str, str]) -> bytes:
    return rng.choice([b"", b"null", b"[]", b"{}", b"0", b'""', b"true", b"a=b&c=d", b"\xff\xfe", b"[" * 50_000])


_SPOILERS: list[Callable[[random.Random, bytes, dict[str, str]], bytes]] = [
    _truncate, _truncate, _flip, _flip, _append, _prepend, _encode, _compress, _substitute
]  # fmt: skip
_HEADERS = [
    ("content-type", "text/plain"), ("content-type", "multipart/form-data; boundary=x"), ("content-type", ""),
    ("accept", "image/png"), ("accept", "text/event-stream"), ("accept-encoding", "br"), ("expect", "100-continue"),
    ("anthropic-version", "1999-01-01"), ("anthropic-beta", "a," * 500), ("x-stainless-retry-count", "-1"),
    ("x-claude-code-agent-id", "x" * 3000), ("x-openai-subagent", "\u00e9"), ("x-codex-turn-metadata", '{"a":'),
    ("x-session-id", ""), ("x-parent-session-id", "~"), ("connection", "close"), ("x-long", "y" * 30_000),
    ("openai-organization", "{}"), ("idempotency-key", "1"), ("x-forwarded-for", "1.2.3.4"), ("te", "trailers"),
]  # fmt: skip
