"""All calls of one attempt as a tree, and where the next one belongs in it.

*A message match proposes a parent, the token prefix decides.* The longest known beginning of a request's messages
that ends with a recorded reply proposes that call as the parent. The prompt is then what the engine saw and sampled
there, continued by a bridge; what the harness sent back in place of the reply is only used to find it. Where nothing
can be bridged the messages are rendered whole, and the call forks unless the rendering happens to extend the parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from canter.errors import NotFound
from canter.tokens.causes import Proposal, message_cause, token_cause
from canter.tokens.messages import Message, ToolSpec, exact_key, is_issued, match_key, tools_key
from canter.tokens.rendering import Rendering
from canter.tokens.trie import EDGE_BYTES, Node, Trie
from canter.types import Call, ForkCause, Ids

AGENT = "main"
"""The label of the calls of an attempt's own agent: no side request and no sub-agent."""
_AGENTS = (AGENT, "subagent")
_QUOTABLE = 64
"""So many of the latest replies are looked for as quoted summaries when a call forks."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompt of a call and its place in the tree.

    `prompt = (parent.prompt + parent.sampled)[:prefix_len] + suffix`, `prefix_len == 0` without a parent. `fork` says
    why the call does not extend `proposed_parent_id`, whose tokens differ from the prompt at `fork_at` first. Without
    a fork the prompt extends its parent's whole prompt and reply, or there is no parent. A call may fork from the
    proposed parent and yet extend another, earlier one: a turn was dropped, what came before it stays.
    """

    prompt: Ids
    parent_id: str | None
    prefix_len: int
    suffix: Ids
    fork: ForkCause | None
    proposed_parent_id: str | None
    fork_at: int | None
    message_keys: tuple[bytes, ...]
    tools: bytes
    label: str = AGENT


@dataclass(slots=True, eq=False)
class _Turn:
    """A recorded call. Its prompt is the whole of `parent` and `suffix`; one that forked is kept whole, so that what it
    forked from may be forgotten. `length` counts the tokens of prompt and reply together."""

    id: str
    ordinal: int
    parent: _Turn | None
    suffix: Ids
    sampled: Ids
    reply: Message
    tools: bytes
    label: str
    fork: ForkCause | None
    prompt: Node
    answer: Node
    children: int = 0
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.suffix) + (self.parent.length if self.parent is not None else 0)

    @property
    def length(self) -> int:
        return self.prompt_len + len(self.sampled)

    @property
    def size(self) -> int:
        """Bytes of memory, roughly."""
        reply = self.reply
        text = len(reply.content) + len(reply.reasoning or "") + sum(len(c.arguments) for c in reply.tool_calls)
        return 4 * (len(self.suffix) + len(self.sampled)) + 2 * text + 1000


