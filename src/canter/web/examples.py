"""Example rollouts as readable conversations, from the raw requests and replies of their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canter.types import CallBodies, Rollout, RolloutState

Turn = tuple[str, str, bool]
"""Role, text, and whether the policy sampled the text."""


@dataclass(frozen=True, slots=True)
class Example:
    """One rollout to read; `reward` is None where there is none."""

    title: str
    reward: float | None
    turns: tuple[Turn, ...]


def choose(rollouts: Sequence[Rollout], count: int = 3) -> list[Rollout]:
    """Scored rollouts spread evenly from the highest reward to the lowest, latest steps first among equals."""
    scored = [r for r in rollouts if r.state is RolloutState.SCORED and r.reward is not None]
    ranked = sorted(scored, key=lambda r: (-(r.reward or 0.0), -r.step, r.group, r.index))
    if len(ranked) <= count or count < 2:
        return ranked[:count]
    return [ranked[round(place * (len(ranked) - 1) / (count - 1))] for place in range(count)]


def conversation(bodies: Sequence[CallBodies]) -> tuple[Turn, ...]:
    """The turns of a rollout: the messages of its last request, then the last reply (none if that call has no reply).

    An assistant message counts as sampled where an earlier reply has the same text; others (a harness's own worked
    examples) do not. Understands chat completions and plain completions; of other bodies, the JSON is shown.
    """
    if not bodies:
        return ()
    replies = [_reply(_json(body.reply)) for body in bodies]
    request, last = _json(bodies[-1].request), replies[-1]
    messages = request.get("messages")
    if not isinstance(messages, list):
        turns: list[Turn] = [("prompt", _text(request.get("prompt", request)), False)]
        return (*turns, *([("completion", last, True)] if last is not None else []))
    said = [(str(message.get("role", "")), _message(message)) for message in messages if isinstance(message, dict)]
    turns = [(role, text, role == "assistant" and text in replies) for role, text in said]
    return (*turns, *([("assistant", last, True)] if last is not None else []))


def _json(raw: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; empty for none, and for what is no object `{"body": …}`."""
    try:
        value = json.loads(raw or b"null")
    except ValueError:
        value = raw.decode(errors="replace")
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"body": value}


def _reply(reply: Mapping[str, Any]) -> str | None:
    """The text of a reply's first choice; None for no reply."""
    if not reply:
        return None
    choices = reply.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict):
        return _text(reply)
    message = first.get("message")
    return _message(message) if isinstance(message, dict) else _text(first.get("text", first))


def _message(message: Mapping[str, Any]) -> str:
    """Reasoning, content and tool calls of a message, in this order."""
    parts = [_text(message[key]) for key in ("reasoning_content", "content") if message.get(key)]
    for call in message.get("tool_calls") or ():
        function = call.get("function", {}) if isinstance(call, dict) else {}
        parts.append(f"{function.get('name', '')}({function.get('arguments', '')})")
    return "\n".join(parts)


def _text(content: object) -> str:
    """Content as text: a string, a list of text parts, or else its JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(part["text"] for part in content)
    return json.dumps(content, ensure_ascii=False)
