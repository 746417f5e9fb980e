"""The input items of a Responses request as canonical messages.

A reply of the policy is one message there and up to many items here (reasoning, message, calls). Items of the
assistant that follow each other are put together again to what was sampled, told by the ids that the gateway gave them,
or, where a harness has dropped those, by what a reply can hold: one reasoning, then one message and its calls.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from canter.errors import BadRequest
from canter.gateway.dialects import fields
from canter.gateway.dialects.responses_tools import custom_arguments, shown_name
from canter.tokens.messages import Message, Role, ToolCall, arrange

REASONING, MESSAGE, FUNCTION, CUSTOM, CUSTOM_RAW = "rs", "msg", "fc", "ctc", "ctcr"
"""What the ids of items begin with. `CUSTOM_RAW`: a call of a custom tool whose input is all of its arguments."""
_OUR_ID = re.compile(r"(?:rs|msg|fc|ctcr?)_([0-9a-f]{24})_([0-9]{1,4})")
_SEALED = "canter-1."

_ROLES: dict[str, Role] = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}
_SET_ASIDE = frozenset(
    {
        "additional_tools",
        "configuration_update",
        "file_search_call",
        "web_search_call",
        "image_generation_call",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "tool_search_call",
        "tool_search_output",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "program",
        "program_output",
    }
)
"""Items of tools that are kept out of the prompt: no call of this policy made them."""
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_THOUGHT_PARTS = frozenset({"reasoning_text", "summary_text", "text"})


def item_id(kind: str, response_id: str, index: int) -> str:
    """The id of item `index` of a response."""
    return f"{kind}_{response_id.rpartition('_')[2]}_{index}"


def origin(id_: object) -> tuple[str, int] | None:
    """The response, without its prefix, and the place in it that an id of ours names."""
    found = _OUR_ID.fullmatch(id_) if isinstance(id_, str) else None
    return (found[1], int(found[2])) if found else None


def seal(reasoning: str) -> str:
    """Reasoning as the opaque text that a client sends back in its place."""
    return _SEALED + base64.urlsafe_b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: str) -> str | None:
    """Inverse of `seal`; `None` for what somebody else has sealed."""
    if not sealed.startswith(_SEALED):
        return None
    try:
        data = base64.b64decode(sealed.removeprefix(_SEALED), altchars=b"-_", validate=True)
        return data.decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return None


def items_of(body: Mapping[str, Any]) -> list[Any]:
    """`input` as items: a text is a message of the user. Raises `BadRequest`."""
    value = body.get("input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if value is not None and not isinstance(value, list):
        raise fields.wrong("input", "a string or an array of items", value)
    return value or []


def is_reference(item: object) -> bool:
    """Whether an item only names another one, by its id."""
    if not isinstance(item, Mapping):
        return False
    type_ = item.get("type")
    return type_ == "item_reference" or (type_ is None and item.get("role") is None and isinstance(item.get("id"), str))


def set_aside(items: Sequence[Any]) -> set[str]:
    """The types of the items that do not reach the prompt."""
    types = (item.get("type") for item in items if isinstance(item, Mapping))
    return {type_ for type_ in types if isinstance(type_, str) and type_ in _SET_ASIDE} - {"additional_tools"}


def read_items(items: Sequence[Any], at: str = "input") -> tuple[Message, ...]:
    """Items as messages. Raises `BadRequest`."""
    builder = _Builder()
    for i, item in enumerate(items):
        where = f"{at}[{i}]."
        if not isinstance(item, Mapping):
            raise fields.wrong(where[:-1], "an object", item)
        _read(builder, item, _type_of(item, where), where)
    return arrange(list(builder.messages()))


@dataclass(slots=True)
class _Turn:
    """One reply of the assistant, as far as it has been read."""

    response: str | None = None
    seen: set[str] = field(default_factory=set)
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            "assistant",
            "\n".join(self.content),
            reasoning="\n".join(self.reasoning) or None,
            tool_calls=tuple(self.calls),
        )


class _Builder:
    """Puts items together. A turn stays open for more items until something else than a tool result follows it."""

    def __init__(self) -> None:
        self._done: list[Message | _Turn] = []
        self._open: _Turn | None = None
        self._answered = False

    def add(self, message: Message) -> None:
        self._done.append(message)
        self._answered = True
        if message.role != "tool":
            self._open = None

    def turn(self, item: Mapping[str, Any], kind: str) -> _Turn:
        """The turn that an item of the assistant belongs to."""
        known = origin(item.get("id"))
        if self._open is None or not self._continues(self._open, item, kind, known):
            self._open, self._answered = _Turn(), False
            self._done.append(self._open)
        if known is not None:
            self._open.response = self._open.response or known[0]
            self._open.seen.add(item["id"])
        return self._open

    def _continues(self, turn: _Turn, item: Mapping[str, Any], kind: str, known: tuple[str, int] | None) -> bool:
        if known is not None and turn.response is not None:
            return known[0] == turn.response and item["id"] not in turn.seen
        if self._answered or (known is not None and known[1] == 0):
            return False
        if kind == REASONING:
            return False  # a reply begins with it
        return kind != MESSAGE or not turn.content

    def messages(self) -> Iterator[Message]:
        for part in self._done:
            yield part.message() if isinstance(part, _Turn) else part


def _type_of(item: Mapping[str, Any], at: str) -> str:
    """The type of an item, also where it need not be said."""
    if is_reference(item):
        return "item_reference"
    if item.get("type") is None and item.get("role") is not None:
        return "message"
    return fields.string(item, "type", at=at)


def _read(builder: _Builder, item: Mapping[str, Any], type_: str, at: str) -> None:
    match type_:
        case "message":
            _read_message(builder, item, at)
        case "reasoning":
            builder.turn(item, REASONING).reasoning.append(_reasoning(item, at))
        case "function_call":
            builder.turn(item, FUNCTION).calls.append(_call(item, at, _arguments(item, at)))
        case "custom_tool_call":
            text = fields.optional_string(item, "input", at=at) or ""
            raw = isinstance(item.get("id"), str) and item["id"].startswith(f"{CUSTOM_RAW}_")
            builder.turn(item, CUSTOM).calls.append(_call(item, at, text if raw else custom_arguments(text)))
        case "function_call_output" | "custom_tool_call_output":
            output = item.get("output")
            content = "" if output is None else _text(output, f"{at}output", _TEXT_PARTS, of_tool=True)
            builder.add(Message("tool", content, tool_call_id=fields.string(item, "call_id", at=at)))
        case "item_reference":
            raise BadRequest(
                f"{at[:-1]} refers to {str(item.get('id'))[:80]!r}, which is no item of a stored response of this "
                "attempt; send the item itself",
                param=at[:-1],
                code="item_not_found",
            )
        case "compaction" | "compaction_trigger":
            raise fields.unsupported(
                f"{at}type", f"{at}type {type_!r} is not supported: the gateway does not compact histories"
            )
        case _ if type_ not in _SET_ASIDE:
            raise fields.unsupported(f"{at}type", f"{at}type {type_[:80]!r} is no item that is known here")


def _read_message(builder: _Builder, item: Mapping[str, Any], at: str) -> None:
    name = fields.string(item, "role", at=at)
    role = _ROLES.get(name)
    if role is None:
        raise BadRequest(
            f"{at}role {name[:80]!r} is none of {', '.join(_ROLES)}; results of tools are function_call_output items",
            param=f"{at}role",
            code="invalid_value",
        )
    content = item.get("content")
    types = _TEXT_PARTS | {"refusal"} if role == "assistant" else _TEXT_PARTS
    text = "" if content is None else _text(content, f"{at}content", types)
    if role == "assistant":
        builder.turn(item, MESSAGE).content.append(text)
    else:
        builder.add(Message(role, text))


def _reasoning(item: Mapping[str, Any], at: str) -> str:
    """What was thought: the text itself, else what we have sealed, else its summary."""
    content, summary = (
        _text(fields.array(item, name, at=at), f"{at}{name}", _THOUGHT_PARTS) for name in ("content", "summary")
    )
    sealed = fields.optional_string(item, "encrypted_content", at=at)
    return content or (unseal(sealed) if sealed else None) or summary


def _call(item: Mapping[str, Any], at: str, arguments: str) -> ToolCall:
    namespace = fields.optional_string(item, "namespace", at=at)
    name = shown_name(fields.string(item, "name", at=at), namespace)
    return ToolCall(fields.string(item, "call_id", at=at), name, arguments)


def _arguments(item: Mapping[str, Any], at: str) -> str:
    arguments = item.get("arguments")
    if isinstance(arguments, Mapping):  # some harnesses send the parsed object back
        arguments = orjson.dumps(arguments).decode()
    if arguments is not None and not isinstance(arguments, str):
        raise fields.wrong(f"{at}arguments", "a string of JSON", arguments)
    return arguments or ""


def _text(content: object, at: str, types: frozenset[str], *, of_tool: bool = False) -> str:
    """Content as one text: a string, or parts of these types, which are joined with newlines as in chat completions."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.wrong(at, "a string or an array of content parts", content)
    return "\n".join(_part(part, f"{at}[{i}]", types, of_tool) for i, part in enumerate(content))


def _part(part: object, at: str, types: frozenset[str], of_tool: bool) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise fields.wrong(at, "a content part", part)
    type_ = fields.string(part, "type", at=f"{at}.")
    if type_ in types:
        return fields.string(part, "refusal" if type_ == "refusal" else "text", at=f"{at}.")
    if of_tool and (text := fields.left_out(type_)) is not None:
        return text
    raise BadRequest(
        f"{at} is a part of type {type_[:80]!r}; the policy reads text only", param=at, code="unsupported_content"
    )
