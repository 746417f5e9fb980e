"""When two requests are one: the same canonical request of the same agent, however it is spelled and however its reply
travels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import orjson

from canter.gateway.dialects.canonical import Asked, Chat, Text
from canter.tokens.messages import exact_key, tools_key

_AGENT_HEADERS = (
    b"x-claude-code-session-id",
    b"x-claude-code-agent-id",
    b"thread-id",  # Codex
    b"x-session-id",  # OpenCode
    b"x-litellm-session-id",  # OpenHands
)
"""In which harnesses name the conversation that asks; a retry has the same."""


def agent_of(headers: Mapping[bytes, bytes]) -> tuple[bytes, ...]:
    """Names the agent that asks, as far as its headers (lower-case names) do. Two sub-agents with one task send one
    request each, at the same time, and each wants a reply of its own."""
    return tuple(headers.get(name, b"") for name in _AGENT_HEADERS)


def request_digest(asked: Asked) -> bytes:
    """Names a request. What only says how the reply travels (`stream`) or is not looked at (metadata, cache marks) does
    not count, nor does the reasoning that a history may carry."""
    fields = [asked.dialect, asked.model, asked.max_tokens, asked.logprobs, asked.stop, asked.requested]
    digest = hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS))
    match asked.prompt:
        case Chat(messages, tools):
            digest.update(tools_key(tools))
            for message in messages:
                digest.update(exact_key(message))
        case Text(text):
            digest.update(b"text" + text.encode("utf-8", "surrogatepass"))
        case tokens:
            digest.update(b"tokens" + np.ascontiguousarray(tokens.ids, "<i4").tobytes())
    return digest.digest()
