"""Labels: by the headers that harnesses sent, and by the words with which they begin the requests that nobody sees."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from gateway_rig import gateway

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from replay_traffic import HARNESSES, scenarios

from canter.gateway.dialects.canonical import Asked, Chat
from canter.gateway.dialects.routes import BY_PATH
from canter.gateway.labels import MAIN, MEMORY, REBUILT, SIDE, SUBAGENT, SUMMARY, TITLE, Label, classify
from canter.tokens.messages import Message, ToolSpec

BASH = ToolSpec("bash", "", {})
SYSTEM, USER = Message("system", "You are an agent."), Message("user", "Fix the bug.")
TURN = (Message("assistant", "Looking."), Message("tool", "a.txt", tool_call_id="1"))

RECORDED = {
    ("claude-code", "context-400"): {"main": 2, "summary": 1},
    ("claude-code", "subagents"): {"main": 3, "subagent": 8},
    ("codex", "compaction"): {"main": 2, "summary": 2},
    ("codex", "subagents"): {"main": 3, "subagent": 5},
    ("opencode", "context-400"): {"main": 6, "side": 1, "title": 1},
    ("opencode", "subagents"): {"main": 3, "subagent": 8, "title": 1},
}


def labelled(
    *messages: Message, tools: bool = True, tools_seen: bool = True, headers: dict[str, str] | None = None
) -> Label:
    asked = Asked("chat", "policy", Chat(messages, (BASH,) if tools else ()), body={"tools": [{}]} if tools else {})
    sent = {name.encode(): value.encode() for name, value in (headers or {}).items()}
    return classify(sent, asked, tools_seen=tools_seen)


@pytest.mark.parametrize("harness", HARNESSES)
def test_recorded_requests_have_the_labels_of_their_agents(harness):
    for scenario, requests in scenarios(harness).items():
        tools_seen, labels = False, Counter()
        for request in requests:
            if not request.is_call:
                continue
            asked = BY_PATH[request.path].parse({**request.body, "model": "policy", "previous_response_id": None})
            headers = {name.encode(): value.encode() for name, value in request.headers.items()}
            labels[classify(headers, asked, tools_seen=tools_seen).name] += 1
            tools_seen = tools_seen or bool(asked.prompt.tools)
        titles = {"title": 1} if harness == "opencode" else {}
        default = {"main": sum(labels.values()) - len(titles), **titles}
        assert labels == RECORDED.get((harness, scenario), default), scenario


@pytest.mark.parametrize(
    ("headers", "label"),
    [
        ({"x-openai-subagent": "collab_spawn"}, SUBAGENT),
        ({"x-openai-subagent": "review"}, SUBAGENT),
        ({"x-openai-subagent": "compact"}, SUMMARY),
        ({"x-openai-subagent": "memory_consolidation"}, MEMORY),
        ({"x-openai-subagent": "guardian"}, SIDE),
        ({"x-codex-parent-thread-id": "01a2"}, SUBAGENT),
        ({"x-codex-turn-metadata": '{"request_kind":"turn","window_number":0}'}, MAIN),
        ({"x-codex-turn-metadata": '{"request_kind": "compaction"}'}, SUMMARY),
        ({"x-codex-turn-metadata": '{"request_kind":"compaction","subagent_kind":"thread_spawn"}'}, SUMMARY),
        ({"x-codex-turn-metadata": '{"request_kind":"turn","subagent_kind":"thread_spawn"}'}, SUBAGENT),
        ({"x-codex-window-id": "01a2:0"}, MAIN),
        ({"x-codex-window-id": "01a2:12"}, REBUILT),
        ({"x-claude-code-agent-id": "a8a2"}, SUBAGENT),
        ({"x-claude-code-session-id": "a8a2"}, MAIN),
        ({"x-parent-session-id": "ses_1"}, SUBAGENT),
        ({"x-session-id": "ses_1"}, MAIN),
    ],
)
def test_headers_tell_agents_and_kinds(headers, label):
    assert labelled(SYSTEM, USER, headers=headers) == label


@pytest.mark.parametrize(
    ("messages", "label"),
    [
        ((Message("system", "You are a title generator. You output ONLY a thread title."), USER), TITLE),
        ((SYSTEM, Message("user", "Generate a title for this conversation:\n"), USER), TITLE),
        ((SYSTEM, USER, *TURN, Message("user", "You are performing a CONTEXT CHECKPOINT COMPACTION. Do.")), SUMMARY),
        (
            (
                Message("system", "You are a helpful AI assistant tasked with summarizing conversations."),
                USER,
                *TURN,
                Message(
                    "user", "CRITICAL: text only.\n\nYour task is to create a detailed summary of the conversation"
                ),
            ),
            SUMMARY,
        ),
        ((Message("system", "You are a context summarization agent. You are given"), USER), SUMMARY),
        ((Message("system", "\nYou are the component that summarizes a conversation when"), USER), SUMMARY),
        ((Message("user", "You are maintaining a context-aware state summary for an agent."),), SUMMARY),
        (
            (SYSTEM, USER, *TURN, Message("user", "You are now acting as the memory extraction subagent. Analyze")),
            MEMORY,
        ),
        (
            (
                Message("system", "You are now acting as the managed memory extraction subagent for"),
                USER,
                *TURN,
                Message("user", "Go."),
            ),
            MEMORY,
        ),
        ((Message("developer", "## Memory Writing Agent: Phase 1"), USER, *TURN), MEMORY),
        ((Message("system", "x-billing: cc_version=2; cc_is_subagent=true;"), USER), SUBAGENT),
        (
            (Message("user", "This session is being continued from a previous conversation that ran out of context."),),
            REBUILT,
        ),
    ],
)
def test_known_words_tell_what_is_asked_for(messages, label):
    assert labelled(*messages, tools=label is not TITLE) == label
    assert labelled(*messages, tools=False, tools_seen=False) == label


def test_a_task_to_find_a_title_is_the_agents_own():
    assert labelled(SYSTEM, Message("user", "Generate a title for this conversation:\n")) == MAIN


def test_words_in_earlier_turns_in_tool_results_and_inside_lines_do_not_count():
    words = "You are performing a CONTEXT CHECKPOINT COMPACTION."
    read = Message("tool", words, tool_call_id="1")
    assert labelled(SYSTEM, USER, TURN[0], read) == MAIN
    assert labelled(SYSTEM, USER, Message("assistant", words), read, Message("user", "Go on.")) == MAIN
    assert labelled(SYSTEM, USER, *TURN, Message("user", words), *TURN, Message("user", "Go on.")) == MAIN
    assert labelled(SYSTEM, Message("user", f"What does {words!r} mean?")) == MAIN
    assert labelled(SYSTEM, Message("user", words)) == SUMMARY


def test_a_long_message_is_read_at_its_ends():
    words = "Your task is to create a detailed summary of the conversation so far."
    assert labelled(SYSTEM, Message("user", f"{words}\n{'x ' * 50_000}")) == SUMMARY
    assert labelled(SYSTEM, Message("user", f"{'x ' * 50_000}\n{words}")) == SUMMARY
    assert labelled(SYSTEM, Message("user", f"{'x ' * 50_000}\n{words}\n{'x ' * 50_000}")) == MAIN


def test_missing_tools_are_a_side_request_only_where_the_attempt_has_tools():
    assert labelled(SYSTEM, USER, tools=False, tools_seen=False) == MAIN
    assert labelled(SYSTEM, USER, tools=False) == SIDE
    assert labelled(SYSTEM, Message("user", "Please summarise the conversation."), tools=False) == SUMMARY
    assert labelled(SYSTEM, Message("user", "Write a short title for it."), tools=False) == TITLE
    assert labelled(SYSTEM, Message("user", "Write a short title for it."), tools=False, tools_seen=False) == MAIN


def test_a_turn_that_may_not_call_tools_now_is_none():
    asked = Asked("chat", "policy", Chat((SYSTEM, USER)), body={"tools": [{}], "tool_choice": "none"})
    assert classify({}, asked, tools_seen=True) == MAIN


async def test_the_label_and_the_cause_are_recorded_with_the_call():
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    async with gateway() as rig:
        await rig.chat("Fix the bug.", tools=tools)
        await rig.chat("Generate a title for this conversation:\nFix the bug.")
        await rig.post(
            "/v1/chat/completions",
            {"model": "policy", "tools": tools, "messages": [{"role": "user", "content": "Fix the bug."}]},
        )
        calls = await rig.store.calls(["r1"])
    assert [(call.label, call.fork and call.fork.value) for call in calls] == [
        ("main", None),
        ("title", "side_request"),
        ("main", None),
    ]


def test_of_many_messages_only_the_first_and_the_last_are_read():
    """Each is work on the event loop, whatever a harness sends."""
    asked = Message("user", "You are performing a CONTEXT CHECKPOINT COMPACTION. Do.")
    assert labelled(*[USER] * 50, asked) == labelled(asked, *[USER] * 50) == SUMMARY
    assert labelled(*[USER] * 50, asked, *[USER] * 50) == MAIN
