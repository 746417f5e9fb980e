"""Pass-through: another server's reply is relayed under our rules, and its token ids are recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from aiohttp import web
from gateway_rig import Rig, config, fake_engine, rollout

from canter.engine.openai import OpenAIEngine, read_completion
from canter.gateway.app import create_app
from canter.gateway.engines import Engines
from canter.gateway.passthrough import UpstreamSource
from canter.gateway.serve import serve
from canter.store.memory import MemoryStore
from canter.types import CallStatus, FinishReason, KeyKind, Reason

USER = {"role": "user", "content": "hi"}


def chat_reply(prompt: list[int], sampled: list[int], **message: Any) -> dict[str, Any]:
    """As vLLM answers with `return_token_ids`."""
    content = [{"token": str(t), "logprob": -t / 100, "bytes": None, "top_logprobs": []} for t in sampled]
    return {
        "id": "chatcmpl-upstream",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "served",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "tool_calls": [], **message},
                "logprobs": {"content": content},
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": sampled,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled),
            "total_tokens": len(prompt + sampled),
        },
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "prompt_token_ids": prompt,
    }


def completions_reply(prompt: list[int], sampled: list[int]) -> dict[str, Any]:
    reply = chat_reply(prompt, sampled)
    logprobs = {"tokens": ["x"] * len(sampled), "token_logprobs": [-0.5] * len(sampled), "top_logprobs": None}
    choice = {"index": 0, "text": "hello", "logprobs": logprobs | {"text_offset": [0] * len(sampled)}}
    choice |= {"finish_reason": "length", "token_ids": sampled, "prompt_token_ids": reply.pop("prompt_token_ids")}
    return reply | {"object": "text_completion", "choices": [choice]}


class Upstream:
    """A scripted server; what it was sent is in `seen`."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], Any]) -> None:
        self._answer = answer
        self.url = ""
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        reply = self._answer(len(self.seen) - 1, self.seen[-1])
        if asyncio.iscoroutine(reply):
            reply = await reply
        if isinstance(reply, web.StreamResponse):
            return reply
        return web.Response(body=json.dumps(reply, separators=(",", ":")).encode(), content_type="application/json")


@asynccontextmanager
async def passthrough(
    answer: Callable[[int, dict[str, Any]], Any], *, version: int | None = 4, memory_bytes: int = 2**28
) -> AsyncIterator[Any]:
    """A rig and its upstream."""
    upstream = Upstream(answer)
    web_app = web.Application()
    web_app.router.add_post("/v1/{route:.*}", upstream.handle)
    runner = web.AppRunner(web_app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    upstream.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    store, settings = MemoryStore(), config()
    engine = OpenAIEngine(upstream.url, "the-upstream-key", model="served", version=version)
    source = UpstreamSource(settings, engine)
    await store.create_rollouts([rollout("r1")])
    started = await store.start_attempt("r1", 1)
    app = create_app(settings, store, source, memory_bytes=memory_bytes)
    try:
        async with serve(app, settings.gateway, grace_s=0.5) as url:
            service = await store.issue_key(KeyKind.SERVICE)
            no_engines = Engines(lambda url, key: fake_engine())
            yield Rig(url, app, store, no_engines, fake_engine(), service, "", {"r1": started}), upstream
    finally:
        await source.close()
        await runner.cleanup()


async def test_the_reply_is_relayed_and_the_ids_are_recorded() -> None:
    async with passthrough(lambda n, body: chat_reply([1, 2, 3], [7, 8])) as (rig, upstream), rig.sdk() as sdk:
        reply = await sdk.chat.completions.create(model="policy", messages=[USER], temperature=0.1, max_tokens=50)
        [call] = await rig.store.calls(["r1"])
    assert reply.model == "policy"
    assert reply.id == call.id != "chatcmpl-upstream"
    assert reply.choices[0].message.content == "hello"
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].logprobs is None
    assert "token_ids" not in (reply.choices[0].model_extra or {})
    assert "prompt_token_ids" not in (reply.model_extra or {})
    [sent] = upstream.seen
    assert sent["model"] == "served"
    assert sent["return_token_ids"] is True
    assert sent["logprobs"] is True
    assert (sent["temperature"], sent["max_tokens"]) == (1.0, 50)
    assert sent["seed"] == call.effective["seed"]
    assert upstream.keys == ["Bearer the-upstream-key"]
    assert call.suffix.tolist() == [1, 2, 3]
    assert call.sampled.tolist() == [7, 8]
    assert call.logprobs.tolist() == pytest.approx([-0.07, -0.08])
    assert call.versions[0].version == 4
    assert call.untrainable is None
    assert call.requested["temperature"] == 0.1


