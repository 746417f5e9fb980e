"""What happens when things go wrong on the way: hang-ups, repeats, slow clients, engines that fail or are not there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import openai
import pytest
from gateway_rig import Rig, config, fake_engine, gateway

from canter.engine.fake import Fault
from canter.errors import (
    BadRequest,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    Refused,
    StoreError,
    TemplateError,
)
from canter.gateway.calls import infrastructure_fault
from canter.gateway.http import HttpError
from canter.gateway.stream import Timing
from canter.store.memory import MemoryStore
from canter.types import Call, CallBodies, CallStatus, EngineRecord, Outcome, Reason

USER = {"role": "user", "content": "hi"}
QUICK = Timing(body_s=0.3, headers_after_s=0.05, keep_alive_s=0.05)


def request_bytes(
    rig: Rig, body: dict[str, Any], *, path: str = "/v1/chat/completions", key: str | None = None
) -> bytes:
    data = json.dumps({"model": "policy", "messages": [USER], **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key or rig.agent_key}\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def connect(rig: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = rig.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


NO_ENGINE = (CallStatus.ERROR, Reason.ENGINE_UNAVAILABLE)


def fate(call: Call) -> tuple[CallStatus, Reason | None]:
    return call.status, call.untrainable


async def until(condition: Any, *, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.01)


async def recorded(rig: Rig, count: int = 1) -> list[Any]:
    async def enough() -> bool:
        return len(await rig.store.calls(["r1"])) >= count

    await until(enough)
    return await rig.store.calls(["r1"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_early_aborts_the_engine_and_is_recorded(stream: bool) -> None:
    engine = fake_engine(lambda *_: "x" * 200, token_delay_s=0.02)
    async with gateway(engine, timing=QUICK) as rig:
        _, writer = await connect(rig)
        writer.write(request_bytes(rig, {"stream": stream}))
        await asyncio.sleep(0.2)
        writer.close()
        [call] = await recorded(rig)
        assert call.status is CallStatus.CANCELLED
        assert call.untrainable is Reason.CLIENT_GONE
        assert 0 < len(call.sampled) < 200, "what was sampled until then is kept"
        assert (await engine.health()).running == 0
        assert rig.app.calls.in_flight == 0


async def test_a_hang_up_behind_the_terminal_event_is_no_abort() -> None:
    async with gateway() as rig:
        reader, writer = await connect(rig)
        writer.write(request_bytes(rig, {"stream": True}))
        await reader.readuntil(b"data: [DONE]\n\n")
        writer.transport.abort()
        [call] = await recorded(rig)
        await asyncio.sleep(0.05)
        assert call.status is CallStatus.OK
        assert call.untrainable is None
        assert rig.app.calls.in_flight == 0


async def test_the_call_is_committed_before_the_terminal_event() -> None:
    async with gateway() as rig:
        reader, writer = await connect(rig)
        writer.write(request_bytes(rig, {"stream": True}))
        await reader.readuntil(b"data: [DONE]\n\n")
        assert len(await rig.store.calls(["r1"])) == 1
        writer.close()


async def test_the_same_body_in_flight_joins_and_after_delivery_is_a_new_sample() -> None:
    async with gateway(fake_engine(token_delay_s=0.02)) as rig:
        both = await asyncio.gather(rig.chat(), rig.chat())
        assert both[0] == both[1]
        assert len(await rig.store.calls(["r1"])) == 1
        again = await rig.chat()
        assert again[1]["id"] != both[0][1]["id"]
        assert len(await rig.store.calls(["r1"])) == 2


async def test_the_order_of_members_does_not_matter_to_a_join() -> None:
    async with gateway(fake_engine(token_delay_s=0.02)) as rig:
        one = rig.post("/v1/chat/completions", {"model": "policy", "messages": [USER], "max_tokens": 9})
        two = rig.post("/v1/chat/completions", {"max_tokens": 9, "messages": [USER], "model": "policy"})
        replies = await asyncio.gather(one, two)
    assert replies[0] == replies[1]


async def test_one_of_two_joined_clients_may_leave() -> None:
    async with gateway(fake_engine(token_delay_s=0.03)) as rig:
        _, writer = await connect(rig)
        body = {"model": "policy", "messages": [USER]}
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {rig.agent_key}\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        await asyncio.sleep(0.05)
        staying = asyncio.ensure_future(rig.post("/v1/chat/completions", body))
        await asyncio.sleep(0.05)
        writer.close()
        status, _ = await staying
        [call] = await rig.store.calls(["r1"])
    assert status == 200
    assert call.status is CallStatus.OK


class SlowStore(MemoryStore):
    """Takes its time to commit a call."""

    async def append_call(self, call: Call, bodies: CallBodies) -> None:
        await super().append_call(call, bodies)
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("pause_s", [0.02, 0.4])
async def test_a_finished_reply_that_was_never_delivered_is_replayed(pause_s: float) -> None:
    """The client leaves while its call is being committed; its repeat comes before or after the commit is done."""
    async with gateway(store=SlowStore()) as rig:
        _, writer = await connect(rig)
        writer.write(request_bytes(rig, {}))
        await recorded(rig)
        writer.close()
        await asyncio.sleep(pause_s)
        status, reply = await rig.post("/v1/chat/completions", {"model": "policy", "messages": [USER]})
        [call] = await rig.store.calls(["r1"])
        assert (status, reply["id"]) == (200, call.id)
        assert (call.status, call.untrainable) == (CallStatus.OK, None)
        assert rig.app.calls.in_flight == 0
        status, again = await rig.post("/v1/chat/completions", {"model": "policy", "messages": [USER]})
        assert (status, again["id"] == call.id) == (200, False)


async def test_a_slow_generation_keeps_its_stream_alive() -> None:
    engine = fake_engine(lambda *_: "x" * 30, token_delay_s=0.01)
    async with gateway(engine, timing=QUICK) as rig:
        reader, writer = await connect(rig)
        writer.write(request_bytes(rig, {"stream": True}))
        text = await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()
        async with rig.sdk() as sdk:
            stream = await sdk.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "other"}], stream=True
            )
            content = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text.count(b": keep-alive\n\n") >= 2
    assert content == "x" * 30


async def test_an_engine_failure_before_the_first_byte_has_a_status_and_says_when_to_retry() -> None:
    async with gateway(fake_engine(faults={0: Fault.ERROR, 1: Fault.ERROR})) as rig, rig.sdk() as sdk:
        with pytest.raises(openai.InternalServerError) as caught:
            await sdk.chat.completions.create(model="policy", messages=[USER], stream=True)
        [call] = await rig.store.calls(["r1"])
        status, _ = await rig.chat()
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "2"
    assert (call.status, call.untrainable) == (CallStatus.ERROR, Reason.ENGINE_UNAVAILABLE)
    assert status == 200


async def test_a_failure_inside_a_stream_is_an_error_event_and_no_clean_end() -> None:
    engine = fake_engine(
        lambda *_: "x" * 20, token_delay_s=0.02, faults={0: Fault.CUT, 1: Fault.CUT, 2: Fault.CUT, 3: Fault.CUT}
    )
    async with gateway(engine, timing=QUICK) as rig:
        reader, writer = await connect(rig)
        writer.write(request_bytes(rig, {"stream": True}))
        text = await reader.read()
        assert b"HTTP/1.1 200 OK" in text
        assert b'data: {"error":{' in text
        assert b"[DONE]" not in text
        assert not text.endswith(b"0\r\n\r\n"), "the chunked body has no end: no client can take it for whole"
        writer.close()
        async with rig.sdk() as sdk:
            stream = await sdk.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "b"}], stream=True
            )
            with pytest.raises(openai.APIError):
                [chunk async for chunk in stream]


async def test_one_failure_of_an_engine_is_not_the_harnesss_trouble() -> None:
    async with gateway(fake_engine(faults={0: Fault.ERROR})) as rig:
        status, _ = await rig.chat()
    assert status == 200


async def test_without_an_engine_a_call_waits_then_503_with_retry_after() -> None:
    async with gateway(register=False) as rig, rig.sdk() as sdk:
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError) as caught:
            await sdk.chat.completions.create(model="policy", messages=[USER])
        waited = time.monotonic() - began
        assert [fate(call) for call in await rig.store.calls(["r1"])] == [NO_ENGINE]
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) > 0
    assert waited >= 0.3


async def test_a_call_that_waits_goes_on_when_an_engine_registers() -> None:
    async with gateway(register=False, settings=config(gateway={"engine_wait_s": 10})) as rig:
        waiting = asyncio.ensure_future(rig.chat())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await rig.engines.register(EngineRecord("http://engine", "fake", 0), "k")
        assert (await asyncio.wait_for(waiting, 2))[0] == 200


async def test_a_pause_holds_new_calls_and_resume_lets_them_go() -> None:
    async with gateway() as rig:
        assert (await rig.post("/api/pause", {}, key=rig.service_key))[0] == 200
        held = [asyncio.ensure_future(rig.chat(f"q{i}")) for i in range(3)]
        await asyncio.sleep(0.15)
        assert not any(task.done() for task in held)
        assert (await rig.post("/api/resume", {}, key=rig.service_key))[0] == 200
        assert [(await asyncio.wait_for(task, 2))[0] for task in held] == [200] * 3


async def test_a_client_that_leaves_a_held_call_leaves_nothing_behind() -> None:
    async with gateway() as rig:
        await rig.post("/api/pause", {}, key=rig.service_key)
        _, writer = await connect(rig)
        writer.write(request_bytes(rig, {}))
        await asyncio.sleep(0.1)
        writer.close()

        async def empty() -> bool:
            return rig.app.calls.in_flight == 0

        await until(empty)
        await rig.post("/api/resume", {}, key=rig.service_key)
        assert (await rig.chat("next"))[0] == 200


async def test_an_attempt_that_is_sealed_while_a_call_runs_refuses_its_reply() -> None:
    async with gateway(fake_engine(lambda *_: "x" * 30, token_delay_s=0.01)) as rig:
        running = asyncio.ensure_future(rig.chat())
        await asyncio.sleep(0.1)
        await rig.store.end_attempt("r1", 1, Outcome.EXITED, exit_code=0)
        status, reply = await running
        assert await rig.store.calls(["r1"]) == []
    assert status == 409
    assert reply["error"]["code"] == "attempt_closed"


async def test_a_client_that_sends_its_body_too_slowly_gets_408() -> None:
    async with gateway(timing=QUICK) as rig:
        reader, writer = await connect(rig)
        whole = request_bytes(rig, {})
        writer.write(whole[:-10])
        reply = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    assert b"HTTP/1.1 408" in reply
    assert b"body_timeout" in reply


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error() -> None:
    async with gateway() as rig:
        _, writer = await connect(rig)
        writer.write(request_bytes(rig, {})[:-10])
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.05)
        assert (await rig.chat())[0] == 200
        assert len(await rig.store.calls(["r1"])) == 1


async def test_a_body_over_the_limit_is_413_by_its_length_and_by_its_bytes() -> None:
    settings = config(gateway={"max_body_bytes": 2000})
    async with gateway(settings=settings) as rig, aiohttp.ClientSession() as http:
        status, reply = await rig.chat("x" * 3000)
        assert (status, reply["error"]["code"]) == (413, "request_too_large")

        async def parts() -> Any:
            for _ in range(30):
                yield b"x" * 100

        headers = {"authorization": f"Bearer {rig.agent_key}"}
        async with http.post(f"{rig.url}/v1/chat/completions", data=parts(), headers=headers) as response:
            assert response.status == 413
        assert (await rig.chat("x" * 100))[0] == 200


async def test_many_idle_and_broken_connections_do_not_hold_up_others() -> None:
    async with gateway() as rig:
        writers = [(await connect(rig))[1] for _ in range(50)]
        for number, writer in enumerate(writers):
            writer.write(request_bytes(rig, {})[: 20 * (number % 10)])
        assert (await asyncio.wait_for(rig.chat(), 2))[0] == 200
        for writer in writers:
            writer.transport.abort()


async def test_the_end_of_the_server_has_a_deadline() -> None:
    engine = fake_engine(faults={0: Fault.HANG})
    async with gateway(engine) as rig:
        hanging = asyncio.ensure_future(rig.chat())
        waiting = asyncio.ensure_future(
            rig.post("/api/events?after=1000&timeout_s=30", None, key=rig.service_key, method="GET")
        )
        await asyncio.sleep(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 3
    assert (await hanging)[0] == 503
    assert (await waiting) == (200, {"events": []})


async def test_a_call_that_was_held_for_too_long_is_recorded() -> None:
    async with gateway(settings=config(engine={"timeout_s": 0.1})) as rig:
        assert (await rig.post("/api/pause", {}, key=rig.service_key))[0] == 200
        status, _ = await rig.chat()
        calls = await rig.store.calls(["r1"])
    assert status == 503
    assert [fate(call) for call in calls] == [NO_ENGINE]


@pytest.mark.parametrize("held", [True, False])
async def test_a_call_that_the_end_of_the_gateway_breaks_off_is_recorded(held: bool) -> None:
    store = MemoryStore()
    async with gateway(fake_engine(lambda *_: "x" * 200, token_delay_s=0.05), store=store) as rig:
        if held:
            await rig.post("/api/pause", {}, key=rig.service_key)
        asking = asyncio.create_task(rig.chat())
        await until(_flying(rig))
    status, reply = await asking
    assert (status, reply["error"]["code"]) == (503, "shutting_down")
    assert [fate(call) for call in await store.calls(["r1"])] == [(CallStatus.ERROR, Reason.GATEWAY_UNAVAILABLE)]


def _flying(rig: Rig) -> Callable[[], Awaitable[bool]]:
    async def flying() -> bool:
        return rig.app.calls.in_flight > 0

    return flying


def test_whose_fault_a_failed_call_is() -> None:
    """Those of the harness have a status below 500."""
    assert infrastructure_fault(EngineUnavailable("x")) is Reason.ENGINE_UNAVAILABLE
    assert infrastructure_fault(EngineError("x")) is Reason.ENGINE_UNAVAILABLE
    for error in (StoreError("x"), HttpError(503, "shutting_down", "x"), KeyError("a fault of ours")):
        assert infrastructure_fault(error) is Reason.GATEWAY_UNAVAILABLE
    for error in (BadRequest("x"), ContextOverflow(9, 8), TemplateError("x"), Refused("x"), HttpError(404, "x", "x")):
        assert infrastructure_fault(error) is None
