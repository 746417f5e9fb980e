"""What every dialect is parsed into, and what it makes its reply of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from canter.tokens.messages import Message, ToolSpec
from canter.types import FinishReason, Ids


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, not empty; `tools` are those that the prompt shows."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as plain text, not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt as token ids, used exactly as they are; not empty."""

    ids: Ids


@dataclass(frozen=True, slots=True)
class Asked:
    """One model request. `body` is its JSON, `requested` what it says about sampling.

    `stream` and `include_usage` say how the reply travels, `logprobs` whether it carries them.
    """

    dialect: str
    model: str
    prompt: Chat | Text | Tokens
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    requested: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token as text and bytes (`None` where it is only a part of a character), with its logprob."""

    token: str
    utf8: bytes | None
    logprob: float


@dataclass(frozen=True, slots=True)
class Start:
    """What is known of a reply before it is sampled: its id, and when it was asked for in Unix seconds."""

    id: str
    created: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished reply. `logprobs` has one entry per sampled token where they were asked for; `stop` is the stop string
    that ended it, if one did; `reasoning_tokens` is what of the reply its reasoning takes, encoded by itself."""

    start: Start
    model: str
    fingerprint: str
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop: str | None = None
    reasoning_tokens: int = 0
