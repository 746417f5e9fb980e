"""What every store does, held against each implementation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from canter.errors import NotFound, Refused
from canter.store import Key, Store, open_store
from canter.store.memory import MemoryStore
from canter.types import (
    Call,
    CallBodies,
    CallStatus,
    EngineRecord,
    FinishReason,
    ForkCause,
    KeyKind,
    Outcome,
    PolicyVersion,
    Reason,
    Reward,
    Rollout,
    RolloutState,
    Split,
    Task,
    VersionSpan,
    as_ids,
)

TASK = Task("t1", "add 1 and 2", {"a": 1, "b": [2]}, {"answer": "3"})
BODIES = CallBodies(b'{"messages": []}', b'{"choices": []}')


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened = MemoryStore() if request.param == "memory" else open_store(tmp_path / "canter.db")
    yield opened
    await opened.close()


def rollout(id: str = "r1", **content: object) -> Rollout:
    return Rollout(id, "g1", TASK, **content)  # type: ignore[arg-type]


def call(id: str = "c1", *, rollout_id: str = "r1", attempt: int = 1, ordinal: int = 0, **content: object) -> Call:
    fields: dict[str, object] = {
        "parent_id": None,
        "prefix_len": 0,
        "suffix": as_ids([1, 2, 3]),
        "sampled": as_ids([4, 2**20]),
        "logprobs": np.array([-0.5, -1.25], np.float32),
        "versions": (VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)),
    }
    return Call(id, rollout_id, attempt, ordinal, **(fields | content))  # type: ignore[arg-type]


def equal(a: Call, b: Call) -> bool:
    arrays = ("suffix", "sampled", "logprobs")
    names = [name for name in Call.__dataclass_fields__ if name not in arrays]
    return all(getattr(a, n) == getattr(b, n) for n in names) and all(
        np.array_equal(getattr(a, n), getattr(b, n)) and getattr(a, n).dtype == getattr(b, n).dtype for n in arrays
    )


async def running(store: Store, id: str = "r1", **content: object) -> None:
    await store.create_rollouts([rollout(id, **content)])
    await store.start_attempt(id, 1)


# -- rollouts --


async def test_a_created_rollout_is_queued_and_keeps_its_content(store: Store) -> None:
    before = time.time()
    given = rollout(split=Split.EVAL, step=3, index=2, seed=7, max_attempts=5)
    (made,) = await store.create_rollouts([given])
    assert made == await store.rollout("r1")
    assert made.state is RolloutState.QUEUED
    assert made.task == TASK
    assert (made.split, made.step, made.index, made.seed, made.max_attempts) == (Split.EVAL, 3, 2, 7, 5)
    assert before <= made.created_at == made.updated_at <= time.time()


async def test_creating_again_is_no_error_and_makes_nothing(store: Store) -> None:
    await running(store)
    again = await store.create_rollouts([rollout(), rollout("r2"), rollout()])
    assert [(r.id, r.state) for r in again] == [("r1", "running"), ("r2", "queued"), ("r1", "running")]
    assert [e.kind for e in await store.events(0)] == ["queued", "running", "queued"]


async def test_an_interruption_uses_no_attempt_up(store: Store) -> None:
    await store.create_rollouts([rollout(max_attempts=1)])
    for number in (1, 2):
        await store.start_attempt("r1", number)
        again = await store.end_attempt("r1", number, Outcome.KILLED, reason=Reason.INTERRUPTED)
        assert (again.state, again.reason, again.max_attempts) == (RolloutState.QUEUED, None, 1 + number)
    assert again == await store.rollout("r1")
    assert await store.create_rollouts([rollout(max_attempts=1)]) == [again]
    await store.start_attempt("r1", 3)
    lost = await store.end_attempt("r1", 3, Outcome.LOST, reason=Reason.NODE_LOST)
    assert (lost.state, lost.reason) == (RolloutState.INVALID, Reason.NODE_LOST)
    assert [a.reason for a in await store.attempts("r1")] == [Reason.INTERRUPTED] * 2 + [Reason.NODE_LOST]


async def test_other_content_under_a_known_id_is_refused_and_nothing_of_the_request_is_kept(store: Store) -> None:
    await store.create_rollouts([rollout()])
    with pytest.raises(Refused, match=r"r1 exists with other content \(seed\)"):
        await store.create_rollouts([rollout("r2"), rollout(seed=9)])
    with pytest.raises(NotFound):
        await store.rollout("r2")


async def test_rollouts_page_in_order_of_id_and_filter(store: Store) -> None:
    await store.create_rollouts([rollout(f"r{i}") for i in (3, 1, 5, 2, 4)])
    await store.start_attempt("r2", 1)
    assert [r.id for r in await store.rollouts(limit=2)] == ["r1", "r2"]
    assert [r.id for r in await store.rollouts(after="r2", limit=2)] == ["r3", "r4"]
    assert [r.id for r in await store.rollouts(states=[RolloutState.RUNNING])] == ["r2"]
    assert [r.id for r in await store.rollouts(ids=["r5", "r1", "nothing"])] == ["r1", "r5"]
    assert await store.rollouts(group="g2") == []


async def test_what_is_unknown_is_not_found(store: Store) -> None:
    for read in (store.rollout("x"), store.attempts("x"), store.reward("x"), store.bodies("x")):
        with pytest.raises(NotFound, match="x"):
            await read
    writes = (
        store.start_attempt("x", 1),
        store.end_attempt("x", 1, Outcome.EXITED),
        store.post_reward(Reward("x", 1, 1.0)),
        store.cancel("x"),
        store.append_call(call(rollout_id="x"), BODIES),
    )
    for write in writes:
        with pytest.raises(NotFound, match="x"):
            await write
    assert await store.events(0) == []


# -- lifecycle --


async def test_a_rollout_from_queue_to_score(store: Store) -> None:
    await running(store)
    attempt = await store.set_process("r1", 1, {"pid": 5, "start": 6})
    assert attempt.process == {"pid": 5, "start": 6}
    assert await store.open_attempts() == [attempt]
    graded = await store.end_attempt("r1", 1, Outcome.EXITED, exit_code=3, message="bye")
    assert graded.state is RolloutState.GRADING
    scored = await store.post_reward(Reward("r1", 1, 0.5, "grader", {"why": "half"}))
    assert (scored.state, scored.reward, scored.reason) == (RolloutState.SCORED, 0.5, None)
    assert scored == await store.rollout("r1")
    assert await store.reward("r1") == Reward("r1", 1, 0.5, "grader", {"why": "half"})
    (attempt,) = await store.attempts("r1")
    assert (attempt.sealed, attempt.outcome, attempt.exit_code, attempt.message) == (True, Outcome.EXITED, 3, "bye")
    assert await store.open_attempts() == []
    events = await store.events(0)
    assert [(e.seq, e.kind) for e in events] == list(
        enumerate(["queued", "running", "process", "grading", "scored"], start=1)
    )
    assert events[-1].data == {"from": "grading", "reward": 0.5, "source": "grader"}


async def test_an_infrastructure_failure_starts_another_attempt_until_none_is_left(store: Store) -> None:
    await running(store, max_attempts=2)
    again = await store.end_attempt("r1", 1, Outcome.LOST, reason=Reason.NODE_LOST)
    assert (again.state, again.attempt, again.reason) == (RolloutState.QUEUED, 1, None)
    await store.start_attempt("r1", 2)
    with pytest.raises(Refused, match="attempt 1 of rollout r1 is superseded by attempt 2"):
        await store.end_attempt("r1", 1, Outcome.EXITED)
    await store.end_attempt("r1", 2, Outcome.EXITED)
    over = await store.invalidate("r1", 2, Reason.GRADER_ERROR, "no verdict")
    assert (over.state, over.reason, over.reward) == (RolloutState.INVALID, Reason.GRADER_ERROR, None)
    assert [a.reason for a in await store.attempts("r1")] == [Reason.NODE_LOST, Reason.GRADER_ERROR]


async def test_the_end_is_final(store: Store) -> None:
    await running(store)
    await store.cancel("r1", "step is over")
    for write in (
        store.start_attempt("r1", 2),
        store.end_attempt("r1", 1, Outcome.EXITED),
        store.post_reward(Reward("r1", 1, 1.0)),
        store.invalidate("r1", 1, Reason.NODE_LOST),
        store.cancel("r1"),
        store.set_process("r1", 1, {}),
    ):
        with pytest.raises(Refused, match="r1 is cancelled"):
            await write
    with pytest.raises(Refused, match="sealed: the rollout is cancelled"):
        await store.append_call(call(), BODIES)
    cancelled = await store.rollout("r1")
    assert (cancelled.state, cancelled.reason, cancelled.message) == ("cancelled", Reason.CANCELLED, "step is over")


# -- calls --


async def test_a_call_comes_back_as_it_went_in(store: Store) -> None:
    await running(store)
    first = call(finish_reason=FinishReason.STOP, requested={"temperature": 0}, effective={"temperature": 1.0})
    second = call(
        "c2",
        ordinal=1,
        parent_id="c1",
        prefix_len=5,
        suffix=as_ids([]),
        status=CallStatus.CANCELLED,
        untrainable=Reason.CLIENT_GONE,
        label="sub",
        dialect="completions",
        model="policy",
        fork=ForkCause.COMPACTION,
        proposed_parent_id="c1",
        fork_at=2,
        started_at=1.5,
        finished_at=2.5,
    )
    await store.append_call(first, BODIES)
    await store.append_call(second, CallBodies(b"\xff\x00not json", b""))
    stored = await store.calls(["r1"])
    assert len(stored) == 2
    assert equal(stored[0], first)
    assert equal(stored[1], second)
    assert await store.bodies("c1") == BODIES
    assert await store.bodies("c2") == CallBodies(b"\xff\x00not json", b"")
    event = (await store.events(0))[-1]
    assert (event.kind, event.rollout_id, event.attempt) == ("call", "r1", 1)
    assert event.data == {"id": "c2", "ordinal": 1, "status": "cancelled", "tokens": 2}


async def test_calls_are_of_the_current_attempt_by_rollout_then_ordinal(store: Store) -> None:
    for id in ("r2", "r1"):
        await running(store, id)
        for ordinal in (1, 0):
            await store.append_call(call(f"{id}-{ordinal}", rollout_id=id, ordinal=ordinal), BODIES)
    await store.invalidate("r2", 1, Reason.NODE_LOST)
    await store.start_attempt("r2", 2)
    await store.append_call(call("r2-new", rollout_id="r2", attempt=2), BODIES)
    assert [c.id for c in await store.calls(["r2", "r1"])] == ["r1-0", "r1-1", "r2-new"]
    assert [c.id for c in await store.calls(["r2", "r1"], attempt=1)] == ["r1-0", "r1-1", "r2-0", "r2-1"]
    assert await store.calls([]) == []


async def test_a_call_needs_the_current_unsealed_attempt(store: Store) -> None:
    await store.create_rollouts([rollout()])
    with pytest.raises(Refused, match="attempt 1 of rollout r1 has not started"):
        await store.append_call(call(), BODIES)
    await store.start_attempt("r1", 1)
    await store.end_attempt("r1", 1, Outcome.EXITED)
    with pytest.raises(Refused, match="sealed: the rollout is grading"):
        await store.append_call(call(), BODIES)
    await store.invalidate("r1", 1, Reason.GATEWAY_UNAVAILABLE)
    await store.start_attempt("r1", 2)
    with pytest.raises(Refused, match="superseded by attempt 2"):
        await store.append_call(call(), BODIES)
    assert await store.calls(["r1"], attempt=1) == []


async def test_a_call_that_could_not_be_read_back_is_refused(store: Store) -> None:
    await running(store)
    await store.append_call(call(), BODIES)
    with pytest.raises(Refused, match="c1 of rollout r1 is already committed"):
        await store.append_call(call(), BODIES)
    with pytest.raises(Refused, match="its parent nobody is not"):
        await store.append_call(call("c2", parent_id="nobody"), BODIES)
    assert [c.id for c in await store.calls(["r1"])] == ["c1"]


async def test_refused_calls_do_not_hurt_those_committed_with_them(store: Store) -> None:
    await running(store)
    wanted = [call(f"c{i}", ordinal=i, attempt=1 + (i % 3 == 0)) for i in range(30)]
    wanted += [call("c1", ordinal=1), call("c99", parent_id="nobody")]
    results = await asyncio.gather(*(store.append_call(c, BODIES) for c in wanted), return_exceptions=True)
    kept = {c.id for c, result in zip(wanted, results, strict=True) if result is None}
    assert kept == {f"c{i}" for i in range(30) if i % 3}
    assert all(isinstance(result, Refused) for result in results if result is not None)
    assert {c.id for c in await store.calls(["r1"])} == kept
    assert (await store.counts())["calls.ok"] == len(kept)


# -- keys --


async def test_the_keys_of_an_attempt_live_as_long_as_what_they_are_for(store: Store) -> None:
    await store.create_rollouts([rollout()])
    started = await store.start_attempt("r1", 1)
    assert started.agent_key.startswith("ck-agent-")
    assert await store.key(started.agent_key) == Key(KeyKind.AGENT, "r1", 1)
    await store.end_attempt("r1", 1, Outcome.EXITED)
    assert await store.key(started.agent_key) == Key(KeyKind.AGENT, "r1", 1, revoked=True)
    grader = await store.grader_key("r1", 1)
    assert grader.startswith("ck-grader-")
    assert await store.key(grader) == Key(KeyKind.GRADER, "r1", 1)
    await store.invalidate("r1", 1, Reason.GATEWAY_UNAVAILABLE)
    assert await store.key(grader) == Key(KeyKind.GRADER, "r1", 1, revoked=True)
    second = await store.start_attempt("r1", 2)
    await store.post_reward(Reward("r1", 2, 1.0))
    assert await store.key(second.agent_key) == Key(KeyKind.AGENT, "r1", 2, revoked=True)


async def test_a_graders_key_is_made_only_for_the_attempt_that_is_graded(store: Store) -> None:
    await store.create_rollouts([rollout()])
    with pytest.raises(NotFound):
        await store.grader_key("nobody", 1)
    with pytest.raises(Refused, match="queued"):
        await store.grader_key("r1", 0)
    await store.start_attempt("r1", 1)
    with pytest.raises(Refused, match="the rollout is running"):
        await store.grader_key("r1", 1)
    await store.end_attempt("r1", 1, Outcome.EXITED)
    await store.invalidate("r1", 1, Reason.GATEWAY_UNAVAILABLE)
    await store.start_attempt("r1", 2)
    await store.end_attempt("r1", 2, Outcome.EXITED)
    for number, why in ((1, "superseded"), (3, "has not started")):
        with pytest.raises(Refused, match=why):
            await store.grader_key("r1", number)
    assert await store.key(await store.grader_key("r1", 2)) == Key(KeyKind.GRADER, "r1", 2)
    await store.post_reward(Reward("r1", 2, 1.0))
    with pytest.raises(Refused, match="scored"):
        await store.grader_key("r1", 2)


async def test_another_graders_key_ends_the_one_before(store: Store) -> None:
    """So a lost reply is harmless: the controller asks again. Asked at once, they share a commit."""
    await store.create_rollouts([rollout()])
    await store.start_attempt("r1", 1)
    await store.end_attempt("r1", 1, Outcome.EXITED)
    secrets = await asyncio.gather(*(store.grader_key("r1", 1) for _ in range(3)))
    keys = [await store.key(secret) for secret in secrets]
    assert keys == [Key(KeyKind.GRADER, "r1", 1, revoked=revoked) for revoked in (True, True, False)]
    event = (await store.events(0))[-1]
    assert (event.kind, event.rollout_id, event.attempt, event.data) == ("key", "r1", 1, {"kind": "grader"})


async def test_service_keys(store: Store) -> None:
    secret = await store.issue_key(KeyKind.SERVICE)
    assert secret.startswith("ck-service-")
    assert await store.key(secret) == Key(KeyKind.SERVICE)
    for unknown in ("", secret[:-1], "ck-service-", "\udcff"):
        assert await store.key(unknown) is None
    (event,) = await store.events(0)
    assert secret not in str(event)
    assert event.data == {"kind": "service"}


# -- engines, versions, facts --


async def test_engines(store: Store) -> None:
    engine = EngineRecord("http://b", "policy", 0, 1.0)
    await store.set_engine(engine)
    await store.set_engine(EngineRecord("http://a", "policy", 0, 1.0))
    await store.set_engine(EngineRecord("http://b", "policy", 0, 2.0))
    assert [(e.url, e.seen_at) for e in await store.engines()] == [("http://a", 1.0), ("http://b", 2.0)]
    await store.set_engine(EngineRecord("http://b", "policy", 1, 3.0))
    await store.remove_engine("http://a")
    await store.remove_engine("http://a")
    assert [(e.url, e.version) for e in await store.engines()] == [("http://b", 1)]
    assert [e.kind for e in await store.events(0)] == ["engine", "engine", "engine", "engine_removed"]


async def test_versions_grow_by_one(store: Store) -> None:
    await store.add_version(PolicyVersion(0, 0))
    await store.add_version(PolicyVersion(1, 1, "checkpoints/1"))
    await store.add_version(PolicyVersion(0, 0))
    await store.add_version(PolicyVersion(1, 1, "checkpoints/1"))
    for wrong in (PolicyVersion(1, 2), PolicyVersion(3, 3)):
        with pytest.raises(Refused, match="cannot follow version 1"):
            await store.add_version(wrong)
    assert [(v.version, v.step, v.path) for v in await store.versions()] == [(0, 0, ""), (1, 1, "checkpoints/1")]
    assert all(v.created_at > 0 for v in await store.versions())
    assert [e.data["version"] for e in await store.events(0)] == [0, 1]


async def test_facts_are_json_values(store: Store) -> None:
    assert await store.fact("manifest") is None
    await store.set_fact("manifest", {"a": [1, None, "é"]})
    await store.set_fact("manifest", {"a": [2, None, "é"]})
    assert await store.fact("manifest") == {"a": [2, None, "é"]}
    with pytest.raises(TypeError):
        await store.set_fact("manifest", object())
    assert await store.fact("manifest") == {"a": [2, None, "é"]}


# -- events and counters --


async def test_events_page_on(store: Store) -> None:
    made = [await store.add_event("tick", rollout_id="r", attempt=1, data={"n": n}) for n in range(5)]
    assert await store.events(0) == made
    assert await store.events(2, limit=2) == made[2:4]
    assert await store.events(5) == []


async def test_a_waiter_is_woken_by_the_next_commit(store: Store) -> None:
    async def wait() -> tuple[float, list[str]]:
        events = await store.events(0, timeout_s=10)
        return time.monotonic(), [e.kind for e in events]

    waiters = [asyncio.create_task(wait()) for _ in range(5)]
    await asyncio.sleep(0.05)
    await store.create_rollouts([rollout()])
    committed = time.monotonic()
    for woken, kinds in await asyncio.gather(*waiters):
        assert kinds == ["queued"]
        assert woken - committed < 0.05


async def test_a_waiter_gives_up_in_time_and_at_the_end(store: Store) -> None:
    started = time.monotonic()
    assert await store.events(0, timeout_s=0.1) == []
    assert 0.1 <= time.monotonic() - started < 1
    waiter = asyncio.create_task(store.events(0, timeout_s=30))
    await asyncio.sleep(0.01)
    await store.close()
    assert await asyncio.wait_for(waiter, 5) == []


async def test_counts_tell_of_harnesses_that_crash_or_hang(store: Store) -> None:
    ends = [
        (Outcome.EXITED, 0),
        (Outcome.EXITED, 1),
        (Outcome.EXITED, -11),
        (Outcome.TIMED_OUT, -15),
        (Outcome.LOST, None),
    ]
    for number, (outcome, exit_code) in enumerate(ends):
        await running(store, f"r{number}")
        await store.end_attempt(f"r{number}", 1, outcome, exit_code=exit_code)
    await running(store, "still")
    counts = await store.counts()
    assert {name: n for name, n in counts.items() if name.startswith("attempts.")} == {
        "attempts.exited_nonzero": 2,
        "attempts.timed_out": 1,
    }


async def test_counts_name_states_and_reasons(store: Store) -> None:
    await running(store)
    await running(store, "r2", max_attempts=1)
    await store.create_rollouts([rollout("r3")])
    await store.append_call(call(), BODIES)
    await store.append_call(call("c2", fork=ForkCause.TEMPLATE, untrainable=Reason.MISSING_LOGPROBS), BODIES)
    await store.append_call(call("c3", status=CallStatus.ERROR, fork=ForkCause.TEMPLATE), BODIES)
    await store.invalidate("r2", 1, Reason.NODE_LOST)
    assert await store.counts() == {
        "rollouts.queued": 1,
        "rollouts.running": 1,
        "rollouts.invalid": 1,
        "invalid.node_lost": 1,
        "calls.ok": 2,
        "calls.error": 1,
        "untrainable.missing_logprobs": 1,
        "fork.template": 2,
    }
