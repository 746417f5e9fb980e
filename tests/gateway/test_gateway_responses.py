"""Responses through the real OpenAI SDK, strict about replies, over real HTTP."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest
from gateway_rig import TOKENIZER, Rig, config, fake_engine, gateway
from openai.types.responses import Response

from canter.errors import EngineError
from canter.gateway.stream import Timing
from canter.types import Call, FinishReason

BASH = {"type": "function", "name": "bash", "description": "Runs.", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
THOUGHT = "<think>\nlet me see ✓\n</think>\n\n"


def says(*texts: str, **settings: Any) -> Any:
    """A script that replies with these texts, one a call."""
    return fake_engine(lambda prompt, sampling, number: texts[min(number, len(texts) - 1)], **settings)


async def calls_of(rig: Rig, rollout_id: str = "r1") -> list[Call]:
    return await rig.store.calls([rollout_id])


async def stream_of(rig: Rig, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream as they are on the wire: the `event:` line and the data of each."""
    body = {"model": "policy", "input": "hi", "stream": True, **fields}
    headers = {"authorization": f"Bearer {rig.agent_key}"}
    async with aiohttp.ClientSession() as http, http.post(f"{rig.url}/v1/responses", json=body, headers=headers) as got:
        text = (await got.content.read()).decode()
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def check_whole(raw: dict[str, Any]) -> None:
    """A reply is what OpenAI's own type says, and the type loses nothing of it."""
    kept = json.loads(Response.model_validate(raw, strict=False).model_dump_json(by_alias=True, exclude_unset=True))
    assert kept == raw


