"""What only the store on disk has to do: last, refuse a second writer, stay small, know its version."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import Connection, inspect, select, text, update

from canter.errors import Refused, StoreError
from canter.store import Store, open_store
from canter.store.migrations import migrate
from canter.store.schema import metadata, schema_version
from canter.store.sqlite import _writing, open_sqlite
from canter.types import (
    Attempt,
    Call,
    CallBodies,
    EngineRecord,
    Event,
    KeyKind,
    Outcome,
    PolicyVersion,
    Reward,
    Rollout,
    RolloutState,
    Task,
    VersionSpan,
    as_ids,
)


def call(id: str, ordinal: int = 0, *, parent: str | None = None, suffix: int = 3, rollout_id: str = "r1") -> Call:
    ids = as_ids(range(ordinal, ordinal + suffix))
    return Call(
        id, rollout_id, 1, ordinal, parent, 0, ids, ids, np.ones(suffix, np.float32), (VersionSpan(0, 0, suffix),)
    )


async def running(store: Store, id: str = "r1") -> None:
    await store.create_rollouts([Rollout(id, "g", Task("t", "p"))])
    await store.start_attempt(id, 1)


def python(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *arguments], stdout=subprocess.PIPE)


# -- lasting --


async def everything(store: Store) -> tuple[Rollout, list[Attempt], dict[str, int], list[Event]]:
    return await store.rollout("r1"), await store.attempts("r1"), await store.counts(), await store.events(0)


async def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "canter.db"
    store = open_store(path)
    await store.create_rollouts([Rollout("r1", "g", Task("t", "p", {"a": 1}, {"b": 2}))])
    started = await store.start_attempt("r1", 1)
    await store.append_call(call("c1"), CallBodies(b"request", b"reply"))
    service = await store.issue_key(KeyKind.SERVICE)
    await store.set_engine(EngineRecord("http://e", "policy", 0, 1.0))
    await store.add_version(PolicyVersion(0, 0))
    await store.set_fact("position", [1, 2])
    before = await everything(store)
    await store.close()

    store = open_store(path)
    assert await everything(store) == before
    assert [c.id for c in await store.calls(["r1"])] == ["c1"]
    assert await store.bodies("c1") == CallBodies(b"request", b"reply")
    for secret in (started.agent_key, service):
        assert await store.key(secret) is not None
    assert [e.url for e in await store.engines()] == ["http://e"]
    assert [v.version for v in await store.versions()] == [0]
    assert await store.fact("position") == [1, 2]
    await store.append_call(call("c2", 1, parent="c1"), CallBodies(b"request 2", b"reply 2"))
    assert await store.bodies("c2") == CallBodies(b"request 2", b"reply 2")
    scored = await store.post_reward(Reward("r1", 1, 1.0))
    assert scored.state is RolloutState.SCORED
    last = (await store.events(0))[-1]
    assert last.seq == before[-1][-1].seq + 2
    await store.close()


_APPENDER = """
    import asyncio, sys
    import numpy as np
    from canter.store import open_store
    from canter.types import *

    async def main():
        store = open_store(sys.argv[1])
        first = int(sys.argv[2])
        names = [f"r{first}-{n}" for n in range(8)]
        await store.create_rollouts([Rollout(name, "g", Task("t", "p")) for name in names])

        async def converse(name):
            await store.start_attempt(name, 1)
            history, parent = b"", None
            for n in range(10_000):
                id = f"{name}-{n}"
                history += f"turn {n} of {name};".encode() * 20
                ids = as_ids(range(n, n + 50))
                span = (VersionSpan(0, 0, 50),)
                call = Call(id, name, 1, n, parent, n and 50, ids, ids, np.full(50, -n, np.float32), span)
                await store.append_call(call, CallBodies(history, id.encode() * 30))
                parent = id
                print(id, flush=True)

        await asyncio.gather(*map(converse, names))

    asyncio.run(main())
