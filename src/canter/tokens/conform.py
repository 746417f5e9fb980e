"""Conversations in the shape that strict chat templates demand.

Harnesses send system messages in the middle of a conversation, several of them at its beginning, developer messages,
and user messages in a row. Some templates raise an error then, some leave such a message out, some move it to the
front, where it would change every token that was sampled before. What a template does is found out once, with probes;
one that takes a message as it is gets it as it is. Otherwise, and only then:

| what the template does not take | what it gets |
|---|---|
| a developer message | a system message |
| several system messages at the beginning | one, joined by empty lines |
| a system message behind a tool result | the result, with the text at its end |
| a system message elsewhere later on | a user message in the same place |
| any system message | the text in front of the first user message |
| user or assistant messages in a row | one message, joined by empty lines |

Every one of these leaves what stands before a message as it was, so conversations stay append-only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from canter.errors import TemplateError
from canter.tokens.messages import Message

_SYSTEM = ("system", "developer")
_GAP = "\n\n"
_FIRST, _USER, _LATER = "canter5d1ffirst", "canter5d1fuser", "canter5d1flater"


@dataclass(frozen=True, slots=True)
class Demands:
    """What a template does not take. `no_developer`: the role; `no_system`: the role; `one_system`: more than one
    message of it at the beginning; `no_later_system`: one behind other messages; `no_rows`: two messages of one role
    behind each other."""

    no_developer: bool = False
    no_system: bool = False
    one_system: bool = False
    no_later_system: bool = False
    no_rows: bool = False


def find_demands(text_of: Callable[[Sequence[Message]], str]) -> Demands:
    """What a template demands. `text_of` renders messages; it may raise `TemplateError`."""

    def takes(*messages: Message) -> bool:
        """Whether all of the messages are shown, in their order."""
        try:
            text = text_of(messages)
        except TemplateError:
            return False
        at = 0
        for message in messages:
            at = text.find(message.content, at)
            if at < 0:
                return False
        return True

    user = Message("user", _USER)
    system = Message("system", _FIRST)
    reply = Message("assistant", "canter5d1freply")
    if not takes(user):
        return Demands()  # nothing is known of a template that renders no plain message
    no_system = not takes(system, user)
    return Demands(
        no_developer=not takes(Message("developer", _FIRST), user),
        no_system=no_system,
        one_system=no_system or not takes(system, Message("system", _LATER), user),
        no_later_system=no_system or not takes(system, user, reply, user, Message("system", _LATER)),
        no_rows=not takes(user, Message("user", _LATER)) or not takes(user, reply, Message("assistant", _LATER), user),
    )


def settle(messages: Sequence[Message], demands: Demands, *, follows: bool = False) -> list[Message]:
    """The conversation as the template takes it. `follows`: it goes on from a reply, and so has no beginning."""
    settled: list[Message] = []
    for sent in messages:
        begins = not follows and all(m.role in _SYSTEM for m in settled)
        message = _taken(sent, demands, begins=begins)
        if settled and _joins(settled[-1], sent, message, demands, begins=begins):
            settled[-1] = _joined(settled[-1], message)
        else:
            settled.append(message)
    return _without_system(settled) if demands.no_system and not follows else settled


def _taken(message: Message, demands: Demands, *, begins: bool) -> Message:
    """A message in a role that the template has; `begins`: only system messages stand before it."""
    if message.role == "developer" and demands.no_developer:
        message = replace(message, role="system")
    if message.role in _SYSTEM and demands.no_later_system and not begins:
        message = replace(message, role="user")
    return message


def _joins(last: Message, sent: Message, message: Message, demands: Demands, *, begins: bool) -> bool:
    """Whether a message, which was sent as `sent`, becomes a part of the one before it.

    A reminder behind a tool result is no new question: as a user message it would make templates forget the reasoning
    of the turns before it.
    """
    if message.role in _SYSTEM:
        return demands.one_system and begins
    if last.role == "tool" and sent.role in _SYSTEM:
        return True
    return demands.no_rows and last.role == message.role and message.role in ("user", "assistant")


def _without_system(messages: list[Message]) -> list[Message]:
    """The leading system message as a user message, joined with the first one where that follows at once."""
    if not messages or messages[0].role != "system":
        return messages
    first, rest = replace(messages[0], role="user"), messages[1:]
    if rest and rest[0].role == "user":
        return [_joined(first, rest[0]), *rest[1:]]
    return [first, *rest]


def _joined(left: Message, right: Message) -> Message:
    reasoning = _GAP.join(r for r in (left.reasoning, right.reasoning) if r) or None
    content = _GAP.join(c for c in (left.content, right.content) if c)
    return replace(left, content=content, reasoning=reasoning, tool_calls=left.tool_calls + right.tool_calls)
