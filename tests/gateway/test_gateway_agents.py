"""Several agents of one attempt that ask the same: each gets a reply of its own, a retry of either does not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest
from gateway_rig import Rig, fake_engine, gateway

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
TASK = {"model": "policy", "messages": [{"role": "user", "content": "count the files"}], "tools": TOOLS}
ONE, TWO = {"x-claude-code-agent-id": "a1"}, {"x-claude-code-agent-id": "a2"}
NAMED = ("X-Claude-Code-Session-Id", "x-claude-code-agent-id", "thread-id", "x-session-id", "x-litellm-session-id")


def calling(*_: object) -> str:
    return '<tool_call>\n{"name": "bash", "arguments": {"command": "ls | wc -l"}}\n</tool_call>'


async def ask(rig: Rig, headers: Mapping[str, str], body: Any = TASK) -> dict[str, Any]:
    key = {"authorization": f"Bearer {rig.agent_key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(rig.url + CHAT, json=body, headers={**key, **headers}) as response,
    ):
        assert response.status == 200, await response.text()
        reply: dict[str, Any] = await response.json()
        return reply


@pytest.mark.parametrize("name", NAMED)
async def test_agents_with_one_task_are_sampled_apart(name: str) -> None:
    async with gateway(fake_engine(calling, token_delay_s=0.005)) as rig:
        await asyncio.gather(*(ask(rig, {name: agent}) for agent in ("a1", "a2", "a1", "a2", "a1")))
        calls = await rig.store.calls(["r1"])
    assert len(calls) == 2
    assert len({call.effective["seed"] for call in calls}) == 2


async def test_each_agent_goes_on_from_its_own_turn() -> None:
    async with gateway(fake_engine(calling, token_delay_s=0.005)) as rig:
        first = await asyncio.gather(ask(rig, ONE), ask(rig, TWO))
        turns = [reply["choices"][0]["message"] for reply in first]
        results = [
            {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": str(number)}
            for number, turn in enumerate(turns)
        ]
        bodies = [
            {**TASK, "messages": [*TASK["messages"], turn, result]} for turn, result in zip(turns, results, strict=True)
        ]
        await asyncio.gather(*(ask(rig, who, body) for who, body in zip((ONE, TWO), bodies, strict=True)))
        calls = sorted(await rig.store.calls(["r1"]), key=lambda call: call.ordinal)
    assert turns[0]["tool_calls"][0]["id"] != turns[1]["tool_calls"][0]["id"]
    assert {call.parent_id for call in calls[2:]} == {call.id for call in calls[:2]}
    assert [call.fork for call in calls] == [None] * 4


async def test_other_headers_name_no_agent() -> None:
    async with gateway(fake_engine(calling, token_delay_s=0.005)) as rig:
        retries = ({"x-stainless-retry-count": str(number), "x-request-id": f"q{number}"} for number in range(3))
        replies = await asyncio.gather(*(ask(rig, {**ONE, **headers}) for headers in retries))
        assert len(await rig.store.calls(["r1"])) == 1
    assert len({reply["id"] for reply in replies}) == 1
