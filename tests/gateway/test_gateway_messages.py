"""Anthropic's Messages over a real gateway, with Anthropic's own SDK, which checks every reply."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import anthropic
import orjson
import pytest
from anthropic import beta_async_tool, beta_tool
from gateway_rig import TOKENIZER, Rig, config, fake_engine, gateway

from canter.engine.fake import Fault
from canter.gateway.stream import Timing

QUICK = Timing(body_s=1.0, headers_after_s=0.05, keep_alive_s=0.05)
USER: dict[str, Any] = {"role": "user", "content": "hi"}
BASH: dict[str, Any] = {
    "name": "bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
WHOLE = (
    "<think>\nLet me look.\n</think>\n\nFirst, café. "
    '<tool_call>\n{"name": "bash", "arguments": { "timeout":  5.0, "command": "ls \\u00e9" }}\n</tool_call>'
)


def sdk(rig: Rig, **settings: Any) -> anthropic.AsyncAnthropic:
    """Strict about replies, no retries."""
    defaults = {"max_retries": 0, "timeout": 20.0, "_strict_response_validation": True, "api_key": rig.agent_key}
    return anthropic.AsyncAnthropic(base_url=rig.url, **{**defaults, **settings})


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 200, "messages": [USER], **fields}


async def test_a_reply_has_thinking_text_and_tool_use_and_true_usage() -> None:
    async with gateway(fake_engine(lambda *_: WHOLE)) as rig, sdk(rig) as client:
        reply = await client.messages.create(**request(tools=[BASH]))
        [call] = await rig.store.calls(["r1"])
    thinking, text, use = reply.content
    assert (thinking.type, text.type, use.type) == ("thinking", "text", "tool_use")
    assert thinking.type == "thinking"
    assert (thinking.thinking, bool(thinking.signature)) == ("Let me look.", True)
    assert text.type == "text"
    assert text.text == "First, café."
    assert use.type == "tool_use"
    assert (use.name, use.input) == ("bash", {"timeout": 5.0, "command": "ls é"})
    assert use.id.startswith("toolu_")
    assert reply.id == call.id
    assert reply.id.startswith("msg_")
    assert (reply.role, reply.type, reply.model) == ("assistant", "message", "policy")
    assert (reply.stop_reason, reply.stop_sequence) == ("tool_use", None)
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (call.prompt_len, len(call.sampled))
    assert reply.usage.output_tokens_details is not None
    assert reply.usage.output_tokens_details.thinking_tokens == len("Let me look.")
    assert (reply.usage.cache_read_input_tokens, reply.usage.cache_creation_input_tokens) == (0, 0)
    assert call.dialect == "messages"
    assert call.requested == {"max_tokens": 200}


async def test_a_stream_gives_the_same_message_as_a_plain_reply() -> None:
    async with gateway(fake_engine(lambda *_: WHOLE)) as rig, sdk(rig) as client:
        plain = await client.messages.create(**request(tools=[BASH]))
        async with client.messages.stream(**request(tools=[BASH])) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    same = {"id": "", "content": ""}
    assert {**final.model_dump(exclude_unset=True), **same} == {**plain.model_dump(exclude_unset=True), **same}
    assert [b.model_dump(exclude={"id"}) for b in final.content] == [
        b.model_dump(exclude={"id"}) for b in plain.content
    ]


async def test_events_come_in_the_order_of_the_protocol_each_with_its_event_line() -> None:
    long = "word " * 600
    engine = fake_engine(lambda *_: f"<think>\n{long}\n</think>\n\n{long}")
    async with gateway(engine, settings=config(sampling={"max_tokens": 9000})) as rig:
        names, data = await raw_events(rig, request(max_tokens=9000, stream=True))
    assert names == [event["type"] for event in data]
    open_blocks: list[int] = []
    for event in data:
        match event["type"]:
            case "content_block_start":
                assert not open_blocks
                open_blocks.append(event["index"])
            case "content_block_delta":
                assert open_blocks == [event["index"]]
            case "content_block_stop":
                assert open_blocks.pop() == event["index"]
    assert names[0] == "message_start"
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["stop_reason"] is None
    assert data[0]["message"]["usage"]["input_tokens"] == data[-2]["usage"]["input_tokens"] > 0
    assert data[-2]["delta"]["stop_reason"] == "end_turn"
    assert names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_delta") > 3


async def raw_events(rig: Rig, body: dict[str, Any]) -> tuple[list[str], list[Any]]:
    headers = {"x-api-key": rig.agent_key, "anthropic-version": "2023-06-01"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{rig.url}/v1/messages?beta=true", json=body, headers=headers) as response,
    ):
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        parts = (await response.text()).split("\n\n")
    assert parts.pop() == ""
    lines = [part.split("\n") for part in parts if not part.startswith(":")]
    return (
        [name.removeprefix("event: ") for name, _ in lines],
        [orjson.loads(data.removeprefix("data: ")) for _, data in lines],
    )


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", None])
@pytest.mark.parametrize("scheme", ["x-api-key", "authorization"])
async def test_either_key_header_and_any_version_are_taken(scheme: str, version: str | None) -> None:
    async with gateway() as rig, aiohttp.ClientSession() as http:
        headers = {scheme: rig.agent_key if scheme == "x-api-key" else f"Bearer {rig.agent_key}"}
        if version:
            headers["anthropic-version"] = version
        async with http.post(f"{rig.url}/v1/messages?beta=true", json=request(), headers=headers) as response:
            assert response.status == 200
            assert response.headers["request-id"].startswith("req_")
            assert (await response.json())["content"] == [{"type": "text", "text": "reply 0"}]


async def test_the_synchronous_client_and_the_beta_namespace_work() -> None:
    async with gateway(fake_engine(lambda *_: WHOLE)) as rig:

        def use() -> tuple[Any, Any, Any]:
            with anthropic.Anthropic(
                base_url=rig.url, api_key=rig.agent_key, max_retries=0, _strict_response_validation=True
            ) as client:
                plain = client.messages.create(**request(tools=[BASH]))
                beta = client.beta.messages.create(
                    **request(
                        tools=[BASH],
                        betas=["context-management-2025-06-27"],
                        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                        thinking={"type": "adaptive"},
                    )
                )
                with client.beta.messages.stream(**request(tools=[BASH])) as stream:
                    return plain, beta, stream.get_final_message()

        for reply in await asyncio.to_thread(use):
            assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]


async def test_the_tool_runner_works_and_makes_one_chain() -> None:
    seen = []

    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: one
            b: two
        """
        seen.append((a, b))
        return str(a + b)

    script = ['<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 40}}\n</tool_call>', "It is 42."]
    async with gateway(fake_engine(lambda p, s, n: script[n])) as rig, sdk(rig) as client:
        runner = client.beta.messages.tool_runner(**request(tools=[add]))
        final = await runner.until_done()
        first, second = await rig.store.calls(["r1"])
    assert seen == [(40, 2)]
    assert final.content[0].type == "text"
    assert final.content[0].text == "It is 42."
    assert (second.parent_id, second.fork) == (first.id, None)


