"""The scripted policy: what it says to agents of every shape, through a real chat template and real parsing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from canter.engine.fake import Fault
from canter.engine.scripted import (
    BULKY,
    DELEGATE,
    FILES,
    FINAL,
    STEPS,
    SUB_TASK,
    SUMMARY,
    TITLE,
    reply,
    scripted_engine,
)
from canter.errors import EngineError
from canter.tokens.byte_level import byte_level_tokenizer
from canter.tokens.messages import Message, ToolCall, ToolSpec
from canter.tokens.parsing import parse_reply
from canter.tokens.rendering import make_rendering
from canter.types import Sampling

TOKENIZER = byte_level_tokenizer()
TASK = Message("user", "Make files.")


def tool(name: str, properties: dict[str, Any], required: Sequence[str] = ()) -> ToolSpec:
    return ToolSpec(name, "A tool.", {"type": "object", "properties": properties, "required": list(required)})


TEXT = {"type": "string"}
BASH = tool("Bash", {"command": TEXT, "timeout": {"type": "number"}}, ["command"])


def say(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
    """The policy's reply as the gateway reads it."""
    text = reply(TOKENIZER.apply_chat_template(messages, tools))
    parsed = parse_reply(text, thinks=True, in_reasoning=False, calls_tools=bool(tools))
    assert parsed.malformed == 0
    calls = tuple(
        ToolCall(f"c{len(messages)}-{i}", name, arguments) for i, (name, arguments) in enumerate(parsed.tool_calls)
    )
    return Message("assistant", parsed.content, parsed.reasoning, calls)


def play(tools: Sequence[ToolSpec], *start: Message) -> list[Message]:
    """A whole conversation, with a result for each call."""
    messages = list(start or [TASK])
    for _ in range(STEPS + 3):
        answer = say(messages, tools)
        messages.append(answer)
        if not answer.tool_calls:
            return messages
        messages += [Message("tool", "ok", tool_call_id=call.id) for call in answer.tool_calls]
    raise AssertionError("it never ends")


def calls_in(messages: Sequence[Message]) -> list[ToolCall]:
    return [call for message in messages for call in message.tool_calls]


@pytest.mark.parametrize(
    ("spec", "parameter", "argv"),
    [
        (BASH, "command", False),
        (tool("exec_command", {"cmd": TEXT}, ["cmd"]), "cmd", False),
        (tool("shell", {"command": {"type": "array", "items": TEXT}}, ["command"]), "command", True),
        (tool("anything", {"command": {"anyOf": [TEXT, {"type": "null"}]}}), "command", False),
        (tool("terminal", {"command": {"type": ["null", "string"]}, "reset": {"type": "boolean"}}), "command", False),
    ],
)
def test_it_makes_the_files_with_whatever_shell_there_is(spec: ToolSpec, parameter: str, argv: bool) -> None:
    messages = play([tool("read_file", {"path": TEXT}, ["path"]), spec])
    calls = calls_in(messages)
    commands = [json.loads(call.arguments)[parameter] for call in calls]
    assert [call.name for call in calls] == [spec.name] * len(FILES)
    assert [isinstance(command, list) for command in commands] == [argv] * len(FILES)
    assert all(name in str(command) for name, command in zip(FILES, commands, strict=True))
    assert messages[-1].content == FINAL


def test_its_turns_show_what_harnesses_change() -> None:
    first, second, third, last = [m for m in play([BASH]) if m.role == "assistant"]
    assert "café" in (first.reasoning or "")
    assert first.content
    assert first.tool_calls[0].arguments.startswith("{ ")
    assert r"\u00e9" in first.tool_calls[0].arguments
    assert list(json.loads(first.tool_calls[0].arguments)) == ["timeout", "command"]
    assert (second.content, second.reasoning) == ("", None)
    assert r"\/" in second.tool_calls[0].arguments
    assert (third.content, len(third.tool_calls)) == ("", 2)
    assert last.content != last.content.strip()


def test_required_parameters_are_filled_with_their_types() -> None:
    properties = {
        "command": TEXT,
        "description": TEXT,
        "risk": {"enum": ["LOW", "HIGH"]},
        "count": {"type": "integer"},
        "background": {"type": "boolean"},
        "tags": {"type": "array"},
        "more": {"type": "object"},
    }
    [call, *_] = calls_in(play([tool("run", properties, list(properties))]))
    found = json.loads(call.arguments)
    assert {**found, "command": ""} == {
        "command": "",
        "description": "canter",
        "risk": "LOW",
        "count": 1,
        "background": False,
        "tags": [],
        "more": {},
    }


