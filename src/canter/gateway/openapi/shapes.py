"""JSON Schema in a few words, for the modules beside this one.

Objects may have members that are not named: the gateway ignores what it does not know. Absent and null mean the same
almost everywhere, so most optional members are `nullable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = dict[str, Any]

MAX_INTEGER = 2**64 - 1
"""Larger numbers are no integers to the gateway's JSON reader."""


def text(about: str = "", *, at_least: int = 0) -> Schema:
    return _told({"type": "string"} | ({"minLength": at_least} if at_least else {}), about)


def integer(about: str = "", *, low: int | None = None, high: int = MAX_INTEGER) -> Schema:
    return _told({"type": "integer"} | ({} if low is None else {"minimum": low}) | {"maximum": high}, about)


def number(low: float, high: float, about: str = "") -> Schema:
    return _told({"type": "number", "minimum": low, "maximum": high}, about)


def boolean(about: str = "") -> Schema:
    return _told({"type": "boolean"}, about)


def null(about: str = "") -> Schema:
    return _told({"type": "null"}, about)


def choice(*values: str | int, about: str = "") -> Schema:
    return _told({"enum": list(values)}, about)


def array(items: Schema, about: str = "", **bounds: Any) -> Schema:
    return _told({"type": "array", "items": items, **bounds}, about)


def record(members: Mapping[str, Schema] | None = None, required: Sequence[str] = (), about: str = "") -> Schema:
    schema: Schema = {"type": "object"}
    if members:
        schema["properties"] = dict(members)
    if required:
        schema["required"] = list(required)
    return _told(schema, about)


def nullable(schema: Schema) -> Schema:
    """`schema`, or null."""
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {"anyOf": [schema, {"type": "null"}]}


def either(*schemas: Schema, about: str = "") -> Schema:
    return _told({"anyOf": list(schemas)}, about)


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def typed(type_: str, members: Mapping[str, Schema] | None = None, required: Sequence[str] = ()) -> Schema:
    """An object whose `type` says which one it is."""
    return record({"type": choice(type_), **(members or {})}, ["type", *required])


def _told(schema: Schema, about: str) -> Schema:
    return {**schema, "description": about} if about else schema


RECORDED = "Recorded; the run's own value is imposed."
SAMPLING: Mapping[str, Schema] = {
    "temperature": nullable(number(0, 2, RECORDED)),
    "top_p": nullable(number(0, 1, RECORDED)),
    "presence_penalty": nullable(number(-2, 2, "Recorded, not applied.")),
    "frequency_penalty": nullable(number(-2, 2, "Recorded, not applied.")),
    "seed": nullable(integer(RECORDED, low=-(2**63))),
    "logit_bias": nullable({**record(about="Recorded, not applied."), "additionalProperties": {"type": "number"}}),
    "n": {"enum": [1, None], "description": "Each call is one sample of the policy."},
}
"""Sampling fields of OpenAI's protocols."""

STOP = either(
    null(),
    text(at_least=1),
    array(text(at_least=1), maxItems=4),
    about="Sampling ends before the first of these strings.",
)
STREAM = nullable(boolean("Server-sent events instead of one JSON reply."))
STREAM_OPTIONS = nullable(
    record({"include_usage": nullable(boolean("Whether the stream ends with the counts of tokens."))})
)
