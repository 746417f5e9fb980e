"""Bodies as differences: nothing is lost, little is kept, memory is bounded."""

from __future__ import annotations

import json
import random

import zstandard
from hypothesis import given
from hypothesis import strategies as st

from canter.store.bodies import Head, Heads, common_ends, decode, encode
from canter.types import NO_IDS, NO_LOGPROBS, Call, CallBodies

COMPRESSOR = zstandard.ZstdCompressor(level=1)

bodies = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda part, times: part * times, st.binary(min_size=1, max_size=40), st.integers(1, 600)),
)


@given(bodies, bodies)
def test_any_body_comes_back_from_any_base(body: bytes, base: bytes) -> None:
    assert decode(encode(body, base, COMPRESSOR), base) == body


@given(bodies, bodies, bodies, bodies, bodies)
def test_a_body_that_shares_parts_with_its_base_comes_back(a: bytes, b: bytes, c: bytes, x: bytes, y: bytes) -> None:
    body, base = a + x + b + c, a + b + y + c
    assert decode(encode(body, base, COMPRESSOR), base) == body


@given(st.binary(max_size=50), st.binary(max_size=50), st.binary(max_size=50), st.binary(max_size=50))
def test_common_ends_are_as_long_as_they_can_be(start: bytes, end: bytes, x: bytes, y: bytes) -> None:
    a, b = start + x + end, start + y + end
    prefix, suffix = common_ends(a, b)
    short = min(len(a), len(b))
    assert prefix + suffix <= short
    assert a[:prefix] == b[:prefix]
    assert suffix == 0 or a[-suffix:] == b[-suffix:]
    assert prefix == short or a[prefix] != b[prefix]
    assert prefix + suffix == short or a[len(a) - suffix - 1] != b[len(b) - suffix - 1]


def noise(seed: int, size: int) -> str:
    return random.Random(seed).randbytes(size // 2).hex()


def request(turns: int, *, marker: bool = False) -> bytes:
    """A harness's request: history, then tools; with a marker that moves to the last message with every call."""
    messages = [{"role": "user", "content": noise(i, 2000)} for i in range(turns)]
    if marker:
        messages[-1]["cache"] = "here"
    return json.dumps({"model": "m", "messages": messages, "tools": noise(-1, 80_000)}).encode()


def test_a_growing_history_costs_its_growth() -> None:
    assert len(encode(request(51), request(50), COMPRESSOR)) < 1300
    assert len(encode(request(51, marker=True), request(50, marker=True), COMPRESSOR)) < 1300


def test_what_has_moved_is_found_again() -> None:
    reply = '{"id": "%s", "logprobs": "%s", "prompt_token_ids": "%s%s"}'
    first = (reply % ("a", noise(1, 4000), noise(2, 100_000), "")).encode()
    second = (reply % ("b", noise(3, 4000), noise(2, 100_000), noise(4, 1000))).encode()
    assert len(encode(second, first, COMPRESSOR)) < 4000


def call(id: str, *, attempt: int = 1, parent: str | None = None) -> Call:
    return Call(id, "r1", attempt, 0, parent, 0, NO_IDS, NO_IDS, NO_LOGPROBS, ())


def push(heads: Heads, c: Call, request: bytes) -> Head | None:
    base = heads.base(c, request)
    heads.push(c, Head(c.id, 0, 0, CallBodies(request, b"")), base)
    return base


def test_a_call_is_stored_against_its_parent() -> None:
    heads = Heads(1000)
    push(heads, call("main"), b"m" * 100)
    push(heads, call("sub"), b"s" * 100)
    base = push(heads, call("next", parent="main"), b"s" * 120)
    assert base is not None
    assert base.call_id == "main"
    assert heads.size == 220


def test_without_a_parent_it_is_stored_against_the_head_most_alike() -> None:
    heads = Heads(1000)
    push(heads, call("main"), b"m" * 100)
    push(heads, call("sub"), b"s" * 100)
    for turn in range(1, 4):
        for name in ("main", "sub"):
            base = push(heads, call(f"{name}{turn}"), name[:1].encode() * (100 + turn))
            assert base is not None
            assert base.call_id.startswith(name)
    assert heads.size == 103 + 103
    assert heads.base(call("other", attempt=2), b"m") is None


def test_the_memory_of_heads_is_bounded() -> None:
    heads = Heads(1000)
    for attempt in range(50):
        for n in range(10):
            push(heads, call(f"{attempt}-{n}", attempt=attempt), bytes((n,)) * 60)
            assert heads.size <= 1000
    push(heads, call("huge", attempt=99), b"h" * 2000)
    assert heads.size == 0
    push(heads, call("small", attempt=99), b"h" * 20)
    assert heads.size == 20