async def test_the_tool_runner_reports_an_error_to_the_policy() -> None:
    @beta_tool
    def fail() -> str:
        """Fails."""
        raise ValueError("no such thing")

    script = ['<tool_call>\n{"name": "fail", "arguments": {}}\n</tool_call>', "Oh."]
    async with gateway(fake_engine(lambda p, s, n: script[n])) as rig:

        def use() -> None:
            with anthropic.Anthropic(base_url=rig.url, api_key=rig.agent_key, max_retries=0) as client:
                client.beta.messages.tool_runner(**request(tools=[fail])).until_done()

        await asyncio.to_thread(use)
        first, second = await rig.store.calls(["r1"])
    assert "no such thing" in TOKENIZER.decode(second.suffix)
    assert (second.parent_id, second.fork) == (first.id, None)


async def test_a_thread_leaves_the_history_to_the_gateway_also_after_a_restart() -> None:
    script = ['<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>', "two", "three"]
    engine = fake_engine(lambda p, s, n: script[n])
    async with gateway(engine) as rig, sdk(rig) as client:
        thread = {"type": "create"}
        first = await client.beta.messages.create(**request(tools=[BASH], system="Be short.", thread=thread))
        got = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "out"}
        second = await client.beta.messages.create(
            **request(messages=[{"role": "user", "content": [got]}], thread=going_on(first))
        )
        store, started = rig.store, rig.attempts
    async with gateway(engine, store=store) as rig:
        rig.attempts = started
        async with sdk(rig) as client:
            more = request(messages=[{"role": "user", "content": "more"}], thread=going_on(second))
            counted = await client.beta.messages.count_tokens(
                model="policy", messages=more["messages"], extra_body={"thread": more["thread"]}
            )
            third = await client.beta.messages.create(**more)
        calls = await store.calls(["r1"])
    assert third.content[0].type == "text"
    assert third.content[0].text == "three"
    assert counted.input_tokens == calls[2].prompt_len
    assert [call.fork for call in calls] == [None, None, None]
    assert [call.parent_id for call in calls] == [None, calls[0].id, calls[1].id]


