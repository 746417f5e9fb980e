"""The wire formats that harnesses speak, one file each: thin, pure, and all on the same canonical request and reply.

A dialect parses a request into `Asked`, makes the JSON of a whole reply from an `Answer`, and turns that JSON into the
events of a stream. Everything in between (tokens, sampling, recording, waiting) is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from canter.gateway.dialects.canonical import Answer, Asked, Start
from canter.gateway.problems import Shape
from canter.tokens.messages import Message


class Dialect(Protocol):
    """One wire format. Methods are pure."""

    name: str
    id_prefix: str
    """What the ids of its replies begin with."""
    shape: Shape
    """How its errors look."""
    tool_call_prefix: str
    """What the ids of tool calls begin with."""

    def parse(self, body: Mapping[str, Any]) -> Asked:
        """Raises `BadRequest` for what cannot be honoured; unknown fields are ignored."""
        ...

    def reply(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        """The JSON of the whole reply, as it is sent where the client does not stream, and as it is recorded."""
        ...

    def keep_alive(self, asked: Asked, start: Start, number: int) -> bytes:
        """The sign of life `number` (from 0) of a stream that waits for its generation: something on which the clients
        of this protocol start their idle timers anew. The first one may open the stream."""
        ...

    def events(self, asked: Asked, reply: Mapping[str, Any], signs: int) -> Iterator[bytes]:
        """The stream that carries `reply`, behind `signs` signs of life; the last item is the terminal event."""
        ...

    def message(self, reply: Mapping[str, Any]) -> Message:
        """The message that a recorded `reply` carries: the inverse of `reply`, as far as messages go."""
        ...

    def failure(self, asked: Asked, start: Start, error: Mapping[str, Any], signs: int) -> bytes:
        """The event that tells of an error (a body of its shape) inside a stream, behind `signs` signs of life."""
        ...
