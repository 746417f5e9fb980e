"""Responses without a network: messages to items and back, and where turns begin."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.errors import BadRequest
from canter.gateway.dialects.canonical import Answer, Asked, Chat, Start
from canter.gateway.dialects.responses import Responses
from canter.gateway.dialects.responses_input import item_id, origin, read_items, seal, unseal
from canter.tokens.messages import Message, ToolCall, arguments_agree, new_tool_call_id
from canter.types import FinishReason

DIALECT = Responses()
TOOLS = [
    {"type": "function", "name": "f"},
    {"type": "custom", "name": "free"},
    {
        "type": "namespace",
        "name": "n",
        "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "free"}],
    },
]
texts = st.text(st.characters(codec="utf-8"), max_size=30)
arguments = st.one_of(
    texts,
    st.dictionaries(texts, st.one_of(texts, st.integers(), st.none(), st.lists(texts, max_size=2)), max_size=3).map(
        json.dumps
    ),
    st.dictionaries(texts, texts, max_size=2).map(lambda d: json.dumps(d, indent=1, ensure_ascii=False)),
    texts.map(lambda text: json.dumps({"input": text})),
    st.sampled_from(["", "{", "[1]", '{"a": 1, "a": 2}', '{"input": 1}', '{"input": "x", "y": 1e400}']),
)
names = st.sampled_from(["f", "free", "n__f", "n__free", "made up", "n__made_up"])
calls = st.builds(lambda name, text: ToolCall(new_tool_call_id(), name, text), names, arguments)
messages = st.builds(
    lambda content, reasoning, tool_calls: Message("assistant", content, reasoning or None, tuple(tool_calls)),
    texts,
    texts,
    st.lists(calls, max_size=3),
)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "include": st.just(["reasoning.encrypted_content"]),
        "reasoning": st.just({"summary": "auto"}),
        "store": st.booleans(),
        "stream": st.booleans(),
    },
)
_numbers = iter(range(10**9))


def asked(items: Any = "hi", **fields: Any) -> Asked:
    return DIALECT.parse({"model": "policy", "input": items, "tools": TOOLS, **fields})


def reply_to(request: Asked, message: Message, finish: FinishReason = FinishReason.STOP) -> dict[str, Any]:
    start = Start(f"resp_{next(_numbers):024x}", 1_800_000_000)
    made: dict[str, Any] = orjson.loads(
        orjson.dumps(DIALECT.reply(request, Answer(start, "policy", "p", message, finish, 3, 4)))
    )
    return made


def chat(request: Asked) -> tuple[Message, ...]:
    assert isinstance(request.prompt, Chat)
    return request.prompt.messages


def says_the_same(sampled: Message, back: Message) -> bool:
    """Whether a message came back: as it was, but for the spelling of a custom tool's arguments."""
    same_calls = [(c.id, c.name) for c in sampled.tool_calls] == [(c.id, c.name) for c in back.tool_calls] and all(
        ours.arguments == theirs.arguments
        or ("free" in ours.name and arguments_agree(ours.arguments, theirs.arguments))
        for ours, theirs in zip(sampled.tool_calls, back.tool_calls, strict=True)
    )
    return same_calls and (sampled.content, sampled.reasoning, sampled.role) == (
        back.content,
        back.reasoning,
        back.role,
    )


@given(messages, wishes, st.sampled_from(list(FinishReason)))
def test_a_message_comes_back_out_of_its_reply(message: Message, wish: dict[str, Any], finish: FinishReason) -> None:
    reply = reply_to(asked(**wish), message, finish)
    assert says_the_same(message, DIALECT.message(reply))


@given(st.lists(messages, min_size=1, max_size=4), wishes, st.booleans())
def test_a_history_of_replies_is_read_as_the_messages_that_they_carry(
    turns: list[Message], wish: dict[str, Any], speak: bool
) -> None:
    """Also where nobody says anything between two replies."""
    items: list[Any] = [{"role": "user", "content": "hi"}]
    carried: list[Message] = []
    for turn in turns:
        reply = reply_to(asked(items, **wish), turn)
        items += reply["output"]
        carried.append(DIALECT.message(reply))
        if speak:
            items.append({"role": "user", "content": "go on"})
    back = [m for m in chat(asked(items, **wish)) if m.role == "assistant"]
    assert back == carried
    assert chat(asked(items)) == chat(asked(items)), "reading is stable"


