"""Threads of Messages: a request that names the reply it goes on from, and leaves what was said before to the server.

The history is put into the request before it is parsed and recorded, so that nothing behind needs to know of threads.
It comes from the record of the attempt's own calls. One reply may be gone on from more than once, and in parallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canter.errors import BadRequest, NotFound, ThreadNotFound
from canter.gateway.dialects import fields
from canter.gateway.dialects.messages import Messages
from canter.gateway.http import json_object
from canter.tokens.tree import Tree
from canter.types import CallBodies

_KEPT = ("system", "tools")
"""Fields that a thread has from its first request on."""


def previous_message(dialect: str, body: Mapping[str, Any]) -> str | None:
    """The id of the reply that a request goes on from; `None` where it says everything itself. Raises `BadRequest`."""
    thread = fields.mapping(body, "thread") if dialect == Messages.name else {}
    if not thread:
        return None
    type_ = fields.string(thread, "type", at="thread.")
    if type_ not in ("create", "continue"):
        raise BadRequest(
            f"thread.type {type_!r} is neither create nor continue", param="thread.type", code="invalid_value"
        )
    return fields.string(thread, "previous_message_id", at="thread.") if type_ == "continue" else None


def check_known(message_id: str, tree: Tree | None) -> None:
    """Raises `ThreadNotFound` unless the attempt whose calls are in `tree` has such a reply."""
    try:
        if tree is None or not message_id.startswith(Messages.id_prefix):
            raise NotFound(message_id)
        tree.tokens(message_id)
    except NotFound as error:
        raise ThreadNotFound(
            f"no reply {message_id[:80]!r} of this attempt is at hand to go on from; send the whole conversation"
        ) from error


def complete(body: Mapping[str, Any], previous: CallBodies) -> dict[str, Any]:
    """A request with the history behind it: what the previous request said, its reply, and what is new."""
    request = json_object(previous.request)
    said = {"role": "assistant", "content": json_object(previous.reply)["content"]}
    kept = {name: request[name] for name in _KEPT if name in request}
    new = {name: value for name, value in body.items() if name != "thread"}
    return {**kept, **new, "messages": [*request["messages"], said, *fields.array(body, "messages")]}