class Tree:
    """The calls of one attempt, in memory. `plan` changes nothing; `add` records a finished call.

    Beyond `max_bytes` the oldest calls that nothing was built on are forgotten: a request that goes on from one of
    them is rendered whole. Not thread-safe.
    """

    def __init__(self, rendering: Rendering, *, max_bytes: int = 64 * 2**20) -> None:
        self._rendering = rendering
        self._max_bytes = max_bytes
        self._trie = Trie()
        self._turns: dict[str, _Turn] = {}
        self._by_tool_call: dict[str, str] = {}
        self._by_reply: dict[bytes, list[str]] = {}
        self._turn_bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def size(self) -> int:
        """Roughly how many bytes of memory the calls take."""
        return self._turn_bytes + EDGE_BYTES * self._trie.edges

    def tokens(self, call_id: str) -> Ids:
        """Prompt and reply of a recorded call. Raises `NotFound`."""
        if call_id not in self._turns:
            raise NotFound(f"call {call_id} is not in this tree")
        return _tokens(self._turns[call_id])

    def plan(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        label: str = AGENT,
        hint: ForkCause | None = None,
    ) -> Plan:
        """The prompt for the turn after `messages`, and which call it extends or forks from.

        `label` is what kind of request it is: of calls that match equally well, one of the same kind goes before. The
        agent itself forks from no call of another kind with which it shares no turn. `hint` is the cause where it
        shares no turn with any recorded call, or only with calls of another kind (`SUBAGENT`, `SIDE_REQUEST`,
        `COMPACTION`). Raises `TemplateError` where the messages cannot be rendered.
        """
        keys = tuple(exact_key(m) for m in messages)
        digest = tools_key(tools)
        walked = self._trie.walk(messages, keys)
        anchor, new_from = self._anchor(messages, walked, label)
        suffix = None
        if anchor is not None and anchor.tools == digest:
            suffix = self._bridge(anchor, messages, tools, walked, new_from)
        if anchor is not None and suffix is not None:
            prompt = np.concatenate([_tokens(anchor), suffix])
        else:
            prompt = self._rendering.full(messages, tools)
        proposed, reply_at = self._proposed(messages, walked, anchor, digest, label)
        parent, same = self._parent(prompt, anchor, proposed, bridged=suffix is not None)
        fork = fork_at = None
        if proposed is not None and not (parent is proposed and same == proposed.length):
            fork_at = _common(prompt, _tokens(proposed))
            fork = self._cause(messages, walked, anchor, proposed, reply_at, digest, prompt, fork_at, label, hint)
        return Plan(
            prompt=prompt,
            parent_id=parent.id if parent is not None else None,
            prefix_len=same,
            suffix=prompt[same:],
            fork=fork,
            proposed_parent_id=proposed.id if proposed is not None else None,
            fork_at=fork_at,
            message_keys=keys,
            tools=digest,
            label=label,
        )

    def add(
        self, call_id: str, plan: Plan, messages: Sequence[Message], reply: Message, sampled: Ids, *, ordinal: int
    ) -> None:
        """Records a finished call, so that later ones can extend it. `reply` is the message as the gateway sent it,
        with the ids it issued; `ordinal` is the call's place in the order of arrival (`Call.ordinal`)."""
        parent = None if plan.parent_id is None else self._turns.get(plan.parent_id)
        if parent is None or plan.prefix_len < parent.length:
            parent, suffix = None, plan.prompt
        else:
            suffix = plan.suffix.copy()
        prompt, answer = self._histories(messages, plan.message_keys, reply)
        self._keep(
            _Turn(call_id, ordinal, parent, suffix, sampled, reply, plan.tools, plan.label, plan.fork, prompt, answer)
        )
        self._shrink()

    def restore(self, rows: Iterable[tuple[Call, Sequence[Message], Sequence[ToolSpec], Message]]) -> None:
        """Records stored calls with the messages and tools of their requests and their replies, in any order.

        Give all calls that were added before, at once or in order of ordinal: a tree so restored plans as the first one
        did. Nothing is forgotten before the next `add`. Raises `NotFound` where a parent is missing.
        """
        for call, messages, tools, reply in sorted(rows, key=lambda row: row[0].ordinal):
            if call.parent_id is not None and call.parent_id not in self._turns:
                raise NotFound(f"call {call.id} was stored as a delta to {call.parent_id}, which is not given")
            parent = None if call.parent_id is None else self._turns[call.parent_id]
            suffix = call.suffix
            if parent is not None and call.prefix_len < parent.length:
                suffix = np.concatenate([_tokens(parent)[: call.prefix_len], suffix])
                parent = None
            prompt, answer = self._histories(messages, [exact_key(m) for m in messages], reply)
            self._keep(
                _Turn(
                    id=call.id,
                    ordinal=call.ordinal,
                    parent=parent,
                    suffix=suffix,
                    sampled=call.sampled,
                    reply=reply,
                    tools=tools_key(tools),
                    label=call.label,
                    fork=call.fork,
                    prompt=prompt,
                    answer=answer,
                )
            )

    # -- finding the parent --

    def _anchor(self, messages: Sequence[Message], walked: Sequence[Node], label: str) -> tuple[_Turn | None, int]:
        """The call whose reply ends the longest known beginning that ends with one, and where new messages start."""
        for depth in range(len(walked), 0, -1):
            if walked[depth - 1].replies:
                return self._latest(walked[depth - 1].replies, label, messages[depth - 1].reasoning), depth
        return None, 0

    def _bridge(
        self,
        anchor: _Turn,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        walked: Sequence[Node],
        new_from: int,
    ) -> Ids | None:
        known = [
            node.reply if node.reply is not None else message
            for node, message in zip(walked[:new_from], messages, strict=False)
        ]
        known[-1] = anchor.reply
        tokens = _tokens(anchor)
        return self._rendering.bridge(
            [*known, *messages[new_from:]],
            tools,
            prompt=tokens[: anchor.prompt_len],
            sampled=anchor.sampled,
            new_from=new_from,
        )

    def _proposed(
        self, messages: Sequence[Message], walked: Sequence[Node], anchor: _Turn | None, tools: bytes, label: str
    ) -> tuple[_Turn | None, int | None]:
        """The call that the request looks like a continuation of, and where in the messages its reply is.

        The last recorded turn among the messages, wherever it was first said; else a call that was asked with exactly
        this beginning and whose reply is not there; else, where no turn is shared, the call that begins most alike. A
        conversation with tools is no fork of a side request that came before it (a title) and has none, and the agent
        is no fork of calls of another kind.
        """
        known = len(walked)
        for at in range(len(messages) - 1, known - 1, -1):
            turn = self._said(messages[at], label)
            if turn is not None:
                return turn, at
        node = walked[-1] if walked else self._trie.root
        if known == len(messages) and (anchor is not None or node.prompts):
            return anchor, None
        if prompts := self._open_to(node.prompts, label):
            return self._latest(prompts, label), None
        if anchor is not None:
            return anchor, None
        alike = [i for i in node.calls_below() if walked or not tools or self._turns[i].tools]
        alike = self._open_to(alike, label)
        return (self._latest(alike, label) if alike else None), None

    def _open_to(self, call_ids: Sequence[str], label: str) -> list[str]:
        """Those that a request of this kind may fork from though it shares no turn with them."""
        return [i for i in call_ids if label != AGENT or self._turns[i].label == AGENT]

    def _said(self, message: Message, label: str) -> _Turn | None:
        """The recorded turn that a message is, whatever stood before it."""
        if message.role != "assistant":
            return None
        for call in message.tool_calls:
            if is_issued(call.id) and call.id in self._by_tool_call:
                return self._turns[self._by_tool_call[call.id]]
        same = self._by_reply.get(match_key(message)) if message.content.strip() or message.tool_calls else None
        same = self._open_to(same or (), label)
        return self._latest(same, label) if same else None

    def _latest(self, call_ids: Sequence[str], label: str, reasoning: str | None = None) -> _Turn:
        """Of calls that match equally well, the one of this kind, with this reasoning, else the one asked last."""

        def rank(turn: _Turn) -> tuple[bool, bool, int, str]:
            same_reasoning = reasoning is not None and turn.reply.reasoning == reasoning
            return turn.label == label, same_reasoning, turn.ordinal, turn.id

        return max([self._turns[i] for i in call_ids], key=rank)

    def _parent(
        self, prompt: Ids, anchor: _Turn | None, proposed: _Turn | None, *, bridged: bool
    ) -> tuple[_Turn | None, int]:
        """The call to store the prompt as a delta of, and the common length: one that it extends, if there is any."""
        if bridged and anchor is not None:
            return anchor, anchor.length
        best, same = None, 0
        for turn in (anchor, proposed):
            if turn is not None:
                common = _common(prompt, _tokens(turn))
                if common == turn.length:
                    return turn, common
                if common > same:
                    best, same = turn, common
        return best, same

    def _cause(
        self,
        messages: Sequence[Message],
        walked: Sequence[Node],
        anchor: _Turn | None,
        proposed: _Turn,
        reply_at: int | None,
        tools: bytes,
        prompt: Ids,
        same: int,
        label: str,
        hint: ForkCause | None,
    ) -> ForkCause:
        if proposed is anchor:
            if tools == b"" != anchor.tools:
                return hint or ForkCause.SIDE_REQUEST
            return token_cause(
                prompt,
                anchor.prompt_len,
                anchor.sampled,
                same,
                reply=anchor.reply,
                closed=len(anchor.sampled) > 0 and int(anchor.sampled[-1]) in self._rendering.stop_token_ids,
                same_tools=tools == anchor.tools,
            )
        latest = sorted(self._turns.values(), key=lambda t: t.ordinal)[-_QUOTABLE:]
        return message_cause(
            messages,
            walked,
            Proposal(proposed.prompt, proposed.reply, proposed.tools, _root(proposed).fork is ForkCause.SUBAGENT),
            tools=tools,
            reply_at=reply_at,
            shares_turn=anchor is not None or reply_at is not None,
            replies=[t.reply for t in latest],
            asides=[t.reply for t in latest if t.label not in _AGENTS],
            hint=hint if proposed.label != label or (anchor is None and reply_at is None) else None,
        )

    # -- keeping calls --

    def _histories(self, messages: Sequence[Message], keys: Sequence[bytes], reply: Message) -> tuple[Node, Node]:
        """The nodes of a call's prompt and of its reply."""
        prompt = self._trie.insert(messages, keys)
        return prompt, self._trie.insert([reply], [exact_key(reply)], below=prompt)

    def _keep(self, turn: _Turn) -> None:
        turn.prompt.prompts.append(turn.id)
        turn.answer.replies.append(turn.id)
        if turn.answer.reply is None:
            turn.answer.reply = turn.reply
        if turn.parent is not None:
            turn.parent.children += 1
        self._turns[turn.id] = turn
        self._by_tool_call.update({c.id: turn.id for c in turn.reply.tool_calls})
        self._by_reply.setdefault(match_key(turn.reply), []).append(turn.id)
        self._turn_bytes += turn.size

    def _shrink(self) -> None:
        while self.size > self._max_bytes:
            leaves = sorted((t for t in self._turns.values() if t.children == 0), key=lambda t: t.ordinal)
            if len(leaves) < 2:
                return
            self._forget(leaves[0])

    def _forget(self, turn: _Turn) -> None:
        del self._turns[turn.id]
        self._turn_bytes -= turn.size
        if turn.parent is not None:
            turn.parent.children -= 1
        for call in turn.reply.tool_calls:
            self._by_tool_call.pop(call.id, None)
        key = match_key(turn.reply)
        self._by_reply[key].remove(turn.id)
        if not self._by_reply[key]:
            del self._by_reply[key]
        turn.answer.replies.remove(turn.id)
        turn.prompt.prompts.remove(turn.id)
        self._trie.prune(turn.answer)
        self._trie.prune(turn.prompt)


def _tokens(turn: _Turn) -> Ids:
    """Prompt and reply of a call, put together from the deltas."""
    pieces: list[Ids] = []
    at: _Turn | None = turn
    while at is not None:
        pieces += (at.sampled, at.suffix)
        at = at.parent
    return np.concatenate(pieces[::-1])


def _root(turn: _Turn) -> _Turn:
    """The call that a chain began with."""
    while turn.parent is not None:
        turn = turn.parent
    return turn


def _common(left: Ids, right: Ids) -> int:
    """Length of the common beginning."""
    n = min(len(left), len(right))
    differs = np.flatnonzero(left[:n] != right[:n])
    return int(differs[0]) if len(differs) else n
