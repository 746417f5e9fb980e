"""What the gateway keeps in memory of the attempts that call now; all of it can be made again from the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from canter.gateway.auth import AttemptRef
from canter.gateway.continuation import Answered, complete_recorded
from canter.gateway.delta import Recent
from canter.gateway.unsent import Unsent
from canter.store import Store
from canter.tokens.tree import Tree
from canter.types import Call, CallBodies, Split

logger = logging.getLogger(__name__)

_EMPTY_BYTES = 4096  # of a conversation's own objects, roughly


@dataclass(slots=True)
class Conversation:
    """The calls of one attempt.

    `tree` finds the parent of a list of messages, `recent` that of a prompt that comes as ids; `answered` are replies
    that a request may refer to by id; `prompts` counts how often each prompt was sent (see `sampling.call_seed`);
    `tools_seen` says whether any call has offered tools; `unsent` are replies that an earlier gateway may not have
    sent. `users` counts the calls in flight; `held_bytes` is roughly what is held beside
    `answered`, `counted_bytes` what of it all `Conversations` has counted. `planning` is held by whoever reads or
    changes `tree` and `recent`: a long prompt is planned in a thread.
    """

    ref: AttemptRef
    seed: int
    split: Split
    recent: Recent
    answered: Answered = field(default_factory=Answered)
    tree: Tree | None = None
    next_ordinal: int = 0
    tools_seen: bool = False
    unsent: Unsent = field(default_factory=Unsent)
    prompts: Counter[bytes] = field(default_factory=Counter)
    users: int = 0
    held_bytes: int = _EMPTY_BYTES
    counted_bytes: int = 0
    planning: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take_ordinal(self) -> int:
        """The number of the next call, by arrival."""
        self.next_ordinal += 1
        return self.next_ordinal - 1


Recall = Callable[[Conversation, Sequence[tuple[Call, CallBodies]]], None]


class Conversations:
    """The conversations in memory, at most about `max_bytes`; those that nobody uses are forgotten oldest first."""

    def __init__(self, store: Store, make_tree: Callable[[], Tree | None], recall: Recall, *, max_bytes: int) -> None:
        self._store = store
        self._make_tree = make_tree
        self._recall = recall
        self._max_bytes = max_bytes
        self._held: OrderedDict[AttemptRef, asyncio.Future[Conversation]] = OrderedDict()
        self._held_bytes = 0
        self._since = time.time()
        self._seen: set[AttemptRef] = set()

    def __len__(self) -> int:
        return len(self._held)

    @contextlib.asynccontextmanager
    async def use(self, ref: AttemptRef) -> AsyncIterator[Conversation]:
        """The conversation of an attempt, read back from the store where it is not in memory."""
        conversation = await self._get(ref)
        conversation.users += 1
        try:
            yield conversation
        finally:
            conversation.users -= 1
            self._count(conversation)
            if self._held_bytes > self._max_bytes:
                self._evict()

    def forget(self, ref: AttemptRef) -> None:
        """Drops an attempt that has ended (one that is in use goes when it is the oldest)."""
        held = self._held.get(ref)
        if held is not None and _idle(held):
            self._drop(ref, held.result())
        self._seen.discard(ref)

    async def _get(self, ref: AttemptRef) -> Conversation:
        held = self._held.get(ref)
        if held is None:
            held = self._held[ref] = asyncio.ensure_future(self._load(ref))
        self._held.move_to_end(ref)
        if not held.done():
            await asyncio.wait({held})
        if (held.cancelled() or held.exception() is not None) and self._held.get(ref) is held:
            del self._held[ref]  # the next call tries again
        return held.result()

    async def _load(self, ref: AttemptRef) -> Conversation:
        rollout = await self._store.rollout(ref.rollout_id)
        conversation = Conversation(ref, rollout.seed, rollout.split, Recent(), tree=self._make_tree())
        calls = await self._store.calls([ref.rollout_id], attempt=ref.number)
        if calls:
            recorded = [(call, await self._store.bodies(call.id)) for call in calls]
            await asyncio.to_thread(self._remember, conversation, recorded)  # much JSON is read and rendered
            conversation.next_ordinal = max(call.ordinal for call in calls) + 1
            logger.info("attempt %s: read %d calls back from the store", ref, len(calls))
        self._seen.add(ref)
        return conversation

    def _remember(self, conversation: Conversation, recorded: list[tuple[Call, CallBodies]]) -> None:
        """Makes the memory of a conversation that nobody else has yet."""
        recorded = complete_recorded(recorded, conversation.answered)
        self._recall(conversation, recorded)
        if conversation.ref not in self._seen:  # else it was only forgotten for want of memory
            conversation.unsent = Unsent(recorded, self._since)

    def _evict(self) -> None:
        """Forgets idle conversations, the longest unused first, until the rest fits."""
        for ref, future in list(self._held.items()):
            if self._held_bytes <= self._max_bytes:
                return
            if _idle(future):
                self._drop(ref, future.result())

    def _count(self, conversation: Conversation) -> None:
        held_bytes = conversation.held_bytes + conversation.answered.size
        self._held_bytes += held_bytes - conversation.counted_bytes
        conversation.counted_bytes = held_bytes

    def _drop(self, ref: AttemptRef, conversation: Conversation) -> None:
        self._held_bytes -= conversation.counted_bytes
        del self._held[ref]


def _idle(held: asyncio.Future[Conversation]) -> bool:
    loaded = held.done() and not held.cancelled() and held.exception() is None
    return loaded and held.result().users == 0
