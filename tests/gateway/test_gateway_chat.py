"""Chat completions through the real OpenAI SDK, strict about replies, over real HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import openai
import pytest
from gateway_rig import STOP_ID, TOKENIZER, Rig, config, fake_engine, gateway

from canter.engine.fake import Fault
from canter.store.memory import MemoryStore
from canter.types import Call, CallStatus, FinishReason, Reason

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}


def says(*texts: str) -> Any:
    """A script that replies with these texts, one a call."""
    return fake_engine(lambda prompt, sampling, number: texts[min(number, len(texts) - 1)])


async def calls_of(rig: Rig, rollout_id: str = "r1") -> list[Call]:
    return await rig.store.calls([rollout_id])


def prompt_text(call: Call, earlier: dict[str, np.ndarray[Any, Any]] | None = None) -> str:
    prefix = (earlier or {}).get(call.parent_id or "", np.zeros(0, np.int32))[: call.prefix_len]
    return TOKENIZER.decode(np.concatenate([prefix, call.suffix]))


async def test_a_reply_has_every_standard_field() -> None:
    async with gateway(says("hello")) as rig, rig.sdk() as sdk:
        reply = await sdk.chat.completions.create(model="policy", messages=[USER])
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "policy"
    assert reply.created > 1_700_000_000
    assert reply.system_fingerprint == "policy-0"
    [choice] = reply.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", "hello", None)
    assert choice.message.tool_calls is None
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.completion_tokens == len("hello") + 1
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.completion_tokens_details is not None


async def test_what_is_stored_is_what_the_engine_saw() -> None:
    seen: list[tuple[Any, Any]] = []

    def script(prompt: Any, sampling: Any, number: int) -> str:
        seen.append((prompt, sampling))
        return "hello"

    async with gateway(fake_engine(script)) as rig, rig.sdk() as sdk:
        reply = await sdk.chat.completions.create(
            model="policy", messages=[USER], temperature=0.2, top_p=0.5, seed=7, max_tokens=99
        )
        [call] = await calls_of(rig)
        bodies = await rig.store.bodies(call.id)
    prompt, sampling = seen[0]
    assert call.id == reply.id
    assert np.array_equal(call.suffix, prompt)
    assert TOKENIZER.decode(call.sampled) == "hello<|im_end|>"
    assert len(call.logprobs) == len(call.sampled)
    assert call.versions[0].version == 0
    assert call.status is CallStatus.OK
    assert call.untrainable is None
    assert dict(call.requested) == {"temperature": 0.2, "top_p": 0.5, "seed": 7, "max_tokens": 99}
    assert (call.effective["temperature"], call.effective["top_p"], call.effective["max_tokens"]) == (1.0, 1.0, 99)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 1.0, 99)
    assert sampling.seed == call.effective["seed"] != 7
    assert STOP_ID in sampling.stop_token_ids
    assert b'"temperature":0.2' in bodies.request
    assert b'"content":"hello"' in bodies.reply


async def test_tool_calls_reasoning_and_ids_that_nobody_else_has() -> None:
    async with gateway(says(f"<think>\nhm\n</think>\n\n{CALL}\n{CALL}")) as rig, rig.sdk() as sdk:
        first = await sdk.chat.completions.create(model="policy", messages=[USER], tools=[BASH])
        second = await sdk.chat.completions.create(model="policy", messages=[USER], tools=[BASH])
    calls = [*(first.choices[0].message.tool_calls or []), *(second.choices[0].message.tool_calls or [])]
    assert len({call.id for call in calls}) == 4
    assert calls[0].function.name == "bash"
    assert calls[0].function.arguments == '{"command": "ls"}'
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content is None
    assert first.choices[0].message.model_extra == {"reasoning_content": "hm"}


async def test_a_conversation_extends_its_parent_token_for_token() -> None:
    async with gateway(says(CALL, "done")) as rig, rig.sdk() as sdk:
        first = await sdk.chat.completions.create(model="policy", messages=[USER], tools=[BASH])
        message = first.choices[0].message
        [tool_call] = message.tool_calls or []
        history = [USER, message.model_dump(), {"role": "tool", "tool_call_id": tool_call.id, "content": "a b"}]
        await sdk.chat.completions.create(model="policy", messages=history, tools=[BASH])
        one, two = await calls_of(rig)
    assert two.parent_id == one.id
    assert two.prefix_len == one.prompt_len + len(one.sampled)
    assert two.fork is None
    assert (one.ordinal, two.ordinal) == (0, 1)
    assert "a b<|im_end|>" in TOKENIZER.decode(two.suffix)


@pytest.mark.parametrize("dump", ["model_dump", "exclude_unset", "exclude_none", "content_parts"])
async def test_every_way_of_sending_a_reply_back_finds_its_parent(dump: str) -> None:
    async with gateway(says("hello", "again")) as rig, rig.sdk() as sdk:
        message = (await sdk.chat.completions.create(model="policy", messages=[USER])).choices[0].message
        back: dict[str, Any] = {
            "model_dump": message.model_dump(),
            "exclude_unset": message.model_dump(exclude_unset=True),
            "exclude_none": message.model_dump(exclude_none=True),
            "content_parts": {"role": "assistant", "content": [{"type": "text", "text": message.content}]},
        }[dump]
        await sdk.chat.completions.create(model="policy", messages=[USER, back, USER])
        one, two = await calls_of(rig)
    assert two.parent_id == one.id
    assert two.fork is None


async def test_a_stream_carries_the_same_reply_in_events() -> None:
    text = "word " * 500
    async with gateway(says(text)) as rig, rig.sdk() as sdk:
        stream = await sdk.chat.completions.create(
            model="policy", messages=[USER], stream=True, stream_options={"include_usage": True}, max_tokens=100
        )
        chunks = [chunk async for chunk in stream]
        [call] = await calls_of(rig)
    *parts, usage = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == text[:100]
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in parts)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 100
    assert call.finish_reason is FinishReason.LENGTH


async def test_streamed_tool_calls_are_whole_and_have_an_index() -> None:
    async with gateway(says(f"ok {CALL}\n{CALL}")) as rig, rig.sdk() as sdk:
        stream = await sdk.chat.completions.create(model="policy", messages=[USER], tools=[BASH], stream=True)
        chunks = [chunk async for chunk in stream]
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [delta.index for delta in deltas] == [0, 1]
    assert all(delta.id and delta.type == "function" for delta in deltas)
    assert all(delta.function and delta.function.arguments == '{"command": "ls"}' for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert all(chunk.choices for chunk in chunks), "no usage chunk unless it is asked for"


async def test_the_sdks_stream_helper_rebuilds_the_message() -> None:
    async with gateway(says(f"ok {CALL}")) as rig, rig.sdk() as sdk:
        async with sdk.chat.completions.stream(model="policy", messages=[USER], tools=[BASH]) as stream:
            completion = await stream.get_final_completion()
        history = [USER, completion.choices[0].message.model_dump()]
        tool_call = (completion.choices[0].message.tool_calls or [])[0]
        history.append({"role": "tool", "tool_call_id": tool_call.id, "content": "x"})
        await sdk.chat.completions.create(model="policy", messages=history, tools=[BASH])
        one, two = await calls_of(rig)
    assert completion.choices[0].message.content == "ok"
    assert tool_call.function.name == "bash"
    assert two.parent_id == one.id
    assert two.fork is None


async def test_raw_responses_and_errors_carry_a_request_id() -> None:
    async with gateway() as rig, rig.sdk() as sdk:
        raw = await sdk.chat.completions.with_raw_response.create(model="policy", messages=[USER])
        assert raw.headers["x-request-id"].startswith("req_")
        assert raw.parse().choices[0].message.content == "reply 0"
        with pytest.raises(openai.NotFoundError) as caught:
            await sdk.chat.completions.create(model="gpt-9", messages=[USER])
    assert caught.value.request_id is not None
    assert caught.value.code == "model_not_found"
    assert "'policy'" in caught.value.message


async def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    async with gateway(says("hé")) as rig, rig.sdk() as sdk:
        reply = await sdk.chat.completions.create(model="policy", messages=[USER], logprobs=True, top_logprobs=3)
        [call] = await calls_of(rig)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    entries = logprobs.content or []
    assert [entry.logprob for entry in entries] == pytest.approx(call.logprobs.tolist())
    assert [entry.token for entry in entries] == ["h", "\ufffd", "\ufffd", "<|im_end|>"]
    assert [entry.bytes for entry in entries[:2]] == [[104], None]
    assert all(entry.top_logprobs == [] for entry in entries)


@pytest.mark.parametrize("stop", ["STOP", ["never", "STOP"]])
async def test_a_stop_string_across_tokens_ends_text_and_tokens(stop: Any) -> None:
    async with gateway(says("one STOP two")) as rig, rig.sdk() as sdk:
        reply = await sdk.chat.completions.create(model="policy", messages=[USER], stop=stop)
        [call] = await calls_of(rig)
    assert reply.choices[0].message.content == "one "
    assert reply.choices[0].finish_reason == "stop"
    assert TOKENIZER.decode(call.sampled) == "one STOP"
    assert len(call.logprobs) == len(call.sampled) == call.versions[-1].end
    assert call.untrainable is None


async def test_max_tokens_is_bounded_by_the_run_and_lowered_to_the_context() -> None:
    settings = config(sampling={"max_tokens": 40}, model={"context_tokens": 64})
    async with gateway(says("x" * 100), settings=settings) as rig, rig.sdk() as sdk:
        reply = await sdk.chat.completions.create(model="policy", messages=[USER], max_tokens=1000)
        assert reply.usage is not None
        prompt_tokens = reply.usage.prompt_tokens
        assert reply.usage.completion_tokens == 40
        filler = "y" * (64 - prompt_tokens - 1)
        reply = await sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": f"hi{filler}"}])
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 1
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": f"hi{filler}!"}])
        assert len(await calls_of(rig)) == 2
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert "maximum context length is 64 tokens" in caught.value.message


async def test_max_completion_tokens_counts_too() -> None:
    async with gateway(says("x" * 100)) as rig, rig.sdk() as sdk:
        reply = await sdk.chat.completions.create(model="policy", messages=[USER], max_completion_tokens=7)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 7


async def test_tool_choice_none_hides_the_tools_and_required_is_recorded_as_not_enforced() -> None:
    async with gateway(says(CALL)) as rig, rig.sdk() as sdk:
        hidden = await sdk.chat.completions.create(model="policy", messages=[USER], tools=[BASH], tool_choice="none")
        await sdk.chat.completions.create(
            model="policy",
            messages=[USER],
            tools=[BASH],
            tool_choice="required",
            response_format={"type": "json_object"},
        )
        one, two = await calls_of(rig)
    assert hidden.choices[0].message.tool_calls is None
    assert "bash" not in TOKENIZER.decode(one.suffix)
    assert "bash" in TOKENIZER.decode(two.suffix)
    assert "not_enforced" not in one.effective
    assert two.effective["not_enforced"] == ["response_format", "tool_choice"]


async def test_seeds_depend_on_rollout_prompt_and_repetition_only() -> None:
    async def seeds(rig: Rig, rollout_id: str, order: list[str]) -> list[tuple[str, int]]:
        started = await rig.start(rollout_id, seed=5)
        for content in order:
            assert (await rig.chat(content, key=started.agent_key))[0] == 200
        return sorted((TOKENIZER.decode(c.suffix), c.effective["seed"]) for c in await calls_of(rig, rollout_id))

    async with gateway(fake_engine(lambda *_: "x")) as rig:
        one = await seeds(rig, "a", ["p", "q", "p"])
        two = await seeds(rig, "b", ["p", "p", "q"])
        other = await rig.start("c", seed=6)
        await rig.chat("p", key=other.agent_key)
        [call] = await calls_of(rig, "c")
    assert one == two
    assert len({seed for _, seed in one}) == 3
    assert call.effective["seed"] not in {seed for _, seed in one}


async def test_concurrent_calls_of_one_attempt_get_ordinals_by_arrival() -> None:
    async with gateway(fake_engine(token_delay_s=0.01)) as rig:
        replies = await asyncio.gather(*(rig.chat(f"question {i}") for i in range(8)))
        recorded = await calls_of(rig)
    assert [status for status, _ in replies] == [200] * 8
    assert sorted(call.ordinal for call in recorded) == list(range(8))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(Fault.SHORT_LOGPROBS, Reason.LENGTH_MISMATCH), (Fault.NAN, Reason.NOT_FINITE)],
)
async def test_a_generation_that_does_not_agree_is_kept_but_not_trained(fault: Fault, reason: Reason) -> None:
    store = MemoryStore()
    engine = fake_engine(faults={0: fault})
    async with gateway(engine, store=store) as rig, rig.sdk() as sdk:
        reply = await sdk.chat.completions.create(model="policy", messages=[USER], logprobs=True)
        [call] = await calls_of(rig)
        counts = await store.counts()
    assert reply.choices[0].message.content == "reply 0"
    assert call.untrainable is reason
    assert counts[f"untrainable.{reason}"] == 1


async def test_an_engine_that_ends_a_reply_early_is_asked_again() -> None:
    async with gateway(fake_engine(faults={0: Fault.CUT})) as rig:
        status, reply = await rig.chat()
        [call] = await calls_of(rig)
    assert status == 200
    assert reply["choices"][0]["message"]["content"] == "reply 1"
    assert call.untrainable is None


async def test_models_are_listed() -> None:
    async with gateway() as rig, rig.sdk() as sdk:
        assert [model.id async for model in sdk.models.list()] == ["policy"]
        assert (await sdk.models.retrieve("policy")).owned_by == "canter"
        with pytest.raises(openai.NotFoundError):
            await sdk.models.retrieve("other/model")
