"""Content blocks of Anthropic's Messages, to canonical messages and back.

What a policy cannot be shown is never dropped unsaid: it is refused, named in its place or recorded as left out, by
the rule in `docs/dialects.md`. Fields that a block has beside those read here (`cache_control`, `citations`, `caller`,
…) say nothing to the policy and are ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from canter.errors import BadRequest
from canter.gateway.dialects import fields
from canter.tokens.messages import UNPARSED, Message, ToolCall, ToolSpec, arrange
from canter.wire import is_too_nested

_ROLES = ("user", "assistant", "system")
_BILLING = "x-anthropic-billing-header:"
_HISTORY_LEVELS = 5  # of JSON around a tool input, when it comes back in a history
_HOSTED = frozenset({"server_tool_use", "mcp_tool_use", "mcp_tool_listing", "container_upload"})
_HOSTED_RESULT = "_tool_result"
"""What the types of the results of Anthropic's own tools end with: `web_search_tool_result`, `mcp_tool_result`, …"""


@dataclass(frozen=True, slots=True)
class Block:
    """A content block and where it is in the request."""

    type: str
    raw: Mapping[str, Any]
    at: str


Tools = Mapping[str, ToolSpec]
"""Every tool of the request that has a schema, by name, also those that the prompt does not list."""


def conversation(body: Mapping[str, Any], tools: Tools) -> tuple[Message, ...]:
    """`system` and `messages` as the canonical conversation. Raises `BadRequest`.

    Neighbours of one role are one turn, as the protocol has it. In a user's turn the tool results come first, then its
    texts as one message.
    """
    raws = fields.array(body, "messages")
    if not raws:
        raise BadRequest("messages is missing or empty", param="messages", code="missing_required_parameter")
    turns: list[tuple[str, list[Block]]] = []
    for i, raw in enumerate(raws):
        role, blocks = _turn(raw, f"messages[{i}]")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        elif blocks or role != "system":
            turns.append((role, blocks))
    system = _system_text(body)
    messages = [Message("system", system)] if system else []
    for role, blocks in turns:
        messages += _READERS[role](blocks, tools)
    if not messages:
        raise BadRequest("messages hold no content", param="messages", code="invalid_value")
    return arrange(messages)


def kept_out(body: Mapping[str, Any]) -> list[str]:
    """The types of the blocks in `messages`, which have been read, that do not reach the prompt."""
    contents = [turn["content"] for turn in body["messages"] if turn["role"] == "assistant"]
    types = {block["type"] for blocks in contents if not isinstance(blocks, str) for block in blocks}
    return sorted(filter(_is_hosted, types))


def assistant(blocks: Sequence[Block]) -> Message:
    """An assistant turn. `redacted_thinking` is encrypted and says nothing; calls of tools that are kept out of the
    prompt, and their results, are no words of this policy."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        match block.type:
            case "text":
                texts.append(_text(block))
            case "thinking":
                thoughts.append(fields.string(block.raw, "thinking", at=f"{block.at}."))
            case "tool_use":
                calls.append(_tool_call(block))
            case "redacted_thinking":
                pass
            case _ if not _is_hosted(block.type):
                raise _refused(block, "an assistant message")
    reasoning = "\n".join(thought for thought in thoughts if thought)
    return Message("assistant", "\n".join(texts), reasoning=reasoning or None, tool_calls=tuple(calls))


def blocks_of(message: Message) -> list[dict[str, Any]]:
    """A reply as content blocks; an empty one has none, as with Anthropic. What is not known is
    absent: there are SDKs that take no null for a text's `citations`."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": _signature(message.reasoning)})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return blocks


def read_blocks(content: object, at: str) -> list[Block]:
    """Content as blocks: a string is one text, an empty one none."""
    if isinstance(content, str):
        return [Block("text", {"text": content}, at)] if content else []
    if not isinstance(content, list):
        raise fields.wrong(at, "a string or an array of content blocks", content)
    blocks = []
    for i, raw in enumerate(content):
        if not isinstance(raw, Mapping):
            raise fields.wrong(f"{at}[{i}]", "a content block", raw)
        blocks.append(Block(fields.string(raw, "type", at=f"{at}[{i}]."), raw, f"{at}[{i}]"))
    return blocks


