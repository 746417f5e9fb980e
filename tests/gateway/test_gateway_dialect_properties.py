"""What is read, written down and read again is the same; and one conversation is one prompt, whatever carries it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from gateway_rig import TOKENIZER, fake_engine, gateway
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from canter.gateway.dialects.canonical import Answer, Asked, Chat, Start, Text, TokenLogprob, Tokens
from canter.gateway.dialects.chat import ChatCompletions, wire_messages, wire_tools
from canter.gateway.dialects.completions import Completions
from canter.gateway.dialects.messages import Messages
from canter.gateway.dialects.responses import Responses
from canter.gateway.identity import request_digest
from canter.tokens.messages import Message, ToolCall, ToolSpec
from canter.types import FinishReason

CHAT, COMPLETIONS = ChatCompletions(), Completions()

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
some_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
names = st.text("abz_", min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, values, max_size=3)
specs = st.builds(ToolSpec, names, texts, st.just({"type": "object", "properties": {}}))
tools = st.lists(specs, max_size=3, unique_by=lambda tool: tool.name).map(tuple)
finishes = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS])
logprobs = st.lists(
    st.builds(TokenLogprob, texts, st.none() | st.binary(max_size=4), st.floats(max_value=0, allow_nan=False)),
    max_size=3,
).map(tuple)


@st.composite
def assistants(draw: st.DrawFn, arguments: st.SearchStrategy[str] = texts, number: int = 0) -> Message:
    calls = draw(st.lists(st.tuples(names, arguments), max_size=3))
    return Message(
        "assistant",
        draw(texts if calls else some_text),
        reasoning=draw(st.none() | some_text),
        tool_calls=tuple(ToolCall(f"call_ct{number:06x}{i:016x}", *call) for i, call in enumerate(calls)),
    )


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """One that every protocol can carry: instructions first, then the user and the assistant in turn."""
    messages = [Message("system", text)] if (text := draw(texts)) else []
    for turn in range(draw(st.integers(1, 3))):
        messages.append(Message("user", draw(some_text)))
        if turn or draw(st.booleans()):
            said = draw(assistants(objects.map(lambda value: orjson.dumps(value).decode()), turn))
            results = [Message("tool", draw(texts), tool_call_id=call.id) for call in said.tool_calls]
            messages += [said, *results]
            if not results:
                messages.append(Message("user", draw(some_text)))
            elif draw(st.booleans()):
                continue
    return tuple(_alternating(messages))


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Without neighbours of the user's, which Messages takes for one turn."""
    kept: list[Message] = []
    for message in messages:
        if not (kept and kept[-1].role == message.role == "user"):
            kept.append(message)
    return kept


def as_chat(messages: Sequence[Message], offered: Sequence[ToolSpec]) -> dict[str, Any]:
    return {"model": "policy", "messages": wire_messages(messages), "tools": wire_tools(offered)}


def as_responses(messages: Sequence[Message], offered: Sequence[ToolSpec]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "policy", "input": []}
    for number, message in enumerate(messages):
        if message.role == "system" and number == 0:
            body["instructions"] = message.content
        elif message.role == "tool":
            output = {"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}
            body["input"].append(output)
        elif message.role == "assistant":
            body["input"] += _items(message)
        else:
            content = [{"type": "input_text", "text": message.content}]
            body["input"].append({"type": "message", "role": message.role, "content": content})
    body["tools"] = [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters}
        for tool in offered
    ]
    return body


def _items(message: Message) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if message.reasoning:
        thought = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "summary": [], "content": thought})
    if message.content:
        content = [{"type": "output_text", "text": message.content, "annotations": []}]
        items.append({"type": "message", "role": "assistant", "content": content})
    for call in message.tool_calls:
        items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments})
    return items


