"""The canonical conversation: what every dialect is turned into before tokens are made of it.

A dialect has already joined text parts into one string and turned absent or null content into `""`. Ids of tool
calls are issued by the gateway (`new_tool_call_id`), are unique everywhere, and come back unchanged from every
harness that was measured; they are the strongest evidence of which turn a message is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from hashlib import blake2b
from typing import Any, Literal

import orjson

from canter.wire import is_too_nested

Role = Literal["system", "developer", "user", "assistant", "tool"]

_MARK = "_ct"
_RANDOM_BYTES = 11
_ISSUED_TAIL = len(_MARK) + 2 * _RANDOM_BYTES
UNPARSED = "__unparsedToolInput"
"""The one member of a tool input that stands for arguments which are no JSON object. Claude Code puts it there itself
where the JSON of a stream is broken, and tells the model so."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an assistant message. `arguments` is the JSON text as it was sampled or sent."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `reasoning` is `None` where there is none; `tool_call_id` is set on tool results."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call; `parameters` is its JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]


def new_tool_call_id(prefix: str = "call") -> str:
    """A fresh, globally unique id for a tool call (`toolu` is the prefix of the Messages dialect)."""
    return f"{prefix}{_MARK}{secrets.token_hex(_RANDOM_BYTES)}"


def sendable(text: str) -> str:
    """A sampled text as JSON can carry it: half a character (a lone surrogate, from an escape in JSON) is `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def is_issued(tool_call_id: str) -> bool:
    """Whether an id has the form of `new_tool_call_id`, and so belongs to a turn that some gateway recorded."""
    return len(tool_call_id) > _ISSUED_TAIL and tool_call_id[-_ISSUED_TAIL:].startswith(_MARK)


def has_issued_calls(message: Message) -> bool:
    """Whether a message is an assistant turn that its tool-call ids identify."""
    calls = message.tool_calls
    return message.role == "assistant" and bool(calls) and all(is_issued(call.id) for call in calls)


def arrange(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation with the results of parallel tool calls in the order of the calls.

    Harnesses send them in the order in which the tools ended, and may send another one the next time: they are a set,
    and the order of the calls is the one that is always the same. Results that no call of the last assistant message
    asked for stay behind the others.
    """
    arranged: list[Message] = []
    at = 0
    while at < len(messages):
        arranged.append(messages[at])
        at += 1
        if len(arranged[-1].tool_calls) > 1:
            order = {call.id: place for place, call in enumerate(arranged[-1].tool_calls)}
            end = at
            while end < len(messages) and messages[end].role == "tool":
                end += 1
            arranged += sorted(messages[at:end], key=lambda m: order.get(m.tool_call_id or "", len(order)))
            at = end
    return tuple(arranged)


def exact_key(message: Message) -> bytes:
    """Digest of a message as it was sent, reasoning left out: a cheap test for "the same again"."""
    fields = [message.role, message.content, message.tool_call_id or ""]
    for call in message.tool_calls:
        fields += (call.id, call.name, call.arguments)
    return _digest("exact", fields)


def match_key(message: Message) -> bytes:
    """Canonical identity by which a message proposes a turn (16 bytes).

    Gateway-issued tool-call ids alone identify an assistant message that has them. Otherwise it is the content
    without trailing whitespace (without leading either where the model said it: harnesses trim replies) and the calls
    with their arguments compared as JSON (`canonical_arguments`). The reasoning does not count, as half of the
    harnesses drop it, nor does the name on a tool result.
    """
    calls = message.tool_calls
    if has_issued_calls(message):
        return _digest("issued", [call.id for call in calls])
    content = message.content.strip() if message.role == "assistant" else message.content.rstrip()
    fields = [message.role, content, message.tool_call_id or ""]
    for call in calls:
        fields += (call.id, call.name, canonical_arguments(call.arguments))
    return _digest("canonical", fields)


