"""Packed arrays come back as they were, and small."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from canter.store.arrays import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from canter.types import Ids, Logprobs

COMPRESSOR = zstandard.ZstdCompressor(level=1)
_INT32 = np.iinfo(np.int32)
bounds = st.sampled_from([(0, 2**16 - 1), (0, 2**16), (0, 2**24 - 1), (0, 2**24), (-1, 3), (_INT32.min, _INT32.max)])


@given(bounds.flatmap(lambda b: arrays(np.int32, st.integers(0, 700), elements=st.integers(*b))))
def test_ids_come_back(ids: Ids) -> None:
    back = unpack_ids(pack_ids(ids, COMPRESSOR))
    assert back.dtype == np.int32
    assert np.array_equal(back, ids)


@given(arrays(np.float32, st.integers(0, 50)))
def test_logprobs_come_back_bit_for_bit(logprobs: Logprobs) -> None:
    back = unpack_logprobs(pack_logprobs(logprobs))
    assert back.dtype == np.float32
    assert back.tobytes() == logprobs.tobytes()


def test_ids_take_at_most_three_bytes_and_less_where_they_repeat() -> None:
    rng = np.random.default_rng(0)
    short = rng.integers(0, 150_000, 100).astype(np.int32)
    assert len(pack_ids(short, COMPRESSOR)) == 301
    long = (rng.zipf(1.2, 30_000) % 150_000).astype(np.int32)
    assert len(pack_ids(long, COMPRESSOR)) < 45_000


def test_ids_packed_by_a_later_version_are_refused() -> None:
    with pytest.raises(ValueError, match="start with 3"):
        unpack_ids(b"\x03abc")
