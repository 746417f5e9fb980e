"""Requests of Messages, good and bad: recorded ones are counted right to the token, wrong ones get a clear error."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
from gateway_rig import TOKENIZER, config, fake_engine, gateway
from test_gateway_messages import BASH, USER, request, sdk

from canter.gateway.dialects.canonical import Chat
from canter.gateway.dialects.messages import Messages
from canter.types import Outcome

TRAFFIC = Path(__file__).parents[1] / "conformance" / "traffic"


def recorded() -> list[dict[str, Any]]:
    """The bodies of all recorded Messages requests, each different one once."""
    bodies: dict[str, dict[str, Any]] = {}
    for path in sorted(TRAFFIC.glob("*.json.xz")):
        for rows in json.loads(lzma.decompress(path.read_bytes())).values():
            for row in rows:
                if row["path"] == "/v1/messages":
                    bodies[json.dumps(row["body"], sort_keys=True)] = row["body"]
    return list(bodies.values())


async def test_count_tokens_is_the_prompt_that_the_engine_then_sees_for_recorded_requests() -> None:
    bodies = recorded()
    assert len(bodies) >= 50
    models = sorted({body["model"] for body in bodies})
    settings = config(model={"path": "nowhere", "aliases": models}, sampling={"max_tokens": 8})
    counts, usages = [], []
    async with gateway(fake_engine(context_tokens=10**6), settings=settings) as rig:
        for body in bodies:
            asked = {name: value for name, value in body.items() if name not in ("max_tokens", "stream")}
            status, counted = await rig.post("/v1/messages/count_tokens", asked)
            assert (status, list(counted)) == (200, ["input_tokens"])
            status, reply = await rig.post("/v1/messages", {**body, "stream": False})
            assert status == 200
            counts.append(counted["input_tokens"])
            usages.append(reply["usage"]["input_tokens"])
        calls = await rig.store.calls(["r1"])
    assert counts == usages == [call.prompt_len for call in calls]
    assert len(set(counts)) > 20


async def test_counting_records_nothing_and_is_not_held_while_the_engine_is_paused() -> None:
    async with gateway() as rig, sdk(rig) as client:
        assert (await rig.post("/api/pause", {}, key=rig.service_key))[0] == 200
        counted = await client.messages.count_tokens(model="policy", messages=[USER], system="x", tools=[BASH])
        assert counted.input_tokens > 0
        assert await rig.store.calls(["r1"]) == []
        assert rig.app.calls.in_flight == 0


async def test_a_conversation_that_ends_with_the_assistant_can_be_counted_but_not_prefilled() -> None:
    history = [USER, {"role": "assistant", "content": "The answer is ("}]
    async with gateway() as rig, sdk(rig) as client:
        counted = await client.messages.count_tokens(model="policy", messages=history)
        assert counted.input_tokens > (await client.messages.count_tokens(model="policy", messages=[USER])).input_tokens
        with pytest.raises(anthropic.BadRequestError, match="cannot be prefilled"):
            await client.messages.create(**request(messages=history))


async def test_models_are_listed_in_the_shape_of_the_family_that_asks() -> None:
    settings = config(model={"path": "nowhere", "name": "policy", "aliases": ["a/b", "claude-x"]})
    async with gateway(settings=settings) as rig, sdk(rig) as client, rig.sdk() as openai:
        assert [model.id async for model in await client.models.list()] == ["policy", "a/b", "claude-x"]
        assert [model.id async for model in await client.models.list(limit=1)] == ["policy", "a/b", "claude-x"]
        page = await client.beta.models.list(before_id="claude-x", limit=1)
        assert ([model.id for model in page.data], page.has_more) == (["a/b"], True)
        for name in ("policy", "a/b"):
            model = await client.models.retrieve(name)
            assert (model.id, model.type, model.max_tokens) == (name, "model", 256)
            assert (await openai.models.retrieve(name)).id == name
        assert [model.id async for model in await openai.models.list()] == ["policy", "a/b", "claude-x"]
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("none")
        for query in ({"limit": 0}, {"limit": 1001}, {"after_id": "none"}):
            with pytest.raises(anthropic.BadRequestError):
                await client.models.list(**query)
        reply = await client.messages.create(**request(model="claude-x"))
        assert reply.model == "claude-x"


ANY = [1, 1.5, True, "x", [], {}, None]


def but(*types: type, also: tuple[Any, ...] = ()) -> list[Any]:
    """Values of any JSON type but these, and more that are wrong."""
    return [value for value in ANY if type(value) not in types] + list(also)


def in_block(type_: str, role: str = "user", **fields: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": [{"type": type_, **fields}]}]
    return request(messages=[*messages, USER] if role == "assistant" else messages)


def in_result(**fields: Any) -> dict[str, Any]:
    return in_block("tool_result", **{"tool_use_id": "i", **fields})


def in_use(**fields: Any) -> dict[str, Any]:
    return in_block("tool_use", "assistant", **{"id": "i", "name": "n", "input": {}, **fields})


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


NONE, STR, LIST, DICT, INT, FLOAT, BOOL = type(None), str, list, dict, int, float, bool
UNREADABLE = [
    "", "image", "document", "input_text", "image_url", "server_tool_use", "search_result", "container_upload",
    "web_search_tool_result", "mcp_tool_use", "compaction",
]  # fmt: skip
HOSTED = [
    "server_tool_use", "web_search_tool_result", "bash_code_execution_tool_result", "mcp_tool_use", "mcp_tool_result",
    "mcp_tool_listing", "container_upload", "tool_yet_to_come_tool_result",
]  # fmt: skip

SEARCHED = {"type": "search_result", "title": "Notes", "source": "a.md", "content": [{"type": "text", "text": "41"}]}

BAD: dict[str, list[dict[str, Any]]] = {
    "model": [without(request(), "model"), *(request(model=v) for v in but(STR))],
    "max_tokens": [
        without(request(), "max_tokens"),
        *(request(max_tokens=v) for v in but(INT, also=(0, -1, 1e30, "5"))),
    ],
    "messages": [without(request(), "messages"), *(request(messages=v) for v in [*but(LIST), []])],
    "a message": [request(messages=[v]) for v in ANY],
    "role": [
        request(messages=[{"role": v, "content": "x"}]) for v in [*but(STR), "", "tool", "developer", "function"]
    ],
    "content": [request(messages=[{"role": r, "content": v}]) for r in ("user", "system") for v in but(STR, LIST)],
    "no content": [request(messages=[{"role": role}]) for role in ("user", "assistant", "system")],
    "a block": [request(messages=[{"role": "user", "content": [v]}]) for v in ANY],
    "block type": [in_block(v) for v in [*but(STR), *UNREADABLE, "tool_use", "thinking", "redacted_thinking"]],
    "block type of the assistant": [
        in_block(v, "assistant", text="x") for v in [*UNREADABLE, "tool_result"] if v not in HOSTED
    ],
    "block type of the system": [in_block(v, "system", text="x") for v in ("image", "tool_result", "thinking")],
    "text": [in_block("text", role, text=v) for role in ("user", "assistant", "system") for v in but(STR)],
    "thinking": [in_block("thinking", "assistant", thinking=v, signature="s") for v in but(STR)],
    "tool_use_id": [in_result(tool_use_id=v) for v in but(STR)],
    "is_error": [in_result(is_error=v) for v in but(BOOL, NONE)],
    "tool result": [
        in_result(content=v)
        for v in [*but(STR, LIST, NONE), *([v] for v in ANY), [{"type": "hologram"}], [{"type": "text", "text": 1}],
                  [{"type": "tool_reference"}], *([{**SEARCHED, n: 1}] for n in SEARCHED),
                  [{**SEARCHED, "content": [{"type": "image"}]}]]
    ],
    "tool use": [
        *(in_use(id=v) for v in but(STR)),
        *(in_use(name=v) for v in but(STR)),
        in_block("tool_use", "assistant", id="i", name="n"),
    ],
    "tool change": [in_block("tool_addition", "system", tool=v) for v in [*ANY, {"name": 1}, {"definition": {"a": 1}}]],
    "system": [request(system=v) for v in [*but(STR, LIST, NONE), *([v] for v in ANY), [{"type": "image"}]]],
    "tools": [request(tools=v) for v in [*but(LIST, NONE), *([v] for v in ANY), [BASH, BASH]]],
    "tool name": [request(tools=[{**BASH, "name": v}]) for v in [*but(STR), ""]],
    "tool description": [request(tools=[{**BASH, "description": v}]) for v in but(STR, NONE)],
    "input_schema": [request(tools=[{**BASH, "input_schema": v}]) for v in but(DICT)],
    "tool type": [request(tools=[{**BASH, "type": v}]) for v in but(STR, NONE)],
    "tool of OpenAI": [request(tools=[{"type": "function", "function": {"name": "f"}}])],
    "defer_loading": [request(tools=[{**BASH, "defer_loading": v}]) for v in but(BOOL, NONE)],
    "tool_choice": [
        request(tools=[BASH], tool_choice=v)
        for v in [*but(DICT, NONE), {"type": "x"}, {"type": 1}, {"type": "tool"}, {"type": "tool", "name": "none"},
                  {"type": "auto", "disable_parallel_tool_use": 1}]
    ] + [request(tool_choice={"type": "any"})],
    "stop_sequences": [
        request(stop_sequences=v) for v in [*but(LIST, NONE), *([v] for v in but(STR)), [""], ["x"] * 65]
    ],
    "temperature": [request(temperature=v) for v in but(INT, FLOAT, NONE, also=(-0.1, 1.1))],
    "top_p": [request(top_p=v) for v in but(INT, FLOAT, NONE, also=(-0.1, 1.1))],
    "top_k": [request(top_k=v) for v in but(INT, NONE, also=(-1,))],
    "stream": [request(stream=v) for v in but(BOOL, NONE)],
    "prefill": [request(messages=[USER, {"role": "assistant", "content": v}]) for v in ("x", "", [])],
}  # fmt: skip
RAW = [b"", b"null", b"[]", b"1", b'"text"', b"NaN", b"{", b"\xff", b'{"a":"\\ud800"}', b"[" * 9999, b'{"a":' * 999]


def test_there_are_enough_bad_requests() -> None:
    assert sum(map(len, BAD.values())) + len(RAW) > 200


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_request_gets_a_clear_400_and_holds_nothing(what: str) -> None:
    async with gateway() as rig:
        for body in BAD[what]:
            status, told = await rig.post("/v1/messages", body)
            assert status == 400, body
            check_shape(told, "invalid_request_error")
            if what not in ("max_tokens", "prefill"):
                status, told = await rig.post("/v1/messages/count_tokens", body)
                assert status == 400, body
                check_shape(told, "invalid_request_error")
        assert await rig.store.calls(["r1"]) == []
        assert rig.app.calls.in_flight == 0


def check_shape(told: Any, type_: str) -> None:
    assert set(told) == {"type", "error", "request_id"}
    assert told["type"] == "error"
    assert told["error"]["type"] == type_
    assert len(told["error"]["message"]) > 10
    assert told["request_id"].startswith("req_")


async def test_bodies_that_are_no_object_get_400_too() -> None:
    async with gateway() as rig, aiohttp.ClientSession() as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for raw in RAW:
                async with http.post(rig.url + path, data=raw, headers={"x-api-key": rig.agent_key}) as response:
                    assert response.status == 400, raw
                    check_shape(await response.json(), "invalid_request_error")


ODD: dict[str, dict[str, Any]] = {
    "unknown fields": request(
        betas=["x"], context_management={"edits": 1}, container=3, mcp_servers="x", service_tier=[], metadata=1,
        thinking="very", output_config=[], speed=1, diagnostics={}, fallbacks="default", n="many", zzz=None,
    ),
    "unknown fields of messages and blocks": request(
        messages=[{"role": "user", "zzz": 1, "output_config": {}, "content": [
            {"type": "text", "text": "x", "cache_control": 1, "citations": "x", "zzz": {}}]}]
    ),
    "null for absent": request(
        system=None, tools=None, tool_choice=None, stop_sequences=None, temperature=None, stream=None, thread=None
    ),
    "empty user": request(messages=[{"role": "user", "content": []}]),
    "tool input of any type": request(messages=[
        USER, {"role": "assistant", "content": [
            {"type": "tool_use", "id": f"i{i}", "name": "n", "input": v} for i, v in enumerate(ANY)]}, USER]),
    "hosted tools": request(tools=[
        {"type": "bash_20250124", "name": "bash"}, {"type": "text_editor_20250728", "name": "edit"},
        {"type": "computer_20251124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
        {"type": "web_search_20260318", "name": "web_search"}, {"type": "memory_20250818", "name": "memory"},
        {"type": "tool_search_tool_regex_20251119", "name": "search"}, {"type": "mcp_toolset", "mcp_server_name": "m"},
        {"type": "browser_toolset_20260801"}, {**BASH, "name": "mine", "type": "custom", "strict": True},
        {**BASH, "type": "function"}, {"type": "tool_yet_to_come", "name": 5}, {"type": ""},
    ], tool_choice={"type": "tool", "name": "bash"}),
    "a system message first": request(messages=[{"role": "system", "content": "x"}, USER]),
    "no user": request(messages=[{"role": "system", "content": "x"}]),
    "a result that nobody asked for": in_result(content="x"),
    "huge numbers": request(max_tokens=2**63, top_k=2**63),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
async def test_what_is_unusual_but_clear_is_answered(what: str) -> None:
    async with gateway() as rig:
        status, told = await rig.post("/v1/messages", ODD[what])
        assert status == 200, told
        [call] = await rig.store.calls(["r1"])
    if what == "hosted tools":
        prompt = TOKENIZER.decode(call.suffix)
        assert [name in prompt for name in ("mine", "web_search", "memory")] == [True, False, False]
        names = ["bash", "edit", "computer", "web_search", "memory", "search", "m", "browser_toolset_20260801"]
        assert call.requested["tools_left_out"] == [*names, "bash", "tool_yet_to_come", ""]


def read(body: dict[str, Any]) -> tuple[list[tuple[str, str]], Any]:
    """Role and content of the messages that a request is, and what is recorded as kept out of them."""
    asked = Messages().parse(body)
    assert isinstance(asked.prompt, Chat)
    return [(message.role, message.content) for message in asked.prompt.messages], asked.requested.get("kept_out")


def test_blocks_of_hosted_tools_in_a_history_are_left_out_and_recorded() -> None:
    hosted = [{"type": type_, "input": "secret"} for type_ in HOSTED]
    for content, said, kept_out in (
        ([{"type": "text", "text": "a"}, *hosted, {"type": "text", "text": "b"}], "a\nb", sorted(HOSTED)),
        (hosted, "", sorted(HOSTED)),
        ([{"type": "text", "text": "a"}], "a", None),
        ("a", "a", None),
    ):
        body = request(messages=[USER, {"role": "assistant", "content": content}, USER])
        assert read(body) == ([("user", "hi"), ("assistant", said), ("user", "hi")], kept_out)


def test_a_passage_that_was_found_is_text() -> None:
    found = in_result(content=[{"type": "text", "text": "found:"}, SEARCHED])
    assert read(found) == ([("tool", "found:\nNotes\na.md\n41")], None)
    given = request(messages=[{"role": "user", "content": [SEARCHED, {"type": "text", "text": "Why?"}]}])
    assert read(given) == ([("user", "Notes\na.md\n41\nWhy?")], None)


async def test_the_frameworks_own_errors_wear_the_shape_of_the_path() -> None:
    async with gateway(settings=config(gateway={"max_body_bytes": 1024})) as rig, aiohttp.ClientSession() as http:

        async def ask(method: str, path: str, expected: int, type_: str, **settings: Any) -> None:
            headers = {"x-api-key": rig.agent_key, **settings.pop("headers", {})}
            async with http.request(method, rig.url + path, headers=headers, **settings) as response:
                assert response.status == expected, (method, path)
                check_shape(await response.json(), type_)
                assert response.headers["request-id"]

        v1 = {"anthropic-version": "2023-06-01"}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            await ask("GET", path, 405, "invalid_request_error")
            await ask("POST", path, 413, "request_too_large", data=b"x" * 1025)
            await ask("POST", path, 415, "invalid_request_error", headers={"content-encoding": "br"}, data=b"x")
            await ask("POST", path, 401, "authentication_error", headers={"x-api-key": "wrong"}, json={})
            await ask("POST", path, 403, "permission_error", headers={"x-api-key": rig.admin_key}, json={})
            await ask("POST", path, 404, "not_found_error", json=request(model="none"))
            await ask("POST", path, 431, "invalid_request_error", headers={"x-big": "x" * 5000} | many(2000), json={})
        await ask("POST", "/v1/messages/batches", 404, "not_found_error", json={})
        await ask("GET", "/v1/files", 404, "not_found_error", headers=v1)
        await ask("POST", "/v1/models", 405, "invalid_request_error", headers=v1)
        await rig.store.end_attempt("r1", 1, Outcome.EXITED, exit_code=0)
        await ask("POST", "/v1/messages", 409, "invalid_request_error", json=request())


def many(count: int) -> dict[str, str]:
    return {f"x-h{i}": "1" for i in range(count)}


async def test_a_prompt_over_the_context_is_told_in_the_words_on_which_clients_compact() -> None:
    async with gateway(fake_engine(context_tokens=50)) as rig, sdk(rig) as client:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 6\d\d tokens > 50 maximum"):
            await client.messages.create(**request(messages=[{"role": "user", "content": "x" * 600}]))