@given(st.lists(messages, min_size=1, max_size=3))
def test_without_ids_turns_are_told_by_what_is_between_them(turns: list[Message]) -> None:
    items: list[Any] = []
    carried: list[Message] = []
    for turn in turns:
        reply = reply_to(asked(), turn)
        carried.append(DIALECT.message(reply))
        for item in reply["output"]:
            if item["id"].startswith("ctcr_"):
                return  # arguments that are no input: only the id could tell
            items.append({name: value for name, value in item.items() if name != "id"})
        items.append({"role": "user", "content": "go on"})
    assert [m for m in read_items(items) if m.role == "assistant"] == carried


@given(messages, wishes, st.integers(0, 3), st.sampled_from(list(FinishReason)))
def test_events_are_numbered_and_carry_the_reply(
    message: Message, wish: dict[str, Any], signs: int, finish: FinishReason
) -> None:
    request = asked(**wish)
    reply = reply_to(request, message, finish)
    start = Start(reply["id"], reply["created_at"])
    sent = [DIALECT.keep_alive(request, start, number) for number in range(signs)]
    sent += DIALECT.events(request, reply, signs)
    events = [orjson.loads(block.split(b"data: ", 1)[1]) for block in b"".join(sent).split(b"\n\n") if block]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == reply["output"]
    assert events[-1]["response"] == reply
    assert sent[-1].startswith(
        b"event: response.completed" if reply["status"] == "completed" else b"event: response.incomplete"
    )
    failure = DIALECT.failure(request, start, {"error": {"message": "m", "type": "server_error", "code": "x"}}, signs)
    last = orjson.loads(failure.split(b"data: ")[-1])
    assert last["sequence_number"] == (signs + 1 if signs else 2)


@pytest.mark.parametrize(
    ("type_", "code", "told"),
    [
        ("server_error", "engine_error", "server_error"),
        ("invalid_request_error", "context_length_exceeded", "context_length_exceeded"),
        ("invalid_request_error", "invalid_type", "invalid_prompt"),
    ],
)
def test_a_failure_says_whether_to_try_again(type_: str, code: str, told: str) -> None:
    body = {"error": {"message": "m", "type": type_, "param": None, "code": code}}
    failure = DIALECT.failure(asked(), Start("resp_1", 1), body, 1)
    assert orjson.loads(failure.split(b"data: ")[-1])["response"]["error"] == {"code": told, "message": "m"}


@given(texts)
def test_sealed_reasoning_is_opaque_and_comes_back(text: str) -> None:
    assert unseal(seal(text)) == text
    [message] = read_items([{"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": seal(text)}])
    assert (message.reasoning or "") == text


@pytest.mark.parametrize("sealed", ["gAAAAABo", "canter-1.%%%", "canter-1._w==", "canter-9.aGk=", ""])
def test_what_somebody_else_sealed_is_left_alone(sealed: str) -> None:
    summary = [{"type": "summary_text", "text": "in short"}]
    item = {"type": "reasoning", "summary": summary, "encrypted_content": sealed, "content": None}
    assert [m.reasoning for m in read_items([item])] == ["in short"]
    assert [m.reasoning for m in read_items([{**item, "summary": None}])] == [None]


def test_ids_name_their_response() -> None:
    assert origin(item_id("fc", "resp_" + "0a" * 12, 7)) == ("0a" * 12, 7)
    assert origin("msg_01a227d5-f2b9-7480-91b4-0a8b3a542450") is None
    assert origin(None) is None


A, B = "a" * 24, "b" * 24


def said(text: str, id_: str | None = None) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text, "id": id_}


def thought(text: str, id_: str | None = None) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}], "id": id_}


def called(call_id: str, id_: str | None = None) -> dict[str, Any]:
    return {"type": "function_call", "name": "f", "call_id": call_id, "arguments": "{}", "id": id_}


