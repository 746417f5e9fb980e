"""Which agent of a harness a call belongs to, and what kind of request it is: told by headers, tools and known marks.

Labels are recorded with the call; which of them train is the recipe's choice (`harness.train_labels`). The rules are
the tables below, the first that matches decides: what a header says, then the words with which harnesses begin the
requests that no user sees, then headers that name a sub-agent, then tools that are missing. Words count only where
harnesses put them, at the start of a line before the first turn or behind the last one: what a tool prints or an
earlier turn says is no request. `docs/harnesses.md` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from canter.gateway.dialects.canonical import Asked, Chat
from canter.types import ForkCause

_READ_CHARACTERS = 16384
"""So much of a message is looked at: harnesses begin with what they want."""


@dataclass(frozen=True, slots=True)
class Label:
    """`name` is recorded; `hint` tells the tree why a call that shares no turn with any other, or none with its own
    kind, begins a conversation of its own."""

    name: str
    hint: ForkCause | None = None


MAIN = Label("main")
REBUILT = Label("main", ForkCause.COMPACTION)
"""The agent's own turn after its history was replaced by a summary."""
SUBAGENT = Label("subagent", ForkCause.SUBAGENT)
TITLE = Label("title", ForkCause.SIDE_REQUEST)
SUMMARY = Label("summary", ForkCause.COMPACTION)
MEMORY = Label("memory", ForkCause.SIDE_REQUEST)
SIDE = Label("side", ForkCause.SIDE_REQUEST)


@dataclass(frozen=True, slots=True)
class _Header:
    """Requests whose header `name` has a value in which `value` is found."""

    name: bytes
    value: re.Pattern[bytes]
    label: Label


@dataclass(frozen=True, slots=True)
class _Mark:
    """Requests in which a line begins with `text`."""

    text: re.Pattern[str]
    label: Label


def _header(name: str, value: str, label: Label) -> _Header:
    return _Header(name.encode(), re.compile(value.encode()), label)


def _marks(label: Label, *lines: str) -> tuple[_Mark, ...]:
    return tuple(_Mark(re.compile(rf"^[ \t]*(?:{line})", re.MULTILINE), label) for line in lines)


