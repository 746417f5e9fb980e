"""Rendering with any chat template, and the proof that a conversation can be continued without rendering it again.

A bridge is found by rendering the conversation once more with a placeholder as the last reply, and reading off what
the template writes after it. It is proven when (1) the text before that reply is what the prompt of the reply was,
(2) reasoning that was sampled is still shown, (3) the reply is closed by a special token, at which no tokenizer merges
across (tried for each closing token), so that the suffix may be encoded by itself.

A full render costs time in proportion to the conversation, so a long one is cut to a window: the system messages, a
stand-in for the first user message, and everything from the assistant turn before the last reply on. That a window
gives the same suffix is proven on the whole conversation the first time a shape of turn is seen, and again after every
further quarter to eighth of the turns (linear in sum). A template that fails once is rendered whole from then on.
Whatever happens here, recorded ids stay what the engine saw; only how faithful a prompt is depends on it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from canter.errors import TemplateError
from canter.tokens.conform import find_demands, settle
from canter.tokens.messages import Message, ToolCall, ToolSpec, tools_key
from canter.tokens.parsing import Parsed, parse_reply
from canter.tokens.tokenizer import ChatTokenizer, PlainTool, plain_tools
from canter.types import NO_IDS, Ids

logger = logging.getLogger(__name__)

_CONTENT = "canter5d1fcontent"
_ARGUMENT = "canter5d1fargument"
_REASONING = "canter5d1freasoning"
_STAND_IN = Message("user", "canter5d1fuser")
_SHORT = 12
"""Conversations of up to so many messages are rendered whole."""
_KEPT_TOOLS = 16
_KEPT_SHAPES = 4096


@dataclass(frozen=True, slots=True)
class _Continuation:
    """What the template writes after a reply: `gap` before the closing token (part of the syntax of tool calls, if
    the reply has any), the closing token, and the text after it up to where the next reply begins."""

    gap: str
    close_id: int
    text: str


class TemplateRendering:
    """Implements `Rendering` with the model's own chat template. Threads may share it."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._tools: dict[bytes, list[PlainTool]] = {}
        self._lock = threading.Lock()
        self._proven: set[tuple[object, ...]] = set()
        self._local = True
        self._boundaries: dict[int, bool] = {}
        self._stops = {i: tokenizer.token(i) or "" for i in tokenizer.stop_token_ids}
        close = self._turn_close()
        if close is not None:
            self._stops[close] = tokenizer.token(close) or ""
        self._thinks = "think>" in tokenizer.chat_template or tokenizer.token_id("</think>") is not None
        self._demands = find_demands(lambda messages: self._render(messages, []))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(self._stops)

    def full(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ids:
        return self.tokenizer.encode(self._render(settle(messages, self._demands), self._plain_tools(tools)))

    def bridge(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompt: Ids, sampled: Ids, new_from: int
    ) -> Ids | None:
        head = settle(messages[:new_from], self._demands)
        messages = [*head, *settle(messages[new_from:], self._demands, follows=True)]
        new_from = len(head)
        reply = messages[new_from - 1]
        closed = len(sampled) > 0 and int(sampled[-1]) in self._stops
        if reply.role != "assistant":
            return None
        if self._thinks and not _has_reasoning(reply):
            text = self.tokenizer.decode(sampled[:-1] if closed else sampled)
            read = parse_reply(text, thinks=True, in_reasoning=self._opens_reasoning(prompt), calls_tools=False)
            reply = replace(reply, reasoning=None if read.reasoning is None else "")
            messages = [*messages[: new_from - 1], reply, *messages[new_from:]]
        if not closed and self._reasoning_is_open(prompt, sampled):
            return None
        found = self._continuation(messages, self._plain_tools(tools), new_from - 1)
        if found is None or not self._is_boundary(found.close_id):
            return None
        if closed and int(sampled[-1]) != found.close_id:
            return None
        if not closed and found.gap and not reply.tool_calls:
            return None
        ids = self.tokenizer.encode(self._stops[found.close_id] + found.text)
        if len(ids) == 0 or ids[0] != found.close_id:
            return None
        return ids[1:] if closed else ids

    def parse(self, sampled: Ids, tools: Sequence[ToolSpec], *, prompt: Ids = NO_IDS) -> Parsed:
        ids = sampled[:-1] if len(sampled) and int(sampled[-1]) in self._stops else sampled
        return parse_reply(
            self.tokenizer.decode(ids),
            thinks=self._thinks,
            in_reasoning=self._opens_reasoning(prompt),
            calls_tools=bool(tools),
        )

    # -- the text after a reply --

    def _continuation(self, messages: Sequence[Message], tools: list[PlainTool], at: int) -> _Continuation | None:
        """Of the whole conversation, or of a window of it where that has been proven to be the same."""
        window = self._window(messages, at) if self._local and len(messages) > _SHORT else None
        if window is None:
            return self._read(messages, tools, at)
        cut, cut_at = window
        try:
            found = self._read(cut, tools, cut_at)
        except TemplateError:  # a template that wants the turns in an order the window breaks
            self._local = False
            return self._read(messages, tools, at)
        shape = (bool(tools), cut[0].role, *((m.role, bool(m.tool_calls), m.reasoning is None) for m in cut))
        if shape in self._proven and not _is_due(sum(m.role == "assistant" for m in messages[: at + 1])):
            return found
        whole = self._read(messages, tools, at)
        if whole != found:
            self._local = False
            logger.warning("the chat template of %s depends on earlier turns; rendering it whole", self.tokenizer.name)
        if len(self._proven) >= _KEPT_SHAPES:
            self._proven.clear()
        self._proven.add(shape)
        return whole

    def _window(self, messages: Sequence[Message], at: int) -> tuple[list[Message], int] | None:
        """A short conversation with the same end, and where the reply is in it."""
        lead = next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), at)
        before = next((i for i in range(at - 1, lead, -1) if messages[i].role == "assistant"), None)
        if before is None:
            return None
        stand_in = [_STAND_IN] if messages[lead].role == "user" else []
        cut = [*messages[:lead], *stand_in, *messages[before:]]
        return cut, at - before + lead + len(stand_in)

    def _read(self, messages: Sequence[Message], tools: list[PlainTool], at: int) -> _Continuation | None:
        reply = messages[at]
        text = self._render([*messages[:at], _placeholder(reply), *messages[at + 1 :]], tools)
        if reply.tool_calls and _ARGUMENT not in text:  # a template that writes no tool calls still closes the turn
            text = self._render([*messages[:at], _placeholder(reply, with_content=True), *messages[at + 1 :]], tools)
        before = self._render(messages[:at], tools)
        if not text.startswith(before):
            return None  # the template now writes earlier turns differently
        mark = _ARGUMENT if reply.tool_calls and _ARGUMENT in text else _CONTENT
        end = text.rfind(mark) + len(mark)
        if end < len(mark) or text.count(_CONTENT) > 1:
            return None
        start = text.find(_CONTENT) if _CONTENT in text else end
        if not _shows_reasoning(reply, text[len(before) : start]):
            return None
        return self._split_at_close(text, end)

    def _split_at_close(self, text: str, end: int) -> _Continuation | None:
        positions = [(text.find(token, end), i) for i, token in self._stops.items()]
        found = min(((position, i) for position, i in positions if position >= 0), default=None)
        if found is None:
            return None
        position, close_id = found
        return _Continuation(text[end:position], close_id, text[position + len(self._stops[close_id]) :])

    def _render(self, messages: Sequence[Message], tools: list[PlainTool]) -> str:
        plain: list[dict[str, Any]] = [self.tokenizer.plain(m) for m in messages]
        return self.tokenizer.render_plain(plain, tools, True)

    def _plain_tools(self, tools: Sequence[ToolSpec]) -> list[PlainTool]:
        if not tools:
            return []
        key = tools_key(tools)
        with self._lock:
            if key not in self._tools:
                if len(self._tools) >= _KEPT_TOOLS:
                    del self._tools[next(iter(self._tools))]
                self._tools[key] = plain_tools(tools)
            return self._tools[key]

    # -- facts about the model --

    def _turn_close(self) -> int | None:
        """The special token with which the template ends a reply."""
        turn = [Message("user", "a"), Message("assistant", _CONTENT), Message("user", "b")]
        try:
            text = self._render(turn, [])
        except TemplateError:
            return None
        _, found, rest = text.partition(_CONTENT)
        ids = self.tokenizer.encode(rest.lstrip()[:64]) if found else NO_IDS
        return int(ids[0]) if len(ids) and self.tokenizer.is_added(int(ids[0])) else None

    def _is_boundary(self, close_id: int) -> bool:
        """Whether text after this token is encoded the same whatever stands before it."""
        if close_id not in self._boundaries:
            self._boundaries[close_id] = self.tokenizer.is_added(close_id) and all(
                self._encodes_apart(before, self._stops[close_id], after)
                for before in ("a", "a ", "\n", "é", "{}", "</tool_call>")
                for after in ("\n", "\n\nb", " b", "b", "\nüser")
            )
        return self._boundaries[close_id]

    def _encodes_apart(self, before: str, close: str, after: str) -> bool:
        encode = self.tokenizer.encode_list
        return encode(before + close + after) == [*encode(before), *encode(close + after)]

    def _opens_reasoning(self, prompt: Ids) -> bool:
        """Whether the prompt ends inside a think block (by default the generation prompt of the template)."""
        if not self._thinks:
            return False
        tail = self.tokenizer.decode(prompt[-8:]) if len(prompt) else self._render([Message("user", "a")], [])
        return tail.rstrip().endswith("<think>")

    def _reasoning_is_open(self, prompt: Ids, sampled: Ids) -> bool:
        if not self._thinks:
            return False
        text = self.tokenizer.decode(sampled)
        opened = self._opens_reasoning(prompt) or text.lstrip().startswith("<think>")
        return opened and "</think>" not in text


