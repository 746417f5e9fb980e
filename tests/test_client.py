"""The HTTP client against a real gateway: the store's answers and exceptions, and patience while it is away."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from canter.client import Client
from canter.errors import Forbidden, GatewayUnavailable, NotFound, PayloadTooLarge, Refused, Unauthorized
from canter.types import (
    KeyKind,
    Outcome,
    PolicyVersion,
    Reason,
    Reward,
    Rollout,
    RolloutState,
    Split,
    Task,
)

sys.path.insert(0, str(Path(__file__).parent / "gateway"))

from gateway_rig import Rig, config, gateway


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with gateway() as running:
        yield running


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[Client]:
    async with Client(rig.url, rig.service_key) as opened:
        yield opened


def new(rollout_id: str) -> Rollout:
    task = Task("t1", "Do it.", {"n": [1, {"a": "ü"}]}, {"answer": 42})
    return Rollout(rollout_id, "g2", task, split=Split.EVAL, step=3, index=1, seed=9, max_attempts=2)


async def test_a_rollouts_life(client: Client, rig: Rig) -> None:
    [made] = await client.create_rollouts([new("x.1-a_b")])
    assert (made.state, made.split, made.step, made.seed) == (RolloutState.QUEUED, Split.EVAL, 3, 9)
    assert made.task.hidden == {}
    assert await client.create_rollouts([new("x.1-a_b")]) == [made]
    assert (await client.rollout(made.id, hidden=True)).task == new("x").task

    started = await client.start_attempt(made.id, 1)
    assert (started.attempt.rollout_id, started.attempt.number) == (made.id, 1)
    attempt = await client.set_process(made.id, 1, {"pid": 5, "dir": "/x"})
    assert attempt.process == {"pid": 5, "dir": "/x"}
    assert attempt in await client.open_attempts()
    assert (await rig.chat(key=started.agent_key))[0] == 200

    ended = await client.end_attempt(made.id, 1, Outcome.EXITED, exit_code=0)
    assert ended.state is RolloutState.GRADING
    lost = await client.grader_key(made.id, 1)  # as if its reply had never arrived
    async with Client(rig.url, lost) as grader:
        assert (await grader.grading(made.id, 1))["calls"] == 1
        key = await client.grader_key(made.id, 1)
        with pytest.raises(Unauthorized, match="revoked"):
            await grader.grading(made.id, 1)
    async with Client(rig.url, key) as grader:
        grading = await grader.grading(made.id, 1)
        assert grading["task"]["hidden"] == {"answer": 42}
        assert (grading["outcome"], grading["exit_code"], grading["calls"]) == ("exited", 0, 1)
        assert grading["last_message"] == "reply 0"
        assert grading["process"] == {"pid": 5, "dir": "/x"}
        scored = await grader.post_reward(Reward(made.id, 1, 0.5, details={"why": "half"}))
    assert (scored.state, scored.reward) == (RolloutState.SCORED, 0.5)
    assert await client.reward(made.id) == await rig.store.reward(made.id) != None  # noqa: E711 (one chain)
    assert await client.attempts(made.id) == await rig.store.attempts(made.id)


async def test_rollouts_are_filtered_as_the_store_does(client: Client, rig: Rig) -> None:
    await client.create_rollouts([new(f"n{i:03}") for i in range(250)])
    assert [r.id for r in await client.rollouts(states=[RolloutState.RUNNING])] == ["r1"]
    assert len(await client.rollouts(group="g2")) == 250
    assert [r.id for r in await client.rollouts(after="n247", limit=2)] == ["n248", "n249"]
    ids = [f"n{i:03}" for i in range(249, 0, -1)]
    assert [r.id for r in await client.rollouts(ids=ids)] == [r.id for r in await rig.store.rollouts(ids=ids)]
    assert (await client.rollouts(ids=["n001"], hidden=True))[0].task.hidden == {"answer": 42}


async def test_failures_retries_and_ends(client: Client, rig: Rig) -> None:
    back = await client.invalidate("r1", 1, Reason.NODE_LOST, "the node is gone")
    assert (back.state, back.attempt) == (RolloutState.QUEUED, 1)
    await client.start_attempt("r1", 2)
    await client.end_attempt("r1", 2, Outcome.SPAWN_FAILED, reason=Reason.SPAWN_ERROR, message="no such file")
    cancelled = await client.cancel("r1", "enough")
    assert cancelled.state is RolloutState.CANCELLED
    counts = await client.counts()
    assert counts == await rig.store.counts()
    assert counts["rollouts.cancelled"] == 1


async def test_calls_and_bodies_come_back_whole(client: Client, rig: Rig) -> None:
    for text in ("a", "b"):
        await rig.chat(text)
    await rig.start("r2")
    await rig.chat("c", key=rig.attempts["r2"].agent_key)
    calls = await client.calls(["r2", "r1"])
    stored = await rig.store.calls(["r1", "r2"])
    assert [call.id for call in calls] == [call.id for call in stored]
    for got, kept in zip(calls, stored, strict=True):
        assert np.array_equal(got.sampled, kept.sampled)
        assert np.array_equal(got.logprobs, kept.logprobs)
        assert (got.effective, got.versions, got.finish_reason) == (kept.effective, kept.versions, kept.finish_reason)
    assert await client.calls([]) == []
    assert await client.calls(["r1"], attempt=7) == []
    bodies = await client.bodies(calls[0].id)
    assert b'"content":"a"' in bodies.request
    assert b"reply 0" in bodies.reply


async def test_engines_versions_facts_and_keys(client: Client, rig: Rig) -> None:
    await client.set_engine("http://127.0.0.1:1", "m", 3, "secret-of-the-engine")
    [engine] = await client.engines()
    assert (engine.url, engine.model, engine.version) == ("http://127.0.0.1:1", "m", 3)
    assert "secret-of-the-engine" not in str([await rig.store.events(0), engine])
    await client.remove_engine("http://127.0.0.1:1")
    assert await client.engines() == []

    await client.add_version(PolicyVersion(0, 0))
    await client.add_version(PolicyVersion(1, 1, "checkpoints/1"))
    assert [v.version for v in await client.versions()] == [0, 1]
    with pytest.raises(Refused):
        await client.add_version(PolicyVersion(9, 2))

    await client.set_fact("trainer position", {"epoch": 1, "at": [2, None]})
    assert await client.fact("trainer position") == {"epoch": 1, "at": [2, None]}
    assert await client.fact("nothing") is None
    with pytest.raises(Forbidden):
        await client.issue_key(KeyKind.SERVICE)
    async with (
        Client(rig.url, rig.admin_key) as admin,
        Client(rig.url, await admin.issue_key(KeyKind.SERVICE)) as fresh,
    ):
        assert await fresh.engines() == []


async def test_events_are_waited_for_and_come_at_once(client: Client, rig: Rig) -> None:
    seen = await client.events(0)
    assert seen == await rig.store.events(0)
    last = seen[-1].seq
    assert await client.events(last) == []
    waiting = asyncio.ensure_future(client.events(last, timeout_s=10))
    await asyncio.sleep(0.05)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await rig.store.set_process("r1", 1, {"pid": 1})
    [event] = await waiting
    assert loop.time() - began < 0.5
    assert (event.kind, event.rollout_id) == ("process", "r1")


async def test_pause_and_resume(client: Client, rig: Rig) -> None:
    await client.pause()
    call = asyncio.ensure_future(rig.chat())
    await asyncio.sleep(0.05)
    assert not call.done()
    await client.resume()
    assert (await call)[0] == 200


async def test_errors_come_back_as_what_they_were(client: Client, rig: Rig) -> None:
    with pytest.raises(NotFound, match="no rollout nobody"):
        await client.rollout("nobody")
    with pytest.raises(Refused):
        await client.start_attempt("r1", 5)
    with pytest.raises(NotFound):
        await client.bodies("nothing")
    async with Client(rig.url, "ck-service-wrong") as stranger:
        with pytest.raises(Unauthorized):
            await stranger.engines()
    async with Client(rig.url, rig.agent_key) as agent:
        with pytest.raises(Forbidden):
            await agent.pause()


async def test_a_body_over_the_limit() -> None:
    async with gateway(settings=config(gateway={"max_body_bytes": 5000})) as rig, Client(rig.url, rig.service_key) as c:
        with pytest.raises(PayloadTooLarge):
            await c.set_fact("big", "x" * 6000)


async def test_a_gateway_that_is_away_is_waited_for(rig: Rig) -> None:
    """Nothing listens at first; a forwarder to the gateway comes up while the client tries."""
    placeholder = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = placeholder.sockets[0].getsockname()[1]
    placeholder.close()
    await placeholder.wait_closed()
    async with Client(f"http://127.0.0.1:{port}", rig.service_key, retry_s=10) as patient:
        waiting = [asyncio.ensure_future(patient.engines()), asyncio.ensure_future(patient.start_attempt("r2", 1))]
        await rig.store.create_rollouts([new("r2")])
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in waiting)
        upstream = int(rig.url.rsplit(":", 1)[1])
        async with await asyncio.start_server(lambda r, w: forward(r, w, upstream), "127.0.0.1", port):
            assert await waiting[0] == []
            assert (await waiting[1]).attempt.number == 1


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)
        target.close()

    await asyncio.gather(pump(reader, to_writer), pump(to_reader, writer), return_exceptions=True)


async def test_patience_ends() -> None:
    async with Client("http://127.0.0.1:9", "k", retry_s=0.2) as client:
        with pytest.raises(GatewayUnavailable, match="is the gateway running"):
            await client.engines()


async def test_only_what_may_be_repeated_is_repeated_after_a_broken_connection() -> None:
    seen: list[bytes] = []

    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await reader.readuntil(b"\r\n")).split(b" ")[0])
        writer.transport.abort()

    async with await asyncio.start_server(breaks, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with Client(f"http://127.0.0.1:{port}", "k", retry_s=0.3) as client:
            with pytest.raises(GatewayUnavailable):
                await client.engines()
            assert len(seen) > 1
            seen.clear()
            with pytest.raises(GatewayUnavailable):
                await client.post_reward(Reward("r", 1, 1.0))
            assert seen == [b"POST"]


async def test_a_client_that_is_not_open_says_so() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await Client("http://127.0.0.1:9", "k").engines()
