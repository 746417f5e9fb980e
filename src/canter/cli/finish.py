"""The end of a run: evaluation, counts and drops into the manifest, and `report.html`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from canter.cli.reading import all_rollouts
from canter.client import Client
from canter.config import Config
from canter.evaluate import evaluation
from canter.runs import RunFolder, write_atomically
from canter.trainer.loop import Result
from canter.trainer.plan import EvaluationName
from canter.types import Rollout, Split
from canter.web.examples import Example, choose, conversation
from canter.web.report import render_report

EXAMPLES = 3


async def finish(run: RunFolder, config: Config, client: Client, result: Result) -> dict[str, Any]:
    """Completes the manifest and writes the report. Returns the manifest."""
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
    return manifest


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


def print_result(console: Console, run: RunFolder, manifest: dict[str, Any]) -> None:
    """The table of held-out success, what was dropped, and where everything is."""
    values = manifest["evaluation"]
    details = values["details"]
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
    crashed, late = counts.get("attempts.exited_nonzero", 0), counts.get("attempts.timed_out", 0)
    if crashed or late:
        console.print(f"attempts whose harness exited with another code than 0: {crashed}; timed out: {late}")
    console.print(f"run folder: {run.path}", soft_wrap=True, highlight=False)
    console.print(f"report: {run.report}", soft_wrap=True, highlight=False)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