def as_messages(messages: Sequence[Message], offered: Sequence[ToolSpec]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "policy", "max_tokens": 64, "messages": []}
    for message in messages:
        if message.role == "system":
            body["system"] = [{"type": "text", "text": message.content, "cache_control": {"type": "ephemeral"}}]
        elif message.role == "assistant":
            body["messages"].append({"role": "assistant", "content": _blocks(message)})
        elif message.role == "tool":
            result = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}
            _user(body).append(result)
        else:
            _user(body).append({"type": "text", "text": message.content})
    body["tools"] = [
        {"name": tool.name, "description": tool.description, "input_schema": tool.parameters} for tool in offered
    ]
    return body


def _user(body: dict[str, Any]) -> list[Any]:
    """The content of the user's turn that is going on."""
    if not body["messages"] or body["messages"][-1]["role"] != "user":
        body["messages"].append({"role": "user", "content": []})
    content: list[Any] = body["messages"][-1]["content"]
    return content


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": "x"})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


WRITERS: dict[str, tuple[Any, Callable[..., dict[str, Any]]]] = {
    "/v1/chat/completions": (CHAT, as_chat),
    "/v1/responses": (Responses(), as_responses),
    "/v1/messages": (Messages(), as_messages),
}


def prompt_of(asked: Asked) -> Chat:
    assert isinstance(asked.prompt, Chat)
    return asked.prompt


@given(conversations(), tools)
def test_one_conversation_is_one_prompt_in_every_protocol(messages: tuple[Message, ...], offered: Any) -> None:
    if messages[-1].role == "assistant":
        messages = messages[:-1]
    wanted = TOKENIZER.encode(TOKENIZER.apply_chat_template(messages, offered))
    for path, (dialect, write) in WRITERS.items():
        body = orjson.loads(orjson.dumps(write(messages, offered)))
        prompt = prompt_of(dialect.parse(body))
        assert prompt.messages == messages, path
        assert prompt.tools == offered, path
        ids = TOKENIZER.encode(TOKENIZER.apply_chat_template(prompt.messages, prompt.tools))
        np.testing.assert_array_equal(ids, wanted, path)


