"""Calls of one attempt, merged into chains: the token sequences that become samples.

Calls form a forest through `parent_id`. A call *extends* its parent if its prompt starts with the parent's whole
prompt and reply; then both lie in one sequence. Where it shares less (a fork: compaction, a sub-agent, an edited
history) a new chain starts, whose shared prefix is context. Where several calls extend one parent, each is the end
of a chain of its own, and the parent's tokens are trained in one of them only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from canter.samples.mask import untrained, whole
from canter.types import Call, Ids, Logprobs, Reason


@dataclass(frozen=True, slots=True)
class Chain:
    """A maximal sequence of calls, each extending the one before token for token.

    calls    the calls, root first; the last one is trained, so every chain trains something
    trained  for each call, whether its sampled tokens are trained here; false is context: untrainable, or trained
             in the chain of a sibling
    stem     the tokens that the first call shares with its parent, in pieces; context
    """

    calls: tuple[Call, ...]
    trained: tuple[bool, ...]
    stem: tuple[Ids, ...] = ()

    @property
    def length(self) -> int:
        """Number of tokens."""
        return whole(self.calls[-1])

    @property
    def trained_tokens(self) -> int:
        return sum(len(call.sampled) for call, trained in zip(self.calls, self.trained, strict=True) if trained)

    @property
    def label(self) -> str:
        return self.calls[-1].label


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of a chain laid out in one array per quantity; the arrays of `canter.types.Sample`."""

    ids: Ids
    mask: NDArray[np.bool_]
    logprobs: Logprobs
    versions: NDArray[np.int32]


def merge(calls: Iterable[Call], reasons: Mapping[str, Reason] | None = None) -> list[Chain]:
    """The chains of one attempt, in the order of their first calls, then depth first.

    `reasons` says which calls are untrained (default: what `mask.untrained` finds). An untrained call is context of
    what extends it; where nothing trained follows, it is in no chain. Everything is ordered by `ordinal`, the order
    in which calls arrived: the result depends neither on the order of `calls` nor on when each finished.
    """
    index = {call.id: call for call in sorted(calls, key=lambda call: (call.ordinal, call.id))}
    reasons = untrained(index.values()) if reasons is None else reasons
    sound = {call_id: call for call_id, call in index.items() if reasons.get(call_id) is not Reason.ORPHANED}
    extensions: dict[str | None, list[Call]] = defaultdict(list)
    for call in sound.values():
        extensions[_extended(call, sound)].append(call)
    live = _live(sound, reasons)
    chains: list[Chain] = []
    for root in extensions[None]:
        if root.id in live:
            stem = _stem(root, index)
            chains.extend(_chains_from(root, extensions, live, reasons, stem))
    return chains


def lay_out(chain: Chain) -> Row:
    """The arrays of a chain. Logprobs are 0 and versions -1 where nothing is trained."""
    length = chain.length
    row = Row(
        ids=np.empty(length, np.int32),
        mask=np.zeros(length, np.bool_),
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
    )
    end = 0
    for piece in chain.stem:
        row.ids[end : end + len(piece)] = piece
        end += len(piece)
    for call, trained in zip(chain.calls, chain.trained, strict=True):
        start, end = call.prompt_len, whole(call)
        row.ids[call.prefix_len : start] = call.suffix
        row.ids[start:end] = call.sampled
        if trained:
            row.mask[start:end] = True
            row.logprobs[start:end] = call.logprobs
            for span in call.versions:
                row.versions[start + span.start : start + span.end] = span.version
    return row


def extends(call: Call, parent: Call | None) -> bool:
    """Whether the call's prompt starts with the parent's whole prompt and reply."""
    return parent is not None and call.prefix_len == whole(parent)


def _extended(call: Call, sound: Mapping[str, Call]) -> str | None:
    """The id of the call that this one extends, `None` where a chain starts with it."""
    return call.parent_id if call.parent_id is not None and extends(call, sound.get(call.parent_id)) else None


def _live(sound: Mapping[str, Call], reasons: Mapping[str, Reason]) -> set[str]:
    """The ids of the calls that are trained, or extended (at any distance) by one that is."""
    live: set[str] = set()
    for call in sound.values():
        if call.id in reasons or not len(call.sampled):
            continue
        at: str | None = call.id
        while at is not None and at not in live:
            live.add(at)
            at = _extended(sound[at], sound)
    return live


def _chains_from(
    root: Call,
    extensions: Mapping[str | None, Sequence[Call]],
    live: set[str],
    reasons: Mapping[str, Reason],
    stem: tuple[Ids, ...],
) -> list[Chain]:
    """One chain per leaf under `root`. A parent's tokens are trained with the first of its children, so the path to a
    leaf owns its calls only from the last turn into a later child on."""
    chains: list[Chain] = []
    path: list[Call] = []
    waiting = [(root, 0, 0)]  # call, depth, depth from which the path owns its calls
    while waiting:
        call, depth, owned_from = waiting.pop()
        del path[depth:]
        path.append(call)
        children = [child for child in extensions.get(call.id, ()) if child.id in live]
        if not children:
            trained = tuple(at >= owned_from and step.id not in reasons for at, step in enumerate(path))
            chains.append(Chain(tuple(path), trained, stem))
        for place, child in reversed(list(enumerate(children))):
            waiting.append((child, depth + 1, owned_from if place == 0 else depth + 1))
    return chains


def _stem(call: Call, index: Mapping[str, Call]) -> tuple[Ids, ...]:
    """The first `prefix_len` tokens of the call's prompt, as views into its ancestors' arrays."""
    pieces: list[Ids] = []
    need = call.prefix_len
    while need > 0 and call.parent_id is not None:
        call = index[call.parent_id]
        own = need - call.prefix_len
        if own > 0:
            prompt = len(call.suffix)
            pieces += [call.sampled[: max(0, own - prompt)], call.suffix[:own]]
            need = call.prefix_len
    return tuple(reversed(pieces))
