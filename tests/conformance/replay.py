"""Plays a recorded scenario against a real gateway, with an engine that samples what the recorded server answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson
from replay_families import Family
from replay_script import REFUSED, Ids, line_for
from replay_traffic import Recorded, scenarios

from canter.config import Config
from canter.engine import Health, PauseMode
from canter.errors import BadRequest, ContextOverflow
from canter.gateway.app import create_app
from canter.gateway.dialects.routes import BY_NAME
from canter.gateway.engines import Engines
from canter.gateway.policy import PolicySource
from canter.gateway.serve import serve
from canter.samples.merge import Chain, lay_out, merge
from canter.store.memory import MemoryStore
from canter.tokens.rendering import Rendering
from canter.types import (
    Call,
    CallStatus,
    EngineRecord,
    FinishReason,
    Generation,
    Rollout,
    Sampling,
    Task,
    VersionSpan,
)
from canter.types import Ids as TokenIds

CONTEXT_TOKENS = 2**20
MODEL = "policy"
_NOT_SENT = ("host", "content-length", "connection", "accept-encoding")


class Prompter:
    """An engine that samples what it is told. `journal` has the prompt and reply of every generation."""

    def __init__(self) -> None:
        self.next: TokenIds | Exception | None = None
        self.cut = False
        self.journal: list[tuple[TokenIds, TokenIds]] = []

    async def generate(
        self, prompt: TokenIds, sampling: Sampling, *, request_id: str, cache_salt: str = ""
    ) -> Generation:
        said, self.next = self.next, None
        if isinstance(said, Exception):
            raise said
        assert said is not None, "a request reached the engine that was expected not to"
        self.journal.append((np.array(prompt), said))
        finish = FinishReason.LENGTH if self.cut else FinishReason.STOP
        logprobs = -np.arange(1, len(said) + 1, dtype=np.float32) / 1000
        return Generation(said, logprobs, finish, (VersionSpan(0, 0, len(said)),) if len(said) else ())

    async def abort(self, request_id: str) -> None: ...

    async def pause(self, mode: PauseMode = "keep") -> None: ...

    async def resume(self) -> None: ...

    async def load_weights(self, version: int, path: str | None = None) -> None: ...

    async def health(self) -> Health:
        return Health(model="scripted", version=0, context_tokens=CONTEXT_TOKENS)

    async def close(self) -> None: ...


@dataclass
class Outcome:
    """What became of one scenario. `chains` counts samples by label, `forks` forks by cause, `counted` prompts whose
    tokens were counted beforehand; `problems` says in words what should never be."""

    chains: Counter[str] = field(default_factory=Counter)
    forks: Counter[str] = field(default_factory=Counter)
    counted: int = 0
    problems: list[str] = field(default_factory=list)

    def brief(self) -> tuple[dict[str, int], dict[str, int]]:
        return dict(sorted(self.chains.items())), dict(sorted(self.forks.items()))


class Stage:
    """A gateway for one family; every scenario is a rollout of its own. `counts`: the tokens of each request of
    Messages are counted before it is sent."""

    def __init__(self, url: str, store: MemoryStore, engine: Prompter, family: Family, *, counts: bool) -> None:
        self.url = url
        self.store = store
        self.engine = engine
        self.family = family
        self.counts = counts
        self.http = aiohttp.ClientSession()

    async def play(self, harness: str, scenario: str) -> Outcome:
        rollout_id = f"{harness}-{scenario}"
        task = Task("t", "Run.", hidden={})
        await self.store.create_rollouts([Rollout(rollout_id, "g", task)])
        key = (await self.store.start_attempt(rollout_id, 1)).agent_key
        self.engine.journal.clear()
        outcome = Outcome()
        ids: defaultdict[str, Ids] = defaultdict(lambda: Ids(self.family.thinks))
        for asked in scenarios(harness)[scenario]:
            if asked.is_call:
                await self._ask(rollout_id, key, harness, scenario, asked, ids[asked.agent], outcome)
        await self._judge(rollout_id, outcome)
        return outcome

    async def _ask(
        self, rollout_id: str, key: str, harness: str, scenario: str, asked: Recorded, ids: Ids, outcome: Outcome
    ) -> None:
        line = line_for(harness, scenario, asked)
        self.engine.next = self.family.sampled(line)
        self.engine.cut = line.cut
        if asked.fault in REFUSED:
            overflow = ContextOverflow(CONTEXT_TOKENS + 1, CONTEXT_TOKENS)
            self.engine.next = overflow if asked.fault == "400ctx" else BadRequest("refused by the script")
        before = len(await self.store.calls([rollout_id]))
        counted = None
        if self.counts and asked.dialect == "messages":
            counted = orjson.loads((await self._send(key, asked, ids, to="/count_tokens"))[1])
        status, body = await self._send(key, asked, ids)
        calls = await self.store.calls([rollout_id])
        where = f"{scenario} {asked.number}"
        if asked.fault in REFUSED:
            if status != 400 or len(calls) != before:
                outcome.problems.append(f"{where}: {status} {body[:200]!r} instead of a refusal")
            return
        if status != 200 or len(calls) != before + 1:
            outcome.problems.append(f"{where}: {status} {body[:300]!r}")
            return
        if counted is not None:
            outcome.counted += 1
            if counted != {"input_tokens": len(self.engine.journal[-1][0])}:
                outcome.problems.append(f"{where}: {counted} were counted, {len(self.engine.journal[-1][0])} prompted")
        call = max(calls, key=lambda c: c.ordinal)
        reply = orjson.loads((await self.store.bodies(call.id)).reply)
        message = BY_NAME[call.dialect].message(reply)
        if len(message.tool_calls) != len(line.calls):
            outcome.problems.append(f"{where}: {len(line.calls)} calls were sampled, {message} was sent")
            return
        ids.learn(line, message, reply)

    async def _send(self, key: str, asked: Recorded, ids: Ids, *, to: str = "") -> tuple[int, bytes]:
        part = "input" if "input" in asked.body else "messages"
        body: dict[str, Any] = {**asked.body, "model": MODEL}
        if isinstance(body.get(part), list):
            body[part] = ids.translate(asked.items)
        if body.get("previous_response_id"):
            body["previous_response_id"] = ids.plain[body["previous_response_id"]]
        headers = {n: v for n, v in asked.headers.items() if n not in _NOT_SENT}
        headers["x-api-key" if asked.dialect == "messages" else "authorization"] = (
            key if asked.dialect == "messages" else f"Bearer {key}"
        )
        async with (
            asyncio.timeout(30),
            self.http.post(self.url + asked.path + to, json=body, headers=headers) as response,
        ):
            return response.status, await response.read()

    async def _judge(self, rollout_id: str, outcome: Outcome) -> None:
        """Counts samples and forks, and checks what holds of every rollout."""
        calls = [call for call in await self.store.calls([rollout_id]) if call.status is CallStatus.OK]
        chains = merge(calls)
        outcome.chains.update(chain.label for chain in chains)
        outcome.forks.update(str(call.fork) for call in calls if call.fork is not None)
        trained = Counter(
            call.id for chain in chains for call, on in zip(chain.calls, chain.trained, strict=True) if on
        )
        if trained != Counter(call.id for call in calls if len(call.sampled)):
            outcome.problems.append(f"not every call is trained once: {trained}")
        outcome.problems += _exact(calls, chains, self.engine.journal)


def _exact(calls: list[Call], chains: list[Chain], journal: list[tuple[TokenIds, TokenIds]]) -> list[str]:
    """Where the samples are not what the engine saw."""
    seen = {call.id: pair for call, pair in zip(sorted(calls, key=lambda c: c.ordinal), journal, strict=True)}
    problems = []
    for chain in chains:
        row = lay_out(chain)
        prompt, sampled = seen[chain.calls[-1].id]
        if not np.array_equal(row.ids, np.concatenate([prompt, sampled])):
            problems.append(f"the sample that ends with {chain.calls[-1].id} is not what the engine saw")
        at = 0
        for call, on in zip(chain.calls, chain.trained, strict=True):
            at = call.prompt_len
            said = row.ids[at : at + len(call.sampled)]
            if not np.array_equal(said, seen[call.id][1]) or row.mask[at : at + len(said)].all() != on:
                problems.append(f"{call.id} is laid out wrong")
    return problems


@contextlib.asynccontextmanager
async def stage(family: Family, *, counts: bool = False) -> AsyncIterator[Stage]:
    settings = Config(
        model={"path": "nowhere"},
        tasks={"train": "train.jsonl"},
        harness={"command": ["true"]},
        grader={"use": "exact"},
        gateway={"engine_wait_s": 1.0},
        sampling={"max_tokens": 4096},
    )
    engine, store = Prompter(), MemoryStore()
    engines = Engines(lambda url, key: engine)
    rendering: Rendering = family.rendering
    source = PolicySource(settings, rendering, family.tokenizer, engines)
    await engines.register(EngineRecord("http://engine", "scripted", 0), "k")
    app = create_app(settings, store, source)
    async with serve(app, settings.gateway, grace_s=0.5) as url:
        played = Stage(url, store, engine, family, counts=counts)
        async with played.http:
            yield played