async def test_one_conversation_is_one_prompt_to_the_engine() -> None:
    call = ToolCall("call_ct" + "0" * 22, "bash", '{"command":"ls -l","timeout":5}')
    messages = (
        Message("system", "Be brief."),
        Message("user", "What is here?"),
        Message("assistant", "Let me look.", reasoning="A list helps.", tool_calls=(call,)),
        Message("tool", "café\n", tool_call_id=call.id),
        Message("user", "And now?"),
    )
    offered = (ToolSpec("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}}),)
    prompts = {}
    async with gateway(fake_engine()) as rig:
        for number, (path, (_, write)) in enumerate(WRITERS.items()):
            started = await rig.start(f"x{number}")
            status, reply = await rig.post(path, write(messages, offered), key=started.agent_key)
            assert status == 200, reply
            [recorded] = await rig.store.calls([f"x{number}"])
            prompts[path] = recorded.suffix.tolist()
    text = TOKENIZER.apply_chat_template(messages, offered)
    assert prompts == dict.fromkeys(WRITERS, TOKENIZER.encode(text).tolist())


@given(conversations(), tools)
def test_a_chat_that_is_read_and_written_again_is_the_same(messages: tuple[Message, ...], offered: Any) -> None:
    once = CHAT.parse(orjson.loads(orjson.dumps(as_chat(messages, offered))))
    prompt = prompt_of(once)
    again = CHAT.parse(as_chat(prompt.messages, prompt.tools))
    assert (prompt_of(again), request_digest(again)) == (prompt, request_digest(once))
    assert prompt.messages == messages


@given(assistants(), finishes, st.none() | logprobs, st.booleans())
def test_a_chat_reply_comes_back_as_the_message_that_it_carries(
    message: Message, finish: FinishReason, tokens: tuple[TokenLogprob, ...] | None, parts: bool
) -> None:
    asked = CHAT.parse({"model": "policy", "messages": [{"role": "user", "content": "hi"}]})
    reply = orjson.loads(orjson.dumps(CHAT.reply(asked, answer(message, finish, tokens))))
    ChatCompletion.model_validate(reply)
    assert CHAT.message(reply) == message
    echo = dict(reply["choices"][0]["message"])
    if parts and echo["content"]:
        echo["content"] = [{"type": "text", "text": echo["content"]}]
    history = [{"role": "user", "content": "hi"}, echo, {"role": "user", "content": "more"}]
    assert prompt_of(CHAT.parse({"model": "policy", "messages": history})).messages[1] == message


@given(assistants(), finishes, st.none() | logprobs, st.booleans())
def test_the_events_of_a_chat_add_up_to_the_reply(
    message: Message, finish: FinishReason, tokens: tuple[TokenLogprob, ...] | None, usage: bool
) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    asked = CHAT.parse({**body, "stream_options": {"include_usage": usage}})
    reply = CHAT.reply(asked, answer(message, finish, tokens))
    *events, end = CHAT.events(asked, reply, 0)
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in choices:
        delta = choice["delta"]
        made["content"] += delta.get("content") or ""
        made["reasoning_content"] += delta.get("reasoning_content") or ""
        made["tool_calls"] += delta.get("tool_calls") or []
    sent = reply["choices"][0]["message"]
    assert made["content"] == (sent["content"] or "")
    assert made["reasoning_content"] == sent.get("reasoning_content", "")
    assert [call.pop("index") for call in made["tool_calls"]] == list(range(len(message.tool_calls)))
    assert made["tool_calls"] == sent.get("tool_calls", [])
    assert choices[-1]["finish_reason"] == finish.value
    assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == ([reply["usage"]] if usage else [])
    assert end == b"data: [DONE]\n\n"


@given(some_text, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.booleans())
def test_a_completion_that_is_read_and_written_again_is_the_same(text: str, ids: list[int], nested: bool) -> None:
    for prompt in (text, ids):
        body = {"model": "policy", "prompt": [prompt] if nested else prompt}
        once = COMPLETIONS.parse(orjson.loads(orjson.dumps(body)))
        written: Any = once.prompt.text if isinstance(once.prompt, Text) else None
        if isinstance(once.prompt, Tokens):
            written = once.prompt.ids.tolist()
        assert written == prompt
        assert request_digest(COMPLETIONS.parse({"model": "policy", "prompt": written})) == request_digest(once)


@given(texts, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), st.none() | logprobs, st.booleans())
def test_a_completions_reply_comes_back_and_its_events_add_up_to_it(
    text: str, finish: FinishReason, tokens: tuple[TokenLogprob, ...] | None, usage: bool
) -> None:
    message = Message("assistant", text)
    asked = COMPLETIONS.parse({"model": "policy", "prompt": "x", "stream_options": {"include_usage": usage}})
    reply = orjson.loads(orjson.dumps(COMPLETIONS.reply(asked, answer(message, finish, tokens))))
    Completion.model_validate(reply)
    assert COMPLETIONS.message(reply) == message
    *events, end = COMPLETIONS.events(asked, reply, 3)
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
    assert [choice for chunk in chunks for choice in chunk["choices"]] == reply["choices"]
    assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == ([reply["usage"]] if usage else [])
    assert end == b"data: [DONE]\n\n"


@pytest.mark.parametrize("path", WRITERS)
@given(messages=conversations(), offered=tools)
def test_what_names_a_request_is_what_it_says(path: str, messages: tuple[Message, ...], offered: Any) -> None:
    """Neither how it travels nor how it is spelled changes it; one more word does."""
    dialect, write = WRITERS[path]
    if messages[-1].role == "assistant":
        messages = messages[:-1]
    body = write(messages, offered)
    name = request_digest(dialect.parse(body))
    shuffled = dict(reversed(list(body.items())))
    assert request_digest(dialect.parse({**shuffled, "stream": True, "metadata": {"a": "b"}, "unknown": 1})) == name
    more = (
        *messages[:-1],
        Message(messages[-1].role, messages[-1].content + "!", tool_call_id=messages[-1].tool_call_id),
    )
    assert request_digest(dialect.parse(write(more, offered))) != name


def answer(message: Message, finish: FinishReason, tokens: tuple[TokenLogprob, ...] | None) -> Answer:
    return Answer(Start("id-1", 7), "policy", "policy-3", message, finish, 5, 4, logprobs=tokens)
