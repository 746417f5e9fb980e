"""Where a prompt comes as token ids: which earlier call it goes on from, so that only the rest is stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from canter.types import NO_IDS, Call, Ids


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One call's tokens, prompt and reply, as a delta: `(parent's tokens)[:prefix_len] + tail`."""

    call_id: str
    parent: Node | None
    prefix_len: int
    tail: Ids

    def __len__(self) -> int:
        return self.prefix_len + len(self.tail)

    def parts(self) -> list[Ids]:
        """All tokens, in pieces that lie in the chain of parents."""
        parts: list[Ids] = []
        node: Node | None = self
        end = len(self)
        while node is not None and end > 0:
            if end > node.prefix_len:
                parts.append(node.tail[: end - node.prefix_len])
                end = node.prefix_len
            node = node.parent
        return parts[::-1]

    def tokens(self) -> Ids:
        """All tokens in one array."""
        parts = self.parts()
        return np.concatenate(parts) if parts else NO_IDS

    def shared_with(self, prompt: Ids) -> int:
        """Length of the longest common prefix."""
        at = 0
        for part in self.parts():
            same = common_prefix(part, prompt[at:])
            at += same
            if same < len(part):
                break
        return at


@dataclass(frozen=True, slots=True)
class Delta:
    """A prompt as `(parent's tokens)[:prefix_len] + suffix`."""

    parent: Node | None
    prefix_len: int
    suffix: Ids


class Recent:
    """The calls of an attempt that a next prompt may go on from: the last few that were used.

    The parents of those stay in memory with them, as deltas; the rest can go.
    """

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._nodes: OrderedDict[str, Node] = OrderedDict()

    def find(self, prompt: Ids) -> Delta:
        """`prompt` against the recent calls: the longest that it extends whole, else the longest common prefix."""
        best, best_len, best_whole = None, 0, False
        for node in reversed(self._nodes.values()):
            common = node.shared_with(prompt)
            whole = common == len(node)
            if common and (whole, common) > (best_whole, best_len):
                best, best_len, best_whole = node, common, whole
            if whole and common == len(prompt):  # nothing can share more
                break
        while best is not None and not best_whole:
            parent = best.parent
            if parent is not None and len(parent) == best.prefix_len <= best_len:
                best, best_len, best_whole = (
                    parent,
                    len(parent),
                    True,
                )  # better to extend it than to fork from its child
            elif best_len <= best.prefix_len:
                best = parent  # nothing of its own is shared
            else:
                break
        return Delta(best, best_len, prompt[best_len:])

    def add(self, call_id: str, delta: Delta, sampled: Ids) -> Node:
        """Adds a committed call."""
        node = Node(call_id, delta.parent, delta.prefix_len, np.concatenate([delta.suffix, sampled]))
        if delta.parent is not None and delta.parent.call_id in self._nodes:
            self._nodes.move_to_end(delta.parent.call_id)
        self._nodes[call_id] = node
        while len(self._nodes) > self._keep:
            self._nodes.popitem(last=False)
        return node

    def restore(self, nodes: Iterable[Node]) -> None:
        """Takes the last of these as the recent calls."""
        self._nodes = OrderedDict((node.call_id, node) for node in list(nodes)[-self._keep :])


def nodes_of(calls: Iterable[Call]) -> dict[str, Node]:
    """Recorded calls, in their order, as nodes by id. A call whose parent is not among them is left out."""
    nodes: dict[str, Node] = {}
    for call in calls:
        if call.parent_id is None or call.parent_id in nodes:
            tail = np.concatenate([call.suffix, call.sampled])
            parent = None if call.parent_id is None else nodes[call.parent_id]
            nodes[call.id] = Node(call.id, parent, call.prefix_len, tail)
    return nodes


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n