"""


async def test_no_call_that_was_answered_is_lost_to_kill_9(tmp_path: Path) -> None:
    path, answered, rng = tmp_path / "canter.db", set[str](), np.random.default_rng(7)
    for round in range(6):
        child = python(_APPENDER, str(path), str(round))
        assert child.stdout is not None
        first = child.stdout.readline()
        await asyncio.sleep(rng.uniform(0, 0.25))
        child.send_signal(signal.SIGKILL)
        lines = first + child.stdout.read()
        child.wait(10)
        child.stdout.close()
        assert first
        answered |= set(lines[: lines.rfind(b"\n")].decode().split())
    assert len(answered) > 50

    store = open_store(path)
    stored = [c for n in range(6) for c in await store.calls([f"r{n}-{k}" for k in range(8)])]
    assert answered <= {c.id for c in stored}
    assert sum((await store.counts()).values()) == len(stored) + 48
    for c in stored:
        assert c.suffix.tolist() == c.sampled.tolist() == list(range(c.ordinal, c.ordinal + 50))
        assert c.logprobs.tolist() == [-c.ordinal] * 50
    ids = {c.id for c in stored}
    assert all(c.parent_id is None or c.parent_id in ids for c in stored)
    for c in stored[:: max(len(stored) // 40, 1)]:
        bodies = await store.bodies(c.id)
        history = b"".join(f"turn {n} of {c.rollout_id};".encode() * 20 for n in range(c.ordinal + 1))
        assert bodies == CallBodies(history, c.id.encode() * 30)
    events = await store.events(0, limit=10**6)
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    assert {e.data["id"] for e in events if e.kind == "call"} == ids
    await store.close()


_DISK_FULL = """
    import asyncio, resource, sys
    from canter.errors import StoreError
    from canter.store import open_store
    from canter.types import *

    async def main():
        store = open_store(sys.argv[1])
        await store.create_rollouts([Rollout("r1", "g", Task("t", "p"))])
        await store.start_attempt("r1", 1)

        async def append(id, size):
            call = Call(id, "r1", 1, 0, None, 0, NO_IDS, NO_IDS, NO_LOGPROBS, ())
            try:
                await store.append_call(call, CallBodies(open("/dev/urandom", "rb").read(size), b""))
            except StoreError as error:
                assert "cannot commit" in str(error), error
                return "failed"
            return "kept"

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # the log cannot grow beyond it
        together = await asyncio.gather(
            append("small-1", 100), append("large-1", 3_000_000), append("small-2", 100), append("large-2", 3_000_000)
        )
        assert together == ["kept", "failed", "kept", "failed"], together
        assert await append("large-3", 3_000_000) == "failed"
        assert await append("small-3", 100) == "kept"
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert await append("large-1", 3_000_000) == "kept"
        kept = {c.id for c in await store.calls(["r1"])}
        assert kept == {"small-1", "small-2", "small-3", "large-1"}, kept
        assert len((await store.bodies("large-1")).request) == 3_000_000
        events = await store.events(0)
        assert [e.seq for e in events] == list(range(1, 7)), events
        await store.close()

    asyncio.run(main())
