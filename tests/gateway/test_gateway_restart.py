"""A gateway that forgets, by a restart or for want of memory, goes on as if it had not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from gateway_rig import TOKENIZER, Rig, fake_engine, gateway

from canter.engine.fake import Fault
from canter.gateway.stream import Timing
from canter.store import Started, open_store
from canter.store.memory import MemoryStore
from canter.types import Call, CallBodies, CallStatus, Ids

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def script(prompt: Ids, sampling: Any, number: int) -> str:
    """Depends on the prompt alone, so that it does not matter which engine is asked."""
    return CALL if len(prompt) % 2 else f"text {len(prompt)}"


class Conversation:
    """A harness that goes on, step by step, with whatever the model said."""

    def __init__(self, started: Started) -> None:
        self.key = started.agent_key
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]

    async def step(self, rig: Rig) -> None:
        body = {"model": "policy", "messages": self.messages, "tools": TOOLS}
        status, reply = await rig.post("/v1/chat/completions", body, key=self.key)
        assert status == 200
        message = reply["choices"][0]["message"]
        self.messages.append(message)
        for call in message.get("tool_calls") or ():
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
        self.messages.append({"role": "user", "content": "x" * (len(self.messages) % 3 + 1)})


def shape(calls: list[Call]) -> list[tuple[Any, ...]]:
    """What must be the same whatever was forgotten in between."""
    numbers = {call.id: call.ordinal for call in calls}
    return [
        (c.ordinal, c.prefix_len, c.suffix.tolist(), c.effective["seed"], numbers.get(c.parent_id or ""), c.fork)
        for c in calls
    ]


@pytest.mark.parametrize("memory_bytes", [2**28, 0])
async def test_a_restart_between_any_two_calls_changes_nothing(tmp_path: Path, memory_bytes: int) -> None:
    async def run(name: str, *, restart: bool) -> list[tuple[Any, ...]]:
        harness: Conversation | None = None
        store = open_store(tmp_path / f"{name}{memory_bytes}.db")
        for _ in range(5):
            async with gateway(fake_engine(script), store=store, start=False, memory_bytes=memory_bytes) as rig:
                harness = harness or Conversation(await rig.start("r1", seed=3))
                for _ in range(1 if restart else 5):
                    await harness.step(rig)
                calls = await store.calls(["r1"])
            if not restart:
                break
            await store.close()
            store = open_store(tmp_path / f"{name}{memory_bytes}.db")
        await store.close()
        return shape(calls)

    straight, interrupted = await run("a", restart=False), await run("b", restart=True)
    assert straight == interrupted
    assert [row[0] for row in straight] == [0, 1, 2, 3, 4]
    assert all(row[-1] is None for row in straight), "no fork"


async def test_completions_go_on_after_a_restart_too() -> None:
    store = MemoryStore()
    ids = TOKENIZER.encode_list("once upon a time")
    key = ""
    for _ in range(3):
        async with gateway(fake_engine(script), store=store, start=False) as rig:
            key = key or (await rig.start("r1")).agent_key
            body = {"model": "policy", "prompt": ids}
            status, _ = await rig.post("/v1/completions", body, key=key)
            assert status == 200
            calls = await store.calls(["r1"])
            ids = [*ids, *calls[-1].sampled.tolist(), 5, 6]
    assert [len(call.suffix) for call in calls] == [16, 2, 2]
    assert [call.parent_id for call in calls] == [None, calls[0].id, calls[1].id]


async def test_failed_calls_are_read_over() -> None:
    store = MemoryStore()
    async with gateway(fake_engine(faults={1: Fault.ERROR, 2: Fault.ERROR}), store=store) as first:
        started = first.attempts["r1"]
        assert [(await first.chat(text))[0] for text in ("a", "b")] == [200, 503]
    async with gateway(store=store) as second:
        second.attempts["r1"] = started
        assert (await second.chat("c"))[0] == 200
    calls = await store.calls(["r1"])
    assert [call.status for call in calls] == [CallStatus.OK, CallStatus.ERROR, CallStatus.OK]
    assert [call.ordinal for call in calls] == [0, 1, 2]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ],
)
async def test_a_reply_that_may_not_have_left_is_sent_again_once(path: str, body: dict[str, Any]) -> None:
    """After kill -9 between the commit of a reply and its last byte the client asks again."""
    store, replies, request = MemoryStore(), [], {"model": "policy", **body}
    async with gateway(store=store) as rig:
        key = rig.agent_key
        replies.append(await rig.post(path, request))
    async with gateway(store=store, start=False) as rig:
        for _ in range(2):
            replies.append(await rig.post(path, request, key=key))
    assert [status for status, _ in replies] == [200] * 3
    first, again, another = (reply for _, reply in replies)
    assert again == first, "what was recorded"
    assert another["id"] != first["id"], "it has arrived by now, so this is a wish for another sample"
    assert [call.id for call in await store.calls(["r1"])] == [first["id"], another["id"]]


async def test_what_something_goes_on_from_has_arrived() -> None:
    store = MemoryStore()
    async with gateway(store=store) as rig:
        key = rig.agent_key
        _, first = await rig.chat()
        said = first["choices"][0]["message"]
        history = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "more"}]
        await rig.post("/v1/chat/completions", {"model": "policy", "messages": history})
    async with gateway(store=store, start=False) as rig:
        _, again = await rig.chat(key=key)
    assert again["id"] != first["id"]


async def test_what_is_gone_on_from_after_a_restart_has_arrived() -> None:
    store = MemoryStore()
    async with gateway(store=store) as rig:
        key = rig.agent_key
        _, first = await rig.chat()
    async with gateway(store=store, start=False) as rig:
        said = first["choices"][0]["message"]
        history = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "more"}]
        await rig.post("/v1/chat/completions", {"model": "policy", "messages": history}, key=key)
        _, again = await rig.chat(key=key)
    assert again["id"] != first["id"]


async def test_what_this_gateway_has_sent_is_not_sent_again_for_want_of_memory() -> None:
    async with gateway(memory_bytes=0) as rig:
        _, first = await rig.chat()
        _, again = await rig.chat()
    assert again["id"] != first["id"]


async def test_two_equal_requests_get_their_own_replies_again() -> None:
    """Of two sub-agents with one task, whose gateway was killed before either had its reply."""
    store = MemoryStore()

    async def ask(rig: Rig, agent: str) -> str:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {key}", "x-claude-code-agent-id": agent}
        url = f"{rig.url}/v1/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as reply:
            return str((await reply.json())["id"])

    async with gateway(fake_engine(token_delay_s=0.02), store=store) as rig:
        key = rig.agent_key
        ids = list(await asyncio.gather(ask(rig, "a"), ask(rig, "b")))
    async with gateway(store=store, start=False) as rig:
        ids += [await ask(rig, agent) for agent in "aba"]
    assert sorted(ids[2:4]) == sorted(ids[:2])
    assert len(set(ids)) == 3


async def test_a_request_without_tools_is_still_a_side_request_after_a_restart() -> None:
    store = MemoryStore()
    async with gateway(store=store) as rig:
        key = rig.agent_key
        await rig.chat(tools=TOOLS)
    async with gateway(store=store, start=False) as rig:
        await rig.chat("Is this a bug?", key=key)
    assert [call.label for call in await store.calls(["r1"])] == ["main", "side"]


class SlowStore(MemoryStore):
    """Reads bodies slowly from the second time on, so that a stream begins before its reply is at hand."""

    reads = 0

    async def bodies(self, call_id: str) -> CallBodies:
        self.reads += 1
        await asyncio.sleep(2 if self.reads > 1 else 0)
        return await super().bodies(call_id)


async def test_a_stream_that_waits_for_a_recorded_reply_has_one_id() -> None:
    store = SlowStore()
    async with gateway(store=store) as rig:
        key = rig.agent_key
        _, first = await rig.post("/v1/responses", {"model": "policy", "input": "hi"})
    timing = Timing(headers_after_s=1, keep_alive_s=0.05)
    async with (
        gateway(store=store, start=False, timing=timing) as rig,
        openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=key, max_retries=0) as sdk,
    ):
        stream = await sdk.responses.create(model="policy", input="hi", stream=True)
        told = [event async for event in stream]
    assert sum(event.type == "response.in_progress" for event in told) > 1, "it waited"
    assert {event.response.id for event in told if hasattr(event, "response")} == {first["id"]}
