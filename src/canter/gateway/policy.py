"""The policy as a source of replies: messages to token ids, ids from an engine, ids back to a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from canter.config import Config
from canter.errors import EngineError
from canter.gateway.attempts import Conversation
from canter.gateway.delta import Delta, nodes_of
from canter.gateway.dialects.canonical import Answer, Asked, Chat, TokenLogprob
from canter.gateway.dialects.routes import BY_NAME
from canter.gateway.engines import Engines
from canter.gateway.http import json_object
from canter.gateway.labels import MAIN
from canter.gateway.prompts import Prompt, Prompts, tree_of
from canter.gateway.sampling import Limits, admit, call_seed, effective, prompt_digest
from canter.gateway.source import Sampled, Ticket
from canter.gateway.stops import cut_generation, cut_text, first_stop
from canter.tokens.messages import Message, ToolCall, ToolSpec, new_tool_call_id, sendable
from canter.tokens.rendering import Rendering
from canter.tokens.tokenizer import ChatTokenizer
from canter.tokens.tree import Plan, Tree
from canter.types import (
    Call,
    CallBodies,
    CallStatus,
    EngineRecord,
    FinishReason,
    Generation,
    Ids,
    Sampling,
)


class PolicySource:
    """Samples on the engines, token ids in and out."""

    def __init__(self, config: Config, rendering: Rendering, tokenizer: ChatTokenizer, engines: Engines) -> None:
        self._sampling = config.sampling
        self._context_tokens = config.model.context_tokens
        self._wait_s = config.gateway.engine_wait_s
        self._rendering = rendering
        self._tokenizer = tokenizer
        self._engines = engines
        self._prompts = Prompts(tokenizer)

    @property
    def away(self) -> bool:
        return self._engines.away

    async def sample(self, ticket: Ticket) -> Sampled:
        asked, conversation = ticket.asked, ticket.conversation
        context_tokens = await self._context()
        prompt = await self._prompts.make(asked, conversation, ticket.request_bytes, context_tokens, ticket.label)
        digest = prompt_digest(prompt.ids)
        earlier = conversation.prompts[digest]
        sampling = admit(
            Limits(self._sampling, conversation.split, context_tokens),
            prompt_tokens=len(prompt.ids),
            max_tokens=asked.max_tokens,
            stop=asked.stop,
            stop_token_ids=self._rendering.stop_token_ids,
            seed=call_seed(conversation.seed, digest, earlier),
        )
        conversation.prompts[digest] += 1
        try:
            generation = await self._engines.generate(prompt.ids, sampling, ticket.running, wait_s=self._wait_s)
        except BaseException:
            conversation.prompts[digest] -= 1  # nothing was sampled: the repeat is this same call
            raise
        self._check(generation.ids)
        return self._sampled(ticket, prompt, sampling, cut_generation(generation, asked.stop, self._tokenizer.decode))

    def _check(self, ids: Ids) -> None:
        """Raises `EngineError` for ids that are no tokens: nothing could be made of them, here or in training."""
        wrong = ids[(ids < 0) | (ids >= self._tokenizer.vocab_size)]
        if len(wrong):
            raise EngineError(
                f"the engine answered token id {wrong[0]}, outside the vocabulary of {self._tokenizer.vocab_size}"
            )

    async def count(self, asked: Asked, conversation: Conversation, request_bytes: int) -> int:
        prompt = await self._prompts.make(asked, conversation, request_bytes, await self._context(), MAIN)
        return len(prompt.ids)

    def make_tree(self) -> Tree:
        return Tree(self._rendering)

    def recall(self, conversation: Conversation, calls: Sequence[tuple[Call, CallBodies]]) -> None:
        """Makes the memory of an attempt again from its calls, in their order."""
        done = [(call, bodies) for call, bodies in calls if call.status is CallStatus.OK]
        tree = tree_of(conversation)
        histories = [_history(call, bodies) for call, bodies in done if call.dialect != "completions"]
        tree.restore(histories)
        conversation.tools_seen = any(tools for _, _, tools, _ in histories)
        nodes = nodes_of(call for call, _ in calls)
        conversation.recent.restore(nodes[call.id] for call, _ in done if call.dialect == "completions")
        for call, _ in calls:
            if call.prompt_len:
                conversation.prompts[prompt_digest(nodes[call.id].tokens()[: call.prompt_len])] += 1
        conversation.held_bytes += tree.size

    async def register(self, record: EngineRecord, key: str) -> None:
        await self._engines.register(record, key)

    async def remove(self, url: str) -> None:
        await self._engines.remove(url)

    async def close(self) -> None:
        self._prompts.close()
        await self._engines.close()

    async def _context(self) -> int:
        engine_tokens = await self._engines.context_tokens(wait_s=self._wait_s)
        return engine_tokens if self._context_tokens is None else min(engine_tokens, self._context_tokens)

    def _sampled(self, ticket: Ticket, prompt: Prompt, sampling: Sampling, generation: Generation) -> Sampled:
        asked, place = ticket.asked, prompt.place
        message, stop = self._message(ticket, prompt.ids, generation.ids)
        finish = generation.finish_reason
        if message.tool_calls and finish is FinishReason.STOP:
            finish = FinishReason.TOOL_CALLS
        generation = replace(generation, finish_reason=finish)
        answer = Answer(
            start=ticket.start,
            model=asked.model,
            fingerprint=_fingerprint(generation),
            message=message,
            finish_reason=finish,
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(generation.ids),
            logprobs=self._logprobs(generation) if asked.logprobs else None,
            stop=stop,
            reasoning_tokens=self._reasoning_tokens(message, generation),
        )
        plan = place if isinstance(place, Plan) else None
        reply = ticket.dialect.reply(asked, answer)
        return Sampled(
            reply=reply,
            generation=generation,
            parent_id=_parent_id(place),
            prefix_len=place.prefix_len,
            suffix=place.suffix,
            effective=effective(sampling, asked.requested),
            remember=_remember(ticket, place, reply, generation.ids),
            fork=plan.fork if plan else None,
            proposed_parent_id=plan.proposed_parent_id if plan else None,
            fork_at=plan.fork_at if plan else None,
        )

    def _message(self, ticket: Ticket, prompt: Ids, sampled: Ids) -> tuple[Message, str | None]:
        """The reply as a message, cut before a stop string, and that; tool calls get ids that nobody else has."""
        asked = ticket.asked
        stop = first_stop(self._tokenizer.decode(sampled), asked.stop) if asked.stop else None
        if not isinstance(asked.prompt, Chat):
            stopped = len(sampled) > 0 and int(sampled[-1]) in self._rendering.stop_token_ids
            text = self._tokenizer.decode(sampled[:-1] if stopped else sampled)
            return Message("assistant", cut_text(text, asked.stop)), stop
        parsed = self._rendering.parse(sampled, asked.prompt.tools, prompt=prompt)
        reasoning = cut_text(parsed.reasoning or "", asked.stop) or None
        prefix = ticket.dialect.tool_call_prefix
        calls = tuple(
            ToolCall(new_tool_call_id(prefix), sendable(name), sendable(arguments))
            for name, arguments in parsed.tool_calls
        )
        message = Message("assistant", cut_text(parsed.content, asked.stop), reasoning=reasoning, tool_calls=calls)
        return message, stop

    def _reasoning_tokens(self, message: Message, generation: Generation) -> int:
        return min(len(self._tokenizer.encode(message.reasoning or "")), len(generation.ids))

    def _logprobs(self, generation: Generation) -> tuple[TokenLogprob, ...]:
        entries = []
        for token_id, logprob in zip(generation.ids.tolist(), generation.logprobs.tolist(), strict=False):
            text = self._tokenizer.decode([token_id])
            entries.append(TokenLogprob(text, None if "�" in text else text.encode("utf-8", "replace"), logprob))
        return tuple(entries)


def _parent_id(place: Plan | Delta) -> str | None:
    if isinstance(place, Plan):
        return place.parent_id
    return place.parent.call_id if place.parent is not None else None


def _remember(ticket: Ticket, place: Plan | Delta, reply: Mapping[str, Any], sampled: Ids) -> Callable[[], None]:
    """What makes the call one that the next can go on from.

    The message is read back from the reply, as after a restart: where a protocol cannot carry what was sampled (a
    name given twice in arguments that it sends as an object), what was sent is what comes back.
    """
    asked, conversation = ticket.asked, ticket.conversation

    def remember() -> None:
        if isinstance(place, Delta):
            conversation.recent.add(ticket.call_id, place, sampled)
            conversation.held_bytes += sampled.nbytes + place.suffix.nbytes
            return
        assert isinstance(asked.prompt, Chat)
        tree = tree_of(conversation)
        before = tree.size
        message = ticket.dialect.message(reply)
        tree.add(ticket.call_id, place, asked.prompt.messages, message, sampled, ordinal=ticket.ordinal)
        conversation.held_bytes += tree.size - before

    return remember


def _fingerprint(generation: Generation) -> str:
    """Names the policy version that sampled the last token."""
    return f"policy-{generation.versions[-1].version}" if generation.versions else "policy"


def _history(call: Call, bodies: CallBodies) -> tuple[Call, Sequence[Message], Sequence[ToolSpec], Message]:
    """A recorded call with its messages, tools and reply, read back from the bodies."""
    dialect = BY_NAME[call.dialect]
    prompt = dialect.parse(json_object(bodies.request)).prompt
    assert isinstance(prompt, Chat), "only chats are in the tree"
    return call, prompt.messages, prompt.tools, dialect.message(json_object(bodies.reply))
