"""An engine that samples nothing: scripted, deterministic, with faults on demand. For protocol tests only."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from canter.engine import Health, PauseMode
from canter.engine.spans import to_spans
from canter.errors import BadRequest, ContextOverflow, EngineError, EngineUnavailable
from canter.types import FinishReason, Generation, Ids, Sampling, as_ids

Script = Callable[[Ids, Sampling, int], str | Sequence[int]]
"""(prompt ids, sampling, number of the request from 0) → ids of the reply, or its text (needs `encode`)."""

Encode = Callable[[str], Sequence[int]]


class Fault(StrEnum):
    """What goes wrong with a request."""

    ERROR = "error"
    """Raises EngineError."""
    HANG = "hang"
    """Never answers; aborting or cancelling ends it."""
    CUT = "cut"
    """Ends half way through with finish reason `abort`."""
    SHORT_LOGPROBS = "short_logprobs"
    """One logprob fewer than ids."""
    NAN = "nan"
    """The last logprob is no number."""


FaultOf = Callable[[Ids, int], Fault | None]
"""(prompt ids, number of the request from 0) → what goes wrong with it."""


def _numbered(faults: Mapping[int, Fault]) -> FaultOf:
    return lambda prompt, number: faults.get(number)


@dataclass(slots=True)
class _Request:
    started: bool = False
    aborted: bool = False


class FakeEngine:
    """Replies from `script`, or with pseudo-random ids that depend on (`seed`, prompt, `sampling`) alone.

    Without a script a reply has up to 32 ids below `vocab` and ends with `stop_id` where that fits `max_tokens`. A
    script's reply is sent as it is, cut at `max_tokens`; text is encoded and `stop_id` added. `token_delay_s` is slept
    before each token, so that pauses, aborts and version changes can fall in the middle of a reply. `faults` maps the
    number of a request (from 0, in order of arrival) to what goes wrong with it, or is a function that says it.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        encode: Encode | None = None,
        model: str = "fake",
        version: int = 0,
        context_tokens: int = 32768,
        vocab: int = 1000,
        stop_id: int = 2,
        seed: int = 0,
        token_delay_s: float = 0.0,
        faults: Mapping[int, Fault] | FaultOf | None = None,
    ) -> None:
        self._script = script
        self._encode = encode
        self._model = model
        self._version = version
        self._context_tokens = context_tokens
        self._vocab = vocab
        self._stop_id = stop_id
        self._seed = seed
        self._token_delay_s = token_delay_s
        self._fault_of: FaultOf = faults if callable(faults) else _numbered(faults or {})
        self._count = 0
        self._requests: dict[str, _Request] = {}
        self._paused: PauseMode | None = None
        self._closed = False
        self._changed = asyncio.Condition()

    async def generate(self, prompt: Ids, sampling: Sampling, *, request_id: str, cache_salt: str = "") -> Generation:
        if self._closed:
            raise EngineUnavailable("the fake engine is closed")
        number, self._count = self._count, self._count + 1
        fault = self._fault_of(prompt, number)
        if len(prompt) >= self._context_tokens:
            raise ContextOverflow(len(prompt), self._context_tokens)
        if request_id in self._requests:
            raise BadRequest(f"request {request_id!r} is already running; use a fresh id", param="request_id")
        request = self._requests[request_id] = _Request()
        try:
            await self._until(lambda: self._paused is None or request.aborted)
            request.started = True
            if fault is Fault.ERROR:
                raise EngineError(f"scripted failure of request {number}")
            if fault is Fault.HANG:
                await self._until(lambda: request.aborted)
            return await self._generate(request, self._plan(prompt, sampling, number), prompt, sampling, fault)
        finally:
            del self._requests[request_id]
            async with self._changed:
                self._changed.notify_all()

    async def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].aborted = True
            await self._notify()

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._paused = mode
        if mode == "keep":
            return
        if mode == "abort":
            await self._abort_started()
        await self._until(lambda: not any(r.started for r in self._requests.values()))

    async def resume(self) -> None:
        self._paused = None
        await self._notify()

    async def load_weights(self, version: int, path: str | None = None) -> None:
        self._version = version

    async def health(self) -> Health:
        running = sum(r.started for r in self._requests.values())
        return Health(
            model=self._model,
            version=self._version,
            context_tokens=self._context_tokens,
            paused=self._paused is not None,
            running=running,
            waiting=len(self._requests) - running,
        )

    async def close(self) -> None:
        """Ends what runs; later requests raise EngineUnavailable."""
        self._closed = True
        for request in self._requests.values():
            request.aborted = True
        await self._notify()

    def _plan(self, prompt: Ids, sampling: Sampling, number: int) -> Ids:
        """The ids of the whole reply, before `max_tokens` cuts it."""
        if self._script is None:
            rng = self._rng(prompt, sampling)
            others = rng.integers(0, self._vocab - 1, int(rng.integers(1, 32)))
            return as_ids([*np.where(others < self._stop_id, others, others + 1).tolist(), self._stop_id])
        reply = self._script(prompt, sampling, number)
        if not isinstance(reply, str):
            return as_ids(reply)
        if self._encode is None:
            raise BadRequest("the script of this FakeEngine replies with text; pass encode=")
        return as_ids([*self._encode(reply), self._stop_id])

    async def _generate(
        self, request: _Request, plan: Ids, prompt: Ids, sampling: Sampling, fault: Fault | None
    ) -> Generation:
        end = min(len(plan), sampling.max_tokens, self._context_tokens - len(prompt))
        stop_at = end // 2 if fault is Fault.CUT else end
        versions: list[int] = []
        while len(versions) < stop_at and await self._step(request):
            versions.append(self._version)
        done = len(versions)
        finish = FinishReason.STOP if end == len(plan) else FinishReason.LENGTH
        logprobs = self._logprobs(prompt, sampling, done)
        if fault is Fault.SHORT_LOGPROBS:
            logprobs = logprobs[:-1]
        if fault is Fault.NAN:
            logprobs[-1:] = np.nan
        return Generation(plan[:done], logprobs, finish if done == end else FinishReason.ABORT, to_spans(versions))

    async def _step(self, request: _Request) -> bool:
        """Waits until the next token may be sampled; False where the request was aborted."""
        if self._token_delay_s and not request.aborted:
            await asyncio.sleep(self._token_delay_s)
        await self._until(lambda: self._paused != "keep" or request.aborted)
        return not request.aborted

    def _logprobs(self, prompt: Ids, sampling: Sampling, count: int) -> np.ndarray:
        return -self._rng(prompt, sampling).exponential(0.5, count).astype(np.float32)

    def _rng(self, prompt: Ids, sampling: Sampling) -> np.random.Generator:
        key = hashlib.blake2b(np.ascontiguousarray(prompt, "<i4").tobytes(), digest_size=16)
        key.update(f"{self._seed} {sampling.seed} {sampling.temperature}".encode())
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key.digest(), "little")))

    async def _abort_started(self) -> None:
        for request in self._requests.values():
            request.aborted = request.aborted or request.started
        await self._notify()

    async def _until(self, condition: Callable[[], bool]) -> None:
        if not condition():
            async with self._changed:
                await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
