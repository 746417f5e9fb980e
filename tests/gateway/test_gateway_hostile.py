"""What a hostile client sends: each gets its 4xx at once, and leaves no trace in the log that it could choose."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.request
from typing import Any

import aiohttp
import orjson
import pytest
from gateway_rig import Rig, config, gateway

from canter.errors import Unauthorized
from canter.gateway.problems import body_of
from canter.gateway.redact import loggable, redact
from canter.wire import MAX_NESTING, is_too_nested

CHAT = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
DEPTHS = (MAX_NESTING + 1, 200, 250, 260, 500, 1000, 1020, 5000)


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


async def send(rig: Rig, method: str, path: str, data: bytes = b"", *, key: str = "") -> tuple[int, dict[str, Any]]:
    headers = {"authorization": f"Bearer {key or rig.agent_key}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, rig.url + path, data=data, headers=headers) as response,
    ):
        return response.status, orjson.loads(await response.read())


@pytest.mark.parametrize(
    ("levels", "too_nested"), [(0, False), (1, False), (MAX_NESTING, False), (MAX_NESTING + 1, True)]
)
def test_nesting_is_counted_in_arrays_and_objects(levels: int, too_nested: bool) -> None:
    lists: Any = 1
    objects: Any = 1
    for _ in range(levels):
        lists, objects = [lists], {"a": objects}
    assert is_too_nested(lists) is too_nested
    assert is_too_nested(objects) is too_nested


async def test_deep_nesting_is_refused_wherever_it_is() -> None:
    message = b'{"model":"policy","messages":[{"role":"user","content":"hi"}],'
    call = (
        b'{"model":"policy","messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":'
    )
    async with gateway() as rig:
        for levels in DEPTHS:
            deep = nested(levels)
            for body in (
                message + b'"unknown":' + deep + b"}",
                message + b'"unknown":' + b"[" * levels + b"]" * levels + b"}",
                message + b'"logit_bias":' + deep + b"}",
                message + b'"response_format":' + deep + b"}",
                message + b'"tools":[{"type":"function","function":{"name":"f","parameters":' + deep + b"}}]}",
                call + deep + b"}}]}]}",
            ):
                status, reply = await send(rig, "POST", CHAT, body)
                assert status == 400, (levels, body[:80], reply)
                assert reply["error"]["code"] == "invalid_json"
        assert await rig.store.calls(["r1"]) == []


async def test_deep_arguments_in_a_string_are_text() -> None:
    async with gateway() as rig:
        for levels in (1, MAX_NESTING, *DEPTHS[:-1]):
            function = {"name": "f", "arguments": nested(levels).decode()}
            called = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
            messages = [USER, called, {"role": "tool", "tool_call_id": "a", "content": "x"}]
            status, reply = await send(rig, "POST", CHAT, orjson.dumps({"model": "policy", "messages": messages}))
            assert status == 200, (levels, reply)


async def test_service_routes_refuse_what_cannot_be_kept() -> None:
    rollout = {"id": "q", "group": "g", "task": {"id": "t", "prompt": "p"}}
    deep = nested(MAX_NESTING + 1)
    long_integer = "9" * 5000

    def rollouts(**fields: Any) -> bytes:
        return json.dumps({"rollouts": [{**rollout, **fields}]}).encode()

    asked: list[tuple[str, str, bytes]] = [
        ("PUT", "/api/rollouts/r1/attempts/1/process", deep),
        ("PUT", "/api/facts/x", b'{"value":' + deep + b"}"),
        ("POST", "/api/rollouts/r1/attempts/1/reward", b'{"value":1,"details":' + nested(150) + b"}"),
        ("POST", "/api/rollouts/r1/attempts/1/reward", b'{"value":1,"details":{"a":1' + b"0" * 40 + b"}}"),
        ("POST", "/api/rollouts", rollouts(task={"id": "t", "prompt": "p", "input": {"a": 10**30}})),
        ("POST", "/api/rollouts", rollouts(task={"id": "t", "prompt": "p", "hidden": json.loads(nested(150))})),
        ("PUT", "/api/engines", b'{"url":"http://e","model":"m","version":9223372036854775808}'),
        ("PUT", "/api/engines", b'{"url":"http://e\\n","model":"m","version":0}'),
        ("PUT", "/api/engines", b'{"url":"\\u0000","model":"m","version":0}'),
        ("POST", "/api/versions", b'{"version":9223372036854775808,"step":1}'),
        ("POST", "/api/rollouts/r1/attempts", b'{"number":18446744073709551616}'),
        ("POST", "/api/rollouts/r1/attempts/1/end", b'{"outcome":"exited","exit_code":18446744073709551616}'),
        ("GET", f"/api/events?after={long_integer}", b""),
        ("GET", "/api/events?after=9223372036854775808", b""),
        ("GET", f"/api/events?limit={long_integer}", b""),
        ("GET", "/api/events?limit=%D9%A3", b""),
        ("GET", f"/api/calls?rollout=r1&attempt={long_integer}", b""),
        ("GET", f"/api/rollouts?limit={long_integer}", b""),
    ]
    for name in ("step", "index", "seed", "max_attempts"):
        asked += [
            ("POST", "/api/rollouts", rollouts(**{name: value})) for value in (2**63, 2**64, 10**30, -(2**63) - 1)
        ]
    async with gateway() as rig:
        for method, path, body in asked:
            status, reply = await send(rig, method, path, body, key=rig.service_key)
            assert (status, reply["error"]["type"]) == (400, "bad_request"), (method, path[:60], body[:80], reply)
        for number in ("9" * 5000, "99999999999999999999", "-1", "1_0", "%201", "0x1"):
            path = f"/api/rollouts/r1/attempts/{number}/grading"
            assert (await send(rig, "GET", path, key=rig.service_key))[0] == 404
        assert [rollout.id for rollout in await rig.store.rollouts()] == ["r1"]


async def test_ids_are_names_of_folders_and_parts_of_urls() -> None:
    task = {"id": "t", "prompt": "p"}
    bad = ("", ".", "..", ".hidden", "-x", "a/b", "a b", "é" * 60, "a\n", "a\x00", "x" * 129, "a%2fb", "a?b", "~")
    good = ("r", "s00001-g000-r01", "a.b_c-D", "0", "x" * 128)
    async with gateway() as rig:
        for name in bad:
            for fields in ({"id": name, "group": "g"}, {"id": "q", "group": name}):
                body = json.dumps({"rollouts": [{**fields, "task": task}]}).encode()
                status, reply = await send(rig, "POST", "/api/rollouts", body, key=rig.service_key)
                assert status == 400, (fields, reply)
                assert "A-Za-z0-9" in reply["error"]["message"], "the refusal says what an id may be"
        for name in good:
            body = json.dumps({"rollouts": [{"id": name, "group": name, "task": task}]}).encode()
            assert (await send(rig, "POST", "/api/rollouts", body, key=rig.service_key))[0] == 200
        assert {rollout.id for rollout in await rig.store.rollouts()} == {"r1", *good}


async def test_no_client_writes_a_line_or_a_key_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as rig:
        await rig.start("r2")
        key = rig.attempts["r2"].agent_key
        with caplog.at_level(logging.INFO):
            for path in (
                f"/v1/x%0a2026-11-30%20CRITICAL%20root:%20forged%0a/{key}",
                f"/v1/_{key}x",
                f"/v1/models/%0aCRITICAL%20forged%0d{key}",
                "/v1/" + "x" * 50_000,
                "/v1/%1b%5b2J%e2%80%a8%e2%80%aeCRITICAL",
            ):
                async with (
                    aiohttp.ClientSession() as http,
                    http.get(
                        aiohttp.client.URL(rig.url + path, encoded=True),
                        headers={"authorization": f"Bearer {rig.agent_key}"},
                    ) as response,
                ):
                    assert response.status == 404
            body = {"model": f"m\nCRITICAL forged {key}", "messages": [USER]}
            assert (await send(rig, "POST", CHAT, orjson.dumps(body)))[0] == 404
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("canter.gateway")]
    assert len(lines) >= 6
    for line in lines:
        assert line.isprintable()
        assert len(line) < 1500
        assert key not in line
        assert key[len("ck-agent-") :] not in line


def test_loggable_text_is_short_and_on_one_line() -> None:
    assert loggable("plain é text") == "plain é text"
    assert loggable("a\nb\x1b\u2028") == r"a\nb\x1b\u2028"
    assert len(loggable("\n" * 10_000)) <= 501


def test_redaction_leaves_the_instruction_of_a_401_alone() -> None:
    async def shown() -> str:
        async with gateway() as rig, aiohttp.ClientSession() as http, http.get(rig.url + "/v1/models") as response:
            return str((await response.json())["error"]["message"])

    message = asyncio.run(shown())
    assert "***" not in message
    assert "Authorization header" in message
    assert "x-api-key" in message
    assert body_of(Unauthorized(message), "canter", "req_1")["error"]["message"] == message == redact(message)


async def test_a_client_that_closes_after_its_reply_sees_the_413() -> None:
    """urllib sends `Connection: close` and its whole body before it reads."""
    async with gateway(settings=config(gateway={"max_body_bytes": 2**20})) as rig:
        body = json.dumps({"value": 1.0, "details": {"text": "x" * 20 * 2**20}}).encode()
        url = f"{rig.url}/api/rollouts/r1/attempts/1/reward"
        for key, wanted in ((rig.service_key, 413), ("ck-agent-unknown", 401)):
            request = urllib.request.Request(url, body, {"authorization": f"Bearer {key}"})
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with pytest.raises(urllib.error.HTTPError) as caught:
                await asyncio.to_thread(opener.open, request, None, 10)
            with caught.value as error:
                assert error.code == wanted
                assert "error" in json.loads(error.read())


@pytest.mark.parametrize(
    "headers",
    [b"x: " + b"a" * 70_000 + b"\r\n", b"".join(b"x%d: 1\r\n" % i for i in range(3000))],
    ids=["long", "many"],
)
async def test_too_many_headers_are_a_431(headers: bytes) -> None:
    async with gateway() as rig:
        host, port = rig.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n")
        head = await asyncio.wait_for(reader.read(2000), 5)
        writer.close()
    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in head
