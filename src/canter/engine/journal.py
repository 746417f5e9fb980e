"""A second, independent record of what an engine drew, for audits of the gateway's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

import orjson

from canter.engine import Engine, Health, PauseMode
from canter.types import Generation, Ids, Sampling


class JournaledEngine:
    """Writes one JSON line per generation to a file (`at`, `request_id`, `prompt`, `ids`, `logprobs`, `versions`,
    `finish_reason`, `sampling`) and passes everything on to `engine`."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine = engine
        self._file: BinaryIO = file.open("ab", buffering=0)

    async def generate(self, prompt: Ids, sampling: Sampling, *, request_id: str, cache_salt: str = "") -> Generation:
        generation = await self._engine.generate(prompt, sampling, request_id=request_id, cache_salt=cache_salt)
        line = {
            "at": time.time(),
            "request_id": request_id,
            "prompt": prompt,
            "ids": generation.ids,
            "logprobs": generation.logprobs,
            "versions": [[s.version, s.start, s.end] for s in generation.versions],
            "finish_reason": generation.finish_reason,
            "sampling": sampling,
        }
        self._file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        return generation

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def load_weights(self, version: int, path: str | None = None) -> None:
        await self._engine.load_weights(version, path)

    async def health(self) -> Health:
        return await self._engine.health()

    async def close(self) -> None:
        await self._engine.close()
        self._file.close()
