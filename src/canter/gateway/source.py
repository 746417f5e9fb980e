"""Where replies come from: the seam between a recorded call and what samples it.

`policy.PolicySource` renders, samples on engines and parses (token ids all the way); `passthrough.UpstreamSource`
relays to an OpenAI-compatible server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from canter.gateway.attempts import Conversation
from canter.gateway.dialects import Dialect
from canter.gateway.dialects.canonical import Asked, Start
from canter.gateway.engines import Running
from canter.gateway.labels import MAIN, Label
from canter.tokens.tree import Tree
from canter.types import Call, CallBodies, EngineRecord, ForkCause, Generation, Ids


@dataclass(frozen=True, slots=True)
class Ticket:
    """One call to be sampled. `ordinal` is its place in the order of arrival, `started_at` Unix seconds, `request` the
    digest of its JSON, which is `request_bytes` long."""

    start: Start
    ordinal: int
    started_at: float
    asked: Asked
    request: bytes
    request_bytes: int
    dialect: Dialect
    conversation: Conversation
    running: Running
    label: Label = MAIN

    @property
    def call_id(self) -> str:
        return self.start.id


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of a ticket: the reply's JSON and all that is recorded of the call.

    `remember` is called once the call is committed and may be gone on from.
    """

    reply: dict[str, Any]
    generation: Generation
    parent_id: str | None
    prefix_len: int
    suffix: Ids
    effective: Mapping[str, Any]
    remember: Callable[[], None]
    fork: ForkCause | None = None
    proposed_parent_id: str | None = None
    fork_at: int | None = None


class Source(Protocol):
    """Samples calls."""

    @property
    def away(self) -> bool:
        """Whether no engine could be reached lately: calls wait for one."""
        ...

    async def sample(self, ticket: Ticket) -> Sampled:
        """Raises `BadRequest` and `ContextOverflow` for what cannot be honoured, `EngineError` where sampling fails."""
        ...

    async def count(self, asked: Asked, conversation: Conversation, request_bytes: int) -> int:
        """Tokens of the prompt that a call would have now. Raises as `sample` does."""
        ...

    def make_tree(self) -> Tree | None:
        """An empty tree for a new attempt; none where the source does not render."""
        ...

    def recall(self, conversation: Conversation, calls: Sequence[tuple[Call, CallBodies]]) -> None:
        """Makes the memory of an attempt again from its recorded calls, given in their order."""
        ...

    async def register(self, record: EngineRecord, key: str) -> None: ...

    async def remove(self, url: str) -> None: ...

    async def close(self) -> None: ...
