"""Prompts of megabytes: the gateway answers others meanwhile, and refuses at once what cannot fit."""

from __future__ import annotations

import asyncio
import io
import time
from typing import Any

import aiohttp
import orjson
from gateway_rig import Rig, fake_engine, gateway

from canter.types import CallStatus

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def send(rig: Rig, path: str, body: bytes, *, timeout_s: float = 30) -> tuple[int, dict[str, Any]]:
    headers = {"authorization": f"Bearer {rig.agent_key}"}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout_s)) as http,
        http.post(rig.url + path, data=io.BytesIO(body), headers=headers) as response,
    ):
        return response.status, orjson.loads(await response.read())


def chat(*contents: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return orjson.dumps({"model": "policy", "messages": messages, **fields})


async def longest_pause(rig: Rig, until: asyncio.Future[Any]) -> tuple[float, int]:
    """The longest that /healthz took while something else is answered, and how often it was asked."""
    longest, asked = 0.0, 0
    async with aiohttp.ClientSession() as http:
        while not until.done():
            before = time.monotonic()
            async with http.get(rig.url + "/healthz") as response:
                assert response.status == 200
            longest, asked = max(longest, time.monotonic() - before), asked + 1
            await asyncio.sleep(0.01)
    return longest, asked


async def test_others_are_answered_while_a_long_prompt_is_encoded() -> None:
    async with gateway(fake_engine(context_tokens=2**23)) as rig:
        for path, body in (
            (CHAT, chat("a b " * 2**20)),
            (COMPLETIONS, orjson.dumps({"model": "policy", "prompt": "c d " * 2**20})),
        ):
            answer = asyncio.ensure_future(send(rig, path, body))
            longest, asked = await longest_pause(rig, answer)
            status, reply = await answer
            assert status == 200, reply
            assert reply["usage"]["prompt_tokens"] >= 4 * 2**20
            assert longest < 3
            assert asked >= 10


async def test_what_cannot_fit_is_refused_without_encoding_it() -> None:
    many = b",".join([b'{"role":"user","content":""}'] * 100_000)
    async with gateway(fake_engine(context_tokens=32768)) as rig:
        for path, body in (
            (CHAT, chat("a" * 31 * 2**20)),
            (COMPLETIONS, orjson.dumps({"model": "policy", "prompt": "a" * 31 * 2**20})),
            (CHAT, b'{"model":"policy","messages":[' + many + b"]}"),
        ):
            started = time.monotonic()
            answer = asyncio.ensure_future(send(rig, path, body))
            longest, _ = await longest_pause(rig, answer)
            status, reply = await answer
            assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
            assert "resulted in at least " in reply["error"]["message"]
            assert longest < 3
            assert time.monotonic() - started < 30
        assert await rig.store.calls(["r1"]) == []


async def test_what_just_does_not_fit_is_counted() -> None:
    async with gateway(fake_engine(context_tokens=200_000)) as rig:
        status, reply = await send(rig, CHAT, chat("a" * 200_000))
        assert status == 400
        assert "resulted in 2000" in reply["error"]["message"]
        assert (await send(rig, CHAT, chat("a" * 199_000)))[0] == 200


async def test_calls_of_one_attempt_are_planned_one_after_another() -> None:
    """A short call that comes while a long one is planned waits for it, and both can be gone on from."""
    long = "x" * 2**20
    async with gateway(fake_engine(context_tokens=2**22)) as rig:
        bodies = [chat(long), *(chat(f"short {i}") for i in range(8)), chat(long, "b")]
        replies = await asyncio.gather(*(send(rig, CHAT, body) for body in bodies))
        assert [status for status, _ in replies] == [200] * 10
        said = replies[0][1]["choices"][0]["message"]
        going_on = {
            "model": "policy",
            "messages": [{"role": "user", "content": long}, said, {"role": "user", "content": "more"}],
        }
        assert (await send(rig, CHAT, orjson.dumps(going_on)))[0] == 200
        calls = await rig.store.calls(["r1"])
    last = max(calls, key=lambda call: call.ordinal)
    assert last.parent_id == replies[0][1]["id"]
    assert len(last.suffix) < 100, "only what is new is stored"


async def test_a_client_that_leaves_while_its_prompt_is_planned_leaves_the_conversation_usable() -> None:
    async with gateway(fake_engine(context_tokens=2**23)) as rig:
        leaving = asyncio.ensure_future(send(rig, CHAT, chat("a b " * 2**20)))
        await asyncio.sleep(0.3)
        leaving.cancel()
        await asyncio.wait({leaving})
        assert (await send(rig, CHAT, chat("still there?")))[0] == 200
        calls = await rig.store.calls(["r1"])
        assert [call.status for call in calls].count(CallStatus.OK) == 1