_KIND_HEADERS = (
    # Codex: what the request is for, whoever asks
    _header("x-codex-turn-metadata", r'"request_kind"\s*:\s*"compact', SUMMARY),
    _header("x-codex-turn-metadata", r'"request_kind"\s*:\s*"[a-z_]*memor', MEMORY),
    _header("x-codex-turn-metadata", r'"request_kind"\s*:\s*"[a-z_]*title', TITLE),
    _header("x-openai-subagent", r"^compact", SUMMARY),
    _header("x-openai-subagent", r"^memory", MEMORY),
    _header("x-openai-subagent", r"guardian", SIDE),
)
_AGENT_HEADERS = (
    _header("x-openai-subagent", r".", SUBAGENT),
    _header("x-codex-parent-thread-id", r".", SUBAGENT),
    _header("x-codex-turn-metadata", r'"subagent_kind"\s*:\s*"', SUBAGENT),
    _header("x-claude-code-agent-id", r".", SUBAGENT),
    _header("x-parent-session-id", r".", SUBAGENT),  # OpenCode
    _header("x-codex-window-id", r":[1-9]\d*$", REBUILT),  # Codex: the agent itself, in a later context window
)
_MARKS = (
    *_marks(
        TITLE,
        r"You are a title generator\b",  # OpenCode
        r"Generate a title for this conversation\b",
        r"Generate a concise, single-line task title\b",  # Codex
        r"Generate a concise, sentence-case title\b",  # Claude Code
        r"Generate a short kebab-case name\b",
        r"Please write a 5-10 word title\b",
    ),
    *_marks(
        SUMMARY,
        r"You are performing a CONTEXT CHECKPOINT COMPACTION\b",  # Codex
        r"Your task is to create a detailed summary of (?:the|this) (?:conversation|RECENT portion)\b",  # Claude Code
        r"You are a helpful AI assistant tasked with summarizing conversations\b",  # Claude Code, older OpenCode
        r"You are a context summarization agent\b",  # OpenCode
        r"You are an anchored context summarization assistant\b",
        r"Create a new anchored summary from the conversation history\b",
        r"\[earlier conversation truncated for compaction retry\]",  # Claude Code, where the first try overflowed
        r"Provide a detailed prompt for continuing our conversation\b",
        r"You are the component that summarizes (?:a conversation|internal chat history)\b",  # Qwen Code
        r"First, reason in your <(?:analysis|scratchpad)>",
        r"You are a specialized context summarizer\b",
        r"You are maintaining a context-aware state summary\b",  # OpenHands
        r"Context Extraction Assistant$",  # LangChain's summarisation middleware
    ),
    *_marks(
        MEMORY,
        r"You are now acting as the (?:managed )?memory extraction subagent\b",  # Claude Code, Qwen Code
        r"You are a Memory Writing Agent\b",  # Codex
        r"## Memory Writing Agent\b",
    ),
    *_marks(
        SIDE,
        r"You are evaluating a \w+ hook in Claude Code\b",
        r"You are verifying a stop condition in Claude Code\b",
        r"You are a background observer (?:paired with the agent|of the worker)\b",
        r"You are a classifier\. Answer with exactly one of these labels\b",
        r"\[SUGGESTION MODE\b",
        r"Analyze \*only\* the content and structure of your immediately preceding response\b",  # Qwen Code
    ),
    _Mark(re.compile(r"\bcc_is_subagent=true\b"), SUBAGENT),  # Claude Code, in a pseudo-header of its system text
)
_REBUILT_MARKS = _marks(
    REBUILT,
    r"This session is being continued from a previous conversation that ran out of context\b",  # Claude Code
    r"Another language model started to solve this problem and produced a summary\b",  # Codex
    r"What did we do so far\?$",  # OpenCode
)
_TOOLLESS_MARKS = (
    *_marks(TITLE, r"(?:Generate|Write|Create|Suggest|Come up with) an? [^.\n]{0,60}\b(?:title|name for this)\b"),
    *_marks(
        SUMMARY,
        r"(?:Please )?(?:[Ss]ummari[sz]e|[Cc]ompress) (?:the|this|our) [^.\n]{0,40}(?:conversation|history|session)\b",
    ),
)
"""What only counts where an attempt that has tools asks without them: other harnesses' words for the same."""


def classify(headers: Mapping[bytes, bytes], asked: Asked, *, tools_seen: bool) -> Label:
    """The label of a request. `headers` have lower-case names; `tools_seen` says whether any earlier call of the
    attempt offered tools."""
    by_kind = _by_header(_KIND_HEADERS, headers)
    if by_kind is not None:
        return by_kind
    texts = list(_asking(asked))
    marked = _by_mark(_MARKS, texts)
    if marked is not None:
        return marked
    by_agent = _by_header(_AGENT_HEADERS, headers)
    if by_agent is not None:
        return by_agent
    if tools_seen and _asks_without_tools(asked):
        return _by_mark(_TOOLLESS_MARKS, texts) or SIDE
    return _by_mark(_REBUILT_MARKS, texts) or MAIN


def _by_header(rules: tuple[_Header, ...], headers: Mapping[bytes, bytes]) -> Label | None:
    return next((rule.label for rule in rules if rule.value.search(headers.get(rule.name, b""))), None)


def _by_mark(rules: tuple[_Mark, ...], texts: list[str]) -> Label | None:
    return next((rule.label for rule in rules if any(rule.text.search(text) for text in texts)), None)


def _asks_without_tools(asked: Asked) -> bool:
    """Whether a chat offers no tools at all (`tool_choice: none` leaves them on offer for the next turn)."""
    return isinstance(asked.prompt, Chat) and not asked.prompt.tools and not asked.body.get("tools")


def _asking(asked: Asked) -> Iterator[str]:
    """The texts that say what is wanted: those before the first turn, and those behind the last one."""
    if not isinstance(asked.prompt, Chat):
        return
    messages = asked.prompt.messages
    turns = [i for i, message in enumerate(messages) if message.role in ("assistant", "tool")] or [len(messages)]
    for message in (*messages[: turns[0]], *messages[turns[-1] + 1 :]):
        yield message.content[:_READ_CHARACTERS]