def test_an_agent_without_a_shell_gets_calls_of_its_first_tool() -> None:
    calls = calls_in(play([tool("add", {"a": {"type": "number"}}, ["a"]), tool("sub", {"a": TEXT})]))
    assert {(call.name, tuple(json.loads(call.arguments).items())) for call in calls} == {("add", (("a", 1),))}


@pytest.mark.parametrize("parameters", [{}, {"properties": []}, {"properties": {"command": True}}, {"required": "x"}])
def test_a_strange_schema_breaks_nothing(parameters: dict[str, Any]) -> None:
    assert calls_in(play([ToolSpec("odd", "", parameters)]))


def test_an_agent_that_reads_code_blocks() -> None:
    messages = [Message("system", "Answer with one block:\n```mswea_bash_command\nls\n```"), TASK]
    for name in FILES:
        answer = say(messages, [])
        assert f"```mswea_bash_command\nprintf '%s\\n' 'café /1' > ./{name}" in answer.content
        messages += [answer, Message("user", "ok")]
    assert say(messages, []).content == FINAL
    messages[0] = Message("system", f"{messages[0].content} End with COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    assert "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in say(messages, []).content


def test_an_agent_that_tells_of_calls_in_words_is_led_to_its_end() -> None:
    tools = [BASH, tool("final_answer", {"answer": TEXT}, ["answer"])]
    messages, made = [TASK], []
    for _ in range(STEPS + 1):
        calls = say(messages, tools).tool_calls
        made += [call.name for call in calls]
        told = f"Calling tools:\n{[call.arguments for call in calls]}"
        messages += [Message("assistant", told), Message("user", "Observation:\nok")]
    assert made == ["Bash"] * len(FILES) + ["final_answer"]


def test_an_agent_that_ends_with_a_tool_is_told_so() -> None:
    final = tool("final_answer", {"answer": TEXT}, ["answer"])
    messages = play([BASH])[:-1]
    assert [call.name for call in say(messages, [BASH, final]).tool_calls] == ["final_answer"]


def test_side_requests_get_texts() -> None:
    assert say([Message("system", "You are a title generator."), TASK], []).content == TITLE
    assert say([TASK], []).content == FINAL


def test_after_a_summary_it_goes_on_where_it_was() -> None:
    done = play([BASH])
    two_steps = done[: [m.role for m in done].index("tool") + 3]
    assert sum(m.role == "tool" for m in two_steps) == 2
    asked = Message("user", "Your task is to create a detailed summary of the conversation so far.")
    summary = say([*two_steps, asked], [BASH]).content
    assert f"{SUMMARY}2" in summary
    rest = play([BASH], TASK, Message("user", f"Earlier: {summary}"))
    assert len(calls_in(rest)) == 2


def test_a_part_is_delegated_where_the_task_says_so() -> None:
    start = tool(
        "task", {"prompt": TEXT, "description": TEXT, "subagent_type": TEXT}, ["prompt", "description", "subagent_type"]
    )
    calls = calls_in(play([BASH, start], Message("user", f"Make files. {DELEGATE}")))
    assert [call.name for call in calls] == ["Bash", "task", "Bash", "Bash"]
    assert json.loads(calls[1].arguments)["prompt"] == SUB_TASK
    assert len(calls_in(play([BASH], Message("user", SUB_TASK)))) == 1


def test_a_task_can_ask_for_long_results() -> None:
    assert "seq 1 4000" in calls_in(play([BASH], Message("user", BULKY)))[0].arguments
    assert "seq" not in calls_in(play([BASH]))[0].arguments


async def test_faults_happen_at_their_turn_and_once() -> None:
    rendering = make_rendering(TOKENIZER, "template")
    engine = scripted_engine(
        TOKENIZER.encode_list,
        TOKENIZER.decode,
        stop_id=TOKENIZER.stop_token_ids[0],
        vocab=TOKENIZER.vocab_size,
        faults={1: [Fault.ERROR]},
    )
    first = play([BASH])[:3]
    good = await engine.generate(rendering.full([TASK], [BASH]), Sampling(), request_id="a")
    assert TOKENIZER.decode(good.ids) == reply(TOKENIZER.apply_chat_template([TASK], [BASH])) + "<|im_end|>"
    prompt = rendering.full(first, [BASH])
    with pytest.raises(EngineError):
        await engine.generate(prompt, Sampling(), request_id="b")
    assert len((await engine.generate(prompt, Sampling(), request_id="c")).ids)
    await engine.close()
