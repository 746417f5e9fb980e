"""The engine that samples with torch in the trainer's process, on CPU or one GPU."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from canter.engine import Health, PauseMode
from canter.engine.batcher import Batcher, Decode, Row
from canter.engine.sampler import Sampler
from canter.engine.weights import copy_folder, copy_module
from canter.errors import BadRequest, ConfigError, ContextOverflow, EngineUnavailable
from canter.types import Generation, Ids, Sampling

CHUNK: Mapping[str, int] = {"cpu": 64, "cuda": 512}
"""Tokens of a prompt computed at once, and the grain at which prompts share; a GPU wants larger pieces."""

MIN_ROWS: Mapping[str, int] = {"cpu": 4, "cuda": 1}
"""From 4 rows on, each row of a matrix product on the CPU is rounded alike whatever the number of rows."""

CLOSE_TIMEOUT_S = 30.0
SYNC_TIMEOUT_S = 600.0


class LocalEngine:
    """Samples from `model`, a transformers causal language model that the engine owns: it is moved to `device` and
    `dtype`, and `sync` and `load_weights` overwrite it. The trainer has another one.

    `decode` turns ids into text, special tokens included, for stop strings. Up to `max_batch` rows are decoded
    together; `cache_tokens` is the number of key-value slots and bounds memory. `context_tokens` defaults to what the
    model's configuration says. The end-of-sequence tokens of the model's generation settings always stop. Raises
    ConfigError.

    The same weights, prompt, sampling parameters and seed give the same reply whatever else runs: bit for bit on a CPU
    if torch has one thread or the environment has MKL_CBWR=AUTO, else but for rounding, which turns about one draw in
    100,000 in float32 and more in bfloat16.
    """

    def __init__(
        self,
        model: Any,
        decode: Decode,
        *,
        device: str = "auto",
        dtype: torch.dtype = torch.float32,
        max_batch: int = 64,
        cache_tokens: int = 65536,
        context_tokens: int | None = None,
        version: int = 0,
        name: str = "policy",
    ) -> None:
        _check_attention(model.config)
        place = _device(device)
        self._model = _place(model, place, dtype)
        self._name = name
        self._eos = _eos(model)
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        batcher = Batcher(
            model,
            decode,
            max_batch=max_batch,
            cache_tokens=cache_tokens,
            chunk=CHUNK[place.type],
            min_rows=MIN_ROWS[place.type],
            version=version,
        )
        self._context_tokens = min(context_tokens or model.config.max_position_embeddings, batcher.longest)
        if context_tokens and context_tokens > batcher.longest:
            raise ConfigError(
                f"model.context_tokens = {context_tokens} is more than engine.cache_tokens = {cache_tokens} can hold "
                f"({batcher.longest}); raise engine.cache_tokens in proportion"
            )
        self._sampler = Sampler(batcher)

    @classmethod
    def load(cls, folder: Path, decode: Decode, *, dtype: torch.dtype = torch.float32, **options: Any) -> LocalEngine:
        """An engine with the model in `folder` (see `canter.engine.models.resolve`)."""
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: cannot load a causal language model from {folder}: {error}") from error
        return cls(model, decode, dtype=dtype, **options)

    async def generate(self, prompt: Ids, sampling: Sampling, *, request_id: str, cache_salt: str = "") -> Generation:
        """Requests with the same `cache_salt` share what their prompts have in common."""
        ids = prompt.tolist()
        self._check(ids)
        row = Row(
            request_id=request_id,
            prompt=ids,
            sampling=sampling,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            limit=min(len(ids) + sampling.max_tokens, self._context_tokens),
            stop_ids=self._eos.union(sampling.stop_token_ids),
            salt=cache_salt,
        )
        done: Future[Generation] = Future()
        self._sampler.post(lambda: self._sampler.submit(row, done))
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            with suppress(EngineUnavailable):
                self._sampler.post(lambda: self._sampler.drop(row))
            raise

    async def abort(self, request_id: str) -> None:
        await asyncio.wrap_future(self._sampler.call(lambda: self._sampler.abort(request_id)))

    async def pause(self, mode: PauseMode = "keep") -> None:
        settled: Future[None] = Future()
        self._sampler.post(lambda: self._sampler.pause(mode, settled))
        await asyncio.wrap_future(settled)

    async def resume(self) -> None:
        await asyncio.wrap_future(self._sampler.call(self._sampler.resume))

    async def load_weights(self, version: int, path: str | None = None) -> None:
        """From a folder of safetensors; without a path the trainer has already brought `version` by `sync`."""
        if path is None:
            if version != self._sampler.batcher.version:
                raise BadRequest(
                    f"the local engine has version {self._sampler.batcher.version}, not {version}; pass a path, or "
                    f"sync() from the trainer",
                    param="version",
                )
            return
        folder = Path(path)
        await asyncio.wrap_future(
            self._sampler.call(lambda: self._sampler.change_version(version, lambda: copy_folder(folder, self._model)))
        )

    def sync(self, source: nn.Module, version: int) -> None:
        """Copies the weights of `source`, LoRA adapters merged, and samples as policy `version` from then on. Blocks
        until it is done; for the trainer's thread, which leaves `source` alone meanwhile. Raises EngineError."""
        self._sampler.call(
            lambda: self._sampler.change_version(version, lambda: copy_module(source, self._model))
        ).result(SYNC_TIMEOUT_S)

    async def health(self) -> Health:
        running, waiting = len(self._sampler.batcher.started), len(self._sampler.batcher.waiting)
        return Health(
            model=self._name,
            version=self._sampler.batcher.version,
            context_tokens=self._context_tokens,
            paused=self._sampler.paused is not None,
            running=running,
            waiting=waiting,
        )

    async def close(self) -> None:
        """Ends what runs with EngineUnavailable, as it answers what comes later."""
        await asyncio.to_thread(self._sampler.close, CLOSE_TIMEOUT_S)

    def _check(self, ids: list[int]) -> None:
        if not ids:
            raise BadRequest("the prompt is empty; send at least one token", param="prompt")
        if len(ids) >= self._context_tokens:
            raise ContextOverflow(len(ids), self._context_tokens)
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise BadRequest(f"the prompt has token ids outside [0, {self._vocabulary})", param="prompt")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type not in CHUNK:
        raise ConfigError(f"engine.device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device = 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
    return device


def _place(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Only weights change their type: rotary frequencies, which are buffers, need float32."""
    model.to(device).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    return model


def _eos(model: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _check_attention(config: Any) -> None:
    """Raises ConfigError for models whose layers are not all plain causal attention."""
    settings = config.to_dict()
    kinds = set(settings.get("layer_types") or ["full_attention"])
    windowed = settings.get("sliding_window") and settings.get("use_sliding_window", True)
    if kinds != {"full_attention"} or (windowed and not settings.get("layer_types")):
        raise ConfigError(
            f"the local engine runs models with full attention in every layer; {settings.get('model_type')} has "
            f"{', '.join(sorted(kinds))}{' with a sliding window' if windowed else ''}: use another engine"
        )
