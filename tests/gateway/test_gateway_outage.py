"""A harness that gave up for want of the model is run again, never graded."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_rig import Rig, fake_engine, gateway

from canter.engine.fake import Fault
from canter.errors import StoreError
from canter.gateway.outage import outage
from canter.store.memory import MemoryStore
from canter.types import NO_IDS, NO_LOGPROBS, Attempt, Call, CallStatus, Outcome, Reason, RolloutState

BEFORE, STARTED, AFTER = 99.0, 100.0, 101.0
EXITED, TIMED_OUT = Outcome.EXITED, Outcome.TIMED_OUT
ENGINE, GATEWAY = Reason.ENGINE_UNAVAILABLE, Reason.GATEWAY_UNAVAILABLE


def call(status: CallStatus, untrainable: Reason | None = None) -> Call:
    return Call("c", "r", 1, 0, None, 0, NO_IDS, NO_IDS, NO_LOGPROBS, (), status=status, untrainable=untrainable)


OK = call(CallStatus.OK)
GONE = call(CallStatus.CANCELLED, Reason.CLIENT_GONE)
NO_ENGINE = call(CallStatus.ERROR, ENGINE)
CUT = call(CallStatus.ERROR, GATEWAY)

TABLE = [
    ("it coped with a failed call", EXITED, 0, [NO_ENGINE, OK], BEFORE, None),
    ("it coped with a gateway that was away", EXITED, 0, [OK], AFTER, None),
    ("a fault of its own", EXITED, 1, [OK], BEFORE, None),
    ("a fault of its own before any call", EXITED, 1, [], BEFORE, None),
    ("it had no wish to call", EXITED, 0, [], BEFORE, None),
    ("it hung up and failed", EXITED, 1, [GONE], BEFORE, None),
    ("no engine from the start", EXITED, 1, [NO_ENGINE, NO_ENGINE], BEFORE, ENGINE),
    ("no engine later on", EXITED, 1, [OK, NO_ENGINE], BEFORE, ENGINE),
    ("killed itself over it", EXITED, -6, [OK, NO_ENGINE], BEFORE, ENGINE),
    ("it swallowed the failure of every call", EXITED, 0, [NO_ENGINE], BEFORE, ENGINE),
    ("the gateway ended while it called", EXITED, 1, [OK, CUT], BEFORE, GATEWAY),
    ("the engine is the more telling", EXITED, 1, [CUT, NO_ENGINE], AFTER, ENGINE),
    ("the gateway was away after its first call", EXITED, 1, [OK], AFTER, GATEWAY),
    ("the gateway was away all the time", EXITED, 1, [], AFTER, GATEWAY),
    ("and it swallowed that", EXITED, 0, [], AFTER, GATEWAY),
    ("its time was over: the run's own rule", TIMED_OUT, None, [NO_ENGINE], AFTER, None),
    ("lost: the controller says so", Outcome.LOST, None, [NO_ENGINE], AFTER, None),
]


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_table(row: tuple[str, Outcome, int | None, list[Call], float, Reason | None]) -> None:
    _, outcome, exit_code, calls, up_since, reason = row
    found = outage(Attempt("r", 1, started_at=STARTED), outcome, exit_code, calls, up_since)
    assert (found and found.reason) == reason


def test_the_message_says_what_was_missing() -> None:
    attempt = Attempt("r", 1, started_at=STARTED)
    engine, away = outage(attempt, EXITED, 1, [NO_ENGINE] * 2, BEFORE), outage(attempt, EXITED, 1, [], AFTER)
    assert engine is not None
    assert away is not None
    assert (
        engine.message
        == "the harness ended with exit code 1 after 2 of its model calls failed: the engine was not available"
    )
    assert away.message == (
        "the harness ended with exit code 1, and the gateway was away while it ran (until 00:01:41 UTC)"
    )


async def ended(rig: Rig, exit_code: int, **more: Any) -> dict[str, Any]:
    body = {"outcome": "exited", "exit_code": exit_code, "message": "openai.InternalServerError", **more}
    status, reply = await rig.post("/api/rollouts/r1/attempts/1/end", body, key=rig.service_key)
    assert status == 200
    rollout: dict[str, Any] = reply["rollout"]
    return rollout


async def reason_of(rig: Rig) -> Reason | None:
    [attempt] = await rig.store.attempts("r1")
    return attempt.reason


async def test_without_an_engine() -> None:
    async with gateway(register=False) as rig:
        assert (await rig.chat())[0] == 503
        rollout = await ended(rig, 1)
        assert (rollout["state"], await reason_of(rig)) == ("queued", ENGINE)
    assert rollout["message"].endswith("the engine was not available; its last words: openai.InternalServerError")


@pytest.mark.parametrize(("exit_code", "state"), [(1, "queued"), (0, "grading")])
async def test_an_engine_that_failed_between_two_calls(exit_code: int, state: str) -> None:
    async with gateway(fake_engine(faults={1: Fault.ERROR, 2: Fault.ERROR})) as rig:
        assert [(await rig.chat(text))[0] for text in ("a", "b")] == [200, 503]
        assert (await ended(rig, exit_code))["state"] == state


@pytest.mark.parametrize(("exit_code", "state"), [(1, "queued"), (0, "grading")])
async def test_a_gateway_that_came_back_during_the_attempt(exit_code: int, state: str) -> None:
    store = MemoryStore()
    async with gateway(store=store) as first:
        assert (await first.chat())[0] == 200
    async with gateway(store=store) as second:
        assert (await ended(second, exit_code))["state"] == state
        assert await reason_of(second) == (GATEWAY if exit_code else None)


async def test_a_gateway_that_was_there_all_the_time() -> None:
    async with gateway() as rig:
        assert (await rig.chat())[0] == 200
        assert (await ended(rig, 1))["state"] == "grading"


async def test_a_reason_that_the_controller_gives_stands() -> None:
    async with gateway(register=False) as rig:
        assert (await rig.chat())[0] == 503
        await ended(rig, 1, reason="spawn_error")
        assert await reason_of(rig) is Reason.SPAWN_ERROR


class FullDisk(MemoryStore):
    """Commits no calls while `full`, not even the record of a failure."""

    full = True

    async def append_call(self, *args: Any) -> None:
        if self.full:
            raise StoreError("no space left")
        await super().append_call(*args)


async def test_a_store_that_could_not_commit() -> None:
    store = FullDisk()
    async with gateway(store=store) as rig:
        assert (await rig.chat())[0] == 503
        assert (await ended(rig, 1))["state"] == RolloutState.QUEUED
        assert await reason_of(rig) is GATEWAY
