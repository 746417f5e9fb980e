"""The wire formats that harnesses speak, one file each: thin, pure, and all on the same canonical request and reply.

A dialect parses a request into `Asked`, makes the JSON of a whole reply from an `Answer`, and turns that JSON into the
events of a stream. Everything in between (tokens, sampling, recording, waiting) is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from canter.gateway.dialects.canonical import Answer, Asked
from canter.gateway.problems import Shape
from canter.tokens.messages import Message


class Dialect(Protocol):
    """One wire format. Methods are pure."""

    name: str
    id_prefix: str
    """What the ids of its replies begin with."""
    shape: Shape
    """How its errors look."""
    keep_alive: bytes
    """What a stream carries while a generation takes its time."""

    def parse(self, body: Mapping[str, Any]) -> Asked:
        """Raises `BadRequest` for what cannot be honoured; unknown fields are ignored."""
        ...

    def reply(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        """The JSON of the whole reply, as it is sent where the client does not stream, and as it is recorded."""
        ...

    def events(self, asked: Asked, reply: Mapping[str, Any]) -> Iterator[bytes]:
        """The stream that carries `reply`; the last item is the terminal event."""
        ...

    def message(self, reply: Mapping[str, Any]) -> Message:
        """The message that a recorded `reply` carries: the inverse of `reply`, as far as messages go."""
        ...

    def failure(self, error: Mapping[str, Any]) -> bytes:
        """The event that tells of an error (an error body of its shape) inside a stream."""
        ...
