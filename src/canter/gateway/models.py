"""`/v1/models`: the names under which a run's policy is called, in the shape of either family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from canter.errors import BadRequest

_PAGE = 20
_LONGEST_PAGE = 1000
_UNKNOWN_DATE = "1970-01-01T00:00:00Z"  # Anthropic's own word for a date that is not known


def openai_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "canter"}


def openai_models(names: Sequence[str]) -> dict[str, Any]:
    return {"object": "list", "data": [openai_model(name) for name in names]}


def anthropic_model(name: str, max_tokens: int) -> dict[str, Any]:
    """`max_tokens` bounds a reply. How long a prompt may be is the engine's to say, and not known here."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": _UNKNOWN_DATE,
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "capabilities": None,
        "max_input_tokens": None,
        "max_tokens": max_tokens,
    }


def anthropic_models(names: Sequence[str], max_tokens: int, query: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A page of the list: at most `limit` behind `after_id`, or before `before_id`. Raises `BadRequest`."""
    shown, more = _page(list(names), query)
    return {
        "data": [anthropic_model(name, max_tokens) for name in shown],
        "has_more": more,
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }


def _page(names: list[str], query: Mapping[str, Sequence[str]]) -> tuple[list[str], bool]:
    """The names of a page, and whether there are more in its direction."""
    limit = _limit(query)
    if (before := _cursor(names, query, "before_id")) is not None:
        return names[max(0, before - limit) : before], before > limit
    after = _cursor(names, query, "after_id")
    start = 0 if after is None else after + 1
    return names[start : start + limit], start + limit < len(names)


def _cursor(names: list[str], query: Mapping[str, Sequence[str]], param: str) -> int | None:
    if param not in query:
        return None
    name = query[param][-1]
    if name not in names:
        raise BadRequest(f"{param} {name[:80]!r} is none of {', '.join(names)}", param=param, code="invalid_value")
    return names.index(name)


def _limit(query: Mapping[str, Sequence[str]]) -> int:
    text = query.get("limit", [str(_PAGE)])[-1]
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= _LONGEST_PAGE):
        raise BadRequest(
            f"limit must be from 1 to {_LONGEST_PAGE}, got {text[:40]!r}", param="limit", code="invalid_value"
        )
    return int(text)
