"""How calls travel between processes: MessagePack maps with token arrays as little-endian bytes.

`pack_*` and `unpack_*` are inverse; `tests/test_wire.py` holds the property.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from canter.types import (
    Call,
    CallStatus,
    FinishReason,
    ForkCause,
    Generation,
    Ids,
    Logprobs,
    Reason,
    Sampling,
    VersionSpan,
)

CONTENT_TYPE = "application/msgpack"
MAX_NESTING = 128
"""Levels of arrays and objects that JSON from outside may have; encoders and templates give up somewhere above."""


def is_too_nested(value: object) -> bool:
    """Whether a JSON value has more than `MAX_NESTING` levels. Does not recurse."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def pack(value: Mapping[str, Any]) -> bytes:
    """MessagePack of a map of plain values and bytes."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack(data: bytes) -> dict[str, Any]:
    """Inverse of `pack`. Raises ValueError on anything that is no MessagePack map."""
    try:
        value = msgpack.unpackb(data, raw=False)
    except Exception as error:  # msgpack raises a dozen unrelated types on bad input
        raise ValueError(f"not a MessagePack body: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a MessagePack map, got {type(value).__name__}")
    return value


def ids_to_bytes(ids: Ids) -> bytes:
    return np.ascontiguousarray(ids, "<i4").tobytes()


def ids_from_bytes(data: bytes) -> Ids:
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def logprobs_to_bytes(logprobs: Logprobs) -> bytes:
    return np.ascontiguousarray(logprobs, "<f4").tobytes()


def logprobs_from_bytes(data: bytes) -> Logprobs:
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def spans_to_lists(spans: Sequence[VersionSpan]) -> list[list[int]]:
    return [[s.version, s.start, s.end] for s in spans]


def spans_from_lists(rows: Sequence[Sequence[int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*row) for row in rows)


def call_to_map(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "rollout_id": call.rollout_id,
        "attempt": call.attempt,
        "ordinal": call.ordinal,
        "parent_id": call.parent_id,
        "prefix_len": call.prefix_len,
        "suffix": ids_to_bytes(call.suffix),
        "sampled": ids_to_bytes(call.sampled),
        "logprobs": logprobs_to_bytes(call.logprobs),
        "versions": spans_to_lists(call.versions),
        "status": call.status.value,
        "finish_reason": call.finish_reason and call.finish_reason.value,
        "untrainable": call.untrainable and call.untrainable.value,
        "label": call.label,
        "dialect": call.dialect,
        "model": call.model,
        "fork": call.fork and call.fork.value,
        "proposed_parent_id": call.proposed_parent_id,
        "fork_at": call.fork_at,
        "requested": dict(call.requested),
        "effective": dict(call.effective),
        "started_at": call.started_at,
        "finished_at": call.finished_at,
    }


def call_from_map(row: Mapping[str, Any]) -> Call:
    return Call(
        **{
            **row,
            "suffix": ids_from_bytes(row["suffix"]),
            "sampled": ids_from_bytes(row["sampled"]),
            "logprobs": logprobs_from_bytes(row["logprobs"]),
            "versions": spans_from_lists(row["versions"]),
            "status": CallStatus(row["status"]),
            "finish_reason": FinishReason(row["finish_reason"]) if row["finish_reason"] else None,
            "untrainable": Reason(row["untrainable"]) if row["untrainable"] else None,
            "fork": ForkCause(row["fork"]) if row["fork"] else None,
        }
    )


def sampling_to_map(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def sampling_from_map(row: Mapping[str, Any]) -> Sampling:
    return Sampling(**{**row, "stop": tuple(row["stop"]), "stop_token_ids": tuple(row["stop_token_ids"])})


def generation_to_map(generation: Generation) -> dict[str, Any]:
    return {
        "ids": ids_to_bytes(generation.ids),
        "logprobs": logprobs_to_bytes(generation.logprobs),
        "finish_reason": generation.finish_reason.value,
        "versions": spans_to_lists(generation.versions),
    }


def generation_from_map(row: Mapping[str, Any]) -> Generation:
    return Generation(
        ids=ids_from_bytes(row["ids"]),
        logprobs=logprobs_from_bytes(row["logprobs"]),
        finish_reason=FinishReason(row["finish_reason"]),
        versions=spans_from_lists(row["versions"]),
    )