async def test_a_stream_is_made_of_the_finished_reply_with_our_tool_call_ids() -> None:
    tool_calls = [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

    def answer(number: int, body: dict[str, Any]) -> dict[str, Any]:
        assert "stream" not in body
        assert "stream_options" not in body
        return chat_reply([1], [2], tool_calls=tool_calls, content=None, reasoning_content="hm")

    async with passthrough(answer) as (rig, _), rig.sdk() as sdk:
        ids = []
        for _ in range(2):
            stream = await sdk.chat.completions.create(
                model="policy", messages=[USER], stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            ids += [call.id for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert len(set(ids)) == 2
    assert "call_0" not in ids
    assert chunks[-1].usage is not None


async def test_logprobs_are_relayed_where_they_are_asked_for() -> None:
    async with passthrough(lambda n, body: chat_reply([1], [2, 3])) as (rig, _), rig.sdk() as sdk:
        reply = await sdk.chat.completions.create(model="policy", messages=[USER], logprobs=True)
    assert [entry.logprob for entry in reply.choices[0].logprobs.content] == [-0.02, -0.03]


CALL = {"id": "call_0", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def test_messages_are_sent_as_the_chat_that_they_are() -> None:
    async with passthrough(lambda n, body: chat_reply([1, 2], [7], tool_calls=[CALL], reasoning_content="hm")) as (
        rig,
        upstream,
    ):
        async with anthropic.AsyncAnthropic(base_url=rig.url, api_key=rig.agent_key, max_retries=0) as sdk:
            reply = await sdk.messages.create(
                model="policy",
                max_tokens=50,
                system="be brief",
                messages=[
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "toolu_9", "name": "ls", "input": {}}],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_9", "content": "f.py"}]},
                ],
                tools=[{"name": "ls", "description": "lists", "input_schema": SCHEMA}],
                stop_sequences=["END"],
            )
        [call] = await rig.store.calls(["r1"])
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
    assert reply.content[-1].input == {"a": 1}
    assert reply.content[-1].id.startswith("toolu")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (2, 1)
    [sent] = upstream.seen
    assert sent["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "toolu_9", "type": "function", "function": {"name": "ls", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "f.py", "tool_call_id": "toolu_9"},
    ]
    function = {"name": "ls", "description": "lists", "parameters": SCHEMA}
    assert sent["tools"] == [{"type": "function", "function": function}]
    assert sent["stop"] == ["END"]
    assert (sent["max_tokens"], sent["return_token_ids"]) == (50, True)
    assert "system" not in sent
    assert (call.suffix.tolist(), call.sampled.tolist(), call.dialect) == ([1, 2], [7], "messages")


async def test_responses_go_on_from_a_stored_one_through_the_chat() -> None:
    async with (
        passthrough(lambda n, body: chat_reply([1], [2], content=f"said {n}")) as (rig, upstream),
        rig.sdk() as sdk,
    ):
        first = await sdk.responses.create(model="policy", input="one", instructions="be brief")
        stream = await sdk.responses.create(
            model="policy", input="two", previous_response_id=first.id, stream=True, max_output_tokens=9
        )
        events = [event async for event in stream]
    assert first.output_text == "said 0"
    assert events[-1].response.output_text == "said 1"
    assert [m["content"] for m in upstream.seen[1]["messages"]] == ["one", "said 0", "two"]
    assert upstream.seen[1]["max_tokens"] == 9
    assert "stream" not in upstream.seen[1]


async def test_what_the_server_refuses_is_told_in_the_protocol_of_the_harness() -> None:
    def overflow(number: int, body: dict[str, Any]) -> web.Response:
        message = "This model's maximum context length is 10 tokens, however you requested 20"
        return web.json_response({"error": {"message": message, "type": "x", "code": 400}}, status=400)

    async with passthrough(overflow) as (rig, _), rig.sdk() as sdk:
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.responses.create(model="policy", input="one")
        status, body = await rig.post("/v1/messages", {"model": "policy", "max_tokens": 5, "messages": [USER]})
        counted, why = await rig.post("/v1/messages/count_tokens", {"model": "policy", "messages": [USER]})
    assert caught.value.code == "context_length_exceeded"
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["message"] == "prompt is too long: 20 tokens > 10 maximum"
    assert counted == 400
    assert "engine.use" in why["error"]["message"]


async def test_completions_pass_through_too() -> None:
    async with passthrough(lambda n, body: completions_reply([5, 6], [7])) as (rig, upstream), rig.sdk() as sdk:
        reply = await sdk.completions.create(model="policy", prompt="hi")
        stream = await sdk.completions.create(model="policy", prompt=[1, 2], stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        one, two = await rig.store.calls(["r1"])
    assert reply.choices[0].text == text == "hello"
    assert upstream.seen[1]["prompt"] == [1, 2]
    assert one.suffix.tolist() == [5, 6]
    assert one.finish_reason is FinishReason.LENGTH
    assert one.logprobs.tolist() == [-0.5]
    assert (two.parent_id, two.prefix_len, len(two.suffix)) == (one.id, 2, 0)


async def test_a_growing_prompt_is_stored_as_what_is_new() -> None:
    prompts = [[1, 2, 3], [1, 2, 3, 9, 4], [1, 2, 5], [1, 2, 3, 9, 4, 9, 6]]
    async with passthrough(lambda n, body: chat_reply(prompts[n], [9])) as (rig, _):
        for number in range(4):
            await rig.chat(str(number))
        calls = await rig.store.calls(["r1"])
    ids = [call.id for call in calls]
    assert [(c.parent_id, c.prefix_len, c.suffix.tolist()) for c in calls] == [
        (None, 0, [1, 2, 3]),
        (ids[0], 4, [4]),
        (ids[0], 2, [5]),
        (ids[1], 6, [6]),
    ]


@pytest.mark.parametrize(
    ("version", "change", "reason"),
    [
        (None, {}, Reason.MISSING_VERSION),
        (4, {"logprobs": None}, Reason.MISSING_LOGPROBS),
        (4, {"token_ids": [1]}, Reason.LENGTH_MISMATCH),
        (4, {"token_ids": None}, Reason.LENGTH_MISMATCH),
    ],
)
async def test_what_does_not_agree_is_kept_untrainable(version: Any, change: dict[str, Any], reason: Reason) -> None:
    def answer(number: int, body: dict[str, Any]) -> dict[str, Any]:
        reply = chat_reply([1], [2, 3])
        reply["choices"][0] |= change
        return reply

    async with passthrough(answer, version=version) as (rig, _):
        status, _ = await rig.chat()
        [call] = await rig.store.calls(["r1"])
    assert status == 200
    assert call.untrainable is reason


async def test_registering_tells_the_version() -> None:
    async with passthrough(lambda n, body: chat_reply([1], [2]), version=None) as (rig, upstream):

        async def register(url: str) -> int:
            body = {"url": url, "model": "m", "version": 11}
            status, _ = await rig.post("/api/engines", body, method="PUT", key=rig.service_key)
            return int(status)

        assert await register("http://elsewhere/v1") == 400
        await rig.chat("a")
        assert await register(upstream.url) == 200
        await rig.chat("b")
        one, two = await rig.store.calls(["r1"])
    assert one.untrainable is Reason.MISSING_VERSION
    assert two.untrainable is None
    assert two.versions[0].version == 11


def error(status: int, message: str, **more: Any) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "code": status, **more}}, status=status)


