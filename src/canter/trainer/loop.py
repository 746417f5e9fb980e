"""The training loop. Read `train` first; it is the whole of it: collect → samples → update → publish.

What happened is in the store, and all that the loop decides is a function of the settings and the step number: which
tasks a step has, the ids and seeds of its rollouts, its samples, its update. So a step can be run again at any time,
and resuming needs no other code than the loop itself:

* A checkpoint says which step is done, and is written every `trainer.checkpoint_every` steps. A trainer that dies
  later loses the weights of the versions after it, but not the tokens they sampled: these are committed.
* The new trainer loads the checkpoint and goes through the steps after it. `create_rollouts` finds rollouts that exist
  and leaves them as they are; where all are in a final state, nothing is sampled and nothing waited for, and the update
  is computed again from the same recorded calls: a *replay*. The same update on the same weights gives the same
  weights, bit for bit on one machine with one number of threads (up to rounding elsewhere and on GPUs; a difference
  that shows in the gradient norm is logged), so the replayed version is the one that was published.
* Until the last published version is reached the engine stays paused: rollouts of the step in progress wait, and none
  of them continues under older weights than the version in its record.
* The step in progress: rollouts that are scored are used, running ones go on, nothing is sampled twice. Every committed
  call is trained once in the lineage of weights that survives.

A step whose batch is empty (every rollout dropped, or no group kept) makes no update and no version.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from canter.config import Config
from canter.config.tree import TrainerConfig
from canter.engine import Engine
from canter.errors import CheckpointError
from canter.harness import train_labels
from canter.runs import RunFolder
from canter.samples import Batch, build
from canter.trainer.backend import Backend
from canter.trainer.checkpoint import Checkpoints
from canter.trainer.collect import Collector, Rollouts, check_batch
from canter.trainer.data import TaskOrder, fingerprint
from canter.trainer.metrics import MetricsFile, Row, Tracker, Trackers
from canter.trainer.plan import EvaluationName, evaluation_rollouts, step_rollouts
from canter.trainer.publish import Publisher
from canter.trainer.worker import Clock, worker
from canter.types import Call, Rollout, Task

log = logging.getLogger(__name__)

REPLAY_TOLERANCE = 1e-3
"""Relative difference of the gradient norm from which a replay is reported as inexact."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished training: the rows of `metrics.jsonl`, and the seconds spent in steps and checkpoints, evaluations not
    counted, over all processes that worked on this run."""

    rows: Sequence[Row]
    train_wall_s: float


async def train(
    config: Config,
    client: Rollouts,
    backend: Backend,
    engine: Engine,
    run: RunFolder,
    *,
    tasks: Sequence[Task],
    heldout: Sequence[Task] = (),
    trackers: Sequence[Tracker] = (),
    say: Callable[[str], None] = log.info,
) -> Result:
    """Trains `backend`'s policy for `trainer.steps` steps, resuming where `run` has checkpoints.

    `say` takes the signs of life of long steps, a line each.

    Raises TooManyDrops, TrainingDiverged, CheckpointError, GatewayUnavailable; after any of them, and after kill -9,
    the same call on the same run folder goes on.
    """
    settings = config.trainer
    order = TaskOrder(tasks, config.run.seed, config.tasks.shuffle)
    checkpoints = Checkpoints(run.checkpoints, settings.keep_checkpoints)
    collector = Collector(client, timeout_s=settings.step_timeout_s, max_invalid=settings.max_invalid, say=say)
    metrics = MetricsFile(run.metrics)
    tracker = Trackers([metrics, *trackers])
    try:
        async with worker() as in_thread:
            await engine.pause()
            done = await in_thread(lambda: restore(backend, checkpoints, position(config, tasks)))
            publisher = await Publisher.open(client, backend, engine, in_thread)
            await publisher.publish(step=done)
            await evaluate(config, collector, heldout, "before")
            clock = Clock()
            for step in range(done + 1, settings.steps + 1):
                rollouts = await collector.collect(step_rollouts(config, order, step), f"step {step}")
                calls = await client.calls([r.id for r in rollouts])
                batch = build_batch(rollouts, calls, config)
                check_batch(batch.report, settings.max_invalid, f"step {step}", rollouts, calls)
                clock.lap("collect_s")
                learned = await in_thread(partial(update, backend, batch, settings))
                clock.lap("update_s")
                await publisher.publish(step=step)
                clock.lap("publish_s")
                row = row_of(step, backend.version, batch, learned, clock.restart())
                check_replay(row, metrics.rows.get(step))
                tracker.record(row)
                if step % settings.checkpoint_every == 0 or step == settings.steps:
                    state = {"step": step, "version": backend.version, **position(config, tasks)}
                    await in_thread(partial(checkpoints.save, step, state, backend.save))
                    clock.lap("checkpoint_s")  # counts in the next step's row
            train_wall_s = sum(row["step_s"] for row in metrics.rows.values()) + clock.total
            await evaluate(config, collector, heldout, "after")
            return Result(list(metrics.rows.values()), train_wall_s)
    finally:
        tracker.close()


def position(config: Config, tasks: Sequence[Task]) -> dict[str, Any]:
    """What the place in the data depends on besides the step; a checkpoint of other data is refused."""
    return {
        "seed": config.run.seed,
        "groups": config.trainer.groups,
        "rollouts_per_group": config.trainer.rollouts_per_group,
        "shuffle": config.tasks.shuffle,
        "tasks": fingerprint(tasks),
    }


def restore(backend: Backend, checkpoints: Checkpoints, expected: Mapping[str, Any]) -> int:
    """Loads the newest checkpoint, if any, and returns the step that it says is done (0 for none)."""
    checkpoint = checkpoints.latest()
    if checkpoint is None:
        return 0
    for name, value in expected.items():
        if checkpoint.state.get(name) != value:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} was made with {name} = {checkpoint.state.get(name)!r}, this run has "
                f"{value!r}; resume with the settings and tasks it was made with, or start a new run"
            )
    backend.load(checkpoint.path)
    if backend.version != checkpoint.state["version"]:
        raise CheckpointError(f"checkpoint {checkpoint.path} has version {backend.version}, not that of its state.json")
    log.info("resuming after step %d (policy version %d)", checkpoint.step, backend.version)
    return checkpoint.step


def build_batch(rollouts: Sequence[Rollout], calls: Sequence[Call], config: Config) -> Batch:
    """Samples with masks, weights and advantages of the calls whose labels train, and the account of what was left
    out."""
    settings = config.trainer
    return build(
        rollouts,
        calls,
        advantage=settings.advantage,
        normalise=settings.normalise,
        keep_flat_groups=settings.keep_flat_groups,
        labels=train_labels(config),
    )


def update(backend: Backend, batch: Batch, settings: TrainerConfig) -> dict[str, float]:
    """One policy update: `trainer.epochs` passes over the batch, an optimizer step each. Returns the last metrics.

    With several passes the ratio of the PPO loss is taken against the policy before the first (see `loss`).
    """
    if not batch.samples:
        return {}
    old = backend.forward(batch.samples) if settings.epochs > 1 else None
    metrics: dict[str, float] = {}
    for _ in range(settings.epochs):
        metrics |= backend.forward_backward(batch.samples, rollouts=batch.rollouts, old=old)
        metrics |= backend.optim_step()
    backend.version += 1
    return metrics


async def evaluate(config: Config, collector: Collector, heldout: Sequence[Task], name: EvaluationName) -> None:
    """Rolls out the held-out tasks through the same path as training, if the run wants this evaluation. What came of it
    is in the store (`plan.evaluation_rollouts` says under which ids)."""
    wanted = config.evaluate.before if name == "before" else config.evaluate.after
    if wanted and heldout:
        await collector.collect(evaluation_rollouts(config, heldout, name), f"evaluation {name} training")


def row_of(
    step: int, version: int, batch: Batch, learned: Mapping[str, float], laps: Mapping[str, float]
) -> dict[str, Any]:
    """The line of `metrics.jsonl` for one step."""
    report = batch.report
    rewards = [np.asarray(group) for group in report.rewards.values()]
    values = np.concatenate(rewards) if rewards else np.zeros(0)
    return {
        "step": step,
        "version": version,
        "time": time.time(),
        "reward_mean": float(values.mean()) if values.size else None,
        "reward_std": float(values.std()) if values.size else None,
        "groups": len(rewards),
        "groups_without_spread": sum(bool(np.ptp(group) == 0) for group in rewards),
        "rollouts": report.rollouts,
        "in_batch": report.in_batch,
        "samples": len(batch.samples),
        "calls": report.calls,
        "sampled_tokens": report.tokens.sampled,
        "trained_tokens": report.tokens.trained,
        "context_tokens": report.tokens.context,
        "dropped": {reason.value: count for reason, count in sorted(report.dropped.items())},
        "untrained_calls": {reason.value: count for reason, count in sorted(report.untrained_calls.items())},
        "forks": {cause.value: count for cause, count in sorted(report.forks.items())},
        **learned,
        **laps,
        "step_s": sum(laps.values()),
    }


def check_replay(row: Row, earlier: Row | None) -> None:
    """Reports a replayed update that was not the recorded one; its importance weights still hold."""
    if earlier is None or "grad_norm" not in row:
        return
    new, old = row["grad_norm"], earlier.get("grad_norm", math.nan)
    if not math.isclose(new, old, rel_tol=REPLAY_TOLERANCE):
        log.warning(
            "the replay of step %d has gradient norm %.6g, recorded was %.6g: version %d is not exactly the published "
            "one (other settings, threads or hardware?)",
            row["step"],
            new,
            old,
            row["version"],
        )