def definition(tool: ToolSpec) -> str:
    """A tool as text, spelled as chat templates list it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return orjson.dumps({"type": "function", "function": function}).decode()


def _turn(raw: object, at: str) -> tuple[str, list[Block]]:
    if not isinstance(raw, Mapping):
        raise fields.wrong(at, "an object", raw)
    role = fields.string(raw, "role", at=f"{at}.")
    if role not in _ROLES:
        raise BadRequest(f"{at}.role {role!r} is none of {', '.join(_ROLES)}", param=f"{at}.role", code="invalid_value")
    content = raw.get("content")
    if content is None:
        if role == "system" and raw.get("output_config") is not None:
            return role, []  # says how hard to think from here on, and nothing to read
        raise BadRequest(f"{at}.content is missing", param=f"{at}.content", code="missing_required_parameter")
    return role, read_blocks(content, f"{at}.content")


def _system_text(body: Mapping[str, Any]) -> str:
    content = body.get("system")
    texts = []
    for block in read_blocks("" if content is None else content, "system"):
        if block.type != "text":
            raise _refused(block, "the system prompt")
        text = _text(block)
        if text.startswith(_BILLING):  # Claude Code's counters, which change from request to request
            text = text.partition("\n")[2]
            if not text:
                continue
        texts.append(text)
    return "\n".join(texts)


def _user(blocks: Sequence[Block], tools: Tools) -> Iterator[Message]:
    texts = []
    results = 0
    for block in blocks:
        if block.type == "text":
            texts.append(_text(block))
        elif block.type == "search_result":
            texts.append(_search_result(block))
        elif block.type == "tool_result":
            results += 1
            yield _tool_result(block, tools)
        else:
            raise _refused(block, "a user message")
    if texts or not results:
        yield Message("user", "\n".join(texts))


def _system(blocks: Sequence[Block], tools: Tools) -> Iterator[Message]:
    texts = []
    for block in blocks:
        if block.type == "text":
            texts.append(_text(block))
        elif block.type in ("tool_addition", "tool_removal"):
            texts.append(_tool_change(block, tools))
        else:
            raise _refused(block, "a system message")
    yield Message("system", "\n".join(texts))


def _assistant(blocks: Sequence[Block], tools: Tools) -> Iterator[Message]:
    yield assistant(blocks)


_READERS: Mapping[str, Callable[[Sequence[Block], Tools], Iterator[Message]]] = {
    "user": _user,
    "system": _system,
    "assistant": _assistant,
}


def _text(block: Block) -> str:
    return fields.string(block.raw, "text", at=f"{block.at}.")


def _search_result(block: Block) -> str:
    """A passage that was found, below its title and its source."""
    at = f"{block.at}."
    texts = [fields.string(block.raw, name, at=at) for name in ("title", "source")]
    for part in read_blocks(fields.array(block.raw, "content", at=at), f"{at}content"):
        if part.type != "text":
            raise _refused(part, "a search result")
        texts.append(_text(part))
    return "\n".join(texts)


def _tool_result(block: Block, tools: Tools) -> Message:
    call_id = fields.string(block.raw, "tool_use_id", at=f"{block.at}.")
    failed = fields.boolean(block.raw, "is_error", at=f"{block.at}.")
    content = block.raw.get("content")
    texts = []
    for part in read_blocks("" if content is None else content, f"{block.at}.content"):
        if part.type == "text":
            texts.append(_text(part))
        elif part.type == "search_result":
            texts.append(_search_result(part))
        elif part.type == "tool_reference":
            texts.append(_referenced(fields.string(part.raw, "tool_name", at=f"{part.at}."), tools))
        elif (text := fields.left_out(part.type)) is not None:
            texts.append(text)
        else:
            raise _refused(part, "a tool result")
    return Message("tool", "\n".join(texts) or ("error" if failed else ""), tool_call_id=call_id)


def _referenced(name: str, tools: Tools) -> str:
    """What a search for tools has found: the definition, where the request holds it."""
    return definition(tools[name]) if name in tools else name


def _tool_change(block: Block, tools: Tools) -> str:
    """A tool that comes or goes in the middle of a conversation, told where it stands."""
    tool = fields.mapping(block.raw, "tool", at=f"{block.at}.")
    inline = fields.mapping(tool, "definition", at=f"{block.at}.tool.")
    if inline:
        name = fields.string(inline, "name", at=f"{block.at}.tool.definition.")
        schema = fields.mapping(inline, "input_schema", at=f"{block.at}.tool.definition.")
        tools = {name: ToolSpec(name, fields.optional_string(inline, "description") or "", schema)}
    else:
        name = fields.string(tool, "name", at=f"{block.at}.tool.")
    if block.type == "tool_removal":
        return f"Tool removed: {name}"
    return f"Tool added: {_referenced(name, tools)}"


def _tool_call(block: Block) -> ToolCall:
    at = f"{block.at}."
    if "input" not in block.raw:
        raise BadRequest(f"{at}input is missing", param=f"{at}input", code="missing_required_parameter")
    return ToolCall(
        fields.string(block.raw, "id", at=at), fields.string(block.raw, "name", at=at), _arguments(block.raw["input"])
    )


def _arguments(value: object) -> str:
    """The arguments that a tool input stands for. It is no object where some program sends what a model really said."""
    if isinstance(value, Mapping) and len(value) == 1 and isinstance(inner := value.get(UNPARSED), Mapping):
        raw = inner.get("raw")
        if isinstance(raw, str):
            return raw
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _input(arguments: str) -> dict[str, Any]:
    """The tool input that `_arguments` reads as these arguments: always an object, as clients insist on one."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    wrapped: object = value
    for _ in range(_HISTORY_LEVELS):
        wrapped = [wrapped]
    if isinstance(value, dict) and not is_too_nested(wrapped):
        return value
    return {UNPARSED: {"raw": arguments, "len": len(arguments)}}


def _signature(reasoning: str) -> str:
    """Opaque to clients, which only want one; nothing is read from it."""
    return "canter-" + hashlib.sha256(reasoning.encode("utf-8", "replace")).hexdigest()


def _is_hosted(type_: str) -> bool:
    return type_ in _HOSTED or type_.endswith(_HOSTED_RESULT)


def _refused(block: Block, where: str) -> BadRequest:
    if fields.left_out(block.type) is not None:
        what = f"{block.at} is of type {block.type!r}; the policy reads text only"
    else:
        what = f"{block.at} is of type {block.type!r}, which {where} cannot hold here"
    return BadRequest(what, param=block.at, code="unsupported_content")
