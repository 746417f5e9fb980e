"""What clients of other makers trip over: on the wire, in the SDKs, in what they send back."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import time
from typing import Any

import pytest
from gateway_rig import Rig, fake_engine, gateway
from raw_client import MODEL_PATHS, TERMINAL, question

from canter.engine.fake import Fault

CHAT = "/v1/chat/completions"
F, G = ({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg")


async def exchange(rig: Rig, data: bytes) -> tuple[bytes, bytes]:
    """Head and body of what comes until the server closes."""
    host, port = rig.url.removeprefix("http://").split(":")
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    return head, body


def http_10(rig: Rig, path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\nauthorization: Bearer {rig.agent_key}\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


# -- HTTP --


async def test_a_reply_on_a_connection_that_is_kept_alive_does_not_wait() -> None:
    def fastest(url: str, key: str) -> float:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
        took = []
        for _ in range(20):
            began = time.monotonic()
            connection.request("POST", "/v1/responses", b'{"model":1}', {"authorization": f"Bearer {key}"})
            assert connection.getresponse().read()
            took.append(time.monotonic() - began)
        connection.close()
        return min(took[5:])

    async with gateway() as rig:
        assert await asyncio.to_thread(fastest, rig.url, rig.agent_key) < 0.03


@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_a_client_of_http_1_0_gets_a_stream_whole_and_not_chunked(path: str) -> None:
    async with gateway() as rig:
        head, body = await exchange(rig, http_10(rig, path, {**question(path), "stream": True}))
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    assert length is not None
    assert int(length[1]) == len(body)
    assert TERMINAL[path] in body
    assert body.startswith((b"data: ", b"event: ", b": "))


async def test_a_stream_that_fails_has_a_status_for_a_client_of_http_1_0() -> None:
    async with gateway(fake_engine(faults={0: Fault.ERROR, 1: Fault.ERROR})) as rig:
        head, body = await exchange(rig, http_10(rig, CHAT, {**question(CHAT), "stream": True}))
    assert head.startswith(b"HTTP/1.1 503")
    assert json.loads(body)["error"]["code"] == "engine_error"


@pytest.mark.parametrize(
    ("path", "members"),
    [
        (CHAT, {"message", "type", "param", "code"}),
        ("/v1/responses", {"message", "type", "param", "code"}),
        ("/v1/messages?beta=true", {"message", "type"}),
        ("/api/rollouts", {"message", "type"}),
    ],
)
@pytest.mark.parametrize("header", ["content-length: -1", "content-length: 3\r\ncontent-length: 4", "no colon"])
async def test_a_malformed_request_is_refused_in_the_shape_of_its_path(
    path: str, members: set[str], header: str
) -> None:
    async with gateway() as rig:
        head, body = await exchange(rig, f"POST {path} HTTP/1.1\r\nhost: x\r\n{header}\r\n\r\n{{}}".encode())
    assert head.startswith(b"HTTP/1.1 400")
    assert re.search(rb"\r\nx-request-id: req_\w+\r\nrequest-id: req_\w+", head)
    reply = json.loads(body)
    assert set(reply["error"]) == members
    assert ("request_id" in reply) is path.startswith("/v1/messages")


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/messages", "/v1/responses/", "//v1/messages"])
async def test_a_wrong_base_url_is_told_what_is_right(path: str) -> None:
    async with gateway() as rig:
        status, reply = await rig.post(path, {})
    assert status in (404, 405)
    if status == 404:
        assert "base URL that ends in /v1" in reply["error"]["message"]


@pytest.mark.parametrize("path", MODEL_PATHS)
async def test_a_refusal_does_not_send_a_long_value_back(path: str) -> None:
    async with gateway() as rig:
        for long in (
            {"model": "m" * 100_000},
            {"messages": [{"role": "r" * 100_000, "content": "x"}]},
            {"input": [{"role": "user", "content": [{"type": "t" * 100_000}]}]},
        ):
            status, reply = await rig.post(path, {**question(path), **long})
            assert status in (200, 400, 404)
            assert len(json.dumps(reply)) < 5000


# -- fields --


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"tools": [F], "tool_choice": {}}, "tool_choice.type"),
        ({"tools": [F], "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tools": [F], "tool_choice": {"type": 1}}, "tool_choice.type"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.mode"),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        ({"response_format": {"type": "x"}}, "response_format.type"),
        ({"response_format": {"type": None}}, "response_format.type"),
        ({"response_format": {"schema": {}}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
            "response_format.json_schema.schema",
        ),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"logit_bias": {"5": True}}, "logit_bias.5"),
    ],
)
async def test_what_a_chat_cannot_have_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with gateway() as rig:
        status, reply = await rig.chat(**fields)
        assert await rig.store.calls(["r1"]) == []
    assert (status, reply["error"]["param"]) == (400, param), reply


async def test_allowed_tools_of_a_chat_are_those_that_the_prompt_shows() -> None:
    def only(mode: str) -> dict[str, Any]:
        named = {"type": "function", "function": {"name": "g"}}
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}

    async with gateway() as rig:
        for fields in ({"tools": [G]}, {"tools": [F, G], "tool_choice": only("auto")}):
            assert (await rig.chat(**fields))[0] == 200
        assert (await rig.chat(tools=[F, G], tool_choice=only("required")))[0] == 200
        plain, auto, required = sorted(await rig.store.calls(["r1"]), key=lambda call: call.ordinal)
    assert plain.prompt_len == auto.prompt_len == required.prompt_len
    assert "not_enforced" not in auto.effective
    assert required.effective["not_enforced"] == ["tool_choice"]


@pytest.mark.parametrize("type_", ["function", "custom"])
async def test_a_named_tool_of_responses_must_be_there(type_: str) -> None:
    tools = [{"type": type_, "name": "f"}]
    async with gateway() as rig:
        ask = {"model": "policy", "input": "hi", "tools": tools}
        good, _ = await rig.post("/v1/responses", {**ask, "tool_choice": {"type": type_, "name": "f"}})
        bad, reply = await rig.post("/v1/responses", {**ask, "tool_choice": {"type": type_, "name": "g"}})
    assert (good, bad, reply["error"]["param"]) == (200, 400, "tool_choice.name")


async def test_a_format_of_messages_is_recorded_as_not_enforced() -> None:
    async with gateway() as rig:
        form = {"type": "json_schema", "schema": {"type": "object"}}
        for config in ({"effort": "low"}, {"format": form}):
            assert (await rig.post("/v1/messages", {**question("/v1/messages"), "output_config": config}))[0] == 200
        free, formed = sorted(await rig.store.calls(["r1"]), key=lambda call: call.ordinal)
    assert "not_enforced" not in free.effective
    assert formed.effective["not_enforced"] == ["output_config"]


# -- histories --


async def test_a_custom_tool_called_with_other_arguments_comes_back_without_its_id() -> None:
    call = '<tool_call>\n{"name": "patch", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
    tools = [{"type": "custom", "name": "patch"}]
    async with gateway(fake_engine(lambda prompt, sampling, number: "done" if number else call)) as rig:
        items: list[Any] = [{"role": "user", "content": "go"}]
        _, reply = await rig.post("/v1/responses", {"model": "policy", "input": items, "tools": tools})
        (made,) = reply["output"]
        assert made["type"] == "custom_tool_call"
        back = {name: made[name] for name in ("type", "call_id", "name", "input")}
        items += [back, {"type": "custom_tool_call_output", "call_id": made["call_id"], "output": "ok"}]
        assert (await rig.post("/v1/responses", {"model": "policy", "input": items, "tools": tools}))[0] == 200
        first, second = sorted(await rig.store.calls(["r1"]), key=lambda call: call.ordinal)
    assert (second.parent_id, second.fork) == (first.id, None)
