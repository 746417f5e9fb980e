"""An OpenAI-compatible server as a source of replies: its JSON is relayed, its token ids are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from canter.config import Config
from canter.engine.openai import Completion, OpenAIEngine, Route
from canter.errors import BadRequest, EngineError, EngineUnavailable
from canter.gateway.attempts import Conversation
from canter.gateway.delta import nodes_of
from canter.gateway.dialects.canonical import Asked, Chat
from canter.gateway.dialects.routes import BY_NAME
from canter.gateway.http import json_object
from canter.gateway.identity import request_digest
from canter.gateway.relay import relayed, route_of, upstream_body
from canter.gateway.sampling import Limits, admit, call_seed, effective
from canter.gateway.source import Sampled, Ticket
from canter.types import Call, CallBodies, CallStatus, EngineRecord, Sampling

_UNKNOWN_CONTEXT = 2**31 - 1  # the server alone knows how long its prompt is, and refuses what does not fit


class UpstreamSource:
    """Relays to one server."""

    def __init__(self, config: Config, engine: OpenAIEngine) -> None:
        self._config = config
        self._engine = engine
        self.away = False

    async def sample(self, ticket: Ticket) -> Sampled:
        asked, conversation = ticket.asked, ticket.conversation
        sampling = self._admit(ticket)
        conversation.prompts[ticket.request] += 1
        try:
            completion = await self._complete(route_of(asked), upstream_body(asked, sampling))
            reply = _relayed(ticket, completion)
        except BaseException:
            conversation.prompts[ticket.request] -= 1  # nothing was sampled: the repeat is this same call
            raise
        delta = conversation.recent.find(completion.prompt)
        sampled = completion.generation.ids

        def remember() -> None:
            conversation.recent.add(ticket.call_id, delta, sampled)
            conversation.held_bytes += delta.suffix.nbytes + sampled.nbytes

        return Sampled(
            reply=reply,
            generation=completion.generation,
            parent_id=delta.parent.call_id if delta.parent is not None else None,
            prefix_len=delta.prefix_len,
            suffix=delta.suffix,
            effective=effective(sampling, asked.requested),
            remember=remember,
        )

    async def count(self, asked: Asked, conversation: Conversation, request_bytes: int) -> int:
        raise BadRequest(
            "tokens cannot be counted with engine.use = 'openai': the server alone renders the prompt",
            code="unsupported_value",
        )

    def make_tree(self) -> None:
        return None

    def recall(self, conversation: Conversation, calls: Sequence[tuple[Call, CallBodies]]) -> None:
        nodes = nodes_of(call for call, _ in calls if call.status is CallStatus.OK)
        conversation.recent.restore(nodes.values())
        for call, bodies in calls:
            asked = BY_NAME[call.dialect].parse(json_object(bodies.request))
            conversation.tools_seen |= isinstance(asked.prompt, Chat) and bool(asked.prompt.tools)
            if (
                call.status is CallStatus.OK or call.prompt_len
            ):  # else nothing was sampled: the repeat is this same call
                conversation.prompts[request_digest(asked)] += 1

    async def register(self, record: EngineRecord, key: str) -> None:
        """Tells which policy version the server has now. Raises `BadRequest` for another server."""
        if record.url.rstrip("/") != self._engine.url:
            raise BadRequest(
                f"this run passes through to {self._engine.url} (engine.url), not to {record.url}", param="url"
            )
        self._engine.version = record.version

    async def remove(self, url: str) -> None:
        self._engine.version = None

    async def close(self) -> None:
        await self._engine.close()

    def _admit(self, ticket: Ticket) -> Sampling:
        asked, conversation = ticket.asked, ticket.conversation
        return admit(
            Limits(self._config.sampling, conversation.split, _UNKNOWN_CONTEXT),
            prompt_tokens=0,
            max_tokens=asked.max_tokens,
            stop=asked.stop,
            stop_token_ids=(),
            seed=call_seed(conversation.seed, ticket.request, conversation.prompts[ticket.request]),
        )

    async def _complete(self, route: Route, body: dict[str, Any]) -> Completion:
        """Waits for a server that cannot be reached, and gives one that fails a second chance."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.gateway.engine_wait_s
        failed = False
        while True:
            try:
                completion = await self._engine.complete(route, body)
                self.away = False
                return completion
            except EngineUnavailable as error:
                self.away = True
                if loop.time() + error.retry_after_s > deadline:
                    raise
                await asyncio.sleep(min(1.0, error.retry_after_s))
            except EngineError:
                if failed:
                    raise
                failed = True


def _relayed(ticket: Ticket, completion: Completion) -> dict[str, Any]:
    try:
        return relayed(ticket, completion)
    except (BadRequest, AttributeError, LookupError, TypeError, ValueError) as error:
        raise EngineError(f"the server's reply cannot be passed on: {type(error).__name__}: {error}") from error
