"""However a client of Messages spells a conversation when it sends it back, it finds its parent, and no call forks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from gateway_rig import TOKENIZER, fake_engine, gateway
from test_gateway_messages import BASH, USER, request, sdk

from canter.gateway.dialects.messages import Messages
from canter.tokens.messages import Message

TWO_CALLS = (
    "<think>\nLet me look.\n  (step 1) café\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "bash", "arguments": '
    '{ "timeout":  5000.0,  "command":  "cd /w && ls \\u00e9\\/" }}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command": "two"}}\n</tool_call>'
)


def results(reply: Any, *, content: Callable[[str], Any] = str) -> dict[str, Any]:
    uses = [block for block in reply.content if block.type == "tool_use"]
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": use.id, "content": content(f"out {i}")} for i, use in enumerate(uses)
        ],
    }


def as_text_block(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]


def rewritten(reply: Any) -> dict[str, Any]:
    """As Claude Code sends it: arguments in another order, a default added, `cd` removed, no thinking."""
    blocks = [block for block in reply.model_dump(exclude_unset=True)["content"] if block["type"] != "thinking"]
    first = next(block for block in blocks if block["type"] == "tool_use")
    first["input"] = {"replace_all": False, "command": "ls é/", "timeout": 5000}
    return said(blocks)


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


SPELLINGS: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "objects": lambda r: [USER, said(r.content), results(r)],
    "model_dump": lambda r: [USER, said(r.model_dump()["content"]), results(r)],
    "exclude_unset": lambda r: [USER, said(r.model_dump(exclude_unset=True)["content"]), results(r)],
    "exclude_none": lambda r: [USER, said(r.model_dump(exclude_none=True)["content"]), results(r)],
    "json": lambda r: [USER, said(json.loads(r.to_json())["content"]), results(r)],
    "to_param": lambda r: [USER, r.to_param(), results(r)],
    "the whole message": lambda r: [USER, json.loads(r.to_json()), results(r)],
    "user as a block": lambda r: [{"role": "user", "content": as_text_block("hi")}, r.to_param(), results(r)],
    "results as blocks": lambda r: [USER, r.to_param(), results(r, content=as_text_block)],
    "results reversed": lambda r: [USER, r.to_param(), {"role": "user", "content": results(r)["content"][::-1]}],
    "results in two messages": lambda r: [
        USER, r.to_param(), *({"role": "user", "content": [block]} for block in results(r)["content"])
    ],
    "reply in three messages": lambda r: [
        USER, *(said([block]) for block in r.to_param()["content"]), results(r)
    ],
    "thinking dropped": lambda r: [USER, said(r.content[1:]), results(r)],
    "thinking redacted": lambda r: [
        USER, said([{"type": "redacted_thinking", "data": "x"}, *r.content[1:]]), results(r)
    ],
    "as Claude Code": lambda r: [USER, rewritten(r), results(r)],
    "a reminder before the results": lambda r: [
        USER, r.to_param(), {"role": "user", "content": [{"type": "text", "text": "note"}, *results(r)["content"]]}
    ],
    "a system message behind": lambda r: [USER, r.to_param(), results(r), {"role": "system", "content": "note"}],
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_spelling_of_a_history_extends_its_parent(spelling: str, stream: bool) -> None:
    async with gateway(fake_engine(lambda p, s, n: TWO_CALLS if n == 0 else "done")) as rig:
        async with sdk(rig) as client:
            if stream:
                async with client.messages.stream(**request(tools=[BASH], max_tokens=250)) as events:
                    reply: Any = await events.get_final_message()
            else:
                reply = await client.messages.create(**request(tools=[BASH], max_tokens=250))
            assert reply.stop_reason == "tool_use"
            history = SPELLINGS[spelling](reply)
            final = await client.messages.create(**request(tools=[BASH], messages=history))
        first, second = await rig.store.calls(["r1"])
    assert (second.parent_id, second.fork) == (first.id, None)
    assert second.prefix_len == first.prompt_len + len(first.sampled), "the sampled ids stand as they were drawn"
    shown = TOKENIZER.decode(second.suffix)
    assert shown.index("out 0") < shown.index("out 1")
    assert final.content[0].type == "text"
    assert final.content[0].text == "done"


@pytest.mark.parametrize("text", ["All done.  \n", "\nAll done: café ✓.  \n", "x"])
async def test_a_reply_of_text_alone_is_found_as_a_string_and_as_blocks(text: str) -> None:
    async with gateway(fake_engine(lambda *_: text)) as rig, sdk(rig) as client:
        reply = await client.messages.create(**request())
        assert reply.content[0].type == "text"
        for content in (reply.content, reply.content[0].text, text.rstrip(), as_text_block(text)):
            history = [
                USER,
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"and {content!r}?"[:30]},
            ]
            await client.messages.create(**request(messages=history))
        first, *others = await rig.store.calls(["r1"])
    for call in others:
        assert (call.parent_id, call.fork) == (first.id, None)


async def test_the_cache_mark_and_the_form_of_old_messages_may_move_as_with_claude_code() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.a15; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ]
    mark = {"cache_control": {"type": "ephemeral"}}
    note = {
        "role": "system",
        "content": [{"type": "text", "text": "# Env", **mark}],
        "output_config": {"effort": "high"},
    }
    script = ['<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>', "done"]
    async with gateway(fake_engine(lambda p, s, n: script[n])) as rig, sdk(rig) as client:
        reply = await client.beta.messages.create(
            **request(messages=[USER, note], system=system, tools=[{**BASH, **mark}])
        )
        system[0]["text"] = "x-anthropic-billing-header: cc_version=2.1.332.fe0; cch=1f; cc_prev_msg=msg_1;"
        later = [USER, {"role": "system", "content": "# Env"}, {"role": "assistant", "content": reply.content}]
        got = {"type": "tool_result", "tool_use_id": reply.content[0].id, "is_error": False, **mark}
        await client.beta.messages.create(
            **request(messages=[*later, {"role": "user", "content": [got]}], system=system, tools=[BASH])
        )
        first, second = await rig.store.calls(["r1"])
    assert (second.parent_id, second.fork) == (first.id, None)
    prompt = TOKENIZER.decode(first.suffix)
    assert "You are an agent.<|im_end|>" in prompt
    assert "billing" not in prompt


async def test_a_tool_that_a_search_loads_does_not_change_the_beginning_of_the_prompt() -> None:
    placeholder = {"name": "Placeholder", "description": "none", "input_schema": {}, "defer_loading": True}
    found = {"name": "Fetch", "description": "Gets a page.", "input_schema": {"type": "object"}, "defer_loading": True}
    script = ['<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>', "done"]
    async with gateway(fake_engine(lambda p, s, n: script[n])) as rig, sdk(rig) as client:
        reply = await client.messages.create(**request(tools=[BASH, placeholder]))
        references = [{"type": "tool_reference", "tool_name": name} for name in ("Fetch", "Gone")]
        got = {"type": "tool_result", "tool_use_id": reply.content[0].id, "content": references}
        history = [USER, reply.to_param(), {"role": "user", "content": [got]}]
        await client.messages.create(**request(messages=history, tools=[BASH, found, placeholder]))
        first, second = await rig.store.calls(["r1"])
    assert "Placeholder" not in TOKENIZER.decode(first.suffix)
    assert (second.parent_id, second.fork) == (first.id, None)
    shown = TOKENIZER.decode(second.suffix)
    assert '"description":"Gets a page."' in shown
    assert "\nGone<|im_end|>" in shown


async def test_an_attempt_goes_on_from_its_recorded_calls_in_a_gateway_that_was_restarted() -> None:
    async with gateway(fake_engine(lambda *_: TWO_CALLS)) as rig, sdk(rig) as client:
        reply = await client.messages.create(**request(tools=[BASH], max_tokens=250))
        store, started = rig.store, rig.attempts
    async with gateway(fake_engine(lambda *_: "done"), store=store) as rig:
        rig.attempts = started
        async with sdk(rig) as client:
            history = [USER, rewritten(reply), results(reply)]
            counted = await client.messages.count_tokens(model="policy", messages=history, tools=[BASH])
            await client.messages.create(**request(tools=[BASH], messages=history))
        first, second = await store.calls(["r1"])
    assert (second.parent_id, second.fork) == (first.id, None)
    assert counted.input_tokens == second.prompt_len


def parsed(*messages: Any, **fields: Any) -> tuple[Message, ...]:
    prompt: Any = Messages().parse({"model": "m", "max_tokens": 1, "messages": list(messages), **fields}).prompt
    return tuple(prompt.messages)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_neighbours_of_one_role_are_one_turn() -> None:
    assert parsed(user("a"), user("b"), user([])) == (Message("user", "a\nb"),)
    text, use = {"type": "text", "text": "t"}, {"type": "tool_use", "id": "i", "name": "n", "input": {}}
    split = [{"role": "assistant", "content": [block]} for block in (text, use)]
    assert parsed(*split, user("x")) == parsed({"role": "assistant", "content": [text, use]}, user("x"))


def test_a_turn_that_only_says_how_hard_to_think_is_not_shown() -> None:
    effort = {"role": "system", "output_config": {"effort": "low"}}
    assert parsed(user("a"), effort) == (Message("user", "a"),)


def test_tools_that_come_and_go_are_told_where_they_stand() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "description": "d"}
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}
    inline = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**tool, "name": "g"}}}
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}
    [_, told] = parsed(user("a"), {"role": "system", "content": [added, inline, removed]}, tools=[tool])
    shown = '{"type":"function","function":{"name":"%s","description":"d","parameters":{"type":"object"}}}'
    assert told.content == f"Tool added: {shown % 'f'}\nTool added: {shown % 'g'}\nTool removed: f"


def test_an_error_without_a_word_reads_error() -> None:
    for content, is_error, shown in [("", True, "error"), (None, True, "error"), ("no", True, "no"), (None, None, "")]:
        block = {"type": "tool_result", "tool_use_id": "i", "content": content, "is_error": is_error}
        assert parsed(user([block])) == (Message("tool", shown, tool_call_id="i"),)
