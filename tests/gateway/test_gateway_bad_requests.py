"""Requests that no harness should send: each gets a clear 4xx in OpenAI's shape, and none of them a held slot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
from gateway_rig import Rig, gateway

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [USER], **fields}


def messages(*given: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": list(given)}


def assistant(**fields: Any) -> dict[str, Any]:
    return messages(USER, {"role": "assistant", "content": "x", **fields}, USER)


def part(value: Any, role: str = "user") -> dict[str, Any]:
    return messages({"role": role, "content": [value]})


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "prompt": "hi", **fields}


RAW: list[bytes] = [
    b"", b"null", b"[]", b"[1]", b"1", b"1.5", b"true", b'"text"', b"NaN", b"Infinity", b"{", b"}", b"{]", b'{"model"',
    b'{"model":"policy","messages":[{"role":"user","content":"hi"}],"temperature":NaN}',
    b'{"model":"policy","messages":[{"role":"user","content":"hi"}]} trailing',
    b"{'model':'policy'}", b"model=policy&messages=hi", b"\xff\xfe\x00", b'{"model":"\xff"}', b'{"a":"\\ud800"}',
    b"[" * 100_000, b'{"a":' * 5_000, b"\x00", b"<xml/>",
    b'{"model":"policy","messages":[{"role":"user","content":"\x01"}]}',
]  # fmt: skip

BAD_CHATS: dict[str, dict[str, Any]] = {
    "no model": {"messages": [USER]},
    "model null": chat(model=None),
    "model number": chat(model=1),
    "model list": chat(model=["policy"]),
    "no messages": {"model": "policy"},
    "messages null": chat(messages=None),
    "messages empty": chat(messages=[]),
    "messages text": chat(messages="hi"),
    "messages object": chat(messages={"role": "user"}),
    "messages number": chat(messages=3),
    "message null": messages(None),
    "message text": messages("hi"),
    "message list": messages([USER]),
    "no role": messages({"content": "hi"}),
    "role null": messages({"role": None, "content": "hi"}),
    "role number": messages({"role": 1, "content": "hi"}),
    "role unknown": messages({"role": "robot", "content": "hi"}),
    "role function": messages(USER, {"role": "function", "name": "f", "content": "x"}),
    "role capital": messages({"role": "User", "content": "hi"}),
    "no content": messages({"role": "user"}),
    "content null": messages({"role": "user", "content": None}),
    "content number": messages({"role": "user", "content": 5}),
    "content object": messages({"role": "user", "content": {"type": "text", "text": "x"}}),
    "content bool": messages({"role": "user", "content": True}),
    "system null": messages({"role": "system", "content": None}, USER),
    "part null": part(None),
    "part number": part(1),
    "part without type": part({"text": "x"}),
    "part type null": part({"type": None, "text": "x"}),
    "part type number": part({"type": 7, "text": "x"}),
    "part text missing": part({"type": "text"}),
    "part text number": part({"type": "text", "text": 1}),
    "part text null": part({"type": "text", "text": None}),
    "part image": part({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
    "part audio": part({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}),
    "part file": part({"type": "file", "file": {"file_id": "f"}}),
    "part unknown": part({"type": "hologram", "hologram": 1}),
    "part of responses": part({"type": "input_text", "text": "x"}),
    "part refusal of a user": part({"type": "refusal", "refusal": "no"}),
    "hologram in a tool result": messages(
        USER, {"role": "tool", "tool_call_id": "a", "content": [{"type": "hologram", "hologram": "x"}]}
    ),
    "tool without id": messages(USER, {"role": "tool", "content": "x"}),
    "tool id number": messages(USER, {"role": "tool", "tool_call_id": 3, "content": "x"}),
    "tool content number": messages(USER, {"role": "tool", "tool_call_id": "a", "content": 5}),
    "name number": messages({**USER, "name": 1}),
    "assistant content number": assistant(content=1),
    "assistant audio": assistant(audio={"id": "x"}),
    "assistant function_call": assistant(function_call={"name": "f", "arguments": "{}"}),
    "tool_calls object": assistant(tool_calls={}),
    "tool_calls text": assistant(tool_calls="f"),
    "tool call null": assistant(tool_calls=[None]),
    "tool call without id": assistant(tool_calls=[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]),
    "tool call without function": assistant(tool_calls=[{"id": "a", "type": "function"}]),
    "tool call without name": assistant(tool_calls=[{"id": "a", "type": "function", "function": {"arguments": "{}"}}]),
    "tool call name number": assistant(tool_calls=[{"id": "a", "function": {"name": 1, "arguments": "{}"}}]),
    "tool call arguments number": assistant(tool_calls=[{"id": "a", "function": {"name": "f", "arguments": 1}}]),
    "tool call arguments list": assistant(tool_calls=[{"id": "a", "function": {"name": "f", "arguments": []}}]),
    "tool call custom": assistant(tool_calls=[{"id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}}]),
    "reasoning_content number": assistant(reasoning_content=1),
    "tools object": chat(tools={}),
    "tools text": chat(tools="f"),
    "tool null": chat(tools=[None]),
    "tool text": chat(tools=["f"]),
    "tool type number": chat(tools=[{"type": 1, "function": {"name": "f"}}]),
    "tool type null": chat(tools=[{"type": None}]),
    "tool without function": chat(tools=[{"type": "function"}]),
    "tool without name": chat(tools=[{"type": "function", "function": {}}]),
    "tool name empty": chat(tools=[{"type": "function", "function": {"name": ""}}]),
    "tool name number": chat(tools=[{"type": "function", "function": {"name": 1}}]),
    "tool parameters text": chat(tools=[{"type": "function", "function": {"name": "f", "parameters": "{}"}}]),
    "tool description number": chat(tools=[{"type": "function", "function": {"name": "f", "description": 1}}]),
    "functions": chat(functions=[{"name": "f"}]),
    "function_call": chat(function_call="auto"),
    "tool_choice unknown": chat(tools=[TOOL], tool_choice="maybe"),
    "tool_choice number": chat(tools=[TOOL], tool_choice=1),
    "tool_choice list": chat(tools=[TOOL], tool_choice=["f"]),
    "tool_choice without name": chat(tools=[TOOL], tool_choice={"type": "function", "function": {"x": 1}}),
    "tool_choice function text": chat(tools=[TOOL], tool_choice={"type": "function", "function": "f"}),
    "n two": chat(n=2),
    "n zero": chat(n=0),
    "n negative": chat(n=-1),
    "n text": chat(n="1"),
    "n float": chat(n=1.0),
    "n bool": chat(n=True),
    "max_tokens zero": chat(max_tokens=0),
    "max_tokens negative": chat(max_tokens=-5),
    "max_tokens text": chat(max_tokens="10"),
    "max_tokens float": chat(max_tokens=10.5),
    "max_tokens bool": chat(max_tokens=True),
    "max_tokens list": chat(max_tokens=[10]),
    "max_completion_tokens zero": chat(max_completion_tokens=0),
    "max_completion_tokens text": chat(max_completion_tokens="many"),
    "temperature text": chat(temperature="hot"),
    "temperature negative": chat(temperature=-0.1),
    "temperature three": chat(temperature=3),
    "temperature bool": chat(temperature=True),
    "temperature list": chat(temperature=[1]),
    "top_p two": chat(top_p=2),
    "top_p text": chat(top_p="1"),
    "seed text": chat(seed="1"),
    "seed float": chat(seed=1.5),
    "presence_penalty text": chat(presence_penalty="x"),
    "presence_penalty large": chat(presence_penalty=9),
    "frequency_penalty list": chat(frequency_penalty=[]),
    "logit_bias list": chat(logit_bias=[1]),
    "logit_bias text": chat(logit_bias="x"),
    "stop number": chat(stop=1),
    "stop five": chat(stop=["a", "b", "c", "d", "e"]),
    "stop empty string": chat(stop=""),
    "stop with empty string": chat(stop=["a", ""]),
    "stop of numbers": chat(stop=[1]),
    "stop of null": chat(stop=[None]),
    "stop object": chat(stop={}),
    "stream text": chat(stream="true"),
    "stream number": chat(stream=1),
    "stream_options text": chat(stream=True, stream_options="usage"),
    "stream_options list": chat(stream=True, stream_options=[]),
    "include_usage text": chat(stream=True, stream_options={"include_usage": "yes"}),
    "logprobs number": chat(logprobs=1),
    "logprobs text": chat(logprobs="true"),
    "top_logprobs large": chat(logprobs=True, top_logprobs=21),
    "top_logprobs negative": chat(logprobs=True, top_logprobs=-1),
    "top_logprobs text": chat(logprobs=True, top_logprobs="2"),
    "response_format text": chat(response_format="json"),
    "response_format list": chat(response_format=[]),
}  # fmt: skip

BAD_COMPLETIONS: dict[str, dict[str, Any]] = {
    "no prompt": {"model": "policy"},
    "prompt null": text(prompt=None),
    "prompt empty": text(prompt=""),
    "prompt empty list": text(prompt=[]),
    "prompt number": text(prompt=3),
    "prompt object": text(prompt={"text": "x"}),
    "prompt two texts": text(prompt=["a", "b"]),
    "prompt two id lists": text(prompt=[[1], [2]]),
    "prompt of an empty list": text(prompt=[[]]),
    "prompt of an empty text": text(prompt=[""]),
    "prompt mixed": text(prompt=[1, "a"]),
    "prompt floats": text(prompt=[1.5, 2.5]),
    "prompt negative id": text(prompt=[1, -1]),
    "prompt huge id": text(prompt=[2**40]),
    "prompt id outside the vocabulary": text(prompt=[5000]),
    "prompt of booleans": text(prompt=[True, False]),
    "prompt of null": text(prompt=[None]),
    "prompt nested": text(prompt=[[[1]]]),
    "no model": {"prompt": "x"},
    "echo": text(echo=True),
    "echo text": text(echo="yes"),
    "suffix": text(suffix="end"),
    "suffix number": text(suffix=1),
    "best_of": text(best_of=3),
    "n two": text(n=2),
    "max_tokens zero": text(max_tokens=0),
    "logprobs bool": text(logprobs=True),
    "logprobs large": text(logprobs=100),
    "stop number": text(stop=1),
    "stream text": text(stream="x"),
    "temperature text": text(temperature="x"),
}  # fmt: skip


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with gateway() as running:
        yield running


async def send(rig: Rig, path: str, data: bytes, **headers: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    all_headers = {"authorization": f"Bearer {rig.agent_key}", "content-type": "application/json", **headers}
    timeout = aiohttp.ClientTimeout(total=5)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.post(rig.url + path, data=data, headers=all_headers) as response,
    ):
        return response.status, {k.lower(): v for k, v in response.headers.items()}, orjson.loads(await response.read())


def check_shape(reply: dict[str, Any], headers: dict[str, str]) -> None:
    error = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str), "codes are texts"
    assert error["message"]
    assert error["param"] is None or isinstance(error["param"], str)
    assert headers["x-request-id"].startswith("req_")


async def check_nothing_held(rig: Rig) -> None:
    assert rig.app.calls.in_flight == 0
    assert await rig.store.calls(["r1"]) == []
    assert (await rig.engine.health()).running == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_bodies_that_are_no_request(rig: Rig, path: str) -> None:
    for data in RAW:
        status, headers, reply = await send(rig, path, data)
        assert status == 400, data[:60]
        check_shape(reply, headers)
    await check_nothing_held(rig)


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_chats(rig: Rig, stream: bool) -> None:
    for name, body in BAD_CHATS.items():
        wanted = {"stream": True, **body} if stream else body
        status, headers, reply = await send(rig, CHAT, orjson.dumps(wanted))
        assert status == 400, f"{name}: {status} {reply}"
        check_shape(reply, headers)
    await check_nothing_held(rig)


async def test_bad_completions(rig: Rig) -> None:
    for name, body in BAD_COMPLETIONS.items():
        status, headers, reply = await send(rig, COMPLETIONS, orjson.dumps(body))
        assert status == 400, f"{name}: {status} {reply}"
        check_shape(reply, headers)
    await check_nothing_held(rig)


async def test_the_refusal_names_the_field(rig: Rig) -> None:
    for body, param in (
        (chat(model=None), "model"),
        (chat(messages=[]), "messages"),
        (messages(USER, {"role": "robot", "content": "x"}), "messages[1].role"),
        (part({"type": "image_url", "image_url": {"url": "x"}}), "messages[0].content[0]"),
        (chat(n=2), "n"),
        (chat(stop=[1]), "stop"),
        (chat(tools=[{"type": 1}]), "tools[0].type"),
    ):
        _, _, reply = await send(rig, CHAT, orjson.dumps(body))
        assert reply["error"]["param"] == param


async def test_what_http_itself_refuses(rig: Rig) -> None:
    good = orjson.dumps(chat())
    for path, headers, wanted, code in (
        (CHAT, {"content-encoding": "gzip"}, 415, "unsupported_encoding"),
        (CHAT, {"content-encoding": "br"}, 415, "unsupported_encoding"),
        ("/v1/embeddings", {}, 404, "not_found"),
        ("/v1/chat/completions/", {}, 404, "not_found"),
        ("/v1/responses/x/y", {}, 404, "not_found"),
        ("/v1/models", {}, 405, "method_not_allowed"),
        ("/v1/%00", {}, 404, "not_found"),
    ):
        status, got, reply = await send(rig, path, good, **headers)
        assert (status, reply["error"]["code"]) == (wanted, code), path
        check_shape(reply, got)
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, reply = await rig.post(CHAT, None, method=method)
        assert (status, reply["error"]["code"]) == (405, "method_not_allowed")


async def test_odd_but_harmless_requests_are_answered() -> None:
    async with gateway() as rig:
        for body in (
            chat(
                betas=["x"],
                thinking={"type": "adaptive"},
                reasoning_effort="high",
                metadata={"a": 1},
                user=7,
                store=False,
            ),
            chat(
                temperature=None,
                top_p=None,
                n=None,
                stop=None,
                stream=None,
                tools=None,
                tool_choice=None,
                max_tokens=None,
            ),
            chat(n=1, logit_bias={}, parallel_tool_calls="whatever", service_tier="auto", prompt_cache_key="k"),
            messages(
                {"role": "developer", "content": "be kind"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
            ),
            assistant(refusal=None, annotations=[], audio=None, function_call=None, tool_calls=None),
            assistant(
                content=None, tool_calls=[{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]
            ),
            assistant(content=[{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]),
            assistant(content=None, refusal="I would rather not"),
            messages(USER, {"role": "assistant", "content": ""}, USER),
            messages({"role": "user", "content": ""}),
            messages(
                USER, {"role": "tool", "tool_call_id": "a", "content": None}, {"role": "tool", "tool_call_id": "b"}
            ),
            chat(tools=[{"type": None, "function": {"name": "f"}}, {"type": "web_search"}, {"type": "custom"}]),
            chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}),
            chat(stream_options={"include_usage": True}),
        ):
            status, _, reply = await send(rig, CHAT, orjson.dumps(body))
            assert status == 200, f"{body}: {reply}"


def test_the_table_is_long() -> None:
    assert len(RAW) * 2 + len(BAD_CHATS) * 2 + len(BAD_COMPLETIONS) >= 150