def going_on(reply: Any) -> dict[str, Any]:
    return {"type": "continue", "previous_message_id": reply.id}


async def test_a_thread_of_another_attempt_is_not_found_and_the_sdk_sends_everything() -> None:
    async with gateway() as rig, sdk(rig) as client:
        theirs = await client.beta.messages.create(**request(thread={"type": "create"}))
        await rig.start("r2")
        async with sdk(rig, api_key=rig.attempts["r2"].agent_key) as other:
            with pytest.raises(anthropic.NotFoundError) as caught:
                await other.beta.messages.create(**request(thread=going_on(theirs)))
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["error"]["details"] == {"error_code": "thread_not_found"}
        assert len(await rig.store.calls(["r1", "r2"])) == 1
        for bad in (
            "x",
            1,
            {"type": "x"},
            {"type": 1},
            {"type": "continue"},
            {"type": "continue", "previous_message_id": 1},
        ):
            status, _ = await rig.post("/v1/messages", request(thread=bad))
            assert status == 400, bad


async def test_the_conversation_object_of_the_sdk_works() -> None:
    async with gateway() as rig, sdk(rig) as client:
        thread = client.beta.messages.thread(model="policy", max_tokens=20, system="Be short.")
        for said in ("one", "two", "three"):
            await thread.send({"role": "user", "content": said})
        calls = await rig.store.calls(["r1"])
    assert [call.fork for call in calls] == [None, None, None]
    assert [call.parent_id for call in calls] == [None, calls[0].id, calls[1].id]


@pytest.mark.parametrize(
    ("text", "fields", "reason", "stop", "shown"),
    [
        ("whole", {}, "end_turn", None, "whole"),
        ("x" * 50, {"max_tokens": 7}, "max_tokens", None, "x" * 7),
        ("before STOP after", {"stop_sequences": ["nope", "STOP"]}, "stop_sequence", "STOP", "before "),
        ("before\n\nafter", {"stop_sequences": ["\n\n"]}, "stop_sequence", "\n\n", "before"),
    ],
)
async def test_why_a_reply_ended(text: str, fields: Any, reason: str, stop: str | None, shown: str) -> None:
    async with gateway(fake_engine(lambda *_: text)) as rig, sdk(rig) as client:
        reply = await client.messages.create(**request(**fields))
        async with client.messages.stream(**request(**fields)) as stream:
            streamed = await stream.get_final_message()
    for message in (reply, streamed):
        assert (message.stop_reason, message.stop_sequence) == (reason, stop)
        assert message.content[0].type == "text"
        assert message.content[0].text == shown


