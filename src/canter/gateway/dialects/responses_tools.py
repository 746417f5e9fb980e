"""Tools of the Responses API as plain functions that a chat template can show, and the way back.

| tool | shown to the policy as |
|---|---|
| `function` | itself |
| `custom` | a function with one string, `input`; a grammar is quoted in the description |
| a tool of a `namespace` | a function named `NAMESPACE__NAME` |
| every other type | kept out of the prompt: its server or harness side is not here; recorded by type |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from canter.errors import BadRequest
from canter.gateway.dialects import fields
from canter.tokens.messages import ToolSpec, parse_arguments, sendable

_JOINT = "__"
_CHOICES = ("none", "auto", "required")
_SYNTAXES = ("lark", "regex")
_HOSTED_CHOICES = frozenset(
    {
        "file_search",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "computer",
        "computer_use",
        "computer_use_preview",
        "image_generation",
        "code_interpreter",
        "apply_patch",
        "shell",
    }
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the prompt shows it (`spec`), and as the harness knows it."""

    spec: ToolSpec
    name: str
    namespace: str | None
    custom: bool
    strict: bool | None = None
    format: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request: `all` that it brings, `shown` those that `tool_choice` leaves, `kept_out` the types of
    those that are never shown."""

    all: tuple[Tool, ...]
    shown: tuple[Tool, ...]
    kept_out: tuple[str, ...]

    def named(self, shown_name: str) -> Tool | None:
        """The tool that the policy calls by this name."""
        return next((tool for tool in self.all if tool.spec.name == shown_name), None)


def shown_name(name: str, namespace: str | None) -> str:
    """The name of a tool in the prompt."""
    return f"{namespace}{_JOINT}{name}" if namespace else name


def read_tools(body: Mapping[str, Any], items: Sequence[Any]) -> Tools:
    """The tools of a request whose input is `items`. Raises `BadRequest`, also where two tools would have one name."""
    tools: dict[str, Tool] = {}
    kept_out: list[str] = []
    for raw, at in _raw_tools(body, items):
        type_ = _type_of(raw, at)
        read = list(_read(raw, type_, at))
        if not read and type_ != "namespace":
            kept_out.append(type_)
        for tool in read:
            known = tools.setdefault(tool.spec.name, tool)
            if (known.name, known.namespace, known.custom) != (tool.name, tool.namespace, tool.custom):
                raise BadRequest(
                    f"{at[:-1]} would be shown as {tool.spec.name!r}, and so would another tool; rename one of them",
                    param=at[:-1],
                    code="invalid_value",
                )
    offered = tuple(tools.values())
    return Tools(offered, _chosen(body, offered), tuple(sorted(set(kept_out))))


def wire_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """`tools` as a Response carries them: those of a namespace together again."""
    wire: list[dict[str, Any]] = []
    namespaces: dict[str, list[dict[str, Any]]] = {}
    for tool in tools:
        if tool.namespace is None:
            wire.append(_wire(tool))
        elif tool.namespace in namespaces:
            namespaces[tool.namespace].append(_wire(tool))
        else:
            members = namespaces[tool.namespace] = [_wire(tool)]
            wire.append({"type": "namespace", "name": tool.namespace, "description": "", "tools": members})
    return wire


def wire_choice(body: Mapping[str, Any]) -> Any:
    """`tool_choice` as a Response carries it."""
    choice = body.get("tool_choice")
    if not isinstance(choice, Mapping):
        return choice or "auto"
    match choice["type"]:
        case "function" | "custom":
            return {"type": choice["type"], "name": choice["name"]}
        case "allowed_tools":
            return {"type": "allowed_tools", "mode": choice["mode"], "tools": choice.get("tools") or []}
        case hosted if hosted in _HOSTED_CHOICES:
            return {"type": hosted}
    return "auto"


def custom_input(arguments: str) -> str | None:
    """The input of a call of a custom tool; `None` where the arguments are not just that."""
    value = parse_arguments(arguments)
    if value is None or not isinstance(value[0], dict) or set(value[0]) != {"input"}:
        return None
    text = value[0]["input"]
    return text if isinstance(text, str) and sendable(text) == text else None


def custom_arguments(text: str) -> str:
    """The arguments that hold the input of a custom tool."""
    return orjson.dumps({"input": text}).decode()


def _raw_tools(body: Mapping[str, Any], items: Sequence[Any]) -> Iterator[tuple[object, str]]:
    for i, raw in enumerate(fields.array(body, "tools")):
        yield raw, f"tools[{i}]."
    for i, item in enumerate(items):
        if isinstance(item, Mapping) and item.get("type") == "additional_tools":
            for j, raw in enumerate(fields.array(item, "tools", at=f"input[{i}].")):
                yield raw, f"input[{i}].tools[{j}]."


def _type_of(raw: object, at: str) -> str:
    if not isinstance(raw, Mapping):
        raise fields.wrong(at[:-1], "an object", raw)
    return fields.string(raw, "type", at=at)


def _read(raw: Any, type_: str, at: str, namespace: str | None = None) -> Iterator[Tool]:
    """What of a tool is shown."""
    if type_ == "namespace" and namespace is None:
        name = _name(raw, at)
        for i, member in enumerate(fields.array(raw, "tools", at=at)):
            inside = f"{at}tools[{i}]."
            yield from _read(member, _type_of(member, inside), inside, name)
    elif type_ == "function":
        name = _name(raw, at)
        description = fields.optional_string(raw, "description", at=at) or ""
        spec = ToolSpec(shown_name(name, namespace), description, fields.mapping(raw, "parameters", at=at))
        strict = raw.get("strict")
        yield Tool(spec, name, namespace, custom=False, strict=strict if isinstance(strict, bool) else None)
    elif type_ == "custom":
        yield _custom(raw, at, namespace)


def _custom(raw: Mapping[str, Any], at: str, namespace: str | None) -> Tool:
    name = _name(raw, at)
    description = fields.optional_string(raw, "description", at=at) or ""
    asked = fields.mapping(raw, "format", at=at)
    told: dict[str, Any] | None = {"type": "text"} if asked.get("type") == "text" else None
    if asked.get("type") == "grammar":
        syntax, definition = (fields.string(asked, part, at=f"{at}format.") for part in ("syntax", "definition"))
        description = f"{description}\n\nThe input follows this {syntax} grammar:\n{definition}".strip()
        if syntax in _SYNTAXES:
            told = {"type": "grammar", "syntax": syntax, "definition": definition}
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    spec = ToolSpec(shown_name(name, namespace), description, parameters)
    return Tool(spec, name, namespace, custom=True, format=told)


def _name(raw: Mapping[str, Any], at: str) -> str:
    name = fields.string(raw, "name", at=at)
    if not name:
        raise BadRequest(f"{at}name is empty", param=f"{at}name", code="invalid_value")
    return name


def _chosen(body: Mapping[str, Any], tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools that `tool_choice` leaves. That a call is made cannot be forced on a policy that is trained on what it
    samples: `required` and names are accepted and recorded as not enforced."""
    choice = body.get("tool_choice")
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return () if choice == "none" else tools
    if not isinstance(choice, Mapping):
        raise BadRequest(
            "tool_choice must be none, auto, required or an object", param="tool_choice", code="invalid_value"
        )
    type_ = fields.string(choice, "type", at="tool_choice.")
    if type_ in ("function", "custom"):
        name = fields.string(choice, "name", at="tool_choice.")
        if not any(name in (tool.name, tool.spec.name) for tool in tools):
            raise BadRequest(
                f"tool_choice.name {name!r} is none of the tools", param="tool_choice.name", code="invalid_value"
            )
    if type_ != "allowed_tools":
        return tools
    if fields.string(choice, "mode", at="tool_choice.") not in ("auto", "required"):
        raise BadRequest("tool_choice.mode must be auto or required", param="tool_choice.mode", code="invalid_value")
    allowed = fields.array(choice, "tools", at="tool_choice.")
    for i, entry in enumerate(allowed):
        if not isinstance(entry, Mapping):
            raise fields.wrong(f"tool_choice.tools[{i}]", "an object", entry)
    return tuple(tool for tool in tools if any(_allows(entry, tool) for entry in allowed))


def _allows(entry: Mapping[str, Any], tool: Tool) -> bool:
    if entry.get("type") == "namespace":
        return tool.namespace is not None and entry.get("name") == tool.namespace
    return entry.get("name") == tool.name and entry.get("namespace") in (None, tool.namespace)


def _wire(tool: Tool) -> dict[str, Any]:
    if tool.custom:
        wire = {"type": "custom", "name": tool.name, "description": tool.spec.description}
        return wire | ({"format": dict(tool.format)} if tool.format else {})
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.spec.description,
        "parameters": dict(tool.spec.parameters),
        "strict": tool.strict,
    }