def gave(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "x"}


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        pytest.param([thought("t"), said("m"), called("1"), called("2")], ["tm12"], id="one reply without ids"),
        pytest.param([said("m"), called("1"), gave("1"), called("2")], ["m1", "2"], id="results part turns"),
        pytest.param([said("m"), said("n")], ["m", "n"], id="two texts"),
        pytest.param([thought("t"), thought("u"), said("m")], ["t", "um"], id="two thoughts"),
        pytest.param([said("m"), thought("t"), called("1")], ["m", "t1"], id="a reply begins with its reasoning"),
        pytest.param([called("1"), said("m"), gave("1")], ["m1"], id="a text behind its call"),
        pytest.param([said("m", f"msg_{A}_0"), called("1", f"fc_{B}_0")], ["m", "1"], id="two responses"),
        pytest.param([said("m", f"msg_{A}_0"), called("1", f"fc_{A}_1")], ["m1"], id="one response"),
        pytest.param([said("m"), called("1", f"fc_{B}_0")], ["m", "1"], id="the first of another response"),
        pytest.param([said("m"), called("1", f"fc_{B}_1")], ["m1"], id="the second of a response"),
        pytest.param([said("m", f"msg_{A}_0"), called("1", "fc_own")], ["m1"], id="an id of the client's"),
        pytest.param(
            [thought("t", f"rs_{A}_0"), thought("t", f"rs_{A}_0"), said("m", f"msg_{A}_1")], ["t", "tm"], id="again"
        ),
        pytest.param(
            [called("1", f"fc_{A}_0"), gave("1"), called("2", f"fc_{A}_1"), gave("2")], ["12"], id="results between"
        ),
        pytest.param(
            [said("m"), {"type": "web_search_call", "id": "ws_1"}, called("1")], ["m1"], id="a hosted call is not there"
        ),
    ],
)
def test_where_a_turn_ends(items: list[dict[str, Any]], turns: list[str]) -> None:
    read = [m for m in read_items(items) if m.role == "assistant"]
    assert [(m.reasoning or "") + m.content + "".join(c.id for c in m.tool_calls) for m in read] == turns


def test_a_codex_request_is_read() -> None:
    """As Codex 0.171 sends it, shortened."""
    tool_call = called("call_43be", "fc_stub10") | {
        "status": "completed",
        "name": "spawn_agent",
        "namespace": "multi_agent_v1",
    }
    body = {
        "model": "policy",
        "stream": True,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a227d5",
        "client_metadata": {"thread_id": "01a227d5"},
        "input": [
            {
                "type": "message",
                "id": "msg_1",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Be good."}],
            },
            {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
            thought("hm", "rs_stub1")
            | {"summary": [{"type": "summary_text", "text": "**hm**"}], "encrypted_content": "ENC1"},
            tool_call,
            gave("call_43be") | {"id": "fco_1"},
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}},
            {
                "type": "namespace",
                "name": "multi_agent_v1",
                "description": "Agents.",
                "tools": [
                    {"type": "function", "name": "spawn_agent", "strict": False, "parameters": {"type": "object"}}
                ],
            },
            {"type": "web_search", "external_web_access": True},
        ],
    }
    request = DIALECT.parse(body)
    developer, user, assistant, tool = chat(request)
    assert (developer, user) == (Message("developer", "Be good."), Message("user", "Go."))
    assert assistant == Message("assistant", "", "hm", (ToolCall("call_43be", "multi_agent_v1__spawn_agent", "{}"),))
    assert tool == Message("tool", "x", tool_call_id="call_43be")
    assert isinstance(request.prompt, Chat)
    assert [t.name for t in request.prompt.tools] == ["exec_command", "multi_agent_v1__spawn_agent"]
    assert request.requested["kept_out"] == ["web_search"]


def test_tools_may_come_with_the_input() -> None:
    items = [{"role": "user", "content": "hi"}, {"type": "additional_tools", "role": "developer", "tools": TOOLS[:1]}]
    request = DIALECT.parse({"model": "policy", "input": items})
    assert isinstance(request.prompt, Chat)
    assert [tool.name for tool in request.prompt.tools] == ["f"]
    assert len(chat(request)) == 1


def test_parts_of_a_text_are_joined_as_in_chat() -> None:
    content = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    outputs = {"type": "function_call_output", "call_id": "1", "output": content}
    assert [m.content for m in read_items([{"role": "user", "content": content}, outputs])] == ["a\nb", "a\nb"]


def test_a_refused_part_is_named() -> None:
    with pytest.raises(BadRequest, match="input_image") as refused:
        read_items([{"role": "user", "content": [{"type": "input_image"}]}])
    assert refused.value.code == "unsupported_content"
