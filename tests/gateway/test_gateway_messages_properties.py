"""The Messages dialect by itself: what it sends, it reads back as the same message."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import orjson
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as Reply
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from canter.errors import BadRequest
from canter.gateway.dialects.canonical import Answer, Asked, Chat, Start
from canter.gateway.dialects.messages import CountTokens, Messages
from canter.tokens.messages import Message, ToolCall, arguments_agree
from canter.types import FinishReason

DIALECT = Messages()
USER = {"role": "user", "content": "hi"}
ASKED = DIALECT.parse({"model": "m", "max_tokens": 1, "messages": [USER]})

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
names = st.text("abz_", min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=3)
arguments = st.one_of(
    objects.map(json.dumps),
    objects.map(lambda value: json.dumps(value, indent=2, ensure_ascii=False)),
    values.map(json.dumps),
    texts,
    st.sampled_from(['{"a": 1, "a": 2}', '{"a": 1e999}', '{"a": 123456789012345678901234567890}', '{"a": "\\ud800"}']),
    st.sampled_from(
        ['{"a": 0.1234567890123456789012}', '{"a": 18446744073709551615}', '{"a": [{"b": 1e400, "b": 2}]}']
    ),
)
calls = st.lists(st.tuples(names, arguments), max_size=3)


@st.composite
def replies(draw: st.DrawFn) -> Message:
    drawn = enumerate(draw(calls))
    return Message(
        "assistant",
        draw(texts),
        reasoning=draw(texts) or None,
        tool_calls=tuple(ToolCall(f"toolu_ct{i:022x}", name, text) for i, (name, text) in drawn),
    )


def answer(message: Message, reason: FinishReason = FinishReason.STOP, stop: str | None = None) -> Answer:
    return Answer(Start("msg_1", 0), "m", "", message, reason, 3, 2, stop=stop, reasoning_tokens=1)


@given(replies())
def test_a_reply_is_read_back_as_the_same_message(message: Message) -> None:
    live = DIALECT.reply(ASKED, answer(message))
    reply = orjson.loads(orjson.dumps(live))
    back = DIALECT.message(reply)
    assert back == DIALECT.message(live), "a gateway remembers the same before and after a restart"
    check_same(message, back)
    assert back == DIALECT.message(orjson.loads(orjson.dumps(DIALECT.reply(ASKED, answer(back))))), (
        "from then on stable"
    )
    history = [USER, {"role": "assistant", "content": reply["content"]}, USER]
    prompt = DIALECT.parse({"model": "m", "max_tokens": 1, "messages": history}).prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages[1] == back


def check_same(sent: Message, back: Message) -> None:
    assert (back.role, back.content, back.reasoning) == ("assistant", sent.content, sent.reasoning)
    assert [(call.id, call.name) for call in back.tool_calls] == [(call.id, call.name) for call in sent.tool_calls]
    for one, two in zip(sent.tool_calls, back.tool_calls, strict=True):
        if not arguments_agree(one.arguments, two.arguments):
            assert not fits(one.arguments)
            assert json.loads(two.arguments) == orjson.loads(one.arguments), "no more is lost than has to be"


def fits(arguments: str) -> bool:
    """Whether objects with each name once, 64-bit integers and doubles hold the arguments as they were sampled."""
    lost: list[object] = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        lost.extend(pairs if len(dict(pairs)) < len(pairs) else ())
        return dict(pairs)

    def real(text: str) -> float:
        lost.extend([text] if Decimal(text) != Decimal(repr(float(text))) else [])
        return float(text)

    def whole(text: str) -> float:
        return int(text) if -(2**63) <= int(text) < 2**64 else real(text)

    json.loads(arguments, object_pairs_hook=members, parse_float=real, parse_int=whole)
    return not lost


@given(replies(), st.integers(0, 20))
def test_the_sdk_accumulates_the_events_to_the_plain_reply(message: Message, signs: int) -> None:
    reply = DIALECT.reply(ASKED, answer(message))
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for raw in DIALECT.events(ASKED, reply, signs):
        name, data = raw.decode().removesuffix("\n\n").split("\n", 1)
        event = EVENT.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}"
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    whole = Reply.model_validate(reply)
    assert snapshot.to_dict() == whole.to_dict()


blocks = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    st.tuples(names, values).map(lambda use: {"type": "tool_use", "id": use[0], "name": "n", "input": use[1]}),
    texts.map(lambda text: {"type": "thinking", "thinking": text, "signature": "s"}),
)
results = st.tuples(names, texts).map(lambda got: {"type": "tool_result", "tool_use_id": got[0], "content": got[1]})
plain = st.one_of(texts, st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3))
turns = st.one_of(
    plain.map(lambda content: {"role": "user", "content": content}),
    plain.map(lambda content: {"role": "system", "content": content}),
    st.lists(results, max_size=3).map(lambda content: {"role": "user", "content": content}),
    st.lists(blocks, max_size=4).map(lambda content: {"role": "assistant", "content": content}),
)


@given(st.lists(turns, min_size=1, max_size=6), plain)
def test_a_conversation_written_down_again_is_the_same(messages: list[dict[str, Any]], system: Any) -> None:
    body = {"model": "m", "messages": messages, "system": system}
    if system in ("", [], [{"type": "text", "text": ""}]) and all(
        turn["role"] == "system" and not turn["content"] for turn in messages
    ):
        with pytest.raises(BadRequest, match="hold no content"):
            CountTokens().parse(body)
        return
    first = canonical(CountTokens().parse(body))
    again = {"model": "m", "messages": [wire(message) for message in first]}
    second = canonical(CountTokens().parse(again))
    assert canonical(CountTokens().parse({**again, "messages": [wire(message) for message in second]})) == second
    assert [m.content for m in merged(first)] == [m.content for m in second]


def canonical(asked: Asked) -> tuple[Message, ...]:
    assert isinstance(asked.prompt, Chat)
    return asked.prompt.messages


def wire(message: Message) -> dict[str, Any]:
    if message.role == "assistant":
        return {"role": "assistant", "content": DIALECT.reply(ASKED, answer(message))["content"]}
    if message.role == "tool":
        got = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}
        return {"role": "user", "content": [got]}
    text = [{"type": "text", "text": message.content}]
    return {"role": message.role, "content": text}


def merged(messages: tuple[Message, ...]) -> list[Message]:
    """A system prompt and a system message behind it are one turn when both are messages."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1].role == message.role == "system":
            found[-1] = Message("system", found[-1].content + "\n" + message.content)
        else:
            found.append(message)
    return found


def test_arguments_that_are_no_object_travel_in_a_wrapper_and_come_back_as_they_were() -> None:
    deep = '{"a":' * 130 + "1" + "}" * 130
    for raw in ('{"command": "echo broken', "[1]", "null", "", "5", '"text"', '{"a": "\\ud800"}', deep):
        message = Message("assistant", tool_calls=(ToolCall("toolu_1", "f", raw),))
        reply = DIALECT.reply(ASKED, answer(message, FinishReason.TOOL_CALLS))
        [block] = reply["content"]
        assert block["input"] == {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
        assert DIALECT.message(reply) == message


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.STOP, "#", ("stop_sequence", "#")),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.TOOL_CALLS, None, ("tool_use", None)),
        (FinishReason.TOOL_CALLS, "#", ("tool_use", None)),
    ],
)
def test_the_reason_of_the_end(reason: FinishReason, stop: str | None, expected: tuple[str, str | None]) -> None:
    reply = DIALECT.reply(ASKED, answer(Message("assistant", "x"), reason, stop))
    assert (reply["stop_reason"], reply["stop_sequence"]) == expected
