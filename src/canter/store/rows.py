"""Values to rows of `schema.py` and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import zstandard
from sqlalchemy import RowMapping

from canter.store import Key
from canter.store.arrays import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from canter.types import (
    Attempt,
    Call,
    CallStatus,
    EngineRecord,
    Event,
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
)


def to_json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()


def _plain(value: Mapping[str, Any]) -> str:
    return to_json(value if isinstance(value, dict) else dict(value)) if value else "{}"


def rollout_row(r: Rollout) -> dict[str, Any]:
    task = {"id": r.task.id, "prompt": r.task.prompt, "input": dict(r.task.input), "hidden": dict(r.task.hidden)}
    return {
        "id": r.id,
        "group": r.group,
        "task": to_json(task),
        "split": r.split.value,
        "step": r.step,
        "index": r.index,
        "seed": r.seed,
        "created_at": r.created_at,
        **progress_row(r),
    }


def progress_row(r: Rollout) -> dict[str, Any]:
    """The part of a rollout that changes in its life."""
    return {
        "state": r.state.value,
        "attempt": r.attempt,
        "max_attempts": r.max_attempts,
        "reward": r.reward,
        "reason": r.reason and r.reason.value,
        "message": r.message,
        "updated_at": r.updated_at,
    }


def rollout_of(row: RowMapping) -> Rollout:
    fields = dict(row)
    return Rollout(
        **fields
        | {
            "task": Task(**orjson.loads(row["task"])),
            "split": Split(row["split"]),
            "state": RolloutState(row["state"]),
            "reason": row["reason"] and Reason(row["reason"]),
        }
    )


def attempt_row(a: Attempt) -> dict[str, Any]:
    return {
        "rollout_id": a.rollout_id,
        "number": a.number,
        "sealed": a.sealed,
        "process": _plain(a.process),
        "outcome": a.outcome and a.outcome.value,
        "exit_code": a.exit_code,
        "reason": a.reason and a.reason.value,
        "message": a.message,
        "started_at": a.started_at,
        "ended_at": a.ended_at,
    }


def attempt_of(row: RowMapping) -> Attempt:
    fields = dict(row)
    return Attempt(
        **fields
        | {
            "process": orjson.loads(row["process"]),
            "outcome": row["outcome"] and Outcome(row["outcome"]),
            "reason": row["reason"] and Reason(row["reason"]),
        }
    )


def reward_row(r: Reward) -> dict[str, Any]:
    return {
        "rollout_id": r.rollout_id,
        "attempt": r.attempt,
        "value": r.value,
        "source": r.source,
        "details": _plain(r.details),
    }


def reward_of(row: RowMapping) -> Reward:
    return Reward(**dict(row) | {"details": orjson.loads(row["details"])})


def call_row(seq: int, call: Call, compressor: zstandard.ZstdCompressor) -> dict[str, Any]:
    return {
        "seq": seq,
        "id": call.id,
        "rollout_id": call.rollout_id,
        "attempt": call.attempt,
        "ordinal": call.ordinal,
        "parent_id": call.parent_id,
        "prefix_len": call.prefix_len,
        "suffix": pack_ids(call.suffix, compressor),
        "sampled": pack_ids(call.sampled, compressor),
        "logprobs": pack_logprobs(call.logprobs),
        "versions": to_json([(s.version, s.start, s.end) for s in call.versions]),
        "status": call.status.value,
        "finish_reason": call.finish_reason and call.finish_reason.value,
        "untrainable": call.untrainable and call.untrainable.value,
        "label": call.label,
        "dialect": call.dialect,
        "model": call.model,
        "fork": call.fork and call.fork.value,
        "proposed_parent_id": call.proposed_parent_id,
        "fork_at": call.fork_at,
        "requested": _plain(call.requested),
        "effective": _plain(call.effective),
        "started_at": call.started_at,
        "finished_at": call.finished_at,
    }


def call_of(row: RowMapping) -> Call:
    fields = dict(row)
    del fields["seq"]
    return Call(
        **fields
        | {
            "suffix": unpack_ids(row["suffix"]),
            "sampled": unpack_ids(row["sampled"]),
            "logprobs": unpack_logprobs(row["logprobs"]),
            "versions": tuple(VersionSpan(*span) for span in orjson.loads(row["versions"])),
            "status": CallStatus(row["status"]),
            "finish_reason": row["finish_reason"] and FinishReason(row["finish_reason"]),
            "untrainable": row["untrainable"] and Reason(row["untrainable"]),
            "fork": row["fork"] and ForkCause(row["fork"]),
            "requested": orjson.loads(row["requested"]),
            "effective": orjson.loads(row["effective"]),
        }
    )


def key_row(hashed: bytes, key: Key) -> dict[str, Any]:
    return {
        "hash": hashed,
        "kind": key.kind.value,
        "rollout_id": key.rollout_id,
        "attempt": key.attempt,
        "revoked": key.revoked,
    }


def key_of(row: RowMapping) -> Key:
    return Key(KeyKind(row["kind"]), row["rollout_id"], row["attempt"], row["revoked"])


def engine_row(e: EngineRecord) -> dict[str, Any]:
    return {"url": e.url, "model": e.model, "version": e.version, "seen_at": e.seen_at}


def engine_of(row: RowMapping) -> EngineRecord:
    return EngineRecord(**row)


def version_row(v: PolicyVersion) -> dict[str, Any]:
    return {"version": v.version, "step": v.step, "path": v.path, "created_at": v.created_at}


def version_of(row: RowMapping) -> PolicyVersion:
    return PolicyVersion(**row)


def event_row(e: Event) -> dict[str, Any]:
    return {
        "seq": e.seq,
        "at": e.at,
        "kind": e.kind,
        "rollout_id": e.rollout_id,
        "attempt": e.attempt,
        "data": _plain(e.data),
    }


def event_of(row: RowMapping) -> Event:
    return Event(**dict(row) | {"data": orjson.loads(row["data"])})
