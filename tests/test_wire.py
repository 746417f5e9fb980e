"""What travels between processes comes back as it was."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from canter import wire
from canter.types import (
    Call,
    CallStatus,
    FinishReason,
    ForkCause,
    Generation,
    Reason,
    Sampling,
    VersionSpan,
)

int32 = st.integers(-(2**31), 2**31 - 1)
ids = arrays(np.int32, st.integers(0, 20), elements=int32)
logprobs = arrays(np.float32, st.integers(0, 20))
spans = st.lists(st.builds(VersionSpan, *[st.integers(0, 2**31)] * 3), max_size=3).map(tuple)
times = st.floats(0, 1e10)
words = st.text(max_size=20)
json_maps = st.dictionaries(
    words,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | words,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
calls = st.builds(
    Call,
    id=words,
    rollout_id=words,
    attempt=st.integers(0, 10),
    ordinal=st.integers(0, 10),
    parent_id=st.none() | words,
    prefix_len=st.integers(0, 2**31),
    suffix=ids,
    sampled=ids,
    logprobs=logprobs,
    versions=spans,
    status=st.sampled_from(CallStatus),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    untrainable=st.none() | st.sampled_from(Reason),
    label=words,
    dialect=words,
    model=words,
    fork=st.none() | st.sampled_from(ForkCause),
    proposed_parent_id=st.none() | words,
    fork_at=st.none() | st.integers(0, 2**31),
    requested=json_maps,
    effective=json_maps,
    started_at=times,
    finished_at=times,
)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 10),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 1000),
    max_tokens=st.integers(1, 10**6),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(words, max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
)
generations = st.builds(
    Generation, ids=ids, logprobs=logprobs, finish_reason=st.sampled_from(FinishReason), versions=spans
)


def assert_same(a: Any, b: Any) -> None:
    """Equality of every field, of arrays bit for bit, of enums as enums."""
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        assert type(x) is type(y), field.name
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, field.name
            assert x.tobytes() == y.tobytes(), field.name
        else:
            assert x == y, field.name


@given(calls)
def test_calls(call: Call) -> None:
    assert_same(wire.call_from_map(wire.unpack(wire.pack(wire.call_to_map(call)))), call)


@given(samplings)
def test_samplings(sampling: Sampling) -> None:
    assert_same(wire.sampling_from_map(wire.unpack(wire.pack(wire.sampling_to_map(sampling)))), sampling)


@given(generations)
def test_generations(generation: Generation) -> None:
    assert_same(wire.generation_from_map(wire.unpack(wire.pack(wire.generation_to_map(generation)))), generation)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_map_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(wire.unpack(data), dict)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x01", b"\x81\xa1a"])
def test_what_is_no_map_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="MessagePack"):
        wire.unpack(data)
