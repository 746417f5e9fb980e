"""Every way in which clients of Responses send a history back, or leave it to the gateway, finds its parent."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_rig import TOKENIZER, Rig, fake_engine, gateway
from openai.types.responses import Response

from canter.store import Store, open_store
from canter.store.memory import MemoryStore
from canter.types import Call, CallBodies, ForkCause

TOOLS: list[Any] = [
    {"type": "function", "name": "bash", "parameters": {"type": "object"}},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
    },
    {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
    },
    {"type": "web_search"},
]
USER = {"role": "user", "content": "hi"}
THOUGHT = "<think>\nlet me see ✓\n</think>\n\n"


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


BASH = call_text("bash", '{ "command":  "echo caf\\u00e9"}')
PATCH = call_text("apply_patch", '{"input": "*** Begin Patch\\n\\u00e9"}')
SPAWN = call_text("agents__spawn", '{"task": 1}')
REPLIES = {
    "text": "I say\n so.  \n",
    "reasoning": f"{THOUGHT}So.",
    "call": BASH,
    "all": f"{THOUGHT}I look.\n\n{BASH}\n{BASH}",
    "custom": f"{THOUGHT}{PATCH}",
    "custom and odd": call_text("apply_patch", '{"patch": "x", "input": 1}'),
    "namespace": f"ok {SPAWN}\n{BASH}",
    "no such tool": call_text("made_up", "{}"),
    "empty": "",
    "only thought": THOUGHT,
}


def says(*texts: str) -> Any:
    return fake_engine(lambda prompt, sampling, number: texts[min(number, len(texts) - 1)])


async def calls_of(rig: Rig) -> list[Call]:
    return await rig.store.calls(["r1"])


def results(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a harness answers to the calls of a reply, else what its user says."""
    calls = [item for item in output if item["type"] in ("function_call", "custom_tool_call")]
    if not calls:
        return [{"role": "user", "content": "go on"}]
    return [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"} for item in calls]


def _without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda item: {name: value for name, value in item.items() if name not in names}


def _message_as_text(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return {"role": "assistant", "content": item["content"][0]["text"]}


def _stripped(item: dict[str, Any]) -> dict[str, Any]:
    item = copy.deepcopy(item)
    for part in item.get("content") or ():
        part["text"] = part["text"].rstrip()
    if "arguments" in item:
        item["arguments"] = json.dumps(json.loads(item["arguments"]))
    return item


def _own_ids(item: dict[str, Any]) -> dict[str, Any]:
    return item | {"id": "msg_01a227d5-f2b9-7480-91b4-0a8b3a542450"}


DUMPS: dict[str, Callable[[Response], list[dict[str, Any]]]] = {
    "model_dump": lambda r: [o.model_dump() for o in r.output],
    "exclude_unset": lambda r: [o.model_dump(exclude_unset=True) for o in r.output],
    "exclude_none": lambda r: [o.model_dump(exclude_none=True) for o in r.output],
    "by_alias": lambda r: [o.model_dump(by_alias=True, exclude_none=True) for o in r.output],
    "json": lambda r: [json.loads(o.model_dump_json()) for o in r.output],
}
CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no ids": _without("id"),
    "no ids, no status": _without("id", "status"),
    "ids of its own": _own_ids,
    "no type of messages": lambda item: _without("type", "id")(item) if item["type"] == "message" else item,
    "messages as texts": _message_as_text,
    "stripped and spelled anew": _stripped,
    "null members": lambda item: (
        item | {"phase": None, "caller": None, "async_": None, "namespace": item.get("namespace")}
    ),
    "reasoning without text": lambda item: item | {"content": None} if item["type"] == "reasoning" else item,
    "reasoning sealed only": lambda item: (
        item | {"content": [], "summary": []} if item["type"] == "reasoning" else item
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dump", DUMPS)
@pytest.mark.parametrize("reply", ["text", "all", "custom", "namespace", "empty"])
async def test_what_the_sdk_dumps_finds_its_parent(reply: str, dump: str, stream: bool) -> None:
    async with gateway(says(REPLIES[reply], "done")) as rig, rig.sdk() as sdk:
        first = await ask(sdk, [USER], stream)
        output = DUMPS[dump](first)
        await ask(sdk, [USER, *output, *results(output)], stream)
        one, two = await calls_of(rig)
    assert (two.parent_id, two.fork) == (one.id, None)


async def ask(sdk: openai.AsyncOpenAI, items: list[Any], stream: bool = False) -> Response:
    fields: dict[str, Any] = {"model": "policy", "input": items, "tools": TOOLS}
    fields["include"] = ["reasoning.encrypted_content"]
    if not stream:
        return await sdk.responses.create(**fields)
    final: Response | None = None
    async for event in await sdk.responses.create(**fields, stream=True):
        if event.type == "response.completed":
            final = event.response
    assert final is not None
    return final


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reply", REPLIES)
async def test_what_harnesses_make_of_it_finds_its_parent(reply: str, change: str) -> None:
    async with gateway(says(REPLIES[reply], "done")) as rig:
        _, first = await post(rig, [USER])
        output = [CHANGES[change](item) for item in first["output"]]
        status, second = await post(rig, [USER, *output, *results(first["output"])])
        assert status == 200, second
        one, two = await calls_of(rig)
    assert two.fork is None
    assert two.parent_id == one.id


async def post(rig: Rig, items: Any, *, key: str | None = None, **fields: Any) -> tuple[int, Any]:
    fields = {"tools": TOOLS, "include": ["reasoning.encrypted_content"], **fields}
    return await rig.post("/v1/responses", {"model": "policy", "input": items, **fields}, key=key)


async def test_a_custom_tool_is_called_with_its_input_and_a_namespaced_one_by_its_own_name() -> None:
    async with gateway(says(f"{PATCH}\n{SPAWN}")) as rig:
        _, reply = await post(rig, [USER])
        [call] = await calls_of(rig)
    patch, spawn = reply["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin Patch\né")
    assert (spawn["type"], spawn["namespace"], spawn["name"]) == ("function_call", "agents", "spawn")
    assert spawn["arguments"] == '{"task": 1}'
    prompt = TOKENIZER.decode(call.suffix)
    assert "agents__spawn" in prompt
    assert "lark grammar" in prompt
    assert "web_search" not in prompt
    assert call.requested["kept_out"] == ["web_search"]


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        (None, ["bash", "apply_patch", "agents__spawn"]),
        ("none", []),
        ("required", ["bash", "apply_patch", "agents__spawn"]),
        ({"type": "function", "name": "bash"}, ["bash", "apply_patch", "agents__spawn"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "spawn"}]},
            ["agents__spawn"],
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "agents"}]},
            ["agents__spawn"],
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
            ["apply_patch"],
        ),
    ],
)
async def test_tool_choice_says_which_tools_are_shown(choice: Any, shown: list[str]) -> None:
    async with gateway(says("ok")) as rig:
        status, reply = await post(rig, [USER], tool_choice=choice)
        [call] = await calls_of(rig)
    assert status == 200
    assert reply["tool_choice"] == (choice or "auto")
    prompt = TOKENIZER.decode(call.suffix)
    assert [name for name in ("bash", "apply_patch", "agents__spawn") if f'"{name}"' in prompt] == shown
    forced = choice not in (None, "none") and (not isinstance(choice, Mapping) or choice.get("mode") != "auto")
    assert ("tool_choice" in call.effective.get("not_enforced", [])) is forced