async def test_the_servers_refusals_are_told_as_they_are() -> None:
    overflow = "This model's maximum context length is 10 tokens. However, you requested 20 tokens."
    replies = [error(400, overflow), error(422, "bad field", param="tools"), error(400, "no", code="odd_code")]
    async with passthrough(lambda n, body: replies[n]) as (rig, _), rig.sdk() as sdk:
        for code, param, text in (
            ("context_length_exceeded", "messages", "maximum context length"),
            ("invalid_request", "tools", "bad field"),
            ("odd_code", None, "no"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.chat.completions.create(model="policy", messages=[USER])
            assert (caught.value.code, caught.value.param) == (code, param)
            assert text in caught.value.message
        assert await rig.store.calls(["r1"]) == []


async def test_a_busy_server_is_waited_for_and_a_failing_one_asked_twice() -> None:
    def busy(number: int, body: dict[str, Any]) -> Any:
        if number == 0:
            return web.Response(status=429, headers={"retry-after": "0"}, text="slow down")
        return chat_reply([1], [2])

    async with passthrough(busy) as (rig, upstream):
        assert (await rig.chat())[0] == 200
        assert len(upstream.seen) == 2
    async with passthrough(lambda n, body: error(500, "sk-secretsecretsecret broke")) as (rig, upstream):
        status, reply = await rig.chat()
        [call] = await rig.store.calls(["r1"])
        assert len(upstream.seen) == 2
    assert status == 503
    assert "sk-secret" not in str(reply)
    assert call.status is CallStatus.ERROR


async def test_our_own_key_being_refused_is_not_the_harnesss_401() -> None:
    async with passthrough(lambda n, body: error(401, "bad key")) as (rig, _):
        status, reply = await rig.chat()
    assert status == 503
    assert "gateway.upstream_key" in reply["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{"token_ids":["a"]}]}', b"<html>"]
)
async def test_nonsense_from_the_server_is_an_engine_error(body: bytes) -> None:
    async with passthrough(lambda n, _: web.Response(body=body)) as (rig, _):
        status, reply = await rig.chat()
    assert status == 503
    assert reply["error"]["code"] == "engine_error"


async def test_a_client_that_leaves_hangs_up_on_the_server() -> None:
    gone = asyncio.Event()

    async def slow() -> dict[str, Any]:
        try:
            await asyncio.sleep(30)
        finally:
            gone.set()
        return {}

    async with passthrough(lambda n, body: slow()) as (rig, _):
        task = asyncio.ensure_future(rig.chat())
        await asyncio.sleep(0.1)
        task.cancel()
        for _ in range(200):
            if calls := await rig.store.calls(["r1"]):
                break
            await asyncio.sleep(0.01)
    [call] = calls
    assert (call.status, call.untrainable) == (CallStatus.CANCELLED, Reason.CLIENT_GONE)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_prompt_ids_are_read_the_same_in_either_way(separators: tuple[str, str]) -> None:
    text = 'a "prompt_token_ids":[1,2] in a text'
    reply = chat_reply(list(range(500)), [3, 4], content=text)
    completion = read_completion(json.dumps(reply, separators=separators).encode(), 1)
    assert completion.prompt.tolist() == list(range(500))
    assert completion.prompt.dtype == np.int32
    assert completion.generation.ids.tolist() == [3, 4]
    assert completion.reply["choices"][0]["message"]["content"] == text
    assert "prompt_token_ids" not in completion.reply


def test_an_empty_list_of_prompt_ids_is_none() -> None:
    completion = read_completion(json.dumps(chat_reply([], [3]), separators=(",", ":")).encode(), 1)
    assert completion.prompt.tolist() == []


@pytest.mark.parametrize("memory_bytes", [2**28, 0])
async def test_a_call_that_failed_does_not_change_the_seed_of_its_repeat(memory_bytes: int) -> None:
    def answer(number: int, body: dict[str, Any]) -> Any:
        return error(500, "broke") if number < 2 else chat_reply([1], [2])

    async with passthrough(answer, memory_bytes=memory_bytes) as (rig, upstream):
        assert [(await rig.chat())[0] for _ in range(3)] == [503, 200, 200]
        seeds = [body["seed"] for body in upstream.seen]
    assert len(set(seeds[:3])) == 1
    assert seeds[3] != seeds[2]


async def test_a_request_without_tools_is_still_a_side_request_when_memory_was_short() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with passthrough(lambda n, body: chat_reply([1], [2]), memory_bytes=0) as (rig, _):
        await rig.chat(tools=tools)
        await rig.chat("Is this a bug?")
        assert [call.label for call in await rig.store.calls(["r1"])] == ["main", "side"]
