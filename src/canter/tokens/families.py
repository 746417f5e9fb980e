"""Rendering with the library `renderers`, which knows the exact token grammar of some thirty model families."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from renderers import create_renderer
from renderers.base import RENDERER_REGISTRY, ToolCallParseStatus, _populate_registry
from renderers.configs import config_from_name

from canter.errors import TemplateError
from canter.tokens.conform import find_demands, settle
from canter.tokens.messages import Message, ToolCall, ToolSpec
from canter.tokens.parsing import Parsed, parse_reply
from canter.tokens.tokenizer import ChatTokenizer, plain_tools
from canter.types import NO_IDS, Ids, as_ids

_TAIL = 256
"""Tokens of the prompt that a family is shown: it only looks for an opened think block at the very end."""


class FamilyTokenizer:
    """A `ChatTokenizer` in the form that the library wants (its `Tokenizer` protocol)."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = tokenizer.name
        self.unk_token_id = tokenizer.unk_token_id
        self.eos_token_id = tokenizer.eos_token_id

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._tokenizer.encode_list(text)

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            found = self._tokenizer.token_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]


class FamilyRendering:
    """Implements `Rendering` with one family of the library. `hermes`: read tool calls as `<tool_call>{json}`."""

    def __init__(self, tokenizer: ChatTokenizer, renderer: Any, *, hermes: bool = False) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        self._hermes = hermes
        self._demands = find_demands(lambda messages: tokenizer.decode(_render(tokenizer, renderer, messages, [])))
        self._stops = tuple(dict.fromkeys((*renderer.get_stop_token_ids(), *tokenizer.stop_token_ids)))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stops

    def full(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ids:
        return as_ids(_render(self.tokenizer, self.renderer, settle(messages, self._demands), tools))

    def bridge(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompt: Ids, sampled: Ids, new_from: int
    ) -> Ids | None:
        new = [self.tokenizer.plain(m) for m in settle(messages[new_from:], self._demands, follows=True)]
        tail, reply = prompt[-_TAIL:].tolist(), sampled.tolist()
        try:
            extended = self.renderer.bridge_to_next_turn(tail, reply, new, tools=plain_tools(tools) or None)
        except Exception as error:  # the library raises whatever its families do
            raise TemplateError(
                f"renderer {type(self.renderer).__name__} cannot continue the conversation: {error}"
            ) from error
        known = len(tail) + len(reply)
        if extended is None or extended.token_ids[:known] != tail + reply:
            return None
        return as_ids(extended.token_ids[known:])

    def parse(self, sampled: Ids, tools: Sequence[ToolSpec], *, prompt: Ids = NO_IDS) -> Parsed:
        tail = prompt[-_TAIL:].tolist() if len(prompt) else self.full([Message("user", "a")], ()).tolist()
        reply = self.renderer.parse_response(sampled.tolist(), tools=plain_tools(tools) or None, prompt_ids=tail)
        if reply.tool_calls and (self._hermes or not tools):
            return self._reread(sampled, reply.reasoning_content is not None, bool(tools))
        calls: list[tuple[str, str]] = []
        content = reply.content
        for call in reply.tool_calls:
            if call.status == ToolCallParseStatus.OK and call.name and isinstance(call.arguments, dict):
                calls.append((call.name, _sampled_arguments(call.raw, call.arguments)))
            else:
                content += call.raw
        return Parsed(content, reply.reasoning_content, tuple(calls), len(reply.tool_calls) - len(calls))

    def _reread(self, sampled: Ids, reasons: bool, calls_tools: bool) -> Parsed:
        """The text read again: what looks like a call is text where no tools were offered."""
        ids = sampled[:-1] if len(sampled) and int(sampled[-1]) in self._stops else sampled
        text = self.tokenizer.decode(ids)
        return parse_reply(text, thinks=reasons, in_reasoning=reasons, calls_tools=calls_tools)


def make_family(tokenizer: ChatTokenizer, name: str) -> Any | None:
    """The renderer of a family for this tokenizer; `None` where the family is unknown or its tokens are missing."""
    _populate_registry()
    if name not in RENDERER_REGISTRY:
        return None
    try:
        return create_renderer(FamilyTokenizer(tokenizer), config_from_name(name))
    except Exception:  # a missing special token is an AssertionError, KeyError, ValueError, … by family
        return None


def find_family(tokenizer: ChatTokenizer) -> Any | None:
    """The first family that renders every probe to the very ids of the model's own chat template."""
    _populate_registry()
    for name in RENDERER_REGISTRY:
        if name != "default":
            renderer = make_family(tokenizer, name)
            if renderer is not None and _renders_alike(tokenizer, renderer):
                return renderer
    return None


def _renders_alike(tokenizer: ChatTokenizer, renderer: Any) -> bool:
    compared = 0
    for messages, tools in _probes():
        try:
            wanted = tokenizer.encode_list(tokenizer.apply_chat_template(messages, tools))
        except TemplateError:
            continue
        try:
            if _render(tokenizer, renderer, messages, tools) != wanted:
                return False
        except TemplateError:
            return False
        compared += 1
    return compared >= 3


def _probes() -> Iterator[tuple[list[Message], list[ToolSpec]]]:
    """Conversations that between them use every feature of a chat template that Canter uses."""
    system, user, more = Message("system", "Be brief."), Message("user", " Hé, 1+1?\n"), Message("user", "and 2+2?")
    answer = Message("assistant", "It is 2.")
    thought = Message("assistant", "It is 2.", reasoning="One and one.")
    tool = ToolSpec("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
    call = Message("assistant", "Let me see.", tool_calls=(ToolCall("call_1", "bash", '{"command": "ls -l"}'),))
    result = Message("tool", "a.txt\n", tool_call_id="call_1", name="bash")
    yield [user], []
    yield [system, user], []
    yield [system, user, answer, more], []
    yield [system, user, thought, more], []
    yield [user], [tool]
    yield [system, user, call, result], [tool]
    yield [system, user, call, result, answer, more, call, result], [tool]


def _render(
    tokenizer: ChatTokenizer, renderer: Any, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[int]:
    plain = [tokenizer.plain(m) for m in messages]
    try:
        ids: list[int] = renderer.render_ids(plain, tools=plain_tools(tools) or None, add_generation_prompt=True)
    except Exception as error:  # the library raises whatever its families do
        raise TemplateError(f"renderer {type(renderer).__name__} cannot render these messages: {error}") from error
    return ids


def _sampled_arguments(raw: str, arguments: dict[str, Any]) -> str:
    """Arguments as they were sampled where the family writes JSON, else the JSON of what was read."""
    read = parse_reply(f"<tool_call>{raw}</tool_call>", thinks=False, in_reasoning=False, calls_tools=True)
    return read.tool_calls[0][1] if len(read.tool_calls) == 1 else json.dumps(arguments, ensure_ascii=False)