async def test_two_tools_that_would_have_one_name_are_refused() -> None:
    clash = [*TOOLS, {"type": "function", "name": "agents__spawn"}]
    async with gateway(says("ok")) as rig:
        status, reply = await post(rig, [USER], tools=clash)
    assert (status, reply["error"]["param"]) == (400, "tools[4]")


async def test_two_turns_in_a_row_stay_two() -> None:
    """A harness that says nothing between two replies: the ids tell which item is whose, though a call could follow a
    text in one reply."""
    async with gateway(says("I look.", BASH, "done")) as rig:
        _, first = await post(rig, [USER])
        _, second = await post(rig, [USER, *first["output"]])
        history = [USER, *first["output"], *second["output"], *results(second["output"])]
        await post(rig, history)
        one, two, three = await calls_of(rig)
    assert [c.parent_id for c in (two, three)] == [one.id, two.id]
    assert [c.fork for c in (two, three)] == [None, None]


async def test_a_stream_cut_behind_its_reasoning_leaves_a_turn_of_its_own() -> None:
    """Codex keeps what was finished and asks again from there."""
    async with gateway(says(f"{THOUGHT}{BASH}", f"{THOUGHT}{BASH}", "done")) as rig:
        _, lost = await post(rig, [USER])
        _, second = await post(rig, [USER, lost["output"][0]])
        await post(rig, [USER, lost["output"][0], *second["output"], *results(second["output"])])
        _, two, three = await calls_of(rig)
    assert (three.parent_id, three.fork) == (two.id, None)


