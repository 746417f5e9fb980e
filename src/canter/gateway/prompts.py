"""From a request to the token ids of its prompt; a long one does not hold up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

from canter.errors import BadRequest, ContextOverflow, TemplateError
from canter.gateway.attempts import Conversation
from canter.gateway.delta import Delta
from canter.gateway.dialects.canonical import Asked, Chat, Text, Tokens
from canter.gateway.labels import Label
from canter.tokens.reach import Reach, reach_of
from canter.tokens.tokenizer import ChatTokenizer
from canter.tokens.tree import Plan, Tree
from canter.types import Ids

_LARGE_BYTES = 128 * 2**10
"""Requests from so many bytes on are made into tokens in a thread: about 50 ms of work."""
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to sample from, and where they belong: planned in the tree, or a delta against recent ids."""

    ids: Ids
    place: Plan | Delta


class Prompts:
    """Makes prompts. One at a time for each conversation, so that each is planned on all that was recorded before."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompt")

    async def make(
        self,
        asked: Asked,
        conversation: Conversation,
        request_bytes: int,
        context_tokens: int,
        label: Label,
    ) -> Prompt:
        """The prompt of a request. Raises `BadRequest`, `TemplateError`, and `ContextOverflow` where even the longest
        tokens there are could not make a text fit."""
        planning = conversation.planning
        work = partial(self._make, asked, conversation, request_bytes, context_tokens, label)
        if request_bytes < _LARGE_BYTES:
            async with planning:
                return work()
        await planning.acquire()
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda _: planning.release())  # the thread goes on when its call is cancelled
        return await asyncio.shield(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make(
        self,
        asked: Asked,
        conversation: Conversation,
        request_bytes: int,
        context_tokens: int,
        label: Label,
    ) -> Prompt:
        match asked.prompt:
            case Chat(messages, tools) as chat:
                if self._may_overflow(request_bytes, context_tokens):
                    with contextlib.suppress(TemplateError):  # the rendering settles what a template does not take
                        self._check(self._tokenizer.apply_chat_template(chat.messages, chat.tools), context_tokens)
                plan = tree_of(conversation).plan(messages, tools, label=label.name, hint=label.hint)
                return Prompt(plan.prompt, plan)
            case Text(text):
                if self._may_overflow(request_bytes, context_tokens):
                    self._check(text, context_tokens)
                ids = self._tokenizer.encode(text)
            case Tokens(ids):
                top = int(ids.max())
                if top >= self._tokenizer.vocab_size:
                    raise BadRequest(
                        f"token id {top} is outside the vocabulary of {self._tokenizer.vocab_size}",
                        param="prompt",
                        code="invalid_value",
                    )
        return Prompt(ids, conversation.recent.find(ids))

    @cached_property
    def _reach(self) -> Reach | None:
        return reach_of(self._tokenizer)

    def _may_overflow(self, request_bytes: int, context_tokens: int) -> bool:
        """Whether a request is long enough for a look at its text: JSON is never shorter than what it holds."""
        if request_bytes < _LARGE_BYTES or self._reach is None:
            return False
        return self._reach.fewest_tokens(request_bytes) > context_tokens

    def _check(self, text: str, context_tokens: int) -> None:
        assert self._reach is not None
        fewest = self._reach.fewest_tokens_of(text)
        if fewest > context_tokens:
            raise ContextOverflow(fewest, context_tokens, at_least=True)


def tree_of(conversation: Conversation) -> Tree:
    assert conversation.tree is not None, "a policy's conversations are made with a tree"
    return conversation.tree
