"""What a breaker found: requests, replies and records that held the gateway up, or lost a sample."""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import pytest
from gateway_rig import STOP_ID, TOKENIZER, fake_engine, gateway

from canter.gateway.dialects.canonical import Asked, Chat
from canter.gateway.labels import classify
from canter.gateway.outage import outage
from canter.store.memory import MemoryStore
from canter.tokens.messages import Message
from canter.types import NO_IDS, NO_LOGPROBS, Attempt, Call, CallStatus, Outcome, Reason

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "object", "properties": {}}


async def test_many_references_to_one_item_are_no_more_work_than_their_number() -> None:
    async with gateway() as rig:
        _, first = await rig.post("/v1/responses", {"model": "policy", "input": "hi"})
        item = {"type": "item_reference", "id": first["output"][0]["id"]}
        body = {"model": "policy", "input": [item] * 10_000}
        began = time.process_time()
        status, counted = await rig.post("/v1/responses/input_tokens", body)
        took = time.process_time() - began
    assert status in (200, 400), counted  # they may be too much for the model
    assert took < 3, "copying the list for each took ten seconds"


def test_blank_lines_are_no_work_for_the_labels() -> None:
    asked = Asked("chat", "policy", Chat((Message("user", "\n" * 4096),)))
    began = time.process_time()
    classify({}, asked, tools_seen=True)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>\n{"name": "f", "arguments": {"input": "\\ud83d"}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "{\\"input\\": \\"\\ud83d\\"}"}\n</tool_call>',
        '<tool_call>\n{"name": "f\\ud83d", "arguments": {}}\n</tool_call>',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_character_is_answered_and_recorded(said: str, stream: bool) -> None:
    function = {"name": "f", "parameters": TOOL}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": function}]}),
        ("messages", {"max_tokens": 99, "messages": [USER], "tools": [{"name": "f", "input_schema": TOOL}]}),
        ("responses", {"input": "hi", "tools": [{"type": "function", **function}]}),
        ("responses", {"input": "ho", "tools": [{"type": "custom", "name": "f"}]}),
    ]
    async with gateway(fake_engine(lambda prompt, sampling, number: said)) as rig:
        for path, body in requests:
            headers = {"authorization": f"Bearer {rig.agent_key}"}
            asked = {"model": "policy", "stream": stream, **body}
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{rig.url}/v1/{path}", json=asked, headers=headers) as reply,
            ):
                text = await reply.text()
                assert reply.status == 200, text
                assert "f" in text
        calls = await rig.store.calls(["r1"])
    assert [(call.status, call.untrainable) for call in calls] == [(CallStatus.OK, None)] * 4


@pytest.mark.parametrize("id_", [-1, 999_999])
async def test_ids_that_are_no_tokens_are_the_engines_fault(id_: int) -> None:
    async with gateway(fake_engine(lambda prompt, sampling, number: [5, id_, STOP_ID])) as rig:
        status, reply = await rig.chat()
        [call] = await rig.store.calls(["r1"])
    assert (status, call.status, call.untrainable) == (503, CallStatus.ERROR, Reason.ENGINE_UNAVAILABLE)
    assert str(id_) in reply["error"]["message"]
    assert str(TOKENIZER.vocab_size) in reply["error"]["message"]


def call(ordinal: int, at: float, status: CallStatus = CallStatus.OK) -> Call:
    empty: dict[str, Any] = {"suffix": NO_IDS, "sampled": NO_IDS, "logprobs": NO_LOGPROBS, "versions": ()}
    why = None if status is CallStatus.OK else Reason.GATEWAY_UNAVAILABLE
    more: dict[str, Any] = {"status": status, "untrainable": why, "started_at": at, "finished_at": at + 1}
    return Call(str(ordinal), "r", 1, ordinal, parent_id=None, prefix_len=0, **empty, **more)


def test_a_harness_that_went_on_after_the_trouble_failed_by_itself() -> None:
    """Run again until it succeeds it would be rewarded for the gateway's restart."""
    attempt = Attempt("r", 1, started_at=100)
    failed = call(0, 110, CallStatus.ERROR)
    ended = (attempt, Outcome.EXITED, 1)
    assert outage(*ended, [call(0, 105), call(1, 130)], up_since=120) is None
    assert outage(*ended, [failed, call(1, 130)], up_since=0) is None
    for calls in ([call(0, 105)], [failed], [call(0, 130), call(1, 131, CallStatus.ERROR)], []):
        assert outage(*ended, calls, up_since=120) is not None


async def test_a_reply_that_may_not_have_left_is_sent_again_once_whatever_is_forgotten() -> None:
    store, ids = MemoryStore(), []
    async with gateway(store=store) as rig:
        key = rig.agent_key
        ids += [(await rig.chat())[1]["id"] for _ in range(3)]  # each asked for after the one before had arrived
    async with gateway(store=store, start=False, memory_bytes=0) as rig:
        ids += [(await rig.chat(key=key))[1]["id"] for _ in range(3)]
    assert len(set(ids)) == 5
    assert ids[3] == ids[2]