async def test_results_between_the_calls_of_one_turn_do_not_part_it() -> None:
    async with gateway(says(f"{BASH}\n{BASH}", "done")) as rig:
        _, first = await post(rig, [USER])
        a, b = first["output"]
        out_a, out_b = results(first["output"])
        await post(rig, [USER, a, out_a, b, out_b])
        one, two = await calls_of(rig)
    assert (two.parent_id, two.fork) == (one.id, None)


async def test_dropped_reasoning_still_finds_its_parent() -> None:
    async with gateway(says(f"{THOUGHT}{BASH}", "done")) as rig:
        _, first = await post(rig, [USER])
        kept = [item for item in first["output"] if item["type"] != "reasoning"]
        await post(rig, [USER, *kept, *results(first["output"])])
        one, two = await calls_of(rig)
    assert (two.parent_id, two.fork) == (one.id, None)


async def test_a_changed_turn_forks_with_its_cause() -> None:
    async with gateway(says("I say so.", "done")) as rig:
        _, first = await post(rig, [USER])
        changed = copy.deepcopy(first["output"])
        changed[0]["content"][0]["text"] = "I never said that."
        await post(rig, [USER, *changed, {"role": "user", "content": "go on"}])
        _, two = await calls_of(rig)
    assert two.fork is ForkCause.EDITED_HISTORY


# -- what is left to the gateway --


async def test_a_chain_of_previous_responses_is_one_conversation() -> None:
    async with gateway(says(f"{THOUGHT}{BASH}", PATCH, "done")) as rig:
        _, first = await post(rig, "hi", instructions="Be brief.")
        _, second = await post(
            rig, results(first["output"]), previous_response_id=first["id"], instructions="Be brief."
        )
        _, third = await post(
            rig, results(second["output"]), previous_response_id=second["id"], instructions="Be brief."
        )
        one, two, three = await calls_of(rig)
    assert [c.parent_id for c in (two, three)] == [one.id, two.id]
    assert [c.fork for c in (two, three)] == [None, None]
    assert third["previous_response_id"] == second["id"]


async def test_instructions_are_not_inherited() -> None:
    async with gateway(says("one", "two")) as rig:
        _, first = await post(rig, "hi", instructions="Be brief.")
        await post(rig, "go on", previous_response_id=first["id"])
        _, two = await calls_of(rig)
    assert two.prefix_len == 0 or two.fork is not None
    assert "Be brief." not in TOKENIZER.decode(two.suffix)


class Counting(MemoryStore):
    """Counts how often bodies are read."""

    reads = 0

    async def bodies(self, call_id: str) -> CallBodies:
        self.reads += 1
        return await super().bodies(call_id)


async def test_a_long_chain_reads_nothing_from_the_store_and_after_a_restart_each_call_once() -> None:
    store, turns = Counting(), 100
    async with gateway(says("ok"), store=store) as rig:
        key = rig.agent_key
        last = await chain(rig, None, turns, key)
        assert store.reads == 0
    async with gateway(says("ok"), store=store) as rig:
        await chain(rig, last, 1, key)
        assert store.reads == turns
        calls = await calls_of(rig)
    assert [c.parent_id for c in calls[1:]] == [c.id for c in calls[:-1]]
    assert all(c.fork is None for c in calls)


async def chain(rig: Rig, last: str | None, turns: int, key: str | None = None) -> str:
    for _ in range(turns):
        _, reply = await post(rig, "go on", key=key, previous_response_id=last)
        last = reply["id"]
    assert last is not None
    return last


