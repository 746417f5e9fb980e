"""The tools of a chat request: which of them the prompt shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canter.errors import BadRequest
from canter.gateway.dialects import fields
from canter.tokens.messages import ToolSpec


@dataclass(frozen=True, slots=True)
class Offered:
    """`shown` are the functions that `tool_choice` leaves; `left_out` names the tools of other types (`custom`, those
    that a server runs), which the prompt does not show."""

    shown: tuple[ToolSpec, ...] = ()
    left_out: tuple[str, ...] = ()


def read_tools(body: Mapping[str, Any]) -> Offered:
    """The tools of a request. Raises `BadRequest`."""
    for legacy in ("functions", "function_call"):
        if body.get(legacy) is not None:
            raise fields.unsupported(legacy, f"{legacy} is not supported; send tools and tool_choice")
    tools: list[ToolSpec] = []
    left_out: list[str] = []
    for i, raw in enumerate(fields.array(body, "tools")):
        at = f"tools[{i}]."
        if not isinstance(raw, Mapping):
            raise fields.wrong(at[:-1], "an object", raw)
        type_ = fields.optional_string(raw, "type", at=at)
        if type_ in (None, "function"):
            tools.append(_function(raw, at))
        else:
            left_out.append(_name_of(raw, type_))
    return Offered(_chosen(body.get("tool_choice"), tuple(tools), left_out), tuple(left_out))


def _name_of(raw: Mapping[str, Any], type_: str) -> str:
    inner = raw.get(type_)
    name = inner.get("name") if isinstance(inner, Mapping) else raw.get("name")
    return name if isinstance(name, str) else type_


def _function(raw: Mapping[str, Any], at: str) -> ToolSpec:
    function = fields.mapping(raw, "function", at=at)
    name = fields.string(function, "name", at=f"{at}function.")
    if not name:
        raise BadRequest(f"{at}function.name is empty", param=f"{at}function.name", code="invalid_value")
    return ToolSpec(
        name,
        fields.optional_string(function, "description", at=f"{at}function.") or "",
        fields.mapping(function, "parameters", at=f"{at}function."),
    )


def _chosen(choice: object, tools: tuple[ToolSpec, ...], left_out: Sequence[str]) -> tuple[ToolSpec, ...]:
    """That a tool is called, or a certain one, cannot be forced on a policy that is trained on what it samples: it is
    accepted and recorded as not enforced."""
    if choice is None or choice == "auto":
        return tools
    if choice == "none":
        return ()
    if choice == "required":
        if not tools and not left_out:
            raise BadRequest("tool_choice required needs tools", param="tool_choice", code="invalid_value")
        return tools
    if not isinstance(choice, Mapping):
        raise BadRequest(
            "tool_choice must be none, auto, required or an object", param="tool_choice", code="invalid_value"
        )
    type_ = fields.optional_string(choice, "type", at="tool_choice.") or ("function" if "function" in choice else "")
    if type_ == "allowed_tools":
        return _allowed(fields.mapping(choice, "allowed_tools", at="tool_choice."), tools)
    if type_ not in ("function", "custom"):
        raise BadRequest(
            f"tool_choice.type {type_!r} is none of function, custom, allowed_tools",
            param="tool_choice.type",
            code="invalid_value",
        )
    at = f"tool_choice.{type_}."
    name = fields.string(fields.mapping(choice, type_, at="tool_choice."), "name", at=at)
    if name not in ([tool.name for tool in tools] if type_ == "function" else left_out):
        raise BadRequest(
            f"{at}name {name!r} is none of the tools",
            param=f"{at}name",
            code="invalid_value",
        )
    return tools


def _allowed(allowed: Mapping[str, Any], tools: tuple[ToolSpec, ...]) -> tuple[ToolSpec, ...]:
    at = "tool_choice.allowed_tools."
    if fields.string(allowed, "mode", at=at) not in ("auto", "required"):
        raise BadRequest(f"{at}mode must be auto or required", param=f"{at}mode", code="invalid_value")
    names = set()
    for i, entry in enumerate(fields.array(allowed, "tools", at=at)):
        if not isinstance(entry, Mapping):
            raise fields.wrong(f"{at}tools[{i}]", "an object", entry)
        if entry.get("type") not in (None, "function"):
            continue  # kept out anyway
        function = fields.mapping(entry, "function", at=f"{at}tools[{i}].")
        names.add(fields.string(function, "name", at=f"{at}tools[{i}].function."))
    return tuple(tool for tool in tools if tool.name in names)
