"""Which engine samples a call: those registered, the least busy first, and what to do when one fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from canter.engine import Engine
from canter.errors import CanterError, EngineError, EngineUnavailable, Unauthorized
from canter.types import EngineRecord, FinishReason, Generation, Ids, Sampling

logger = logging.getLogger(__name__)

Connect = Callable[[str, str], Engine]
"""(base URL, key) → client of that engine."""

_DOWN_S = 1.0  # how long an engine that could not be reached is left alone
_TRIES = 2  # of a request that engines answer with an error of their own


@dataclass(slots=True)
class _Slot:
    record: EngineRecord
    key: str
    engine: Engine
    running: int = 0
    down_until: float = 0.0
    lost: bool = False  # whether the last try to reach it failed
    context_tokens: int | None = None


@dataclass(slots=True)
class Running:
    """The generation of call `id` on its way, so that it can be aborted; `engine` is set while one samples it."""

    id: str
    request_id: str = ""
    engine: Engine | None = None
    aborted: bool = False

    async def abort(self) -> bool:
        """Ends the generation where it is; `Engines.generate` then returns what there is. False if none is running."""
        if self.engine is None:
            return False
        self.aborted = True
        await self.engine.abort(self.request_id)
        return True


class Engines:
    """The engines that are registered now; their keys are held in memory only. `timeout_s` bounds one generation."""

    def __init__(self, connect: Connect, *, timeout_s: float = 600) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._slots: dict[str, _Slot] = {}
        self._changed = asyncio.Condition()

    @property
    def away(self) -> bool:
        """Whether none that is registered could be reached when it was last tried."""
        return all(slot.lost for slot in self._slots.values())

    async def register(self, record: EngineRecord, key: str) -> None:
        """Adds an engine or refreshes it; with a new key it is connected to again."""
        known = self._slots.get(record.url)
        if known is not None and known.key == key:
            known.record, known.down_until, known.lost = record, 0.0, False
        else:
            self._slots[record.url] = _Slot(record, key, self._connect(record.url, key))
            await _close(known)
        async with self._changed:
            self._changed.notify_all()

    async def remove(self, url: str) -> None:
        """Forgets an engine; what it still generates is sampled again elsewhere."""
        await _close(self._slots.pop(url, None))

    async def close(self) -> None:
        for url in list(self._slots):
            await self.remove(url)

    async def generate(self, prompt: Ids, sampling: Sampling, running: Running, *, wait_s: float) -> Generation:
        """Samples on the least busy engine. An engine that goes away is replaced by the next one, or waited for.

        Nothing of the reply has been seen before it is whole, so sampling it again elsewhere is safe. Raises
        `EngineUnavailable` when there was no engine for `wait_s`, and what the engine raised.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        tries = failures = 0
        while True:
            slot = await self._pick(deadline)
            began = loop.time()
            running.engine, running.request_id = slot.engine, f"{running.id}.{tries}"
            tries += 1
            slot.running += 1
            try:
                async with asyncio.timeout(self._timeout_s):
                    generation = await slot.engine.generate(prompt, sampling, request_id=running.request_id)
                slot.lost = False
                if generation.finish_reason is FinishReason.ABORT and not running.aborted:
                    raise EngineError("it ended the generation although nobody had asked for that")
                return generation
            except (EngineUnavailable, Unauthorized) as error:
                self._lost(slot, error)
                if loop.time() - began > _DOWN_S:  # it did sample for a while: the wait for another one starts anew
                    deadline = loop.time() + wait_s
            except (EngineError, TimeoutError) as error:
                failures += 1
                why = str(error) or f"no reply within {self._timeout_s:g} s"
                logger.warning("engine %s failed a request (%d of %d): %s", slot.record.url, failures, _TRIES, why)
                if failures >= _TRIES:
                    raise EngineError(f"engine {slot.record.url}: {why}") from error
            finally:
                slot.running -= 1
                running.engine = None

    async def context_tokens(self, *, wait_s: float) -> int:
        """The longest prompt plus reply of the engine. Raises `EngineUnavailable` after `wait_s` without one."""
        began = asyncio.get_running_loop().time()
        while True:
            slot = await self._pick(began + wait_s)
            if slot.context_tokens is not None:
                return slot.context_tokens
            try:
                slot.context_tokens = (await slot.engine.health()).context_tokens
                slot.lost = False
            except (EngineError, Unauthorized) as error:
                self._lost(slot, error)

    def _lost(self, slot: _Slot, error: CanterError) -> None:
        slot.down_until, slot.lost = asyncio.get_running_loop().time() + _DOWN_S, True
        logger.warning("engine %s cannot be reached, another one is used or waited for: %s", slot.record.url, error)

    async def _pick(self, deadline: float) -> _Slot:
        """The least busy engine that can be reached. Raises `EngineUnavailable` at `deadline`."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            up = [slot for slot in self._slots.values() if slot.down_until <= now]
            if up:
                return min(up, key=lambda slot: slot.running)
            if now >= deadline:
                known = ", ".join(self._slots) or "none is registered"
                raise EngineUnavailable(f"no engine could be reached in time ({known}); is the trainer running?")
            await self._wait_until(min([deadline, *(slot.down_until for slot in self._slots.values())]))

    async def _wait_until(self, when: float) -> None:
        """Until an engine registers, or `when` at the latest."""
        try:
            async with asyncio.timeout_at(when), self._changed:
                await self._changed.wait()
        except TimeoutError:
            return


async def _close(slot: _Slot | None) -> None:
    if slot is not None:
        await slot.engine.close()
