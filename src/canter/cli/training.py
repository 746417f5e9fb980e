"""The trainer's process: the engine that serves the gateway, and the loop that changes its weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from transformers.utils.logging import disable_progress_bar

from canter.cli.finish import finish, print_result
from canter.cli.manifest import file_hash
from canter.client import Client
from canter.config import Config
from canter.engine import Engine
from canter.engine.fake import FakeEngine
from canter.engine.http import serve_engine
from canter.engine.journal import JournaledEngine
from canter.engine.local import LocalEngine
from canter.errors import CanterError
from canter.gateway import chat_template
from canter.runs import RunFolder
from canter.tokens.tokenizer import load_tokenizer
from canter.trainer.run import SyncedEngine, run_trainer

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""Between two announcements of the engine: a gateway that restarts knows it again after this long."""
GOODBYE_S = 5.0
"""Deadline for the gateway to hear that the engine ends."""


async def run_training(run: RunFolder, config: Config, url: str, key: str, model: Path) -> None:
    """Trains to the end of the run's steps, resuming where it was left, and finishes the run folder."""
    torch.set_num_threads(config.run.threads or len(os.sched_getaffinity(0)))
    disable_progress_bar()
    console = Console()
    run.update_manifest({"model": {"path": config.model.path, "sha256": await asyncio.to_thread(file_hash, model)}})
    if config.evaluate.before and not run.metrics.exists():
        console.print("evaluating the model as given on the held-out tasks, then training")
    engine = await asyncio.to_thread(make_engine, config, model)
    await engine.pause()
    try:
        async with Client(url, key) as client, announced(engine, config, run, client):
            result = await run_trainer(config, client, run, model=model, engine=engine, console=console)
            finished = await finish(run, config, client, result)
    finally:
        await engine.close()
    print_result(console, run, finished)


def make_engine(config: Config, model: Path) -> SyncedEngine:
    tokenizer = load_tokenizer(model, chat_template=chat_template(config))
    settings = config.engine
    if settings.use == "fake":
        return SyncedFake(vocab=tokenizer.vocab_size, stop_id=tokenizer.stop_token_ids[0], seed=config.run.seed)
    return LocalEngine.load(
        model,
        tokenizer.decode,
        device=settings.device,
        dtype=getattr(torch, settings.dtype),
        max_batch=settings.max_batch,
        cache_tokens=settings.cache_tokens,
        context_tokens=config.model.context_tokens,
        name=config.model.name,
    )


class SyncedFake(FakeEngine):
    """The fake engine with the local one's way to change versions; it has no weights to copy."""

    def sync(self, source: nn.Module, version: int) -> None:
        asyncio.run(self.load_weights(version))


@contextlib.asynccontextmanager
async def announced(engine: Engine, config: Config, run: RunFolder, client: Client) -> AsyncIterator[None]:
    """The engine listens on loopback, with a key of its own, and the gateway knows it."""
    served = JournaledEngine(engine, run.logs / "engine.jsonl") if config.engine.journal else engine
    key = secrets.token_urlsafe(32)
    url, server = await serve_engine(served, key)
    beat = asyncio.create_task(heartbeat(engine, config.model.name, client, url, key))
    try:
        yield
    finally:
        beat.cancel()
        with contextlib.suppress(CanterError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):  # the gateway may be gone for good
                await client.remove_engine(url)
        await server.close()


async def heartbeat(engine: Engine, name: str, client: Client, url: str, key: str) -> None:
    """Announces the engine again and again; a gateway that is away is no reason to stop."""
    while True:
        try:
            await client.set_engine(url, name, (await engine.health()).version, key)
        except CanterError as error:
            log.warning("the engine could not be announced to the gateway: %s", error)
        await asyncio.sleep(HEARTBEAT_S)
