"""The gateway's pure parts: deltas, stop strings, sampling; and the replay table and engine choice by themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from gateway_rig import TOKENIZER, fake_engine
from hypothesis import example, given
from hypothesis import strategies as st

from canter.config.tree import SamplingConfig
from canter.engine.fake import FakeEngine
from canter.errors import BadRequest, ContextOverflow, EngineError, EngineUnavailable, Unauthorized
from canter.gateway.calls import why_untrainable
from canter.gateway.delta import Recent, common_prefix
from canter.gateway.dialects.canonical import Chat, Start
from canter.gateway.dialects.chat import ChatCompletions, parse_messages
from canter.gateway.dialects.messages_blocks import conversation
from canter.gateway.dialects.responses_input import read_items
from canter.gateway.engines import Engines, Running
from canter.gateway.gate import Gate
from canter.gateway.http import new_id
from canter.gateway.identity import request_digest
from canter.gateway.replay import Flight, Flights
from canter.gateway.sampling import Limits, admit, call_seed, effective, prompt_digest
from canter.gateway.stops import cut_generation, cut_text
from canter.types import (
    EngineRecord,
    FinishReason,
    Generation,
    Ids,
    Reason,
    Sampling,
    Split,
    VersionSpan,
    as_ids,
)

START = Start("call", 0)

few_ids = st.lists(st.integers(0, 3), max_size=12)


# -- deltas --


@given(few_ids, few_ids)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(as_ids(a), as_ids(b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@example([([0], [0]), ([], [0]), ([0], [])])
@given(st.lists(st.tuples(few_ids, few_ids), min_size=1, max_size=14))
def test_a_delta_is_the_prompt_and_extends_what_it_can(calls: list[tuple[list[int], list[int]]]) -> None:
    recent = Recent(keep=4)
    wholes: list[list[int]] = []
    for number, (prompt, sampled) in enumerate(calls):
        delta = recent.find(as_ids(prompt))
        before = delta.parent.tokens().tolist() if delta.parent is not None else []
        assert before[: delta.prefix_len] + delta.suffix.tolist() == prompt
        assert delta.prefix_len <= len(before)
        contained = [whole for whole in wholes if whole and prompt[: len(whole)] == whole]
        if contained and len(wholes) <= 4:
            assert before == max(contained, key=len), "the longest call that is wholly contained is the parent"
        node = recent.add(f"c{number}", delta, as_ids(sampled))
        assert node.tokens().tolist() == prompt + sampled
        wholes.append(prompt + sampled)


def test_memory_grows_with_what_is_new_only() -> None:
    recent = Recent()
    tokens = list(range(1000))
    held = 0
    for number in range(50):
        delta = recent.find(as_ids(tokens))
        node = recent.add(f"c{number}", delta, as_ids([1, 2, 3]))
        held += node.tail.nbytes
        tokens = [*node.tokens().tolist(), 7]
    assert held == 4 * (1000 + 49 * 1 + 50 * 3)


# -- stop strings --


@given(st.text("abé ", max_size=12), st.lists(st.text("abé ", min_size=1, max_size=3), max_size=4))
def test_a_cut_generation_ends_with_the_first_stop_string(text: str, stops: list[str]) -> None:
    ids = TOKENIZER.encode(text)
    count = len(ids)
    spans = (VersionSpan(0, 0, count // 2), VersionSpan(1, count // 2, count))
    whole = Generation(ids, np.arange(count, dtype=np.float32), FinishReason.LENGTH, spans)
    cut = cut_generation(whole, stops, TOKENIZER.decode)
    kept = len(cut.ids)
    assert cut.ids.tolist() == ids[:kept].tolist()
    assert len(cut.logprobs) == kept
    if not any(stop in text for stop in stops):
        assert cut is whole
        return
    assert cut.finish_reason is FinishReason.STOP
    assert any(stop in TOKENIZER.decode(cut.ids) for stop in stops)
    assert not any(stop in TOKENIZER.decode(ids[: kept - 1]) for stop in stops)
    assert max((span.end for span in cut.versions), default=0) == kept
    shown = cut_text(TOKENIZER.decode(cut.ids), stops)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)


# -- sampling --


@given(
    context=st.integers(16, 200),
    prompt=st.integers(0, 300),
    wanted=st.none() | st.integers(1, 400),
    cap=st.integers(1, 100),
)
def test_a_reply_never_outgrows_the_context_nor_the_run(
    context: int, prompt: int, wanted: int | None, cap: int
) -> None:
    limits = Limits(SamplingConfig(max_tokens=cap), Split.TRAIN, context)
    arguments: dict[str, Any] = {
        "prompt_tokens": prompt,
        "max_tokens": wanted,
        "stop": (),
        "stop_token_ids": (),
        "seed": 1,
    }
    if prompt + 1 > context:
        with pytest.raises(ContextOverflow):
            admit(limits, **arguments)
        return
    sampling = admit(limits, **arguments)
    assert prompt + sampling.max_tokens <= context
    assert sampling.max_tokens == min(cap, context - prompt, cap if wanted is None else wanted)


def test_evaluation_has_its_own_temperature_where_one_is_set() -> None:
    config = SamplingConfig(temperature=1.0, eval_temperature=0.0)
    assert Limits(config, Split.EVAL, 100).temperature == 0.0
    assert Limits(config, Split.TRAIN, 100).temperature == 1.0
    assert Limits(SamplingConfig(temperature=0.7), Split.EVAL, 100).temperature == 0.7


def test_what_was_asked_for_in_vain_is_named() -> None:
    asked = {"tool_choice": {"type": "function"}, "logit_bias": {}, "temperature": 0}
    assert effective(Sampling(), asked)["not_enforced"] == ["logit_bias", "tool_choice"]
    for choice in ("auto", "none", None):
        assert "not_enforced" not in effective(Sampling(), {"tool_choice": choice})


def test_seeds_and_digests_are_stable() -> None:
    digest = prompt_digest(as_ids([1, 2, 3]))
    assert call_seed(7, digest, 0) == 7573988416635119344
    assert 0 <= call_seed(7, digest, 1) < 2**63
    assert len({call_seed(s, digest, n) for s in range(5) for n in range(5)}) == 25


def _calls() -> list[dict[str, object]]:
    """Calls of which each differs from the first in one thing."""
    variants = [("a", "f", "{}"), ("b", "f", "{}"), ("a", "g", "{}"), ("a", "f", '{"x": 1}')]
    return [{"id": id_, "function": {"name": name, "arguments": text}} for id_, name, text in variants]


def test_a_request_is_the_same_however_it_is_spelled_and_travels() -> None:
    def digest(**fields: object) -> bytes:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logit_bias": {"1": 2, "3": 4}}
        return request_digest(ChatCompletions().parse({**body, **fields}))

    same: list[dict[str, object]] = [
        {"stream": True, "stream_options": {"include_usage": True}},
        {"messages": [{"content": [{"type": "text", "text": "hi"}], "role": "user"}]},
        {"logit_bias": {"3": 4, "1": 2}},
        {"metadata": {"a": "b"}},
        {"tools": []},
    ]
    assert {digest(**fields) for fields in same} == {digest()}
    others: list[dict[str, object]] = [
        {"messages": [{"role": "user", "content": "hi "}]},
        {"model": "n"},
        {"max_tokens": 5},
        {"logprobs": True},
        {"stop": "x"},
        {"temperature": 0.5},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "system", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "h"}, {"role": "user", "content": "i"}]},
        *({"messages": [{"role": "assistant", "tool_calls": [call]}]} for call in _calls()),
        *({"messages": [{"role": "tool", "tool_call_id": id_, "content": "hi"}]} for id_ in "ab"),
    ]
    assert len({digest(**fields) for fields in [*others, {}]}) == len(others) + 1


def test_a_picture_that_a_tool_found_does_not_end_the_rollout() -> None:
    """A user's is refused (see the tests of bad requests); a tool's is named in its place, in every protocol."""
    text, shown = {"type": "text", "text": "a.png"}, "a.png\n[{} left out: this model reads text only]"
    chat = {"role": "tool", "tool_call_id": "1", "content": [text, {"type": "image_url", "image_url": {"url": "x"}}]}
    assert parse_messages({"messages": [chat]})[0].content == shown.format("image_url")
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text, {"type": "image", "source": {}}]}
    assert conversation({"messages": [{"role": "user", "content": [result]}]}, {})[0].content == shown.format("image")
    output = [{"type": "input_text", "text": "a.png"}, {"type": "input_image", "image_url": "x"}]
    [item] = read_items([{"type": "function_call_output", "call_id": "1", "output": output}])
    assert item.content == shown.format("input_image")


def test_tools_that_a_chat_cannot_show_are_kept_out_and_recorded() -> None:
    """Responses and Messages do the same; what is kept out may yet be chosen, which is recorded as not enforced."""
    function = {"type": "function", "function": {"name": "f"}}
    tools = [
        {"type": "custom", "custom": {"name": "patch"}},
        function,
        {"type": "web_search"},
        {"type": "mcp", "name": "m"},
    ]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    allowed = {"mode": "auto", "tools": [tools[0], function]}
    for choice, shown in (
        (None, ["f"]),
        ("none", []),
        ("required", ["f"]),
        ({"type": "custom", "custom": {"name": "patch"}}, ["f"]),
        ({"type": "allowed_tools", "allowed_tools": allowed}, ["f"]),
    ):
        asked = ChatCompletions().parse(body | {"tool_choice": choice})
        assert isinstance(asked.prompt, Chat)
        assert [tool.name for tool in asked.prompt.tools] == shown
        assert asked.requested["tools_left_out"] == ["patch", "web_search", "m"]
    with pytest.raises(BadRequest, match="'f' is none of the tools"):
        ChatCompletions().parse(body | {"tool_choice": {"type": "custom", "custom": {"name": "f"}}})
    assert "tools_left_out" not in ChatCompletions().parse(body | {"tools": [function]}).requested


# -- what may be trained --


@pytest.mark.parametrize(
    ("ids", "logprobs", "spans", "reason"),
    [
        ([1, 2], [-1, -2], [(0, 0, 2)], None),
        ([1, 2], [-1, -2], [(0, 0, 1), (3, 1, 2)], None),
        ([1, 2], [], [(0, 0, 2)], Reason.MISSING_LOGPROBS),
        ([1, 2], [-1], [(0, 0, 2)], Reason.LENGTH_MISMATCH),
        ([1], [-1, -2], [(0, 0, 1)], Reason.LENGTH_MISMATCH),
        ([1, 2], [-1, float("nan")], [(0, 0, 2)], Reason.NOT_FINITE),
        ([1, 2], [-1, float("-inf")], [(0, 0, 2)], Reason.NOT_FINITE),
        ([1, 2], [-1, -2], [], Reason.MISSING_VERSION),
        ([1, 2], [-1, -2], [(0, 0, 1)], Reason.MISSING_VERSION),
        ([1, 2], [-1, -2], [(0, 1, 2)], Reason.MISSING_VERSION),
        ([1, 2], [-1, -2], [(0, 0, 3)], Reason.MISSING_VERSION),
        ([1, 2], [-1, -2], [(0, 0, 2), (1, 1, 2)], Reason.MISSING_VERSION),
    ],
)
def test_why_untrainable(ids: list[int], logprobs: list[float], spans: list[Any], reason: Reason | None) -> None:
    versions = tuple(VersionSpan(*span) for span in spans)
    generation = Generation(as_ids(ids), np.array(logprobs, np.float32), FinishReason.STOP, versions)
    assert why_untrainable(generation) is reason


# -- the gate --


async def test_the_gate_holds_for_so_long_only() -> None:
    gate = Gate()
    await gate.passed(0)
    gate.pause()
    with pytest.raises(EngineUnavailable, match="paused"):
        await gate.passed(0.01)
    asyncio.get_running_loop().call_later(0.02, gate.resume)
    await gate.passed(5)
    assert not gate.paused


# -- replay --


async def test_flights_forget_what_is_delivered_failed_or_too_old() -> None:
    flights: Flights[int] = Flights(keep=2)

    async def run(flight: Flight[int]) -> int:
        return 1

    async def fail(flight: Flight[int]) -> int:
        raise EngineError("no")

    failed = flights.board("failed", START, fail)
    with pytest.raises(EngineError):
        await failed.task
    assert await flights.board("failed", START, run).task == 1, "a failure is not replayed"
    for name in "abcd":
        flight = flights.board(name, START, run)
        await flight.task
        flights.leave(name, flight)
    assert len(flights) == 3, "the boarded one and the last two undelivered"
    kept = flights.board("d", START, fail)
    assert await kept.task == 1
    flights.delivered("d", kept)
    assert len(flights) == 2


async def test_a_flight_that_cannot_be_aborted_gently_is_cancelled() -> None:
    flights: Flights[int] = Flights(abort_grace_s=0.05)

    async def hang(flight: Flight[int]) -> int:
        flight.abort = abort
        await asyncio.sleep(60)
        return 1

    async def abort() -> bool:
        return True

    flight = flights.board("x", START, hang)
    await asyncio.sleep(0)
    flights.leave("x", flight)
    await asyncio.wait({flight.task}, timeout=2)
    assert flight.task.cancelled()
    assert flight.abandoned
    await flights.close()


async def test_closing_ends_a_flight_that_nobody_waits_for_and_waits_for_its_end() -> None:
    flights: Flights[int] = Flights()
    recorded: list[bool] = []

    async def hang(flight: Flight[int]) -> int:
        flight.abort = abort
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            recorded.append(flight.abandoned)
        return 1

    async def abort() -> bool:
        return True

    flight = flights.board("x", START, hang)
    await asyncio.sleep(0)
    flights.leave("x", flight)
    await asyncio.sleep(0.01)
    await flights.close()
    assert flight.task.cancelled()
    assert recorded == [True]


# -- engines --


class Dead(FakeEngine):
    """Cannot be reached, or refuses the key."""

    error: Exception = EngineUnavailable("refused")

    async def generate(self, *_: Any, **__: Any) -> Any:
        raise self.error


class Wrong(Dead):
    error = Unauthorized("not this key")


async def engines_of(*made: Any) -> Engines:
    by_url = {f"http://{number}": engine for number, engine in enumerate(made)}
    engines = Engines(lambda url, key: by_url[url])
    for url in by_url:
        await engines.register(EngineRecord(url, "m", 0), "k")
    return engines


async def sample(engines: Engines, *, wait_s: float = 0.1) -> Generation:
    return await engines.generate(as_ids([1]), Sampling(), Running(new_id("c")), wait_s=wait_s)


@pytest.mark.parametrize("dead", [Dead, Wrong])
async def test_an_engine_that_is_gone_is_replaced_by_another(dead: type[FakeEngine]) -> None:
    engines = await engines_of(dead(), fake_engine())
    for _ in range(3):
        assert (await sample(engines)).finish_reason is FinishReason.STOP


@pytest.mark.parametrize("dead", [Dead, Wrong])
async def test_with_no_other_engine_the_wait_is_bounded(dead: type[FakeEngine]) -> None:
    engines = await engines_of(dead())
    with pytest.raises(EngineUnavailable, match="http://0"):
        await asyncio.wait_for(sample(engines), 2)


async def test_the_least_busy_engine_is_taken() -> None:
    counts = [0, 0]

    def counting(number: int) -> FakeEngine:
        def script(prompt: Ids, sampling: Sampling, request: int) -> str:
            counts[number] += 1
            return "x" * 5

        return fake_engine(script, token_delay_s=0.005)

    engines = await engines_of(counting(0), counting(1))
    await asyncio.gather(*(sample(engines) for _ in range(10)))
    assert counts == [5, 5]


async def test_a_generation_has_a_deadline() -> None:
    engine = fake_engine(lambda *_: "x" * 100, token_delay_s=0.05)
    engines = Engines(lambda url, key: engine, timeout_s=0.1)
    await engines.register(EngineRecord("http://e", "m", 0), "k")
    with pytest.raises(EngineError, match=r"no reply within 0\.1 s"):
        await sample(engines)
    assert (await engine.health()).running == 0


async def test_registering_with_a_new_key_connects_again_and_removing_forgets() -> None:
    keys: list[str] = []

    def connect(url: str, key: str) -> FakeEngine:
        keys.append(key)
        return fake_engine()

    engines = Engines(connect)
    for key in ("a", "a", "b"):
        await engines.register(EngineRecord("http://e", "m", 0), key)
    assert keys == ["a", "b"]
    await engines.remove("http://e")
    with pytest.raises(EngineUnavailable, match="none is registered"):
        await sample(engines, wait_s=0)
