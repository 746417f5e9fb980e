"""Calls are held, not refused, while the engine is paused or away; and what cannot be held says when to come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import orjson
import pytest
from gateway_rig import Rig, config, fake_engine, gateway
from raw_client import MODEL_PATHS, TERMINAL, ask, question

from canter.errors import StoreError
from canter.gateway.stream import Timing
from canter.store.memory import MemoryStore
from canter.types import Call, CallBodies, CallStatus, EngineRecord, Reason

QUICK = Timing(body_s=1.0, headers_after_s=0.05, engine_headers_s=0.05, keep_alive_s=0.05)
PAUSE_S = 1.5
PATIENCE = 0.6
"""Of clients whose idle timer would not outlast a pause, if nothing started it anew."""
LONG_WAIT = config(gateway={"engine_wait_s": 10})

Ask = Callable[[Rig], Awaitable[str]]


async def chat(rig: Rig) -> str:
    async with rig.sdk(timeout=PATIENCE) as sdk:
        stream = await sdk.chat.completions.create(**question("/v1/chat/completions"), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def completions(rig: Rig) -> str:
    async with rig.sdk(timeout=PATIENCE) as sdk:
        stream = await sdk.completions.create(**question("/v1/completions"), stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])


async def responses(rig: Rig) -> str:
    async with rig.sdk(timeout=PATIENCE) as sdk:
        stream = await sdk.responses.create(**question("/v1/responses"), stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])


async def messages(rig: Rig) -> str:
    async with claude(rig, timeout=PATIENCE) as sdk, sdk.messages.stream(**question("/v1/messages")) as stream:
        return await stream.get_final_text()


@asynccontextmanager
async def claude(rig: Rig, **settings: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    defaults: dict[str, Any] = {"max_retries": 0, "_strict_response_validation": True}
    sdk = anthropic.AsyncAnthropic(base_url=rig.url, api_key=rig.agent_key, **{**defaults, **settings})
    async with sdk:
        yield sdk


async def chat_whole(rig: Rig) -> str:
    async with rig.sdk() as sdk:
        reply = await sdk.chat.completions.create(**question("/v1/chat/completions"))
        return reply.choices[0].message.content or ""


async def completions_whole(rig: Rig) -> str:
    async with rig.sdk() as sdk:
        return (await sdk.completions.create(**question("/v1/completions"))).choices[0].text


async def responses_whole(rig: Rig) -> str:
    async with rig.sdk() as sdk:
        return str((await sdk.responses.create(**question("/v1/responses"))).output_text)


async def messages_whole(rig: Rig) -> str:
    async with claude(rig, timeout=20) as sdk:
        reply = await sdk.messages.create(**question("/v1/messages"))
        return "".join(block.text for block in reply.content if block.type == "text")


CLIENTS: list[Ask] = [
    chat, completions, responses, messages, chat_whole, completions_whole, responses_whole, messages_whole
]  # fmt: skip


async def sat_out(rig: Rig, end: Callable[[], Awaitable[Any]]) -> None:
    """All clients at once. Streaming ones give up when nothing comes for 0.6 s; what holds them ends after 1.5 s."""
    asking = {client.__name__: asyncio.create_task(client(rig)) for client in CLIENTS}
    await asyncio.sleep(PAUSE_S)
    assert not [task for task in asking.values() if task.done()]
    await end()
    texts = {name: await asyncio.wait_for(task, 10) for name, task in asking.items()}
    assert {text for text in texts.values() if not text.startswith("reply ")} == set(), texts
    for name in ("chat", "completions", "responses", "messages"):
        assert texts[name] == texts[f"{name}_whole"], "the one joined the other"
    assert [call.status for call in await rig.store.calls(["r1"])] == [CallStatus.OK] * 4


async def test_the_vendors_clients_sit_a_pause_out() -> None:
    async with gateway(timing=QUICK) as rig:
        await rig.post("/api/pause", {}, key=rig.service_key)
        await sat_out(rig, lambda: rig.post("/api/resume", {}, key=rig.service_key))


async def test_the_vendors_clients_sit_a_pause_of_the_engine_out() -> None:
    """It stops in the middle of generations, as it does while new weights come."""
    engine = fake_engine(lambda prompt, sampling, number: f"reply {number}" + "x" * 100, token_delay_s=0.01)
    async with gateway(engine, timing=QUICK) as rig:
        asyncio.get_running_loop().call_later(0.3, asyncio.ensure_future, engine.pause("keep"))
        await sat_out(rig, engine.resume)


async def test_the_vendors_clients_sit_a_missing_engine_out() -> None:
    async with gateway(timing=QUICK, settings=LONG_WAIT, register=False) as rig:
        await sat_out(rig, lambda: rig.engines.register(EngineRecord("http://engine", "fake", 0), "k"))


@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_a_stream_that_waits_for_an_engine_still_has_a_status(path: str) -> None:
    """Few clients try again after an error inside a stream, all of them after a 503."""
    timing = Timing(headers_after_s=0.02, engine_headers_s=5, keep_alive_s=0.02)
    async with gateway(timing=timing, register=False) as rig:
        client = await ask(rig, path, {**question(path), "stream": True})
        head = await client.read_until(b"\r\n\r\n")
        client.hang_up()
        [call] = await rig.store.calls(["r1"])
    assert head.startswith(b"HTTP/1.1 503")
    assert b"\r\nretry-after: 2\r\n" in head
    assert (call.status, call.untrainable) == (CallStatus.ERROR, Reason.ENGINE_UNAVAILABLE)


@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_a_stream_whose_engine_is_lost_still_has_a_status(path: str) -> None:
    """The engine was there when the gateway last looked, and is gone when the call comes."""
    timing = Timing(headers_after_s=0.02, engine_headers_s=5, keep_alive_s=0.02)
    async with gateway(timing=timing) as rig:
        await rig.engine.close()
        client = await ask(rig, path, {**question(path), "stream": True})
        head = await client.read_until(b"\r\n\r\n")
        client.hang_up()
    assert head.startswith(b"HTTP/1.1 503")


async def test_an_engine_that_is_back_is_no_longer_missed() -> None:
    """The wait for an engine does not put off the status line of later calls."""
    timing = Timing(headers_after_s=0.05, engine_headers_s=30, keep_alive_s=0.05)
    async with gateway(fake_engine(lambda *_: "x" * 20, token_delay_s=0.02), timing=timing, register=False) as rig:
        waiting = asyncio.create_task(rig.chat())
        await asyncio.sleep(0.1)
        await rig.engines.register(EngineRecord("http://engine", "fake", 0), "k")
        await waiting
        began = time.monotonic()
        path = "/v1/chat/completions"
        client = await ask(rig, path, {**question(path, "other"), "stream": True})
        await client.read_until(b"\r\n\r\n")
        waited = time.monotonic() - began
        await client.read_until(TERMINAL[path])
        client.hang_up()
    assert waited < 0.3


@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_signs_of_life_are_events_where_comments_do_not_count(path: str) -> None:
    """Codex does not start its idle timer anew for a comment."""
    async with gateway(timing=QUICK) as rig:
        await rig.post("/api/pause", {}, key=rig.service_key)
        client = await ask(rig, path, {**question(path), "stream": True})
        await asyncio.sleep(0.5)
        await rig.post("/api/resume", {}, key=rig.service_key)
        text = await client.read_until(TERMINAL[path])
        client.hang_up()
    held = text[: text.index(b"reply 0")]
    signs = held.count(b": keep-alive\n\n") + held.count(b"event: ping\n") + held.count(b"response.in_progress\n")
    assert signs >= 4
    if path == "/v1/responses":
        assert b": keep-alive" not in held


class BrokenStore(MemoryStore):
    async def append_call(self, call: Call, bodies: CallBodies) -> None:
        raise StoreError("the disk is full")


@asynccontextmanager
async def no_engine() -> AsyncIterator[Rig]:
    async with gateway(register=False) as rig:
        yield rig


@asynccontextmanager
async def held_too_long() -> AsyncIterator[Rig]:
    async with gateway(settings=config(engine={"timeout_s": 0.1})) as rig:
        await rig.post("/api/pause", {}, key=rig.service_key)
        yield rig


@asynccontextmanager
async def no_disk() -> AsyncIterator[Rig]:
    async with gateway(store=BrokenStore()) as rig:
        yield rig


@pytest.mark.parametrize("trouble", [no_engine, held_too_long, no_disk])
@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_every_503_says_when_to_come_back(path: str, trouble: Any) -> None:
    async with trouble() as rig:
        for stream in (False, True):
            client = await ask(rig, path, {**question(path), "stream": stream})
            head, body = await client.read_reply()
            client.hang_up()
            assert head.startswith(b"HTTP/1.1 503"), head
            assert b"\r\nretry-after: " in head
            assert int(head.split(b"\r\nretry-after: ")[1].split(b"\r\n")[0]) >= 1
            error = orjson.loads(body)["error"]
            assert error["type"] == ("overloaded_error" if path == "/v1/messages" else "server_error")


@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_a_call_that_the_end_of_the_gateway_breaks_off_says_when_to_come_back(path: str) -> None:
    async with gateway(fake_engine(lambda *_: "x" * 200, token_delay_s=0.05)) as rig:
        client = await ask(rig, path, question(path))
        await asyncio.sleep(0.1)
    head = await client.read_until(b"\r\n\r\n")
    client.hang_up()
    assert head.startswith(b"HTTP/1.1 503")
    assert b"\r\nretry-after: " in head
