"""The messages of an attempt as a trie: histories that begin alike share their beginning.

An edge is a message, found by its exact digest first and by its canonical identity (`match_key`) second; once found
in the second way, the exact digest is remembered, so that a history that comes back is walked in one look-up a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from canter.tokens.messages import Message, Role, arguments_agree, has_issued_calls, match_key
from canter.types import ForkCause

EDGE_BYTES = 300
"""Rough memory of an edge with its share of the nodes (a node has two edges as a rule)."""


@dataclass(slots=True, eq=False)
class Node:
    """The history that ends with one message. `prompts` are ids of calls whose prompt it is, `replies` ids of calls
    whose reply its last message is, `reply` that message as the gateway sent it."""

    parent: Node | None
    role: Role | None
    depth: int
    edges: dict[bytes, Node] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    reply: Message | None = None

    def path(self) -> list[Node]:
        """The nodes from the first message to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def calls_below(self) -> Iterator[str]:
        """Ids of all calls whose prompt is this history or goes on from it."""
        pending = [self]
        seen: set[int] = set()
        while pending:
            node = pending.pop()
            if id(node) not in seen:
                seen.add(id(node))
                yield from node.prompts
                pending.extend(node.edges.values())


class Trie:
    def __init__(self) -> None:
        self.root = Node(None, None, 0)
        self.edges = 0

    def walk(self, messages: Sequence[Message], keys: Sequence[bytes]) -> list[Node]:
        """The nodes of the longest known beginning of `messages`, whose exact digests are `keys`."""
        node, found = self.root, []
        for message, key in zip(messages, keys, strict=True):
            child = self._child(node, message, key)
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def insert(self, messages: Sequence[Message], keys: Sequence[bytes], below: Node | None = None) -> Node:
        """The node of a history (that goes on from `below`), made where it is new."""
        node = below or self.root
        for message, key in zip(messages, keys, strict=True):
            child = self._child(node, message, key)
            if child is None:
                child = Node(node, message.role, node.depth + 1)
                known = len(node.edges)
                node.edges[key] = child
                node.edges.setdefault(match_key(message), child)
                self.edges += len(node.edges) - known
            node = child
        return node

    def prune(self, node: Node) -> None:
        """Forgets a history that no call needs any more, and its beginnings that nothing else needs."""
        while node.parent is not None and not (node.edges or node.prompts or node.replies):
            parent = node.parent
            for key in [key for key, child in parent.edges.items() if child is node]:
                del parent.edges[key]
                self.edges -= 1
            node = parent

    def _child(self, node: Node, message: Message, key: bytes) -> Node | None:
        child = node.edges.get(key)
        if child is None:
            child = node.edges.get(match_key(message))
            if child is None or not _same_turn(child, message):
                child = _reply_like(node, message)
            if child is not None:
                node.edges[key] = child
                self.edges += 1
        return child


def _same_turn(node: Node, message: Message) -> bool:
    """Whether a message with the canonical identity of a node also says the same: ids alone do not tell."""
    if node.reply is not None:
        return reply_change(node.reply, message) is None
    return not has_issued_calls(message)


def _reply_like(node: Node, message: Message) -> Node | None:
    """The turn that was taken right here and says what an assistant message says, whatever ids its calls carry."""
    if message.role != "assistant" or has_issued_calls(message):
        return None
    replies = {id(child): child for child in node.edges.values() if child.reply is not None}
    return next((c for c in replies.values() if c.reply and reply_change(c.reply, message) is None), None)


def reply_change(reply: Message, echo: Message) -> ForkCause | None:
    """What a harness changed in a reply before it sent it back; `None` for nothing, or nothing that matters.

    The model then keeps its own tokens; where something does matter the turn is another one, and forks.
    """
    sampled, sent = reply.tool_calls, echo.tool_calls
    same_names = [c.name for c in sampled] == [c.name for c in sent]
    agree = len(sent) <= len(sampled) and all(
        call.name == other.name and arguments_agree(call.arguments, other.arguments)
        for call, other in zip(sampled, sent, strict=False)
    )
    ours, theirs = reply.content.strip(), echo.content.strip()
    if ours == theirs:
        if agree:
            return None if same_names else ForkCause.TRUNCATED  # the end of the reply is missing
        return ForkCause.TOOL_ARGUMENTS
    if ours.startswith(theirs) and not sent:
        return ForkCause.TRUNCATED  # a stream that broke off; only the reasoning may have been left of it
    if ours and theirs.startswith(ours) and same_names:
        return ForkCause.TRUNCATED  # what the harness had continued, put together
    return ForkCause.EDITED_HISTORY