"""


def test_a_full_disk_fails_exactly_the_writes_that_do_not_fit(tmp_path: Path) -> None:
    child = python(_DISK_FULL, str(tmp_path / "canter.db"))
    child.communicate(timeout=30)
    assert child.returncode == 0


# -- one writer --


async def test_a_second_writer_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "canter.db"
    child = python(_APPENDER, str(path), "0")
    assert child.stdout is not None
    assert child.stdout.readline()
    with pytest.raises(StoreError, match=f"open for writing in process {child.pid}; stop it, or reach"):
        open_store(path)
    reader = open_store(path, read_only=True)
    assert await reader.calls(["r0-0"])
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    store = open_store(path)
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        open_store(path)
    await store.cancel("r0-0")
    assert (await reader.rollout("r0-0")).state is RolloutState.CANCELLED
    await store.close()
    await reader.close()
    await open_store(path).close()


async def test_a_reader_cannot_write_and_does_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "canter.db"
    with pytest.raises(StoreError, match="no store at"):
        open_store(path, read_only=True)
    store = open_store(path)
    await running(store)
    reader = open_store(path, read_only=True)
    assert [e.kind for e in await reader.events(0)] == ["queued", "running"]
    assert await reader.events(2, timeout_s=10) == []
    with pytest.raises(StoreError, match="open for reading only; write through its gateway"):
        await reader.cancel("r1")
    await reader.close()
    await store.close()


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path / "canter.db")
    await running(store)
    unfinished = asyncio.ensure_future(store.append_call(call("c1"), CallBodies(b"", b"")))
    await asyncio.sleep(0)
    await store.close()
    await store.close()
    await unfinished
    for use in (store.rollout("r1"), store.rollouts(), store.cancel("r1")):
        with pytest.raises(StoreError, match="the store is closed"):
            await use
    reopened = open_store(tmp_path / "canter.db")
    assert len(await reopened.calls(["r1"])) == 1
    await reopened.close()


async def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "canter.db"
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"cannot open .*canter.db: file is not a database"):
            open_store(path, read_only=read_only)
    with pytest.raises(StoreError, match="is its folder there and writable"):
        open_store(tmp_path / "nowhere" / "canter.db")


# -- group commit --


async def test_a_failing_write_does_not_take_others_with_it(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path / "canter.db")
    await running(store)
    bad = call("bad")
    object.__setattr__(bad, "requested", {"not": object()})
    results = await asyncio.gather(
        *(store.append_call(c, CallBodies(b"x", b"y")) for c in (call("c1"), bad, call("c1"), call("c2"))),
        return_exceptions=True,
    )
    assert [type(r) for r in results] == [type(None), TypeError, Refused, type(None)]
    assert [c.id for c in await store.calls(["r1"])] == ["c1", "c2"]
    assert [e.seq for e in await store.events(0)] == [1, 2, 3, 4]
    await store.close()


async def test_a_caller_that_leaves_does_not_disturb_the_writer(tmp_path: Path) -> None:
    store = open_store(tmp_path / "canter.db")
    await running(store)
    tasks = [asyncio.create_task(store.append_call(call(f"c{n}"), CallBodies(b"", b""))) for n in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.append_call(call("last"), CallBodies(b"", b""))
    assert {f"c{n}" for n in range(1, 20, 2)} <= {c.id for c in await store.calls(["r1"])}
    await store.close()


async def test_event_loops_in_other_threads_are_answered(tmp_path: Path) -> None:
    store = open_store(tmp_path / "canter.db")
    await running(store)

    def elsewhere() -> list[str]:
        async def work() -> list[str]:
            waiter = asyncio.create_task(store.events(2, timeout_s=10))
            await store.append_call(call("c1"), CallBodies(b"", b""))
            return [e.kind for e in await waiter]

        return asyncio.run(work())

    assert await asyncio.to_thread(elsewhere) == ["call"]
    await store.close()


# -- size --


def stored(path: Path) -> int:
    """Bytes of the database once its log is folded in."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
    connection.close()
    return path.stat().st_size


async def converse(store: Store, path: Path, turns: int, *, start: bytes, ids: int) -> int:
    """A conversation that grows by 300 ids and 1 kB a call; returns its bytes on disk after the first call."""
    rng, history, parent, at_first = np.random.default_rng(0), start, None, 0
    for n in range(turns):
        suffix = rng.integers(0, 150_000, 300 if n else ids).astype(np.int32)
        logprobs = rng.random(300).astype(np.float32)
        history += rng.bytes(500).hex().encode()
        c = Call(
            f"c{n}", "r1", 1, n, parent, 0 if n == 0 else 1, suffix, suffix[:300], logprobs, (VersionSpan(0, 0, 300),)
        )
        await store.append_call(c, CallBodies(b'{"messages": "' + history + b'"}', rng.bytes(300)))
        parent = c.id
        if n == 0:
            at_first = stored(path)
    return at_first


