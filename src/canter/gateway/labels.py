"""Which agent of a harness a call belongs to, and what kind of request it is: told by headers, tools and known marks.

Labels are recorded with the call; which of them train is the recipe's choice (`harness.train_labels`). The rules are
the tables below, the first that matches decides: what a header says, then the words with which harnesses begin the
requests that no user sees, then headers that name a sub-agent, then tools that are missing. Words count only where
harnesses put them, at the start of a line before the first turn or behind the last one: what a tool prints or an
earlier turn says is no request. `docs/harnesses.md` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from canter.gateway.dialects.canonical import Asked, Chat
from canter.types import ForkCause

_READ_CHARACTERS = 4096
"""So much of a message is looked at, half of it at its beginning and half at its end."""
_READ_MESSAGES = 8
"""So many messages are looked at, half of them the first and half the last: each is some 10 µs of work."""
_HEAD = 8
"""Characters by which words are looked up; no mark is shorter."""


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
    """Requests in which a line begins with `words`, or that have them somewhere (`inside`)."""

    words: str
    label: Label
    inside: bool = False


class _Marks:
    """Marks in their order, found by the words that lines begin with."""

    def __init__(self, marks: Sequence[_Mark]) -> None:
        self._inside = [(place, mark) for place, mark in enumerate(marks) if mark.inside]
        self._by_head: dict[str, list[tuple[int, _Mark]]] = {}
        for place, mark in enumerate(marks):
            if not mark.inside:
                self._by_head.setdefault(mark.words[:_HEAD], []).append((place, mark))

    def find(self, texts: Sequence[str]) -> Label | None:
        """The label of the first mark that any of the texts has."""
        found = [(place, mark) for text in texts for place, mark in self._in(text)]
        return min(found, key=lambda pair: pair[0])[1].label if found else None

    def _in(self, text: str) -> Iterator[tuple[int, _Mark]]:
        yield from ((place, mark) for place, mark in self._inside if mark.words in text)
        for line in text.splitlines():
            start = line.lstrip()
            for place, mark in self._by_head.get(start[:_HEAD], ()):
                if start.startswith(mark.words):
                    yield place, mark


@dataclass(frozen=True, slots=True)
class _Phrase:
    """Requests in which a line begins as `text` says."""

    text: re.Pattern[str]
    label: Label

    def is_in(self, text: str) -> bool:
        return self.text.search(text) is not None


def _header(name: str, value: str, label: Label) -> _Header:
    return _Header(name.encode(), re.compile(value.encode()), label)


def _marks(label: Label, *lines: str) -> tuple[_Mark, ...]:
    return tuple(_Mark(words, label) for words in lines)


def _phrase(label: Label, line: str) -> _Phrase:
    return _Phrase(re.compile(rf"^[ \t]*{line}", re.MULTILINE | re.IGNORECASE), label)


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
_MARKS = _Marks(
    (
        *_marks(
            TITLE,
            "You are a title generator",  # OpenCode
            "Generate a title for this conversation",
            "Generate a concise, single-line task title",  # Codex
            "Generate a concise, sentence-case title",  # Claude Code
            "Generate a short kebab-case name",
            "Please write a 5-10 word title",
        ),
        *_marks(
            SUMMARY,
            "You are performing a CONTEXT CHECKPOINT COMPACTION",  # Codex
            "Your task is to create a detailed summary of the conversation",  # Claude Code
            "Your task is to create a detailed summary of this conversation",
            "Your task is to create a detailed summary of the RECENT portion",
            "[earlier conversation truncated for compaction retry]",
            "You are a helpful AI assistant tasked with summarizing conversations",  # Claude Code, older OpenCode
            "You are a context summarization agent",  # OpenCode
            "You are an anchored context summarization assistant",
            "Create a new anchored summary from the conversation history",
            "Provide a detailed prompt for continuing our conversation",
            "You are the component that summarizes a conversation",  # Qwen Code
            "You are the component that summarizes internal chat history",
            "First, reason in your <analysis> block",
            "First, reason in your <scratchpad>",
            "You are a specialized context summarizer",
            "You are maintaining a context-aware state summary",  # OpenHands
            "Context Extraction Assistant",  # LangChain
        ),
        *_marks(
            MEMORY,
            "You are now acting as the memory extraction subagent",  # Claude Code
            "You are now acting as the managed memory extraction subagent",  # Qwen Code
            "You are a Memory Writing Agent",  # Codex
            "## Memory Writing Agent",
        ),
        *_marks(
            SIDE,
            "You are verifying a stop condition in Claude Code",
            "You are a background observer paired with the agent",  # Claude Code
            "You are a background observer of the worker",
            "You are a classifier. Answer with exactly one of these labels",
            "[SUGGESTION MODE",
            "Analyze *only* the content and structure of your immediately preceding response",  # Qwen Code
        ),
        _Mark("hook in Claude Code. Your task is to evaluate the condition", SIDE, inside=True),
        _Mark("cc_is_subagent=true", SUBAGENT, inside=True),  # Claude Code, in a pseudo-header of its system text
    )
)
_REBUILT_MARKS = _Marks(
    _marks(
        REBUILT,
        "This session is being continued from a previous conversation that ran out of context",  # Claude Code
        "Another language model started to solve this problem and produced a summary",  # Codex
        "What did we do so far?",  # OpenCode
    )
)
_TOOLLESS_PHRASES = (
    _phrase(TITLE, r"(?:generate|write|create|suggest|come up with) an? [^.\n]{0,60}\b(?:title|name for this)\b"),
    _phrase(
        SUMMARY,
        r"(?:please )?(?:summari[sz]e|compress) (?:the|this|our) [^.\n]{0,40}\b(?:conversation|history|session)\b",
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
    marked = _MARKS.find(texts)
    if marked is not None and (marked is not TITLE or _asks_without_tools(asked)):
        return marked  # with tools, a task to find a title is the agent's own
    by_agent = _by_header(_AGENT_HEADERS, headers)
    if by_agent is not None:
        return by_agent
    if tools_seen and _asks_without_tools(asked):
        return _by_phrase(_TOOLLESS_PHRASES, texts) or SIDE
    return _REBUILT_MARKS.find(texts) or MAIN


def _by_header(rules: tuple[_Header, ...], headers: Mapping[bytes, bytes]) -> Label | None:
    for rule in rules:
        value = headers.get(rule.name)
        if value is not None and rule.value.search(value):
            return rule.label
    return None


def _by_phrase(rules: Sequence[_Phrase], texts: Sequence[str]) -> Label | None:
    return next((rule.label for rule in rules if any(rule.is_in(text) for text in texts)), None)


def _asks_without_tools(asked: Asked) -> bool:
    """Whether a chat offers no tools at all (`tool_choice: none` leaves them on offer for the next turn)."""
    return isinstance(asked.prompt, Chat) and not asked.prompt.tools and not asked.body.get("tools")


def _asking(asked: Asked) -> Iterator[str]:
    """The texts that say what is wanted: those before the first turn, and those behind the last one."""
    if not isinstance(asked.prompt, Chat):
        return
    messages = asked.prompt.messages
    turns = [i for i, message in enumerate(messages) if message.role in ("assistant", "tool")] or [len(messages)]
    asking = (*messages[: turns[0]], *messages[turns[-1] + 1 :])
    if len(asking) > _READ_MESSAGES:
        asking = (*asking[: _READ_MESSAGES // 2], *asking[-_READ_MESSAGES // 2 :])
    for message in asking:
        text, half = message.content, _READ_CHARACTERS // 2
        yield text if len(text) <= _READ_CHARACTERS else f"{text[:half]}\n{text[-half:]}"
