"""Reads fields of a request's JSON: right type or a clear refusal that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canter.errors import BadRequest

MAX_STOPS = 4
_UNREADABLE = frozenset(
    {
        "image",
        "image_url",
        "input_image",
        "document",
        "file",
        "input_file",
        "container_upload",
        "input_audio",
        "audio",
        "video",
    }
)
"""Parts of content that a policy which reads text cannot be shown."""


def kind(value: object) -> str:
    """JSON's word for the type of a value."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)


def wrong(param: str, wanted: str, value: object) -> BadRequest:
    return BadRequest(f"{param} must be {wanted}, got {kind(value)}", param=param, code="invalid_type")


def unsupported(param: str, what: str) -> BadRequest:
    return BadRequest(what, param=param, code="unsupported_value")


def left_out(type_: str) -> str | None:
    """What the policy reads in a tool's result in place of a part that is no text; `None` for a type that is not known.

    A user's picture is refused: whoever sends it can be told. A tool's came up in the middle of a rollout, which a
    refusal would end though the agent could go on without it.
    """
    return f"[{type_} left out: this model reads text only]" if type_ in _UNREADABLE else None


def string(body: Mapping[str, Any], name: str, *, at: str = "") -> str:
    """A string that must be there."""
    value = body.get(name)
    if value is None:
        raise BadRequest(f"{at}{name} is missing", param=at + name, code="missing_required_parameter")
    if not isinstance(value, str):
        raise wrong(at + name, "a string", value)
    return value


def optional_string(body: Mapping[str, Any], name: str, *, at: str = "") -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(at + name, "a string or null", value)
    return value


def boolean(body: Mapping[str, Any], name: str, *, at: str = "") -> bool:
    """A boolean; absent and null are false."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise wrong(at + name, "a boolean", value)
    return value


def integer(body: Mapping[str, Any], name: str, *, low: int | None = None, high: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, "an integer or null", value)
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"from {low} to {high}" if high is not None else f"at least {low}"
        raise BadRequest(f"{name} must be {bounds}, got {value}", param=name, code="invalid_value")
    return value


def number(body: Mapping[str, Any], name: str, *, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, "a number or null", value)
    if not low <= value <= high:
        raise BadRequest(f"{name} must be from {low:g} to {high:g}, got {value:g}", param=name, code="invalid_value")
    return float(value)


def mapping(body: Mapping[str, Any], name: str, *, at: str = "") -> Mapping[str, Any]:
    """An object; absent and null are an empty one."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(at + name, "an object", value)
    return value


def array(body: Mapping[str, Any], name: str, *, at: str = "") -> list[Any]:
    """An array; absent and null are an empty one."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(at + name, "an array", value)
    return value


def stop_strings(body: Mapping[str, Any]) -> tuple[str, ...]:
    """`stop`: a string or up to four; empty ones are refused."""
    value = body.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("stop", "a string or an array of strings", value)
    if len(stops) > MAX_STOPS or not all(stops):
        raise BadRequest(
            f"stop must be at most {MAX_STOPS} strings, none of them empty", param="stop", code="invalid_value"
        )
    return tuple(stops)


def check_sampling(body: Mapping[str, Any]) -> None:
    """Refuses sampling fields of a wrong type or range, and more than one choice. Their values are only recorded: the
    run's own are imposed."""
    number(body, "temperature", low=0, high=2)
    number(body, "top_p", low=0, high=1)
    number(body, "presence_penalty", low=-2, high=2)
    number(body, "frequency_penalty", low=-2, high=2)
    integer(body, "seed")
    for token, bias in mapping(body, "logit_bias").items():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise wrong(f"logit_bias.{token[:80]}", "a number", bias)
    choices = integer(body, "n")
    if choices is not None and choices != 1:
        raise unsupported("n", f"n must be 1, got {choices}: each call is one sample of the policy")
