"""Recorded calls as readable text, whatever dialect they were made in."""

from __future__ import annotations

from collections.abc import Sequence

from canter.errors import CanterError
from canter.gateway.dialects.canonical import Chat, Text
from canter.gateway.dialects.routes import BY_NAME
from canter.gateway.http import json_object
from canter.tokens.messages import Message
from canter.types import Call, CallBodies

Line = tuple[str, str]
"""Who says it (a role, or `prompt` for a plain text) and the text."""


def asked(call: Call, bodies: CallBodies) -> Sequence[Line]:
    """What a request says; one that cannot be read is shown as it is. A request that goes on from a stored response
    says only what it adds."""
    if not bodies.request:
        return ()
    try:
        prompt = BY_NAME[call.dialect].parse(json_object(bodies.request)).prompt
    except (CanterError, KeyError):
        return (("prompt", _raw(bodies.request)),)
    match prompt:
        case Chat(messages):
            return [(message.role, text_of(message)) for message in messages]
        case Text(text):
            return (("prompt", text),)
        case _:
            return (("prompt", f"{len(prompt.ids)} token ids"),)


def replied(call: Call, bodies: CallBodies) -> str | None:
    """The text of a reply, `None` where there is none."""
    if not bodies.reply or bodies.reply in (b"null", b"{}"):
        return None
    try:
        return text_of(BY_NAME[call.dialect].message(json_object(bodies.reply)))
    except (CanterError, KeyError, IndexError, TypeError):
        return _raw(bodies.reply)


def text_of(message: Message) -> str:
    """Reasoning, content and tool calls, in this order, as far as there are any."""
    parts = [message.reasoning or "", message.content]
    parts += [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(part for part in parts if part)


def _raw(body: bytes) -> str:
    return body.decode("utf-8", "replace")
