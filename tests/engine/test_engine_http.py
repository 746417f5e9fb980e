import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest

from canter.engine import Engine
from canter.engine.fake import FakeEngine, Fault
from canter.engine.http import HttpEngine, serve_engine
from canter.errors import BadRequest, ConfigError, ContextOverflow, EngineError, EngineUnavailable, Unauthorized
from canter.types import FinishReason, Ids, Sampling, VersionSpan, as_ids

PROMPT = as_ids([5, 6, 7])
KEY = "engine-key"


@asynccontextmanager
async def served(engine: Engine, *, key: str = KEY, timeout_s: float = 5) -> AsyncIterator[HttpEngine]:
    url, server = await serve_engine(engine, KEY)
    client = HttpEngine(url, key, timeout_s=timeout_s)
    try:
        yield client
    finally:
        await client.close()
        await server.close()


async def test_a_generation_travels_whole():
    seen: list[tuple[Ids, Sampling]] = []
    engine = FakeEngine(lambda prompt, sampling, n: seen.append((prompt, sampling)) or [3, 4], version=7)
    sampling = Sampling(0.5, 0.9, 3, 12, 99, ("x",), (4,))
    async with served(engine) as client:
        there = await client.generate(PROMPT, sampling, request_id="a")
    here = await engine.generate(PROMPT, sampling, request_id="a")
    assert seen[0][0].tolist() == PROMPT.tolist()
    assert seen[0][1] == sampling
    assert there.ids.tolist() == here.ids.tolist()
    assert there.logprobs.tolist() == here.logprobs.tolist()
    assert (there.finish_reason, there.versions) == (FinishReason.STOP, (VersionSpan(7, 0, 2),))
    assert (there.ids.dtype, there.logprobs.dtype) == (np.int32, np.float32)


async def test_mismatched_replies_are_passed_on_for_the_gateway_to_judge():
    engine = FakeEngine(lambda *_: [1, 2], faults={0: Fault.SHORT_LOGPROBS, 1: Fault.NAN})
    async with served(engine) as client:
        assert len((await client.generate(PROMPT, Sampling(), request_id="a")).logprobs) == 1
        assert np.isnan((await client.generate(PROMPT, Sampling(), request_id="b")).logprobs[-1])


async def test_errors_are_raised_again_as_what_they_were():
    async with served(FakeEngine(context_tokens=4, faults={0: Fault.ERROR})) as client:
        with pytest.raises(EngineError, match="scripted failure of request 0"):
            await client.generate(PROMPT, Sampling(), request_id="a")
        with pytest.raises(ContextOverflow) as caught:
            await client.generate(as_ids([1] * 9), Sampling(), request_id="a")
        assert (caught.value.prompt_tokens, caught.value.max_tokens) == (9, 4)
        with pytest.raises(BadRequest, match="keep, wait, abort") as bad:
            await client.pause("sometimes")  # type: ignore[arg-type]
        assert bad.value.param == "mode"


async def test_a_closed_engine_is_unavailable():
    engine = FakeEngine()
    await engine.close()
    async with served(engine) as client:
        with pytest.raises(EngineUnavailable) as caught:
            await client.generate(PROMPT, Sampling(), request_id="a")
    assert caught.value.retry_after_s == 2


class BrokenEngine(FakeEngine):
    async def generate(self, prompt, sampling, *, request_id, cache_salt=""):
        raise RuntimeError("out of memory")


async def test_an_unexpected_failure_is_an_engine_error():
    async with served(BrokenEngine()) as client:
        with pytest.raises(EngineError, match="RuntimeError: out of memory"):
            await client.generate(PROMPT, Sampling(), request_id="a")


@pytest.mark.parametrize("key", ["", "wrong", "engine-key2"])
async def test_every_route_wants_the_key(key):
    async with served(FakeEngine(), key=key) as client:
        for call in (
            client.generate(PROMPT, Sampling(), request_id="a"),
            client.abort("a"),
            client.pause(),
            client.resume(),
            client.load_weights(1),
            client.health(),
        ):
            with pytest.raises(Unauthorized):
                await call


async def test_controls_reach_the_engine():
    engine = FakeEngine(lambda *_: [1] * 50, token_delay_s=0.005)
    async with served(engine) as client:
        running = asyncio.create_task(client.generate(PROMPT, Sampling(), request_id="a"))
        await asyncio.sleep(0.05)
        await client.pause("keep")
        await client.load_weights(3, "/some/where")
        health = await client.health()
        assert (health.version, health.paused, health.running, health.model) == (3, True, 1, "fake")
        await client.resume()
        await asyncio.sleep(0.03)
        await client.abort("a")
        generation = await running
    assert generation.finish_reason is FinishReason.ABORT
    assert [span.version for span in generation.versions] == [0, 3]


async def wait_until_idle(engine: Engine) -> None:
    async with asyncio.timeout(2):
        while (await engine.health()).running:  # noqa: ASYNC110  (the protocol has no event for it)
            await asyncio.sleep(0.01)


async def test_cancelling_the_client_aborts_on_the_server():
    engine = FakeEngine(faults={0: Fault.HANG})
    async with served(engine) as client:
        task = asyncio.create_task(client.generate(PROMPT, Sampling(), request_id="a"))
        await asyncio.sleep(0.05)
        assert (await engine.health()).running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until_idle(engine)


async def test_a_late_answer_is_an_engine_error_and_aborts():
    engine = FakeEngine(faults={0: Fault.HANG})
    async with served(engine, timeout_s=0.1) as client:
        with pytest.raises(EngineError, match=r"did not answer within 0\.1 s"):
            await client.generate(PROMPT, Sampling(), request_id="a")
        await wait_until_idle(engine)


async def test_a_server_that_goes_away_is_unavailable():
    url, server = await serve_engine(FakeEngine(faults={0: Fault.HANG}), KEY)
    client = HttpEngine(url, KEY)
    running = asyncio.create_task(client.generate(PROMPT, Sampling(), request_id="a"))
    await asyncio.sleep(0.05)
    await server.close()
    with pytest.raises(EngineUnavailable):
        await running
    with pytest.raises(EngineUnavailable, match="not reachable"):
        await client.health()
    await client.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b"\x00"),
        ("/generate", b"\x80"),
        ("/abort", b"[]"),
        ("/weights", b'{"version": "1"}'),
        ("/pause", b"{"),
    ],
)
async def test_malformed_bodies_are_bad_requests(path, body):
    async with served(FakeEngine()) as client, aiohttp.ClientSession() as session:
        reply = await session.post(client.url + path, data=body, headers={"Authorization": f"Bearer {KEY}"})
        assert reply.status == 400
        assert (await reply.json())["error"]["type"] == "bad_request"


async def test_an_unknown_route_is_an_error_that_says_so():
    async with served(FakeEngine()) as client, aiohttp.ClientSession() as session:
        reply = await session.get(client.url + "/nothing", headers={"Authorization": f"Bearer {KEY}"})
        assert (reply.status, (await reply.json())["error"]["message"]) == (404, "Not Found")


async def test_a_server_needs_a_key_and_loopback():
    with pytest.raises(ConfigError, match="key"):
        await serve_engine(FakeEngine(), "")
    with pytest.raises(ConfigError, match="loopback"):
        await serve_engine(FakeEngine(), KEY, host="0.0.0.0")