@pytest.mark.parametrize("sqlite", [True, False])
async def test_a_restart_between_two_links_changes_nothing(tmp_path: Path, sqlite: bool) -> None:
    store: Store = open_store(tmp_path / "run.db") if sqlite else MemoryStore()
    async with gateway(says(f"{THOUGHT}{BASH}"), store=store) as rig:
        key = rig.agent_key
        _, first = await post(rig, "hi")
    body = {"model": "policy", "tools": TOOLS, "previous_response_id": first["id"]}
    async with gateway(says(BASH), store=store) as rig:
        _, second = await rig.post("/v1/responses", {**body, "input": results(first["output"])}, key=key)
        body["previous_response_id"] = second["id"]
    async with gateway(says("done"), store=store) as rig:
        status, third = await rig.post("/v1/responses", {**body, "input": results(second["output"])}, key=key)
        status, again = await rig.post("/v1/responses", {**body, "input": results(second["output"])}, key=key)
        one, two, three, four = await calls_of(rig)
    assert status == 200, again
    assert [c.parent_id for c in (two, three, four)] == [one.id, two.id, two.id]
    assert all(c.fork is None for c in (two, three, four))
    assert three.id == third["id"]


async def test_branches_of_older_responses_go_on_from_them() -> None:
    store = Counting()
    async with gateway(says("ok"), store=store) as rig:
        ids: list[str] = []
        for _ in range(8):
            ids.append(await chain(rig, ids[-1] if ids else None, 1))
        await chain(rig, ids[1], 1)
        calls = await calls_of(rig)
    assert calls[-1].parent_id == ids[1]
    assert calls[-1].fork is None
    assert store.reads == 2


async def test_items_are_found_by_their_ids_also_after_a_restart() -> None:
    store = MemoryStore()
    async with gateway(says(f"{THOUGHT}I look. {BASH}"), store=store) as rig:
        key = rig.agent_key
        _, first = await post(rig, [USER])
        names = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        names[0].pop("type")
        _, second = await post(rig, [USER, *names, *results(first["output"])])
        body = {"model": "policy", "tools": TOOLS, "previous_response_id": second["id"]}
    async with gateway(says("done"), store=store) as rig:
        status, third = await rig.post("/v1/responses", {**body, "input": results(second["output"])}, key=key)
        one, two, three = await calls_of(rig)
    assert status == 200, third
    assert [c.parent_id for c in (two, three)] == [one.id, two.id]
    assert [c.fork for c in (two, three)] == [None, None]


async def test_only_what_this_attempt_stored_is_found() -> None:
    async with gateway(says("ok")) as rig:
        await rig.start("r2")
        _, kept = await post(rig, "hi")
        _, forgotten = await post(rig, "hi", store=False)
        other = rig.attempts["r2"].agent_key
        for response_id, key in ((forgotten["id"], rig.agent_key), (kept["id"], other), ("resp_x", rig.agent_key)):
            body = {"model": "policy", "input": "go on", "previous_response_id": response_id}
            status, reply = await rig.post("/v1/responses", body, key=key)
            assert (status, reply["error"]["code"]) == (400, "previous_response_not_found")
            assert reply["error"]["param"] == "previous_response_id"
            item = {"type": "item_reference", "id": f"msg_{response_id.removeprefix('resp_')}_0"}
            status, reply = await rig.post("/v1/responses", {"model": "policy", "input": [item]}, key=key)
            assert (status, reply["error"]["code"]) == (400, "item_not_found")
            status, reply = await rig.post(f"/v1/responses/{response_id}", None, key=key, method="GET")
            assert (status, reply["error"]["code"]) == (404, "not_found")


async def test_a_stored_response_can_be_read() -> None:
    async with gateway(says("ok")) as rig, rig.sdk() as sdk:
        made = await sdk.responses.create(model="policy", input="hi")
        read = await sdk.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError):
            await sdk.responses.retrieve(made.id, stream=True)
    assert read.model_dump() == made.model_dump()


async def test_tokens_behind_a_previous_response_are_counted() -> None:
    async with gateway(says("ok")) as rig, rig.sdk() as sdk:
        first = await sdk.responses.create(model="policy", input="hi")
        counted = await sdk.responses.input_tokens.count(model="policy", input="go on", previous_response_id=first.id)
        second = await sdk.responses.create(model="policy", input="go on", previous_response_id=first.id)
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens
