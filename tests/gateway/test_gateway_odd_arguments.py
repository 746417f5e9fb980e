"""Arguments that a wire form cannot carry as they were sampled: an exact echo extends its turn, before and after a
restart, whatever the protocol makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gateway_rig import Rig, fake_engine, gateway

from canter.store import Started
from canter.store.memory import MemoryStore

ODD = {
    "a name twice": '{"a": 1, "a": 2}',
    "a name twice within": '{"a": {"b": [1], "b": {}}}',
    "more digits than a double has": '{"a": 0.1234567890123456789012}',
    "beyond 64 bits": '{"a": 123456789012345678901234567890}',
    "beyond a double": '{"a": 1e999}',
    "beyond what JavaScript counts": '{"a": 9007199254740993}',
    "minus nought": '{"a": -0.0}',
    "another spelling": '{ "b":  5e3,\t"a": "\\u00e9\\/" }',
    "no object": "[1, 2]",
    "a broken object": '{"a": ',
    "half a surrogate pair": '{"a": "\\ud800"}',
    "a text": '"{}"',
    "only an input": '{"input": "x"}',
    "an input and more": '{"input": "x", "a": 1, "a": 1}',
    "a wrapper": '{"__unparsedToolInput": {"raw": "{", "len": 1}}',
    "a wrapper of nothing": '{"__unparsedToolInput": {}}',
    "deep": '{"a": ' + "[" * 124 + "]" * 124 + "}",
}
PARAMETERS = {"type": "object", "properties": {}}
USER = {"role": "user", "content": "hi"}

Asks = Callable[[Any], tuple[str, dict[str, Any]]]
"""Path and request: the first of a conversation, or the one that sends a reply back."""


def chat(reply: Any) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    messages: list[Any] = [USER]
    if reply is not None:
        said = reply["choices"][0]["message"]
        calls = said.get("tool_calls") or ()
        messages += [said, *({"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls), USER]
    return "/v1/chat/completions", {"messages": messages, "tools": tools}


def responses(reply: Any, **tool: Any) -> tuple[str, dict[str, Any]]:
    items: list[Any] = [USER]
    if reply is not None:
        calls = [item for item in reply["output"] if item["type"].endswith("_call")]
        items += reply["output"]
        items += [{"type": f"{c['type']}_output", "call_id": c["call_id"], "output": "ok"} for c in calls]
        items.append(USER)
    tools = [tool or {"type": "function", "name": "f", "parameters": PARAMETERS}]
    return "/v1/responses", {"input": items, "tools": tools, "store": False}


def custom(reply: Any) -> tuple[str, dict[str, Any]]:
    return responses(reply, type="custom", name="f")


def messages(reply: Any) -> tuple[str, dict[str, Any]]:
    turns: list[Any] = [USER]
    if reply is not None:
        uses = [block for block in reply["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "ok"} for use in uses]
        turns += [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": [*results, {"type": "text", "text": "hi"}]},
        ]
    return "/v1/messages", {"max_tokens": 99, "messages": turns, "tools": [{"name": "f", "input_schema": PARAMETERS}]}


@pytest.mark.parametrize("asks", [chat, responses, custom, messages])
async def test_an_exact_echo_of_odd_arguments_extends_its_turn(asks: Asks) -> None:
    store = MemoryStore()
    started: dict[str, Started] = {}
    replies: dict[str, Any] = {}

    async def ask(rig: Rig, name: str, reply: Any) -> Any:
        path, body = asks(reply)
        status, got = await rig.post(path, {"model": "policy", **body}, key=started[name].agent_key)
        assert status == 200, (name, got)
        return got

    called = [f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>' for text in ODD.values()]
    async with gateway(
        fake_engine(lambda _, __, number: [*called, *called, *["done"] * 99][number]), store=store
    ) as rig:
        for name in [f"{when} {what}" for when in ("live", "restored") for what in ODD]:
            started[name] = await rig.start(name)
            replies[name] = await ask(rig, name, None)
        for name in started:
            if name.startswith("live"):
                await ask(rig, name, replies[name])
    async with gateway(store=store, start=False) as rig:
        for name in started:
            if name.startswith("restored"):
                await ask(rig, name, replies[name])
    for name in started:
        first, second = await store.calls([name])
        assert (second.parent_id, second.fork) == (first.id, None), name
        assert second.prefix_len == first.prompt_len + len(first.sampled), name