@pytest.mark.parametrize("length", [0, 200_000])
async def test_a_call_is_stored_in_proportion_to_what_it_adds(tmp_path: Path, length: int) -> None:
    path = tmp_path / "canter.db"
    store = open_store(path)
    await running(store)
    rng, turns = np.random.default_rng(1), 60
    first = await converse(store, path, turns, start=rng.bytes(length // 2).hex().encode(), ids=max(length // 7, 300))
    per_call = (stored(path) - first) / (turns - 1)
    assert per_call < 6000  # 300 + 300 ids and logprobs: 3,000; 500 random bytes as hex and 300: 800; the rest indexes
    assert (await store.bodies("c59")).request.endswith(b'"}')
    await store.close()


async def test_long_conversations_start_over_with_whole_bodies(tmp_path: Path) -> None:
    path = tmp_path / "canter.db"
    store = open_store(path)
    await running(store)
    for n in range(200):
        await store.append_call(call(f"c{n}", n), CallBodies(b"turn" * (n + 1), b"%d" % n))
    for n in (0, 63, 64, 65, 199):
        assert await store.bodies(f"c{n}") == CallBodies(b"turn" * (n + 1), b"%d" % n)
    whole = sqlite3.connect(path).execute("SELECT seq FROM bodies WHERE base IS NULL ORDER BY seq").fetchall()
    assert whole == [(1,), (65,), (129,), (193,)]
    await store.close()


async def test_no_key_is_stored_in_the_clear(tmp_path: Path) -> None:
    path = tmp_path / "canter.db"
    store = open_store(path)
    await store.create_rollouts([Rollout("r1", "g", Task("t", "p"))])
    started = await store.start_attempt("r1", 1)
    await store.end_attempt("r1", 1, Outcome.EXITED)
    secrets = (started.agent_key, await store.grader_key("r1", 1), await store.issue_key(KeyKind.SERVICE))
    await store.close()
    content = path.read_bytes()
    assert b"service" in content
    for secret in secrets:
        assert secret[len("ck-service-") :].encode() not in content


# -- schema --


def columns(connection: Connection) -> dict[str, set[str]]:
    found = inspect(connection)
    return {table: {c["name"] for c in found.get_columns(table)} for table in found.get_table_names()}


def version(connection: Connection) -> int:
    return int(connection.execute(select(schema_version.c.version)).scalar_one())


def test_an_older_database_gets_the_steps_that_it_lacks(tmp_path: Path) -> None:
    ran: list[int] = []

    def add_note(connection: Connection) -> None:
        ran.append(2)
        connection.execute(text("ALTER TABLE rollouts ADD COLUMN note TEXT"))

    with _writing(tmp_path / "canter.db") as connection:
        with connection.begin():
            assert columns(connection) == {t.name: set(t.columns.keys()) for t in metadata.sorted_tables}
        for _ in range(2):
            with connection.begin():
                migrate(connection, {2: add_note})
        assert ran == [2]
        with connection.begin():
            assert "note" in columns(connection)["rollouts"]
            assert version(connection) == 2


def test_a_step_that_fails_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    def add_note(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE rollouts ADD COLUMN note TEXT"))

    def fail(_: Connection) -> None:
        raise RuntimeError("half done")

    with _writing(tmp_path / "canter.db") as connection:
        with pytest.raises(RuntimeError, match="half done"), connection.begin():
            migrate(connection, {2: add_note, 3: fail})
        with connection.begin():
            assert "note" not in columns(connection)["rollouts"]
            assert version(connection) == 1


async def test_a_newer_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "canter.db"
    with _writing(path) as connection, connection.begin():
        connection.execute(update(schema_version).values(version=99))
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"canter.db has schema version 99, this canter (knows|reads) 1"):
            open_store(path, read_only=read_only)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE schema_version SET version = 1")
    raw.close()
    await open_store(path).close()
