"""The durable record of a run: rollouts, attempts, calls, rewards, events, keys, engines, policy versions.

One process owns a store and is its only writer. Writes return once they are committed; concurrent ones share
a commit. `open_store` gives the SQLite one; `canter.store.memory.MemoryStore` is for tests.

Every change appends an event in the same commit. Its kind is, for a rollout, the state it came into (`queued`,
`running`, `grading`, `scored`, `invalid`, `cancelled`; `data.from` is the state it left) or `process`; else `call`,
`key`, `engine`, `engine_removed`, `version`, or what `add_event` was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from canter.types import (
    Attempt,
    Call,
    CallBodies,
    EngineRecord,
    Event,
    KeyKind,
    Outcome,
    PolicyVersion,
    Reason,
    Reward,
    Rollout,
    RolloutState,
)


@dataclass(frozen=True, slots=True)
class Key:
    """What a key may do; the key itself is only ever stored as its SHA-256."""

    kind: KeyKind
    rollout_id: str | None = None
    attempt: int | None = None
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt that has just been started, with its harness's fresh key (shown this once)."""

    attempt: Attempt
    agent_key: str


class Store(Protocol):
    """Every method is a coroutine. Writes raise `Refused` where the lifecycle forbids them, `NotFound` where the
    subject is unknown, `StoreError` where the disk does; nothing is half written."""

    # -- rollouts and their lifecycle (`canter.store.lifecycle` is the table) --
    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Adds rollouts as `queued`, all or none. A known id is no error with the same content, else `Refused`."""
        ...

    async def rollout(self, rollout_id: str) -> Rollout: ...

    async def rollouts(
        self,
        *,
        states: Sequence[RolloutState] = (),
        group: str | None = None,
        ids: Sequence[str] = (),
        after: str | None = None,
        limit: int = 1000,
    ) -> list[Rollout]:
        """In order of id; `after` pages on. Empty filters match all."""
        ...

    async def start_attempt(self, rollout_id: str, number: int) -> Started:
        """queued → running: makes attempt `number` (the last one plus 1) with an agent key."""
        ...

    async def set_process(self, rollout_id: str, number: int, process: Mapping[str, Any]) -> Attempt: ...

    async def end_attempt(
        self,
        rollout_id: str,
        number: int,
        outcome: Outcome,
        *,
        exit_code: int | None = None,
        reason: Reason | None = None,
        message: str = "",
    ) -> Rollout:
        """The harness has ended: seals the attempt (its agent key is revoked). Without `reason`: running → grading.
        With a reason: running → queued for another attempt while it is retryable and any are left, else invalid;
        `INTERRUPTED` does not use one up (`max_attempts` grows by one)."""
        ...

    async def post_reward(self, reward: Reward) -> Rollout:
        """grading → scored, or running → scored for a rule of the run. Seals; final."""
        ...

    async def invalidate(self, rollout_id: str, number: int, reason: Reason, message: str = "") -> Rollout:
        """running | grading → queued again (retryable and attempts left) or invalid."""
        ...

    async def cancel(self, rollout_id: str, message: str = "") -> Rollout:
        """Any state that is not final → cancelled."""
        ...

    async def attempts(self, rollout_id: str) -> list[Attempt]: ...

    async def open_attempts(self) -> list[Attempt]:
        """The current attempts of all rollouts that run or are graded (what a restarted controller adopts)."""
        ...

    async def reward(self, rollout_id: str) -> Reward | None: ...

    # -- calls --
    async def append_call(self, call: Call, bodies: CallBodies) -> None:
        """Commits a call. Only for the current, unsealed attempt, else `Refused`."""
        ...

    async def calls(self, rollout_ids: Sequence[str], *, attempt: int | None = None) -> list[Call]:
        """Calls of these rollouts' current attempts (or of attempt number `attempt`), by rollout, then ordinal."""
        ...

    async def bodies(self, call_id: str) -> CallBodies: ...

    # -- keys --
    async def issue_key(self, kind: KeyKind) -> str: ...

    async def grader_key(self, rollout_id: str, number: int) -> str:
        """A fresh key for grading attempt `number`; an earlier one of the attempt is revoked. Only while the attempt is
        graded, else `Refused`: there is none that a harness, which runs before, could find."""
        ...

    async def key(self, secret: str) -> Key | None:
        """What this key may do now; `None` where it was never issued. Cached: cheap to ask at every request."""
        ...

    # -- engines, policy versions, run-wide facts --
    async def set_engine(self, engine: EngineRecord) -> None: ...

    async def remove_engine(self, url: str) -> None: ...

    async def engines(self) -> list[EngineRecord]: ...

    async def add_version(self, version: PolicyVersion) -> None:
        """Publishes; a version must be one more than the last (`Refused`), the same again is no error."""
        ...

    async def versions(self) -> list[PolicyVersion]: ...

    async def set_fact(self, name: str, value: Any) -> None:
        """A JSON value under a name (run manifest, schema, trainer position)."""
        ...

    async def fact(self, name: str) -> Any: ...

    # -- events --
    async def add_event(
        self,
        kind: str,
        *,
        rollout_id: str | None = None,
        attempt: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> Event: ...

    async def events(self, after: int, *, timeout_s: float = 0, limit: int = 1000) -> list[Event]:
        """Events with `seq > after`; with none yet, waits up to `timeout_s` and is woken at once by the next commit."""
        ...

    async def counts(self) -> dict[str, int]:
        """Counters for reports: `rollouts.STATE`, `invalid.REASON`, `calls.STATUS`, `untrainable.REASON`,
        `fork.CAUSE`; those that are 0 are left out."""
        ...

    async def close(self) -> None: ...


def open_store(path: str | Path, *, read_only: bool = False) -> Store:
    """Opens or makes the SQLite store at `path` as its only writer, or opens one for reading beside its writer.

    Raises `StoreError`.
    """
    from canter.store.sqlite import open_sqlite, read_sqlite  # SQLAlchemy takes long to import

    return read_sqlite(path) if read_only else open_sqlite(path)
