"""Recorded requests of real harnesses: how they are kept, grouped by agent, and read.

`traffic/HARNESS.json.xz` maps a scenario to its requests in their order: method, path, headers (lower-case names, no
credentials), body (prose replaced by filler of the same length), `turn` (how far the server that was recorded took
the task to be: 1 + the number of tool results, 0 for a title or a summary) and `fault` (what it did wrong, `ok`).
"""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "traffic"
HARNESSES = tuple(sorted(path.name.removesuffix(".json.xz") for path in FOLDER.glob("*.json.xz")))
_AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id", "x-session-id")
_UNSTABLE = ("cache_control", "output_config")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request. `number` is its place in the scenario, from 0."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    turn: int
    fault: str

    @property
    def agent(self) -> str:
        """Whose conversation it belongs to; empty where no header says so."""
        return next((self.headers[name] for name in _AGENT_HEADERS if name in self.headers), "")

    @property
    def is_call(self) -> bool:
        """Whether it asks the model for something."""
        return self.method == "POST"

    @property
    def dialect(self) -> str:
        return {"/v1/messages": "messages", "/v1/responses": "responses"}.get(self.path, "chat")

    @property
    def items(self) -> list[Mapping[str, Any]]:
        """Messages, or the input items of Responses."""
        return list(self.body.get("messages") or self.body.get("input") or ())


@dataclass(frozen=True, slots=True)
class Said:
    """A tool call in a recorded history."""

    id: str
    name: str
    arguments: str


@functools.cache
def scenarios(harness: str) -> dict[str, list[Recorded]]:
    raw = json.loads(lzma.decompress((FOLDER / f"{harness}.json.xz").read_bytes()))
    return {name: [_recorded(i, row) for i, row in enumerate(rows)] for name, rows in raw.items()}


def _recorded(number: int, row: Mapping[str, Any]) -> Recorded:
    return Recorded(
        number, row["method"], row["path"], row["headers"], row["body"] or {}, row["turn"] or 0, row["fault"] or "ok"
    )


def is_reply(item: Mapping[str, Any]) -> bool:
    """Whether an item of a history is (a part of) what the model said."""
    return item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call")


def calls_of(item: Mapping[str, Any]) -> Iterator[Said]:
    """The tool calls in an item, in their order, arguments as JSON text."""
    if item.get("type") == "function_call":
        namespace = item.get("namespace")  # the prompt shows such a tool as NAMESPACE__NAME
        yield Said(item["call_id"], f"{namespace}__{item['name']}" if namespace else item["name"], item["arguments"])
    for call in item.get("tool_calls") or ():
        yield Said(call["id"], call["function"]["name"], call["function"]["arguments"])
    if item.get("role") == "assistant" and isinstance(item.get("content"), list):
        for block in item["content"]:
            if block.get("type") == "tool_use":
                yield Said(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))


def text_of(item: Mapping[str, Any]) -> str:
    content = item.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(block.get("text", "") for block in content if block.get("type") != "reasoning_text")


def echo_of(requests: Sequence[Recorded], asked: Recorded) -> list[Mapping[str, Any]] | None:
    """What came back of the reply to `asked`, in the first later request of the same agent that goes on from it."""
    before = [_stable(item) for item in asked.items]
    for later in requests[asked.number + 1 :]:
        items = later.items
        if later.agent != asked.agent or len(items) <= len(before) or not is_reply(items[len(before)]):
            continue
        if [_stable(item) for item in items[: len(before)]] == before:
            rest = items[len(before) :]
            end = next((i for i, item in enumerate(rest) if not is_reply(item)), len(rest))
            return rest[:end] if asked.dialect == "responses" else rest[:1]
    return None


def _stable(value: Any) -> Any:
    """A history without what harnesses move about in it."""
    if isinstance(value, Mapping):
        plain = {name: _stable(member) for name, member in value.items() if name not in _UNSTABLE}
        content = plain.get("content")
        if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
            plain["content"] = content[0]["text"]
        return plain
    if isinstance(value, list):
        return [_stable(member) for member in value]
    return value
