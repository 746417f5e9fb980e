"""`canter rollouts`: what ran, how it ended, and what one rollout said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.table import Table

from canter.cli import options
from canter.cli.endings import ending, last_lines
from canter.cli.reading import all_rollouts, read
from canter.gateway.transcript import asked, replied
from canter.runs import RunFolder
from canter.store import Store
from canter.types import Attempt, Call, CallBodies, Outcome, Rollout, RolloutState

_LAST_LINES = 5
_SYSTEM_CHARS = 200


@click.group("rollouts")
def command() -> None:
    """List the rollouts of a run, or show one with its attempts and calls. RUN is a path, a name, or `latest`."""


@command.command("list")
@options.run_argument
@click.option(
    "--state", "states", multiple=True, type=click.Choice([s.value for s in RolloutState]), help="Only these."
)
@click.option("--group", help="Only this group.")
@options.as_json
def list_(run: str, states: Sequence[str], group: str | None, as_json: bool) -> int:
    """One line per rollout, in order of id."""
    folder = RunFolder.find(run)

    async def matching(store: Store) -> list[tuple[Rollout, Attempt | None]]:
        rollouts = [
            r
            for r in await all_rollouts(store)
            if (not states or r.state.value in states) and (group is None or r.group == group)
        ]
        return [(r, await current(store, r)) for r in rollouts]

    found = read(folder, matching)
    if as_json:
        options.print_json({"rollouts": [summary(r) | {"ended": ended(attempt)} for r, attempt in found]})
        return 0
    table = Table("rollout", "task", "split", "state", "attempt", "ended", "reward", "reason", box=None)
    for r, attempt in found:
        end = ending(attempt) if attempt is not None else ""
        reward = "" if r.reward is None else f"{r.reward:.3g}"
        table.add_row(r.id, r.task.id, r.split.value, r.state.value, str(r.attempt), end, reward, r.reason or "")
    Console().print(table)
    click.echo(f"{len(found)} rollouts")
    if found:
        click.echo(f"next: canter rollouts show {folder.path} {found[-1][0].id}")
    return 0


@command.command("show")
@options.run_argument
@click.argument("rollout_id", metavar="[ID]", required=False)
@options.as_json
def show(run: str, rollout_id: str | None, as_json: bool) -> int:
    """One rollout with its attempts and calls; without ID the counts of the whole run."""
    folder = RunFolder.find(run)
    if rollout_id is None:
        return show_counts(folder, as_json)
    rollout, attempts, calls, bodies = read(folder, lambda store: gather(store, rollout_id))
    if as_json:
        options.print_json(
            {
                "rollout": summary(rollout) | {"task": rollout.task.public(), "message": rollout.message},
                "attempts": [asdict(a) for a in attempts],
                "calls": [call_summary(c) | loaded(b) for c, b in zip(calls, bodies, strict=True)],
            }
        )
        return 0
    click.echo(f"{rollout.id}  task {rollout.task.id}  {rollout.state}  reward {rollout.reward}")
    if rollout.reason:
        click.echo(f"reason: {rollout.reason}: {rollout.message}")
    for attempt in attempts:
        print_attempt(folder, attempt, rollout.message)
    for call, body in zip(calls, bodies, strict=True):
        print_call(call, body)
    click.echo(f"next: canter samples {folder.path}")
    return 0


def show_counts(folder: RunFolder, as_json: bool) -> int:
    counts = read(folder, lambda store: store.counts())
    if as_json:
        options.print_json({"counts": counts})
    else:
        for name, number in sorted(counts.items()):
            click.echo(f"{number:8}  {name}")
        click.echo(f"next: canter rollouts list {folder.path}")
    return 0


async def current(store: Store, rollout: Rollout) -> Attempt | None:
    """The attempt that the rollout's state tells of, None before the first."""
    attempts = await store.attempts(rollout.id) if rollout.attempt else []
    return next((a for a in attempts if a.number == rollout.attempt), None)


def ended(attempt: Attempt | None) -> dict[str, Any] | None:
    """How an attempt ended, for programs; None before its end."""
    if attempt is None or attempt.outcome is None:
        return None
    return {"outcome": attempt.outcome, "exit_code": attempt.exit_code, "text": ending(attempt)}


def print_attempt(run: RunFolder, attempt: Attempt, known: str) -> None:
    """How it ended and where its folder is; of one that failed, its last words, too, beside what is `known` already."""
    folder = attempt_folder(run, attempt)
    gone = attempt.outcome is not None and folder is not None and not folder.is_dir()
    where = "" if folder is None else f"  {folder}" + (" (removed; runner.keep_dirs)" if gone else "")
    click.echo(f"attempt {attempt.number}: {ending(attempt) or 'running'}{where}")
    if attempt.outcome is None or (attempt.outcome is Outcome.EXITED and attempt.exit_code == 0):
        return
    started = folder is not None and attempt.outcome is not Outcome.SPAWN_FAILED
    lines = last_lines(folder / "stderr.txt", _LAST_LINES) if folder is not None and started else []
    if attempt.message and attempt.message != known and attempt.message not in (line.strip() for line in lines):
        click.echo(f"  {attempt.message}")
    if lines and folder is not None:
        click.echo(f"  the end of {folder / 'stderr.txt'}:")
        click.echo("\n".join(f"  | {line}" for line in lines))


def attempt_folder(run: RunFolder, attempt: Attempt) -> Path | None:
    """Where the runner put it, or where it lies in a run folder that was moved; None if nothing was started."""
    if not (told := attempt.process.get("dir")):
        return None
    folder = Path(str(told))
    moved = run.attempts.joinpath(*folder.parts[-2:])
    return moved if moved.is_dir() else folder


async def gather(store: Store, rollout_id: str) -> tuple[Rollout, list[Attempt], list[Call], list[CallBodies]]:
    rollout = await store.rollout(rollout_id)
    calls = await store.calls([rollout_id])
    return rollout, await store.attempts(rollout_id), calls, [await store.bodies(c.id) for c in calls]


def summary(rollout: Rollout) -> dict[str, Any]:
    """A rollout without its task's content."""
    values = asdict(rollout)
    task = values.pop("task")
    return values | {"task_id": task["id"]}


def call_summary(call: Call) -> dict[str, Any]:
    values = asdict(call)
    for name in ("suffix", "sampled", "logprobs"):
        values[name] = values[name].tolist()
    return values | {"prompt_len": call.prompt_len}


def loaded(body: CallBodies) -> dict[str, Any]:
    return {"request": orjson.loads(body.request or b"null"), "reply": orjson.loads(body.reply or b"null")}


def print_call(call: Call, body: CallBodies) -> None:
    kind = f"fork ({call.fork} at token {call.fork_at})" if call.fork else ("extends" if call.parent_id else "starts")
    why = f", untrainable: {call.untrainable}" if call.untrainable else ""
    click.echo(
        f"\n── call {call.ordinal} {call.id}  {kind}  prompt {call.prompt_len} tokens, "
        f"sampled {len(call.sampled)}, {call.status}/{call.finish_reason}, {call.label}{why}"
    )
    lines = asked(call, body)
    if lines and lines[0][0] == "system" and call.parent_id is None and len(lines) > 1:
        click.echo(f"   system: {shown(lines[0][1], _SYSTEM_CHARS)}")
    if lines:
        click.echo(f"   {lines[-1][0]}: {shown(lines[-1][1])}")
    if (reply := replied(call, body)) is not None:
        click.echo(f"   reply: {shown(reply)}")


def shown(text: str, width: int = 600) -> str:
    return text if len(text) <= width else f"{text[:width]}… ({len(text)} characters)"