async def test_a_reply_has_every_standard_field() -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "max_output_tokens": 99,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "user": "u",
    }
    async with gateway(says("hello")) as rig, rig.sdk() as sdk:
        reply = await sdk.responses.create(model="policy", input="hi", **fields)
        [call] = await calls_of(rig)
        raw = json.loads((await rig.store.bodies(call.id)).reply)
    check_whole(raw)
    assert call.id == reply.id
    assert reply.id.startswith("resp_")
    assert (reply.object, reply.status, reply.model, reply.error) == ("response", "completed", "policy", None)
    assert reply.output_text == "hello"
    assert (reply.instructions, reply.metadata, reply.max_output_tokens) == ("Be brief.", {"a": "b"}, 99)
    assert reply.reasoning is not None
    assert (reply.reasoning.effort, reply.reasoning.summary) == ("high", "auto")
    assert reply.usage is not None
    assert reply.usage.input_tokens == call.prompt_len
    assert reply.usage.output_tokens == len("hello") + 1
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert raw["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert dict(call.requested) == {"max_output_tokens": 99, "text": fields["text"], "reasoning": fields["reasoning"]}
    assert call.effective["max_tokens"] == 99
    assert call.effective["not_enforced"] == ["text"]
    assert TOKENIZER.decode(call.suffix).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")


async def test_reasoning_text_and_parallel_calls_are_items_of_their_own() -> None:
    async with gateway(says(f"{THOUGHT}ok {CALL}\n{CALL}")) as rig, rig.sdk() as sdk:
        reply = await sdk.responses.create(model="policy", input="hi", tools=[BASH])
        [call] = await calls_of(rig)
        raw = json.loads((await rig.store.bodies(call.id)).reply)
    check_whole(raw)
    reasoning, message, *tool_calls = raw["output"]
    assert [item["type"] for item in raw["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me see ✓"}]
    assert (reasoning["summary"], reasoning["encrypted_content"]) == ([], None)
    assert message["content"][0]["text"] == "ok"
    assert {item["arguments"] for item in tool_calls} == {'{"command": "ls"}'}
    assert len({item["call_id"] for item in tool_calls}) == 2
    own = reply.id.removeprefix("resp_")
    assert [item["id"] for item in raw["output"]] == [f"rs_{own}_0", f"msg_{own}_1", f"fc_{own}_2", f"fc_{own}_3"]
    assert raw["usage"]["output_tokens_details"]["reasoning_tokens"] == len("let me see ✓".encode())


@pytest.mark.parametrize("text", [f"{THOUGHT}ok {CALL}\n{CALL}", "word " * 600, "", THOUGHT])
async def test_a_stream_carries_the_same_reply_in_numbered_events(text: str) -> None:
    async with gateway(says(text), settings=config(sampling={"max_tokens": 2800})) as rig:
        events = await stream_of(rig, tools=[BASH], reasoning={"summary": "auto"})
        [call] = await calls_of(rig)
        raw = json.loads((await rig.store.bodies(call.id)).reply)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    changed = ("status", "output", "usage", "incomplete_details")
    assert events[1][1]["response"] | {name: raw[name] for name in changed} == raw
    last_name, last = events[-1]
    assert last["response"] == raw
    done = [data for name, data in events if name == "response.output_item.done"]
    assert [data["item"] for data in done] == raw["output"]
    assert [data["output_index"] for data in done] == list(range(len(done)))
    added = [data["item"] for name, data in events if name == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in raw["output"]]
    assert last_name == ("response.incomplete" if raw["status"] == "incomplete" else "response.completed")
    assert _joined(events) == _texts(raw["output"])


def _joined(events: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    """What the deltas of each item add up to."""
    texts: dict[tuple[str, str], str] = {}
    for name, data in events:
        if name.endswith(".delta"):
            key = (data["item_id"], name)
            texts[key] = texts.get(key, "") + data["delta"]
    return sorted((item_id, text) for (item_id, _), text in texts.items())


def _texts(output: list[dict[str, Any]]) -> list[tuple[str, str]]:
    texts = []
    for item in output:
        parts = [*item.get("content", []), *item.get("summary", [])]
        texts += [(item["id"], part["text"]) for part in parts]
        texts += [(item["id"], item["arguments"])] if "arguments" in item else []
    return sorted(text for text in texts if text[1])


async def test_the_sdks_stream_helper_rebuilds_the_reply() -> None:
    async with (
        gateway(says(f"{THOUGHT}ok {CALL}")) as rig,
        rig.sdk() as sdk,
        sdk.responses.stream(model="policy", input="hi", tools=[BASH]) as stream,
    ):
        numbers = [event.sequence_number async for event in stream]
        final = await stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert final.output_text == "ok"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_reply_is_incomplete(stream: bool) -> None:
    async with gateway(says("a long answer")) as rig:
        if stream:
            name, last = (await stream_of(rig, max_output_tokens=4))[-1]
            assert name == "response.incomplete"
            raw = last["response"]
        else:
            _, raw = await rig.post("/v1/responses", {"model": "policy", "input": "hi", "max_output_tokens": 4})
        [call] = await calls_of(rig)
    check_whole(raw)
    assert (raw["status"], raw["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert raw["output"][0]["status"] == "incomplete"
    assert call.finish_reason is FinishReason.LENGTH


async def test_a_reply_cut_while_it_thinks_has_no_message() -> None:
    async with gateway(says("<think>\nlet me see")) as rig, rig.sdk() as sdk:
        reply = await sdk.responses.create(model="policy", input="hi", max_output_tokens=5)
    [item] = reply.output
    assert (item.type, item.status) == ("reasoning", "incomplete")


async def test_a_summary_and_sealed_reasoning_only_where_they_are_asked_for() -> None:
    asked = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    async with gateway(says(f"{THOUGHT}ok")) as rig:
        _, plain = await rig.post("/v1/responses", {"model": "policy", "input": "hi"})
        _, full = await rig.post("/v1/responses", {"model": "policy", "input": "hi", **asked})
    check_whole(full)
    assert (plain["output"][0]["summary"], plain["output"][0]["encrypted_content"]) == ([], None)
    assert full["output"][0]["summary"] == [{"type": "summary_text", "text": "let me see ✓"}]
    assert "let me see" not in full["output"][0]["encrypted_content"]


@pytest.mark.parametrize("text", ["hello ✓", f"{THOUGHT}hello {CALL}", "<think>\nno\n</think>\n\nhello"])
async def test_logprobs_are_those_of_the_text(text: str) -> None:
    async with gateway(says(text)) as rig, rig.sdk() as sdk:
        reply = await sdk.responses.create(
            model="policy", input="hi", tools=[BASH], include=["message.output_text.logprobs"]
        )
        [call] = await calls_of(rig)
    [message] = [item for item in reply.output if item.type == "message"]
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs
    if "✓" in part.text:  # a character of three tokens: whose they are cannot be told
        assert [entry.logprob for entry in part.logprobs] == call.logprobs.tolist()
    else:
        assert "".join(entry.token for entry in part.logprobs) == part.text
        first = [TOKENIZER.decode([i]) for i in call.sampled.tolist()].index("h")
        assert [entry.logprob for entry in part.logprobs] == call.logprobs.tolist()[first : first + len(part.text)]


async def test_stop_strings_end_a_reply() -> None:
    async with gateway(says("one STOP two")) as rig:
        status, reply = await rig.post("/v1/responses", {"model": "policy", "input": "hi", "stop": ["STOP"]})
    assert (status, reply["output"][0]["content"][0]["text"]) == (200, "one ")
    assert reply["status"] == "completed"


async def test_a_stream_that_waits_shows_events_that_count() -> None:
    timing = Timing(headers_after_s=0.05, keep_alive_s=0.05)
    async with gateway(says("hello", token_delay_s=0.06), timing=timing) as rig:
        events = await stream_of(rig)
    names = [name for name, _ in events]
    waited = names.index("response.output_item.added")
    assert names[:waited] == ["response.created"] + ["response.in_progress"] * (waited - 1)
    assert waited > 3
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert len({data["response"]["id"] for _, data in events if "response" in data}) == 1


def breaks(prompt: Any, sampling: Any, number: int) -> str:
    raise EngineError("the GPU fell off the bus")


async def test_a_failure_in_a_stream_is_an_event_that_clients_know() -> None:
    timing = Timing(headers_after_s=0.05, keep_alive_s=0.05)
    async with gateway(fake_engine(breaks), timing=timing) as rig, rig.sdk() as sdk:
        await rig.engine.pause("keep")
        seen: list[Any] = []

        async def listen() -> None:
            async for event in await sdk.responses.create(model="policy", input="hi", stream=True):
                seen.append(event)
                await rig.engine.resume()

        with pytest.raises(openai.APIConnectionError):
            await listen()
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.failed"
    assert seen[-1].response.status == "failed"
    assert seen[-1].response.error.code == "server_error"
    assert "GPU" in seen[-1].response.error.message


async def test_errors_have_openais_shape() -> None:
    async with gateway(says("hello")) as rig, rig.sdk() as sdk:
        with pytest.raises(openai.BadRequestError) as missing:
            await sdk.responses.create(model="policy", input=[])
        with pytest.raises(openai.NotFoundError) as model:
            await sdk.responses.create(model="gpt-5", input="hi")
        status, put = await rig.post("/v1/responses", {}, method="PUT")
        deleted = await rig.post("/v1/responses/resp_1", {}, method="DELETE")
        cancelled = await rig.post("/v1/responses/resp_1/cancel", {})
    assert (missing.value.code, missing.value.param) == ("missing_required_parameter", "input")
    assert model.value.code == "model_not_found"
    assert (status, put["error"]["code"], put["error"]["type"]) == (405, "method_not_allowed", "invalid_request_error")
    assert (deleted[0], deleted[1]["error"]["code"]) == (405, "method_not_allowed")
    assert (cancelled[0], cancelled[1]["error"]["code"]) == (404, "not_found")


async def test_overflow_is_told_as_openai_does() -> None:
    async with gateway(says("hello"), settings=config(model={"path": "nowhere", "context_tokens": 40})) as rig:
        status, reply = await rig.post("/v1/responses", {"model": "policy", "input": "word " * 40})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"background": True}, "background", "unsupported_value"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_value"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_value"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": [5]}, "input[0]", "invalid_type"),
        ({"input": [{"type": "no_such_item"}]}, "input[0].type", "unsupported_value"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type", "unsupported_value"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "unsupported_content",
        ),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name", "missing_required_parameter"),
        (
            {"input": [{"type": "function_call_output", "output": "x"}]},
            "input[0].call_id",
            "missing_required_parameter",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "item_not_found"),
        ({"input": [{}]}, "input[0].type", "missing_required_parameter"),
        ({"instructions": ["x"]}, "instructions", "invalid_type"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": "9"}, "max_output_tokens", "invalid_type"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
        ({"reasoning": "high"}, "reasoning", "invalid_type"),
        ({"store": "no"}, "store", "invalid_type"),
        ({"stream": 1}, "stream", "invalid_type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "invalid_type"),
        ({"tools": [{"name": "x"}]}, "tools[0].type", "missing_required_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0].name", "missing_required_parameter"),
        ({"tool_choice": "maybe"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "missing_required_parameter"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "x"}}, "tool_choice.mode", "invalid_value"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"n": 2}, "n", "unsupported_value"),
        ({"previous_response_id": 7}, "previous_response_id", "previous_response_not_found"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    async with gateway(says("hello")) as rig:
        status, reply = await rig.post("/v1/responses", {"model": "policy", "input": "hi", **fields})
        assert await calls_of(rig) == []
    assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, param, code), reply


@pytest.mark.parametrize(
    "fields",
    [
        {"truncation": "auto", "service_tier": "flex", "context_management": [{"type": "compaction"}]},
        {"client_metadata": {"x": 1}, "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}},
        {"stream_options": {"include_obfuscation": False}, "moderation": None, "include": ["no.such.thing", 7]},
        {"reasoning": {"effort": "vast", "summary": "none", "context": "auto"}, "text": {"verbosity": "immense"}},
        {"tools": [{"type": "web_search", "filters": 5}, {"type": "brand_new_20270101"}]},
        {"tool_choice": {"type": "web_search"}, "parallel_tool_calls": False},
        dict.fromkeys(("tools", "tool_choice", "metadata", "reasoning", "text", "include", "store", "user")),
    ],
)
async def test_what_is_not_looked_at_is_never_refused(fields: dict[str, Any]) -> None:
    async with gateway(says("hello")) as rig:
        status, reply = await rig.post("/v1/responses", {"model": "policy", "input": "hi", **fields})
    assert status == 200, reply
    check_whole(reply)


async def test_tokens_of_a_request_can_be_counted() -> None:
    async with gateway(says("hello")) as rig, rig.sdk() as sdk:
        counted = await sdk.responses.input_tokens.count(model="policy", input="hi", instructions="Be brief.")
        reply = await sdk.responses.create(model="policy", input="hi", instructions="Be brief.")
    assert reply.usage is not None
    assert counted.input_tokens == reply.usage.input_tokens
