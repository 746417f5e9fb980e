"""The legacy completions protocol: a text or token ids in, text out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from gateway_rig import STOP_ID, TOKENIZER, fake_engine, gateway


async def test_token_ids_are_used_exactly_as_they_are() -> None:
    ids = [256, 5, 99, 258, 257, 0]
    async with gateway(fake_engine(lambda *_: "hello")) as rig, rig.sdk() as sdk:
        reply = await sdk.completions.create(model="policy", prompt=ids, max_tokens=20, logprobs=0)
        nested = await sdk.completions.create(model="policy", prompt=[ids])
        one, two = await rig.store.calls(["r1"])
    assert one.suffix.tolist() == ids
    assert (two.parent_id, two.prefix_len) == (one.id, len(ids))
    assert one.dialect == "completions"
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert reply.choices[0].text == nested.choices[0].text == "hello"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 6)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx(one.logprobs.tolist())
    assert logprobs.tokens == [*"hello", "<|im_end|>"]
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert int(one.sampled[-1]) == STOP_ID


@pytest.mark.parametrize("prompt", ["once upon", ["once upon"]])
async def test_a_text_is_encoded_and_nothing_is_added(prompt: Any) -> None:
    async with gateway() as rig, rig.sdk() as sdk:
        await sdk.completions.create(model="policy", prompt=prompt)
        [call] = await rig.store.calls(["r1"])
    assert TOKENIZER.decode(call.suffix) == "once upon"


async def test_an_agent_that_keeps_its_own_ids_makes_one_chain() -> None:
    async with gateway() as rig, rig.sdk() as sdk:
        ids = TOKENIZER.encode_list("begin ")
        for _ in range(4):
            await sdk.completions.create(model="policy", prompt=ids)
            ids = [*ids, *(await rig.store.calls(["r1"]))[-1].sampled.tolist(), 7, 8]
        calls = await rig.store.calls(["r1"])
    for before, after in itertools.pairwise(calls):
        assert after.parent_id == before.id
        assert after.prefix_len == before.prompt_len + len(before.sampled)
        assert after.suffix.tolist() == [7, 8]


async def test_streams_carry_text_reason_and_usage() -> None:
    async with gateway(fake_engine(lambda *_: "word " * 300)) as rig, rig.sdk() as sdk:
        stream = await sdk.completions.create(
            model="policy", prompt="x", stream=True, stream_options={"include_usage": True}, max_tokens=64
        )
        *parts, usage = [chunk async for chunk in stream]
    assert "".join(part.choices[0].text for part in parts) == ("word " * 300)[:64]
    assert parts[-1].choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 64


async def test_stop_strings_cut_the_text() -> None:
    async with gateway(fake_engine(lambda *_: "a\nb\nc")) as rig, rig.sdk() as sdk:
        reply = await sdk.completions.create(model="policy", prompt="x", stop=["\n"])
        [call] = await rig.store.calls(["r1"])
    assert reply.choices[0].text == "a"
    assert TOKENIZER.decode(call.sampled) == "a\n"


async def test_chats_and_completions_of_one_attempt_do_not_mix() -> None:
    async with gateway() as rig:
        await rig.chat("a")
        [chat] = await rig.store.calls(["r1"])
        ids = [*chat.suffix.tolist(), *chat.sampled.tolist(), 1]
        status, _ = await rig.post("/v1/completions", {"model": "policy", "prompt": ids})
        _, completion = await rig.store.calls(["r1"])
    assert status == 200
    assert completion.parent_id is None
    assert completion.suffix.tolist() == ids
