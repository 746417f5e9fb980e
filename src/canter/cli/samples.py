"""`canter samples`: what the trainer learned from, rebuilt from the store, with every drop counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import click

from canter.cli import options
from canter.cli.reading import read, trained_steps
from canter.cli.supervise import load_run
from canter.config import Config
from canter.runs import RunFolder
from canter.samples import Batch, audit
from canter.store import Store
from canter.trainer.loop import build_batch
from canter.types import Call, Sample


@click.command("samples")
@options.run_argument
@click.option("--step", type=int, help="Only this step.")
@click.option("--verify", is_flag=True, help="Check every committed call: trained once, or not with a reason.")
@options.as_json
def command(run: str, step: int | None, verify: bool, as_json: bool) -> int:
    """Training samples of a run, by step. RUN is a path, a name, or `latest`. Exit code 1 if --verify finds a fault."""
    folder = RunFolder.find(run)
    config = load_run(folder)
    batches = read(folder, lambda store: build_all(store, config, step))
    faults = [fault for batch, calls in batches.values() for fault in audit(batch, calls)] if verify else []
    unfinished = read(folder, lambda store: count_unfinished(store, step)) if verify else (0, 0)
    if as_json:
        options.print_json(
            {
                "run": folder.id,
                "steps": {str(n): batch.report.to_json() for n, (batch, _) in batches.items()},
                "samples": [as_row(s, n) for n, (batch, _) in batches.items() for s in batch.samples],
                **(
                    {"faults": faults, "unfinished": dict(zip(("rollouts", "calls"), unfinished, strict=True))}
                    if verify
                    else {}
                ),
            }
        )
        return 1 if faults else 0
    print_steps(batches)
    if verify:
        of = " of a finished rollout" if unfinished[0] else ""
        click.echo("\n".join(faults) or f"every committed call{of} is trained exactly once, or not with a reason")
        if unfinished[0]:
            click.echo(f"{unfinished[0]} rollouts are not finished ({unfinished[1]} calls): not counted")
    hint = f"canter rollouts list {folder.path}" if verify else f"canter samples {folder.path} --verify"
    click.echo(f"next: {hint}    or --json for programs")
    return 1 if faults else 0


async def build_all(store: Store, config: Config, step: int | None) -> dict[int, tuple[Batch, list[Call]]]:
    """Batch and calls of each step, built as the trainer builds them."""
    found = {}
    for number, rollouts in sorted((await trained_steps(store)).items()):
        if step is None or step == number:
            done = [r for r in rollouts if r.state.terminal]  # the others belong to the step in progress
            calls = await store.calls([r.id for r in done])
            found[number] = (build_batch(done, calls, config), calls)
    return found


async def count_unfinished(store: Store, step: int | None) -> tuple[int, int]:
    """Training rollouts that are in no final state, and the calls of their current attempts so far."""
    steps = await trained_steps(store)
    found = [r.id for n, some in steps.items() if step in (None, n) for r in some if not r.state.terminal]
    return len(found), len(await store.calls(found)) if found else 0


def as_row(sample: Sample, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "rollout_id": sample.rollout_id,
        "group": sample.group,
        "chain": sample.chain,
        "label": sample.label,
        "calls": list(sample.calls),
        "reward": sample.reward,
        "advantage": sample.advantage,
        "weight": sample.weight,
        "ids": sample.ids.tolist(),
        "mask": sample.mask.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "versions": sample.versions.tolist(),
    }


def print_steps(batches: dict[int, tuple[Batch, list[Call]]]) -> None:
    click.echo("step  rollouts  in batch  samples  trained tokens  mean reward  dropped")
    total: Counter[str] = Counter()
    for number, (batch, _) in batches.items():
        report = batch.report
        total.update({str(k): v for k, v in report.dropped.items()})
        reward = "-" if report.mean_reward is None else f"{report.mean_reward:.3f}"
        click.echo(
            f"{number:4}  {report.rollouts:8}  {report.in_batch:8}  {report.samples:7}  {report.tokens.trained:14}  "
            f"{reward:>11}  {said(report.dropped)}"
        )
    click.echo(f"dropped rollouts by reason: {said(total) or 'none'}")


def said(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
