"""The end of a run: evaluation, counts and drops into the manifest, and `report.html`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from canter.cli.reading import all_rollouts
from canter.client import Client
from canter.config import Config
from canter.evaluate import evaluation
from canter.runs import RunFolder, write_atomically
from canter.trainer.loop import Result
from canter.trainer.metrics import Row
from canter.trainer.plan import EvaluationName
from canter.types import Outcome, Rollout, Split
from canter.web.examples import Example, choose, conversation
from canter.web.report import render_report

EXAMPLES = 3
LOOKED_AT = 200
"""Rollouts, newest first, in which an example of a failed attempt is looked for; each is a request."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What the terminal says at the end: the manifest, the rows of the steps, a rollout whose harness failed."""

    manifest: dict[str, Any]
    rows: Sequence[Row]
    crashed: str | None


async def finish(run: RunFolder, config: Config, client: Client, result: Result) -> Finished:
    """Completes the manifest and writes the report."""
    rollouts = await all_rollouts(client)
    rows = list(result.rows)
    manifest = run.update_manifest(
        {
            "finished_at": time.time(),
            "train_wall_s": result.train_wall_s,
            "evaluation": evaluation(
                evaluated(config.evaluate.before, rollouts, "before"),
                evaluated(config.evaluate.after, rollouts, "after"),
                solved_at=config.evaluate.solved_at,
            ),
            "drops": {
                "rollouts": total(rows, "dropped"),
                "calls": total(rows, "untrained_calls"),
            },
            "forks": total(rows, "forks"),
            "tokens": {
                name: sum(int(row[f"{name}_tokens"]) for row in rows) for name in ("sampled", "trained", "context")
            },
            "counts": await client.counts(),
        }
    )
    examples = [await example(client, r) for r in choose([r for r in rollouts if r.split is Split.TRAIN], EXAMPLES)]
    write_atomically(run.report, render_report(manifest, rows, examples))
    failed = manifest["counts"].get("attempts.exited_nonzero", 0)
    return Finished(manifest, rows, await crashed(client, rollouts) if failed else None)


async def crashed(client: Client, rollouts: Sequence[Rollout]) -> str | None:
    """Id of a rollout of which an attempt's harness exited with another code than 0, of the newest `LOOKED_AT`."""
    started = [r for r in rollouts if r.attempt]
    for rollout in sorted(started, key=lambda r: r.updated_at, reverse=True)[:LOOKED_AT]:
        if any(a.outcome is Outcome.EXITED and a.exit_code != 0 for a in await client.attempts(rollout.id)):
            return rollout.id
    return None


def learned_nothing(rows: Sequence[Row]) -> bool:
    """Whether every group of every step was flat, and so no update had a gradient."""
    groups = sum(row["groups"] for row in rows)
    flat = sum(row["groups_without_spread"] for row in rows)
    return 0 < groups == flat and not any(row.get("grad_norm") for row in rows)


def evaluated(wanted: bool, rollouts: Sequence[Rollout], name: EvaluationName) -> list[Rollout] | None:
    return [r for r in rollouts if r.id.startswith(f"eval-{name}-")] if wanted else None


def total(rows: Sequence[Any], name: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row[name])
    return dict(sorted(counts.items()))


async def example(client: Client, rollout: Rollout) -> Example:
    calls = await client.calls([rollout.id])
    turns = conversation([(call, await client.bodies(call.id)) for call in calls])
    return Example(title=f"{rollout.id} (task {rollout.task.id})", reward=rollout.reward, turns=turns)


def print_result(console: Console, run: RunFolder, finished: Finished) -> None:
    """The table of held-out success, what was dropped, and where everything is."""
    manifest = finished.manifest
    details = manifest["evaluation"]["details"]
    if details:
        table = Table(
            "held-out tasks", "solved", "95 % interval", "mean reward", "n", "invalid", title="Before and after"
        )
        for name in ("before", "after"):
            if name in details:
                found = details[name]
                low, high = found["interval"] or (None, None)
                table.add_row(
                    name,
                    percent(found["solved"]),
                    f"{percent(low)} – {percent(high)}",
                    "-" if found["mean_reward"] is None else f"{found['mean_reward']:.3f}",
                    str(found["n"]),
                    str(sum(found["invalid"].values())),
                )
        console.print(table)
    dropped = manifest["drops"]["rollouts"]
    console.print(f"training took {manifest['train_wall_s']:.0f} s; rollouts dropped: {dropped or 'none'}")
    counts = manifest["counts"]
    failed, late = counts.get("attempts.exited_nonzero", 0), counts.get("attempts.timed_out", 0)
    if failed or late:
        shown = f"; for example: canter rollouts show {run.path} {finished.crashed}" if finished.crashed else ""
        line = f"attempts whose harness exited with another code than 0: {failed}; timed out: {late}{shown}"
        console.print(line, soft_wrap=True, highlight=False)
    if learned_nothing(finished.rows):
        console.print("nothing was learned: in every group all rewards were equal (docs/metrics.md)", soft_wrap=True)
    console.print(f"run folder: {run.path}", soft_wrap=True, highlight=False)
    console.print(f"report: {run.report}", soft_wrap=True, highlight=False)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
