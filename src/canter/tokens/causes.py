"""Why a call does not extend the turn that its messages propose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canter.tokens.messages import Message
from canter.tokens.trie import Node, reply_change
from canter.types import ForkCause, Ids

_SUMMARY_CHARS = 32
"""A reply of at least so many characters that turns up inside another message is taken for a summary."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The call that a request proposes as its parent, as far as causes need it. `prompt` is the history that it was
    asked with; `tools` the digest of its tools; `in_subagent` whether its conversation is a sub-agent's."""

    prompt: Node
    reply: Message
    tools: bytes
    in_subagent: bool


def message_cause(
    messages: Sequence[Message],
    walked: Sequence[Node],
    proposal: Proposal,
    *,
    tools: bytes,
    reply_at: int | None,
    shares_turn: bool,
    replies: Iterable[Message],
    asides: Iterable[Message],
    hint: ForkCause | None,
) -> ForkCause:
    """The cause that can be read off the messages.

    `walked` are the nodes of the known beginning of `messages`; `reply_at` is where the proposed call's reply is among
    the messages, if it is; `shares_turn` whether any recorded turn is; `replies` are recorded replies that a summary
    may quote, `asides` those of them that answered side requests; `hint` is the cause that is known beforehand.
    """
    path = proposal.prompt.path()
    shared = 0
    while shared < min(len(path), len(walked)) and path[shared] is walked[shared]:
        shared += 1
    if hint is not None:
        return hint
    if _quotes(messages[shared:], replies, asides):
        return ForkCause.COMPACTION
    if not shares_turn and tools == b"" != proposal.tools:
        return ForkCause.SIDE_REQUEST
    if not shares_turn and (tools != proposal.tools or proposal.in_subagent or _other_system(messages, path, shared)):
        return ForkCause.SUBAGENT
    if tools != proposal.tools and shared == len(messages):
        return ForkCause.TEMPLATE
    if shared == len(path):
        return _after_prompt(messages[shared:], proposal, reply_later=reply_at is not None and reply_at > shared)
    return _inside_prompt(messages, path, shared, reply_at)


def token_cause(
    prompt: Ids, parent_prompt_len: int, sampled: Ids, same: int, *, reply: Message, closed: bool, same_tools: bool
) -> ForkCause:
    """The cause where the messages extend the parent but the tokens do not: `prompt` agrees with the parent's prompt
    and reply in the first `same` tokens. `closed`: the reply ended with a stop token."""
    if not same_tools:
        return ForkCause.TEMPLATE
    if reply.reasoning and reply.reasoning.strip() and same < len(prompt):
        return ForkCause.DROPPED_REASONING
    if same < parent_prompt_len:
        return ForkCause.TEMPLATE
    if not closed and same >= parent_prompt_len + len(sampled) - 1:
        return ForkCause.TRUNCATED
    return ForkCause.TOKENISATION


def _quotes(messages: Sequence[Message], replies: Iterable[Message], asides: Iterable[Message]) -> bool:
    """Whether a compaction's summary is among the messages: a whole reply of the model within one that it did not
    write and no tool did, or the reply to a side request as a turn of this conversation."""
    texts = [m.content for m in messages if m.role not in ("assistant", "tool")]
    summaries = {r.content.strip() for r in replies}
    if any(s in text for s in summaries if len(s) >= _SUMMARY_CHARS for text in texts):
        return True
    said = {m.content.strip() for m in messages if m.role == "assistant" and not m.tool_calls}
    return bool(said & {r.content.strip() for r in asides} - {""})


def _other_system(messages: Sequence[Message], path: Sequence[Node], shared: int) -> bool:
    """Whether the histories part within the system messages."""
    ours = messages[shared].role if shared < len(messages) else None
    theirs = path[shared].role if shared < len(path) else None
    return bool({ours, theirs} & {"system", "developer"})


def _after_prompt(rest: Sequence[Message], proposal: Proposal, *, reply_later: bool) -> ForkCause:
    """The whole prompt of the proposed call comes back, but its reply does not, or only `reply_later`: something was
    put before it (OpenCode keeps a turn whose stream broke behind its last item, and the one asked for after that)."""
    if reply_later:
        return ForkCause.EDITED_HISTORY
    if rest and rest[0].role == "assistant":
        return reply_change(proposal.reply, rest[0]) or ForkCause.UNKNOWN
    return ForkCause.DROPPED_TURN


def _inside_prompt(messages: Sequence[Message], path: Sequence[Node], shared: int, reply_at: int | None) -> ForkCause:
    """The histories part within the prompt of the proposed call."""
    theirs = path[shared]
    ours = messages[shared] if shared < len(messages) else None
    if reply_at is not None and reply_at < len(path) and not any(n.role == "user" for n in path[:shared]):
        return ForkCause.COMPACTION  # the beginning was replaced and got shorter, the end stayed
    if theirs.role == "assistant":
        if ours is not None and ours.role == "assistant" and theirs.reply is not None:
            same_turn = [c.id for c in ours.tool_calls] == [c.id for c in theirs.reply.tool_calls]
            change = reply_change(theirs.reply, ours)
            if change is not None and (same_turn or change is ForkCause.TRUNCATED):
                return change
        return ForkCause.DROPPED_TURN
    if reply_at is not None and reply_at < len(path) and any(n.role == "assistant" for n in path[shared:]):
        return ForkCause.DROPPED_TURN
    return ForkCause.EDITED_HISTORY