def _is_due(turns: int) -> bool:
    """Whether a conversation of so many turns is proven again: four to eight times while it doubles."""
    return turns % (1 << max(0, turns.bit_length() - 3)) == 0


def _has_reasoning(reply: Message) -> bool:
    return bool(reply.reasoning and reply.reasoning.strip())


def _shows_reasoning(reply: Message, shown: str) -> bool:
    """Whether what the template writes between the prompt of a reply and its content (or up to its first arguments)
    is the reasoning that was sampled: all of it where there is some, no think block where there was none."""
    if _has_reasoning(reply):
        return _REASONING in shown
    if reply.reasoning is None and "think>" in shown:
        return False
    return reply.content == "" or not shown.replace("<think>", "").replace("</think>", "").strip()


def _placeholder(reply: Message, *, with_content: bool = False) -> Message:
    """A reply of the same shape (`with_content` though it has none) whose parts can be found again when rendered."""
    calls = tuple(ToolCall(c.id, c.name, f'{{"a": "{_ARGUMENT}"}}') for c in reply.tool_calls)
    return replace(
        reply,
        content=_CONTENT if with_content or reply.content.strip() or not calls else "",
        reasoning=_REASONING if _has_reasoning(reply) else reply.reasoning,
        tool_calls=calls,
    )