async def test_an_empty_reply_has_no_blocks_and_may_come_back() -> None:
    async with gateway(fake_engine(lambda p, s, n: "" if n == 0 else "more")) as rig, sdk(rig) as client:
        reply = await client.messages.create(**request())
        assert (reply.content, reply.stop_reason, reply.usage.output_tokens) == ([], "end_turn", 1)
        history = [USER, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "go on"}]
        await client.messages.create(**request(messages=history))
        first, second = await rig.store.calls(["r1"])
    assert (second.parent_id, second.fork) == (first.id, None)


async def test_what_the_client_asks_of_sampling_is_recorded_and_what_it_cannot_have_is_named() -> None:
    asked = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 3,
        "stop_sequences": ["#"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
        "tool_choice": {"type": "any"},
    }
    body = request(**asked, tools=[BASH, {"type": "bash_20250124", "name": "shell"}], metadata={"user_id": "u"})
    async with gateway() as rig:
        assert (await rig.post("/v1/messages", body))[0] == 200
        assert (await rig.post("/v1/messages", request(tools=[BASH], tool_choice={"type": "auto"})))[0] == 200
        forced, free = await rig.store.calls(["r1"])
    assert forced.requested == {**asked, "max_tokens": 200, "tool_choice": "any", "tools_left_out": ["shell"]}
    assert (forced.effective["temperature"], forced.effective["stop"]) == (1.0, ["#"])
    assert forced.effective["not_enforced"] == ["tool_choice"]
    assert "not_enforced" not in free.effective
    assert "shell" not in TOKENIZER.decode(forced.suffix)


async def test_tool_choice_none_hides_the_tools() -> None:
    async with gateway(fake_engine(lambda *_: "<tool_call>text</tool_call>")) as rig, sdk(rig) as client:
        reply = await client.messages.create(**request(tools=[BASH], tool_choice={"type": "none"}))
        [call] = await rig.store.calls(["r1"])
    assert "bash" not in TOKENIZER.decode(call.suffix)
    assert reply.content[0].type == "text"
    assert call.requested["tool_choice"] == "none"


async def test_a_waiting_stream_is_kept_alive_with_pings() -> None:
    engine = fake_engine(lambda *_: "late", token_delay_s=0.1)
    async with gateway(engine, timing=QUICK) as rig, sdk(rig) as client:
        async with client.messages.stream(**request()) as stream:
            assert await stream.get_final_text() == "late"
        async with (
            aiohttp.ClientSession(headers={"x-api-key": rig.agent_key}) as http,
            http.post(f"{rig.url}/v1/messages", json=request(stream=True)) as response,
        ):
            first = await response.content.readuntil(b"\n\n")
            rest = await response.read()
    assert first == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert rest.startswith(first), "and so on, until the reply begins"
    assert rest.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_an_engine_that_fails_in_time_has_a_status_and_later_an_error_event() -> None:
    engine = fake_engine(lambda *_: "x" * 20, token_delay_s=0.02, faults=lambda prompt, number: Fault.CUT)
    async with gateway(engine) as rig, sdk(rig) as client:
        with pytest.raises(anthropic.APIStatusError) as early:
            await client.messages.create(**request(stream=True))
        assert early.value.status_code == 503
        assert early.value.response.headers["retry-after"] == "2"
        assert error_type(early.value) == "overloaded_error"
    engine = fake_engine(lambda *_: "x" * 20, token_delay_s=0.02, faults=lambda prompt, number: Fault.CUT)
    async with gateway(engine, timing=QUICK) as rig, sdk(rig) as client:
        stream = await client.messages.create(**request(stream=True))
        with pytest.raises(anthropic.APIError) as late:
            [event async for event in stream]
        assert error_type(late.value) == "overloaded_error"


def error_type(error: anthropic.APIError) -> str:
    assert isinstance(error.body, dict)
    assert error.body["type"] == "error"
    assert error.body["request_id"].startswith("req_")
    return str(error.body["error"]["type"])