def tools_key(tools: Sequence[ToolSpec]) -> bytes:
    """Digest of the tools of a request, in their order, the order of schema keys included (templates render it)."""
    if not tools:
        return b""
    rows = [[tool.name, tool.description, tool.parameters] for tool in tools]
    try:
        text = orjson.dumps(rows)
    except TypeError:  # integers beyond 64 bits, lone surrogates
        text = json.dumps(rows).encode()
    return blake2b(text, digest_size=16).digest()


def canonical_arguments(text: str) -> str:
    """Arguments as a canonical text: equal for equal JSON values whatever their key order, blanks, escapes or number
    spelling. Text that is no JSON, or has duplicate keys, stands for itself."""
    value = parse_arguments(text)
    return "raw:" + text.strip() if value is None else "json:" + _canonical(value[0])


def arguments_agree(sampled: str, echoed: str) -> bool:
    """Whether echoed arguments are the sampled ones, or only what a harness adds to or normalises in them.

    Harmless are: another spelling of the same JSON, members added to objects (Claude Code writes defaults in), a
    leading `cd DIR && ` removed from a string (Claude Code keeps the working directory itself), blanks trimmed at the
    ends of a string, and the sampled text quoted as what it is (Claude Code, for arguments that it could not read; as
    the `input` of a custom tool, where its call comes back without its id).
    """
    if sampled == echoed:
        return True
    left, right = parse_arguments(sampled), parse_arguments(echoed)
    if right is not None and (quoted := _quoted(right[0])) is not None:
        return quoted != "" and sampled.strip().startswith(quoted)
    if right is not None and right[0] == {"input": sampled}:
        return True
    if left is None or right is None:
        return sampled.strip() == echoed.strip()
    return _agree(left[0], right[0])


def _quoted(echoed: Any) -> str | None:
    """The text of arguments that a harness could not read and sends back as text (long ones cut)."""
    wrapped = echoed.get(UNPARSED) if isinstance(echoed, dict) and len(echoed) == 1 else None
    raw = wrapped.get("raw") if isinstance(wrapped, dict) else None
    return raw.strip() if isinstance(raw, str) else None


def parse_arguments(text: str) -> tuple[Any] | None:
    """The JSON value in `text` (numbers as `Decimal`), boxed; `None` for no JSON, for duplicate keys, and for more than
    `MAX_NESTING` levels."""
    try:
        value = json.loads(
            text, parse_float=Decimal, parse_int=Decimal, parse_constant=_refuse, object_pairs_hook=_unique_members
        )
    except (ValueError, RecursionError, InvalidOperation):
        return None
    return None if is_too_nested(value) else (value,)


def _refuse(token: str) -> Any:
    raise ValueError(f"{token} is not JSON")


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("duplicate key")
    return members


def _canonical(value: Any) -> str:
    match value:
        case dict():
            members = sorted(value.items())
            return "{" + ",".join(f"{json.dumps(name)}:{_canonical(member)}" for name, member in members) + "}"
        case list():
            return "[" + ",".join(_canonical(item) for item in value) + "]"
        case Decimal():
            return _number(value)
        case _:
            return json.dumps(value)


def _number(value: Decimal) -> str:
    """Digits and exponent without trailing zeros (5000.0, 5e3 and 5000 agree), exact at any length."""
    sign, digits, exponent = value.as_tuple()
    mantissa = "".join(map(str, digits)).lstrip("0")
    stripped = mantissa.rstrip("0")
    if not stripped:
        return "0"
    return f"{'-' if sign else ''}{stripped}e{int(exponent) + len(mantissa) - len(stripped)}"


def _agree(sampled: Any, echoed: Any) -> bool:
    match sampled, echoed:
        case dict(), dict():
            return all(name in echoed and _agree(member, echoed[name]) for name, member in sampled.items())
        case list(), list():
            return len(sampled) == len(echoed) and all(map(_agree, sampled, echoed))
        case str(), str():
            ours, theirs = sampled.strip(), echoed.strip()
            return ours == theirs or (ours.startswith("cd ") and ours.partition(" && ")[2].strip() == theirs)
        case _:
            return _canonical(sampled) == _canonical(echoed)


def _digest(domain: str, fields: Sequence[str]) -> bytes:
    text = domain + "".join([f"{len(field)}:{field}" for field in fields])
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
