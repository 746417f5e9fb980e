"""A whole run in one process, without processes: a store, an engine that samples from the tiny llama, and a
controller whose harness is one model call. Parts of it can be killed at any step of the trainer."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from canter.config import Config
from canter.engine import Health, PauseMode
from canter.store.memory import MemoryStore
from canter.trainer.collect import TERMINAL
from canter.trainer.model import prepare
from canter.trainer.torch_backend import TorchBackend
from canter.types import (
    Call,
    CallBodies,
    Event,
    FinishReason,
    Generation,
    Ids,
    Logprobs,
    Outcome,
    PolicyVersion,
    Reason,
    Reward,
    Rollout,
    Sample,
    Sampling,
    Task,
    VersionSpan,
    as_ids,
)
from tiny_policy import VOCABULARY, tiny_llama

TASKS = [Task(id=f"t{n}", prompt=f"task {n}", hidden={"answer": n}) for n in range(5)]


class Killed(BaseException):
    """Stands for kill -9 of the trainer: nothing in the package catches it."""


class Fuse:
    """Burns down by one at each call; raises Killed when it is out. `None` never is."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.burnt = 0

    def burn(self) -> None:
        self.burnt += 1
        if self.burnt == self.length:
            raise Killed


class TinyEngine:
    """Samples 4 tokens with torch from its own copy of the model; deterministic in weights, prompt and seed."""

    def __init__(self) -> None:
        self.model = tiny_llama()
        self.version = 0
        self.dead = False
        self.synced: list[int] = []
        self._open = asyncio.Event()

    async def generate(self, prompt: Ids, sampling: Sampling, *, request_id: str, cache_salt: str = "") -> Generation:
        await self._open.wait()
        if self.dead:
            raise ConnectionError("the engine died with the trainer")
        ids, logprobs = sample(self.model, prompt.tolist(), sampling.seed or 0)
        spans = (VersionSpan(self.version, 0, len(ids)),)
        return Generation(as_ids(ids), np.array(logprobs, np.float32), FinishReason.STOP, spans)

    async def abort(self, request_id: str) -> None: ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._open.clear()

    async def resume(self) -> None:
        self._open.set()

    async def load_weights(self, version: int, path: str | None = None) -> None: ...

    async def health(self) -> Health:
        return Health("tiny", self.version, 256)

    async def close(self) -> None:
        self.dead = True
        self._open.set()

    def sync(self, source: nn.Module, version: int) -> None:
        self.model.load_state_dict(source.state_dict())
        self.version = version
        self.synced.append(version)


@torch.no_grad()
def sample(model: nn.Module, ids: list[int], seed: int, count: int = 4) -> tuple[list[int], list[float]]:
    random = torch.Generator().manual_seed(seed)
    sampled, logprobs = [], []
    for _ in range(count):
        row = torch.log_softmax(model(input_ids=torch.tensor([ids + sampled])).logits[0, -1], -1)
        sampled.append(int(torch.multinomial(row.exp(), 1, generator=random)))
        logprobs.append(float(row[sampled[-1]]))
    return sampled, logprobs


class MortalClient:
    """The store as the trainer sees it; its fuse burns before and after each request is carried out."""

    def __init__(self, store: MemoryStore, fuse: Fuse) -> None:
        self._store, self._fuse = store, fuse

    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        self._fuse.burn()
        found = await self._store.create_rollouts(rollouts)
        self._fuse.burn()
        return found

    async def rollouts(self, *, ids: Sequence[str] = (), limit: int = 1000) -> list[Rollout]:
        self._fuse.burn()
        return await self._store.rollouts(ids=ids, limit=limit)

    async def cancel(self, rollout_id: str, message: str = "") -> Rollout:
        self._fuse.burn()
        return await self._store.cancel(rollout_id, message)

    async def calls(self, rollout_ids: Sequence[str]) -> list[Call]:
        self._fuse.burn()
        return await self._store.calls(rollout_ids)

    async def events(self, after: int, *, timeout_s: float = 0, limit: int = 1000) -> list[Event]:
        self._fuse.burn()
        return await self._store.events(after, timeout_s=timeout_s, limit=limit)

    async def add_version(self, version: PolicyVersion) -> None:
        self._fuse.burn()
        await self._store.add_version(version)
        self._fuse.burn()

    async def versions(self) -> list[PolicyVersion]:
        self._fuse.burn()
        return await self._store.versions()


