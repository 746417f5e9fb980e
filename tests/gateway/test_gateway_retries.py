"""A request that comes again: it joins what is on its way, gets what never arrived, and is sampled anew once it did."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest
from gateway_rig import Rig, config, fake_engine, gateway
from raw_client import MODEL_PATHS, TERMINAL, RawClient, ask, question, reply_id

from canter.gateway.serve import bind, serve
from canter.gateway.stream import Timing
from canter.store.memory import MemoryStore
from canter.types import Call, CallBodies, CallStatus, Reason

CHAT = "/v1/chat/completions"
QUICK = Timing(body_s=1.0, headers_after_s=0.05, keep_alive_s=0.05, send_s=0.3)
LONG = 3_000
"""Tokens of a reply whose JSON, with logprobs, is more than all buffers between gateway and client hold."""


def body(path: str, content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {**question(path, content), **fields}


async def calls_of(rig: Rig) -> list[Call]:
    return await rig.store.calls(["r1"])


async def until(condition: Callable[[], Awaitable[bool]], *, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.01)


async def whole(rig: Rig, path: str, asked: dict[str, Any]) -> str:
    """The id of the reply that a client gets which waits for it."""
    status, reply = await rig.post(path, asked)
    assert status == 200, reply
    return str(reply["id"])


@contextlib.asynccontextmanager
async def long_replies() -> AsyncIterator[Rig]:
    """A gateway whose replies are long and whose kernel holds little of them."""
    settings = config(sampling={"max_tokens": LONG})
    async with gateway(fake_engine(lambda *_: "x" * (LONG - 1)), timing=QUICK, settings=settings) as rig:
        sock = bind(settings.gateway)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)  # accepted connections inherit it
        async with serve(rig.app, settings.gateway, sock=sock, grace_s=0.5) as url:
            yield replace(rig, url=url)


@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_thirty_at_once_are_one_generation(path: str) -> None:
    """Every third one wants a stream."""
    async with gateway(fake_engine(lambda *_: "x" * 20, token_delay_s=0.02), timing=QUICK) as rig:

        async def one(number: int) -> str:
            client = await ask(rig, path, body(path, stream=number % 3 == 0))
            data = await client.read_until(TERMINAL[path] if number % 3 == 0 else b"xxxx")
            client.hang_up()
            return reply_id(path, data)

        ids = await asyncio.gather(*(one(number) for number in range(30)))
        [call] = await calls_of(rig)
    assert set(ids) == {call.id}
    assert call.status is CallStatus.OK


@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_thirty_at_once_get_equal_replies(path: str) -> None:
    async with gateway(fake_engine(token_delay_s=0.02)) as rig:
        replies = await asyncio.gather(*(rig.post(path, body(path)) for _ in range(30)))
        assert len(await calls_of(rig)) == 1
    assert {orjson.dumps(reply) for _, reply in replies} == {orjson.dumps(replies[0][1])}
    assert {status for status, _ in replies} == {200}


@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_what_was_delivered_as_a_stream_is_sampled_anew_without_one(path: str) -> None:
    """Claude Code repeats a turn with `stream: false` when it cannot read the stream: a new sample, not the same."""
    async with gateway() as rig:
        client = await ask(rig, path, body(path, stream=True))
        first = reply_id(path, await client.read_until(TERMINAL[path]))
        second = await whole(rig, path, body(path, stream=False))
        assert [call.id for call in await calls_of(rig)] == [first, second]
        client.hang_up()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_a_hang_up_right_behind_the_terminal_event_is_a_delivery(path: str, reset: bool) -> None:
    async with gateway() as rig:
        client = await ask(rig, path, body(path, stream=True))
        first = reply_id(path, await client.read_until(TERMINAL[path]))
        client.hang_up(reset=reset)
        second = await whole(rig, path, body(path, stream=True) | {"stream": False})
        calls = await calls_of(rig)
    assert first != second
    assert [(call.status, call.untrainable) for call in calls] == [(CallStatus.OK, None)] * 2


class HangUpStore(MemoryStore):
    """Its client hangs up at the moment at which the call is committed: the kernel knows, nobody has been told."""

    client: RawClient | None = None
    reset = False

    async def append_call(self, call: Call, bodies: CallBodies) -> None:
        await super().append_call(call, bodies)
        if self.client is not None:
            self.client.hang_up(reset=self.reset)
            self.client = None


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_a_hang_up_just_before_the_reply_leaves_is_no_delivery(path: str, stream: bool, reset: bool) -> None:
    store = HangUpStore()
    store.reset = reset
    async with gateway(fake_engine(lambda *_: "x" * 20, token_delay_s=0.005), store=store) as rig:
        store.client = await ask(rig, path, body(path, stream=stream))
        await until(_calls(rig, 1))
        again = await whole(rig, path, body(path))
        [call] = await calls_of(rig)
    assert again == call.id
    assert (call.status, call.untrainable) == (CallStatus.OK, None)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_hang_up_in_the_middle_of_a_long_reply_is_no_delivery(stream: bool, reset: bool) -> None:
    async with long_replies() as rig:
        client = await ask(rig, CHAT, body(CHAT, stream=stream, logprobs=True), receive_bytes=4096)
        begun = reply_id(CHAT, await client.read_until(b'"object"'))
        client.hang_up(reset=reset)
        await asyncio.sleep(0.1)
        again = await whole(rig, CHAT, body(CHAT, logprobs=True))
        [call] = await calls_of(rig)
    assert begun == again == call.id
    assert (call.status, call.untrainable) == (CallStatus.OK, None)


async def test_a_long_reply_arrives_whole() -> None:
    async with long_replies() as rig, rig.sdk() as sdk:
        asked = body(CHAT, logprobs=True)
        whole = await sdk.chat.completions.create(**asked)
        stream = await sdk.chat.completions.create(**asked, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    assert whole.choices[0].message.content == "x" * (LONG - 1)
    assert "".join(choice.delta.content or "" for choice in choices) == "x" * (LONG - 1)
    for logprobs in (whole.choices[0].logprobs, choices[0].logprobs):
        assert logprobs is not None
        assert len(logprobs.content or ()) == LONG


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_reads_nothing_is_given_up(stream: bool) -> None:
    async with long_replies() as rig:
        client = await ask(rig, CHAT, body(CHAT, stream=stream, logprobs=True), receive_bytes=4096)
        await until(_calls(rig, 1))

        async def idle() -> bool:
            return rig.app.calls.in_flight == 0

        await until(idle)
        again = await whole(rig, CHAT, body(CHAT, logprobs=True))
        [call] = await calls_of(rig)
        client.hang_up()
    assert again == call.id, "it never arrived, so the repeat gets it"


@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_thirty_who_leave_before_the_reply_leave_nothing_behind(path: str) -> None:
    """One after the other, each before there is a reply; the last one stays."""
    async with gateway(fake_engine(lambda *_: "x" * 40, token_delay_s=0.01), timing=QUICK) as rig:
        for number in range(30):
            client = await ask(rig, path, body(path, stream=number % 2 == 0))
            await asyncio.sleep(0.02)
            client.hang_up(reset=number % 3 == 0)
        last = await whole(rig, path, body(path))
        calls = await calls_of(rig)
        assert rig.app.calls.in_flight == 0
        assert (await rig.engine.health()).running == 0
    fates = [(call.status, call.untrainable) for call in calls if call.id != last]
    assert {call.id: call.status for call in calls}[last] is CallStatus.OK
    assert set(fates) == {(CallStatus.CANCELLED, Reason.CLIENT_GONE)}


async def test_a_repeat_joins_while_others_leave() -> None:
    async with gateway(fake_engine(lambda *_: "x" * 60, token_delay_s=0.01), timing=QUICK) as rig:
        staying = await ask(rig, CHAT, body(CHAT, stream=True))
        for _ in range(10):
            leaving = await ask(rig, CHAT, body(CHAT))
            await asyncio.sleep(0.02)
            leaving.hang_up()
        reply = reply_id(CHAT, await staying.read_until(TERMINAL[CHAT]))
        staying.hang_up()
        assert [(call.id, call.status) for call in await calls_of(rig)] == [(reply, CallStatus.OK)]


async def test_two_attempts_never_share_a_reply() -> None:
    async with gateway(fake_engine(token_delay_s=0.02)) as rig:
        other = await rig.start("r2")
        replies = await asyncio.gather(rig.post(CHAT, body(CHAT)), rig.post(CHAT, body(CHAT), key=other.agent_key))
    assert replies[0][1]["id"] != replies[1][1]["id"]


def _calls(rig: Rig, count: int) -> Callable[[], Awaitable[bool]]:
    async def enough() -> bool:
        return len(await calls_of(rig)) >= count

    return enough
