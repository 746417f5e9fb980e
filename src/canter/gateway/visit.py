"""Requests under `/api`, read: the shapes of their bodies, their query and their path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from canter.errors import BadRequest, NotFound
from canter.gateway.auth import AttemptRef
from canter.gateway.http import json_object
from canter.store import Key
from canter.types import KeyKind, Outcome, Reason, Split, Task

LONGEST_WAIT_S = 60.0

T = TypeVar("T")
Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Of a rollout or a group: it becomes a folder's name and a part of URLs as it is."""
Url = Annotated[str, StringConstraints(pattern=r"^https?://[!-~]{1,200}$")]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Ordinal = Annotated[int, Field(ge=1, lt=2**31)]


@dataclass(frozen=True, slots=True)
class NewRollout:
    id: Id
    group: Id
    task: Task
    split: Split = Split.TRAIN
    step: Count = 0
    index: Count = 0
    seed: Integer = 0
    max_attempts: Ordinal = 3


@dataclass(frozen=True, slots=True)
class NewRollouts:
    rollouts: list[NewRollout]


@dataclass(frozen=True, slots=True)
class NewAttempt:
    number: Ordinal


@dataclass(frozen=True, slots=True)
class NewEnd:
    outcome: Outcome
    exit_code: Integer | None = None
    reason: Reason | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class NewInvalid:
    reason: Reason
    message: str = ""


@dataclass(frozen=True, slots=True)
class Why:
    message: str = ""


@dataclass(frozen=True, slots=True)
class NewReward:
    value: float
    source: str = "grader"
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewEngine:
    url: Url
    model: str
    version: Count
    key: str = ""


@dataclass(frozen=True, slots=True)
class NewVersion:
    version: Count
    step: Count
    path: str = ""


@dataclass(frozen=True, slots=True)
class NewKey:
    kind: KeyKind


_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    shape: TypeAdapter(shape)
    for shape in (NewRollouts, NewAttempt, NewEnd, NewInvalid, Why, NewReward, NewEngine, NewVersion, NewKey)
}


@dataclass(frozen=True, slots=True)
class Visit:
    """A request under `/api` as a handler sees it: who asks, the path's parameters, the query and the body."""

    key: Key
    params: Mapping[str, str]
    query: Mapping[str, Sequence[str]]
    body: bytes

    def read(self, shape: type[T]) -> T:
        """The body as `shape`. Raises `BadRequest` that names the first wrong field."""
        try:
            value: T = _ADAPTERS[shape].validate_json(self.body or b"{}", strict=True)
            json_object(orjson.dumps(value))  # fails where the store and the replies would, far from the request
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the body"
            raise BadRequest(f"{where}: {first['msg']}", param=where) from error
        except orjson.JSONEncodeError as error:
            raise BadRequest(f"the body holds a value that cannot be kept: {error}") from error
        return value

    def attempt(self) -> AttemptRef:
        number = self.params["n"]
        if not _is_integer(number):
            raise NotFound(f"attempt {number[:40]!r} is no number")
        return AttemptRef(self.params["id"], int(number))

    def one(self, name: str) -> str | None:
        values = self.query.get(name)
        return values[-1] if values else None

    def integer(self, name: str, default: int, *, high: int) -> int:
        text = self.one(name)
        if text is None:
            return default
        if not _is_integer(text):
            raise BadRequest(f"{name} must be an integer from 0 up to {high}, got {text[:40]!r}", param=name)
        return min(int(text), high)

    def seconds(self, name: str) -> float:
        text = self.one(name) or "0"
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not value >= 0:
            raise BadRequest(f"{name} must be seconds from 0 up, got {text[:40]!r}", param=name)
        return min(value, LONGEST_WAIT_S)


def _is_integer(text: str) -> bool:
    """Whether a text is an integer from 0 up that fits 64 bits."""
    return text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) < 2**63