class MortalBackend(TorchBackend):
    """Keeps the lineage of its weights: the calls that they were trained on, saved and restored with them."""

    def __init__(self, config: Config, engine: TinyEngine, fuse: Fuse) -> None:
        super().__init__(prepare(tiny_llama(), config), config, sync=engine.sync)
        self._fuse = fuse
        self.lineage: list[str] = []

    def forward_backward(
        self, samples: Sequence[Sample], *, rollouts: int, old: Sequence[Logprobs] | None = None
    ) -> Mapping[str, float]:
        self._fuse.burn()
        self.lineage += [call for one in samples for call in one.calls]
        for one in samples:
            assert set(one.versions[one.mask]) == {self.version}, "sampled by another version than the one trained"
        return super().forward_backward(samples, rollouts=rollouts, old=old)

    def optim_step(self) -> Mapping[str, float]:
        self._fuse.burn()
        return super().optim_step()

    def publish(self) -> Path | None:
        self._fuse.burn()
        found = super().publish()
        self._fuse.burn()
        return found

    def save(self, folder: Path) -> None:
        self._fuse.burn()
        super().save(folder)
        (folder / "lineage.json").write_text(json.dumps(self.lineage))
        self._fuse.burn()

    def load(self, folder: Path) -> None:
        self._fuse.burn()
        super().load(folder)
        self.lineage = json.loads((folder / "lineage.json").read_text())


Judge = Callable[[Rollout, Ids], float | Reason | None]
"""(rollout, sampled ids) → its reward, or why it is invalid, or None for one that never ends."""


def low_tokens(rollout: Rollout, ids: Ids) -> float:
    """Rewards tokens in the lower half of the vocabulary."""
    return float((ids < VOCABULARY // 2).mean())


class TinyWorld:
    """What outlives a trainer: the store and the controller. `engine` is the current trainer's; `untrainable` is why
    its calls cannot be trained. With `side_calls` every rollout also makes a call labelled `title`, with a prompt of
    its own."""

    def __init__(self, judge: Judge = low_tokens) -> None:
        self.store = MemoryStore()
        self.engine = TinyEngine()
        self.judge = judge
        self.untrainable: Reason | None = None
        self.side_calls = False
        self._task = asyncio.create_task(self._control())
        self._running: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in [self._task, *self._running]:
            task.cancel()
        await asyncio.gather(self._task, *self._running, return_exceptions=True)

    async def _control(self) -> None:
        seq = 0
        while True:
            for event in await self.store.events(seq, timeout_s=30):
                seq = event.seq
                if event.kind == "queued" and event.rollout_id:
                    task = asyncio.create_task(self._roll_out(event.rollout_id))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)

    async def _roll_out(self, rollout_id: str) -> None:
        rollout = await self.store.rollout(rollout_id)
        await self.store.start_attempt(rollout_id, 1)
        prompt = as_ids([1, *rollout.task.prompt.encode()]) % VOCABULARY
        generation = await self._generate(prompt, rollout)
        outcome = self.judge(rollout, generation.ids)
        if outcome is None or (await self.store.rollout(rollout_id)).state.value in TERMINAL:
            return
        call = replace(_call(rollout, prompt, generation), untrainable=self.untrainable)
        await self.store.append_call(call, CallBodies(b"{}", b"{}"))
        if self.side_calls:
            side = _call(rollout, as_ids([2, *prompt]), await self._generate(as_ids([2, *prompt]), rollout))
            title = replace(side, id=f"{rollout.id}-c1", ordinal=1, label="title")
            await self.store.append_call(title, CallBodies(b"{}", b"{}"))
        if isinstance(outcome, Reason):
            await self.store.end_attempt(rollout_id, 1, Outcome.EXITED, reason=outcome, message="scripted")
            return
        await self.store.end_attempt(rollout_id, 1, Outcome.EXITED, exit_code=0)
        await self.store.post_reward(Reward(rollout_id, 1, outcome))

    async def _generate(self, prompt: Ids, rollout: Rollout) -> Generation:
        while True:
            for _ in range(rollout.seed % 3):  # rollouts finish in an order of their own
                await asyncio.sleep(0)
            try:
                return await self.engine.generate(prompt, Sampling(seed=rollout.seed), request_id=rollout.id)
            except ConnectionError:
                await asyncio.sleep(0)


def _call(rollout: Rollout, prompt: Ids, generation: Generation) -> Call:
    return Call(
        id=f"{rollout.id}-c0",
        rollout_id=rollout.id,
        attempt=1,
        ordinal=0,
        parent_id=None,
        prefix_len=0,
        suffix=prompt,
        sampled=generation.ids,
        logprobs=generation.logprobs,
        versions=generation.versions,
        finish_reason=generation.finish_reason,
    )


def weights(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: copy.deepcopy(p.detach()) for name, p in backend._policy.model.named_parameters()}
