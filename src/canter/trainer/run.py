"""Puts the parts of the embedded trainer together."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from torch import nn

from canter.config import Config
from canter.engine import Engine
from canter.runs import RunFolder
from canter.trainer.collect import Rollouts
from canter.trainer.data import read_tasks
from canter.trainer.loop import Result, train
from canter.trainer.metrics import TensorBoard, Terminal, Tracker, read_metrics
from canter.trainer.model import load
from canter.trainer.torch_backend import TorchBackend

log = logging.getLogger(__name__)


class SyncedEngine(Engine, Protocol):
    """An engine in this process that takes weights from a module (`canter.engine.local.LocalEngine`)."""

    def sync(self, source: nn.Module, version: int) -> None: ...


async def run_trainer(
    config: Config, client: Rollouts, run: RunFolder, *, model: Path, engine: SyncedEngine, console: Console
) -> Result:
    """Trains the model in folder `model`, or goes on where `run` was left.

    `engine` serves the gateway that `client` talks to. Pause it before it is announced there: it has the weights as
    given, and is resumed as soon as it has those of the last published version. Raises what `loop.train` raises, and
    ConfigError.
    """
    tasks = read_tasks(config.path(config.tasks.train))
    heldout = read_tasks(config.path(config.tasks.eval)) if config.tasks.eval else []
    policy = await asyncio.to_thread(load, model, config, device=device_of(config))
    if config.trainer.share_prefix and not policy.shares_prefix:
        log.warning("this model takes no tree attention mask; trainer.share_prefix is off, prompts are repeated")
    backend = TorchBackend(policy, config, sync=engine.sync)
    return await train(
        config,
        client,
        backend,
        engine,
        run,
        tasks=tasks,
        heldout=heldout,
        trackers=trackers(config, run, console),
        say=partial(console.print, highlight=False, soft_wrap=True),
    )


def device_of(config: Config) -> torch.device:
    """Where the trainer computes: where the engine does."""
    name = config.engine.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def trackers(config: Config, run: RunFolder, console: Console) -> list[Tracker]:
    """What shows the run besides `metrics.jsonl`."""
    shown: list[Tracker] = [Terminal(console, config.trainer.steps, read_metrics(run.metrics))]
    if config.run.tensorboard:
        shown.append(TensorBoard(run.path / "tensorboard"))
    return shown
