"""What every store decides alike, apart from the lifecycle: admission of rollouts and versions, events, counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from canter.errors import Refused
from canter.store import Key
from canter.store.lifecycle import Draft
from canter.types import Call, Outcome, PolicyVersion, Rollout, RolloutState


def admit(rollouts: Sequence[Rollout], known: Mapping[str, Rollout], now: float) -> list[Rollout]:
    """Those rollouts that are new, as they will be stored: queued, before their first attempt.

    `known` are the stored ones of the same ids. Raises `Refused` where an id is known with other content.
    """
    fresh: dict[str, Rollout] = {}
    for rollout in rollouts:
        other = known.get(rollout.id) or fresh.get(rollout.id)
        if other is None:
            fresh[rollout.id] = _queued(rollout, now)
        elif differing := [name for name in _CONTENT if getattr(rollout, name) != getattr(other, name)]:
            raise Refused(
                f"rollout {rollout.id} exists with other content ({', '.join(differing)}); give the new one its own id"
            )
    return list(fresh.values())


_CONTENT = ("group", "task", "split", "step", "index", "seed")  # `max_attempts` grows with interruptions


def _queued(r: Rollout, now: float) -> Rollout:
    fresh = Rollout(r.id, r.group, r.task, r.split, r.step, r.index, r.seed, max_attempts=r.max_attempts)
    return replace(fresh, created_at=now, updated_at=now)


def admit_version(version: PolicyVersion, known: Sequence[PolicyVersion], now: float) -> PolicyVersion | None:
    """The version as it will be stored, or `None` where it is already `known` (all stored ones, in order).

    The first is 0, the model as given, or 1, its first update. Raises `Refused` unless it is one more than the last.
    """
    if any((v.version, v.step, v.path) == (version.version, version.step, version.path) for v in known):
        return None
    allowed = (known[-1].version + 1,) if known else (0, 1)
    if version.version not in allowed:
        last = f"version {known[-1].version} (step {known[-1].step})" if known else "nothing"
        raise Refused(f"version {version.version} (step {version.step}) cannot follow {last}; next is {allowed[-1]}")
    return replace(version, created_at=version.created_at or now)


def key_event(key: Key) -> Draft:
    """The event that an issued key leaves."""
    return Draft("key", key.rollout_id, key.attempt, {"kind": key.kind.value})


def call_event(call: Call) -> Draft:
    """The event that a committed call leaves."""
    data = {"id": call.id, "ordinal": call.ordinal, "status": call.status.value, "tokens": len(call.sampled)}
    return Draft("call", call.rollout_id, call.attempt, data)


def call_conflict(call: Call) -> str:
    """Why a call may not be stored that breaks a constraint."""
    return f"call {call.id} of rollout {call.rollout_id} is already committed, or its parent {call.parent_id} is not"


def count_rollouts(rows: Iterable[tuple[str, str | None, int]]) -> dict[str, int]:
    """Counters from rows of (state, reason, count)."""
    counts: Counter[str] = Counter()
    for state, reason, n in rows:
        counts[f"rollouts.{state}"] += n
        if state == RolloutState.INVALID:
            counts[f"invalid.{reason}"] += n
    return dict(counts)


def count_attempts(rows: Iterable[tuple[str | None, int | None, int]]) -> dict[str, int]:
    """Counters of those whose harness did not succeed, from rows of (outcome, exit code, count); none for no such."""
    counts: Counter[str] = Counter()
    for outcome, exit_code, n in rows:
        if outcome == Outcome.TIMED_OUT:
            counts["attempts.timed_out"] += n
        elif outcome == Outcome.EXITED and exit_code != 0:
            counts["attempts.exited_nonzero"] += n
    return dict(counts)


def count_calls(rows: Iterable[tuple[str, str | None, str | None, int]]) -> dict[str, int]:
    """Counters from rows of (status, untrainable, fork, count)."""
    counts: Counter[str] = Counter()
    for status, untrainable, fork, n in rows:
        counts[f"calls.{status}"] += n
        if untrainable is not None:
            counts[f"untrainable.{untrainable}"] += n
        if fork is not None:
            counts[f"fork.{fork}"] += n
    return dict(counts)
