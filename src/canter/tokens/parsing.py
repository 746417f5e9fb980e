"""Sampled text back into a message: reasoning, content and tool calls.

For models that the library `renderers` does not know: `<think>…</think>` and `<tool_call>{"name", "arguments"}
</tool_call>`, as the Hermes and Qwen families write them. What does not parse is never lost: it stays in the content.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply as a message. `tool_calls` are (name, arguments as the JSON text that was sampled); `malformed` counts
    attempts at a call that are no call and were left in `content`."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()
    malformed: int = 0


def parse_reply(text: str, *, thinks: bool, in_reasoning: bool, calls_tools: bool) -> Parsed:
    """Splits the text of a reply (without its stop token).

    `thinks`: the model writes think blocks; `in_reasoning`: the prompt has opened one already; `calls_tools`: tools
    were offered, so that `<tool_call>` is a call and not text.
    """
    reasoning, content = _split_reasoning(text, in_reasoning) if thinks else (None, text)
    if not calls_tools or _CALL_OPEN not in content:
        return Parsed(content, reasoning)
    return _split_calls(content, reasoning)


def _split_reasoning(text: str, in_reasoning: bool) -> tuple[str | None, str]:
    body = text.lstrip()
    if body.startswith(_THINK_OPEN):
        body = body.removeprefix(_THINK_OPEN)
    elif in_reasoning:
        body = text
    else:
        return None, text
    reasoning, _, content = body.partition(_THINK_CLOSE)
    return reasoning.strip("\n"), content.lstrip("\n")


def _split_calls(text: str, reasoning: str | None) -> Parsed:
    outside: list[str] = []
    calls: list[tuple[str, str]] = []
    malformed = 0
    at = 0
    while (start := text.find(_CALL_OPEN, at)) >= 0:
        found = _read_call(text, start + len(_CALL_OPEN))
        if found is None:
            malformed += 1
            outside.append(text[at : start + len(_CALL_OPEN)])
            at = start + len(_CALL_OPEN)
        else:
            call, end = found
            calls.append(call)
            outside.append(text[at:start])
            at = end
    outside.append(text[at:])
    content = "".join(outside)
    return Parsed(content.strip() if calls else content, reasoning, tuple(calls), malformed)


def _read_call(text: str, at: int) -> tuple[tuple[str, str], int] | None:
    """The call whose JSON begins at `at`, and where the text goes on; `None` where there is none.

    The JSON is read by its own grammar, so that a `</tool_call>` inside a string ends nothing. A call at the very end
    may lack its closing tag.
    """
    members = _read_members(text, _blank(text, at))
    if members is None:
        return None
    slices, end = members
    end = _blank(text, end)
    if text.startswith(_CALL_CLOSE, end):
        end += len(_CALL_CLOSE)
    elif end != len(text):
        return None
    name, arguments = slices.get("name", '""'), slices.get("arguments", "{}")
    if arguments.startswith('"'):  # an object as a JSON string, as the OpenAI API spells it
        arguments = json.loads(arguments)
    return ((json.loads(name), arguments), end) if name[1:-1] and name[0] == '"' and _is_object(arguments) else None


def _read_members(text: str, at: int) -> tuple[dict[str, str], int] | None:
    """The members of the JSON object at `at` as slices of the text, and where it ends."""
    if not text.startswith("{", at):
        return None
    slices: dict[str, str] = {}
    separator = "{"
    try:
        while text[at] == separator:
            at = _blank(text, at + 1)
            if separator == "{" and text[at] == "}":
                break
            name, at = _JSON.raw_decode(text, at)
            at = _blank(text, at)
            if not isinstance(name, str) or text[at] != ":":
                return None
            start = _blank(text, at + 1)
            _, at = _JSON.raw_decode(text, start)
            slices[name] = text[start:at]
            separator, at = ",", _blank(text, at)
        return (slices, at + 1) if text[at] == "}" else None
    except (ValueError, IndexError, RecursionError):
        return None


def _blank(text: str, at: int) -> int:
    """The first position from `at` on that is no JSON whitespace."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(token: str) -> Any:
    raise ValueError(f"{token} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)
