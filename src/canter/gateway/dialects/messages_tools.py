"""The tools of a Messages request: which of them the prompt lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from canter.errors import BadRequest
from canter.gateway.dialects import fields
from canter.tokens.messages import ToolSpec


@dataclass(frozen=True, slots=True)
class Offered:
    """`listed` are those that the prompt lists, `known` all that have a schema, by name.

    `left_out` names those of any type but `custom`: Anthropic's own (`bash_20250124`, `web_search_20260318`, …) come
    without a schema, and of a type that is yet to come nobody knows how to show it.
    A tool with `defer_loading` is not listed: the policy reads its definition where a search has found it
    (`tool_reference`). That keeps the beginning of the prompt the same when a harness loads more tools.
    """

    listed: tuple[ToolSpec, ...] = ()
    known: Mapping[str, ToolSpec] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def parse_tools(body: Mapping[str, Any]) -> Offered:
    """Raises `BadRequest`."""
    listed: list[ToolSpec] = []
    known: dict[str, ToolSpec] = {}
    left_out: list[str] = []
    for i, raw in enumerate(fields.array(body, "tools")):
        at = f"tools[{i}]."
        if not isinstance(raw, Mapping):
            raise fields.wrong(at[:-1], "an object", raw)
        type_ = fields.optional_string(raw, "type", at=at)
        if type_ not in (None, "custom"):
            if "function" in raw:
                raise fields.unsupported(
                    f"{at}type", f"{at}function is OpenAI's; send name, description and input_schema"
                )
            left_out.append(_name_of(raw, type_))
            continue
        tool = _custom(raw, at)
        if tool.name in known:
            raise BadRequest(
                f"{at}name {tool.name!r} is taken by another tool", param=f"{at}name", code="invalid_value"
            )
        known[tool.name] = tool
        if not fields.boolean(raw, "defer_loading", at=at):
            listed.append(tool)
    return Offered(tuple(listed), known, tuple(left_out))


def check_tool_choice(body: Mapping[str, Any], offered: Offered) -> str:
    """`auto`, `any`, `none` or `tool`. `any` and `tool` cannot be forced on a policy that is trained on what it
    samples: they are accepted and recorded as not enforced."""
    choice = fields.mapping(body, "tool_choice")
    if not choice:
        return "auto"
    type_ = fields.string(choice, "type", at="tool_choice.")
    if type_ not in ("auto", "any", "none", "tool"):
        raise BadRequest(
            f"tool_choice.type {type_!r} is none of auto, any, none, tool",
            param="tool_choice.type",
            code="invalid_value",
        )
    fields.boolean(choice, "disable_parallel_tool_use", at="tool_choice.")
    if type_ == "any" and not (offered.known or offered.left_out):
        raise BadRequest("tool_choice any needs tools", param="tool_choice", code="invalid_value")
    if type_ == "tool":
        name = fields.string(choice, "name", at="tool_choice.")
        if name not in offered.known and name not in offered.left_out:
            raise BadRequest(
                f"tool_choice.name {name!r} is none of the tools", param="tool_choice.name", code="invalid_value"
            )
    return type_


def _name_of(raw: Mapping[str, Any], type_: str) -> str:
    name = raw.get("name") or raw.get("mcp_server_name")
    return name if isinstance(name, str) else type_


def _custom(raw: Mapping[str, Any], at: str) -> ToolSpec:
    name = fields.string(raw, "name", at=at)
    if not name:
        raise BadRequest(f"{at}name is empty", param=f"{at}name", code="invalid_value")
    if raw.get("input_schema") is None:
        raise BadRequest(f"{at}input_schema is missing", param=f"{at}input_schema", code="missing_required_parameter")
    return ToolSpec(
        name, fields.optional_string(raw, "description", at=at) or "", fields.mapping(raw, "input_schema", at=at)
    )
