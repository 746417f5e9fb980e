"""`canter harness check`: one rollout of an installed harness against a scripted model, and what it sent."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from canter.cli import options
from canter.cli.endings import ending, last_lines, start_advice
from canter.config import Config, load, resolve
from canter.types import Call, Outcome, Task

if TYPE_CHECKING:
    from canter.cli.trial import Seen, Trial

TASK = Task(
    "check",
    "Make the files canter-1.txt to canter-4.txt in the current folder with shell commands, each with one short line "
    "of text, then say that you are done.",
)
_TAIL_LINES = 15
_SCALE = "(the scripted model has one token per byte: to a real one these prompts are about a quarter as long)"


@click.command("check")
@click.argument("target", metavar="NAME|FILE.toml")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=300, show_default=True, help="Seconds.")
@click.option("--keep", is_flag=True, help="Keep the run folder, also if all is well.")
@options.as_json
def command(target: str, settings: tuple[str, ...], timeout_s: float, keep: bool, as_json: bool) -> int:
    """Run an installed harness once against a scripted model and print what it sent.

    NAME is a recipe, and KEY=VALUE one of its `harness.args` (with a dot in KEY: any setting). FILE.toml is a run's
    settings, with whatever `harness.use`, `.command` or `.function` it has: so any agent can be checked. No model, no
    GPU and no network are needed. The model makes three turns of tool calls and ends; see docs/harnesses.md.

    Exit code 0 if the harness finished, every fork of its conversation has a known cause, and every sampled token of
    the calls that train is trained exactly once.
    """
    from canter.cli.trial import run_trial, scripted_model, trial_folder

    config, task = configured(target, settings, timeout_s)
    parent = Path(tempfile.mkdtemp(prefix="ct-"))  # short: some harnesses put sockets into the attempt's folder
    worth_a_look = keep
    try:
        run = trial_folder(parent, "c", config)
        trial = asyncio.run(run_trial(config, run, task, scripted_model()))
        problems = trial.verdict()
        worth_a_look = keep or bool(problems)
        if as_json:
            options.print_json(as_row(trial, problems))
        else:
            report(trial, target)
            conclude(trial, problems, keep, config.base)
    finally:
        if not worth_a_look:
            shutil.rmtree(parent, ignore_errors=True)
    return 1 if problems else 0


def configured(target: str, settings: Sequence[str], timeout_s: float) -> tuple[Config, Task]:
    """The settings of the check and its task: with a file, the first of its training tasks, where they can be read."""
    if target.endswith(".toml"):
        config, task = _of_file(load(target, settings))
    else:
        tree = {
            "model": {"path": "scripted"},
            "tasks": {"train": "none.jsonl"},
            "harness": {"use": target},
            "grader": {"command": ["true"]},
        }
        given = [text if "." in text.partition("=")[0] else f"harness.args.{text}" for text in settings]
        config, task = resolve(tree, given), TASK
    return config.model_copy(update=_changed(config, timeout_s)), task


def _of_file(config: Config) -> tuple[Config, Task]:
    from canter.trainer.data import read_tasks

    file = config.path(config.tasks.train)
    tasks = read_tasks(file) if file.is_file() else []
    return config, tasks[0] if tasks else TASK


def _changed(config: Config, timeout_s: float) -> dict[str, Any]:
    """What a check has otherwise than a run: no grader of the user's, kept folders, room for tokens of one byte."""
    return {
        "model": config.model.model_copy(update={"context_tokens": None}),
        "harness": config.harness.model_copy(update={"timeout_s": timeout_s, "timeout_reward": 0.0}),
        "grader": type(config.grader)(command=["sh", "-c", "echo 1"]),
        "runner": config.runner.model_copy(update={"keep_dirs": "all", "max_attempts": 1}),
        "sampling": config.sampling.model_copy(update={"max_tokens": max(4096, config.sampling.max_tokens)}),
        "gateway": config.gateway.model_copy(
            update={"host": "127.0.0.1", "port": 0, "tls_cert": None, "tls_key": None}
        ),
    }


# -- what is printed --


def report(trial: Trial, name: str) -> None:
    """The requests, the conversations they are, and what was trained."""
    console = Console(width=max(120, Console().width), highlight=False)
    console.print(requests_table(trial))
    if trial.calls:
        click.echo(_SCALE)
    console.print(conversations_table(trial))
    forks = ", ".join(f"{cause} {count}" for cause, count in sorted(trial.batch.report.forks.items())) or "none"
    tokens = trial.batch.report.tokens
    click.echo(f"forks: {forks}")
    click.echo(f"sampled tokens: {tokens.sampled}, trained: {tokens.trained}, not trained: {_lost(trial) or 'none'}")
    if trial.offered:
        made = f"{len(trial.made)} of {len(trial.offered)}"
        click.echo(f"commands executed: {made}" + ("" if trial.made else " (no file of them in work/)"))
    for attempt in trial.attempts:
        click.echo(f"{name}: {ending(attempt) or 'it still ran'}, {trial.wall_s:.1f} s in all")


def requests_table(trial: Trial) -> Table:
    names = ("", "request", "status", "stream", "model", "tools", "label", "parent", "prompt", "sampled", "user agent")
    table = Table(*names, box=None, title="Requests", title_justify="left")
    seen: set[str] = set()
    for number, request in enumerate(trial.requests):
        again = request.call is not None and request.call.id in seen
        table.add_row(str(number + 1), *_request_cells(request, again))
        if request.call is not None:
            seen.add(request.call.id)
    return table


def _request_cells(request: Seen, again: bool) -> Iterator[str]:
    call, body = request.call, request.body
    yield f"{request.method} {request.path}"
    yield str(request.status or "none")
    yield from _asked_cells(body) if body else ("", "", "")
    if call is None:
        yield from ("refused" if request.refused else "", "", "", "")
    else:
        yield call.label
        yield f"same as call {call.ordinal}" if again else _place(call)
        yield str(call.prompt_len)
        yield str(len(call.sampled))
    yield request.user_agent[:40]


def _asked_cells(body: Mapping[str, Any]) -> Iterator[str]:
    yield "yes" if body.get("stream") else "no"
    yield str(body.get("model", ""))[:40]
    yield str(_tools(body))


def _tools(body: Mapping[str, Any]) -> int:
    """How many a request offers; a refused one may have anything there."""
    tools = body.get("tools")
    return len(tools) if isinstance(tools, list) else 0


def _place(call: Call) -> str:
    if call.fork is not None:
        return f"fork: {call.fork}"
    return "extends" if call.parent_id is not None else "starts"


def conversations_table(trial: Trial) -> Table:
    names = ("", "label", "calls", "tokens", "trained", "reason")
    table = Table(*names, box=None, title="\nConversations (samples)", title_justify="left")
    for number, sample in enumerate(trial.batch.samples):
        table.add_row(
            str(number + 1), sample.label, str(len(sample.calls)), str(len(sample.ids)), str(sample.trained), ""
        )
    for call in trial.calls:
        if call.id in trial.batch.untrained:
            reason = trial.batch.untrained[call.id]
            table.add_row("-", call.label, "1", str(call.prompt_len + len(call.sampled)), "0", f"not trained: {reason}")
    return table


def _lost(trial: Trial) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(trial.batch.report.tokens.untrained.items()))


def conclude(trial: Trial, problems: Sequence[str], keep: bool, base: Path) -> None:
    """The verdict, and what to do next. `base` is the folder of the TOML file."""
    if not problems:
        click.echo("good: it finished, no fork is unexplained, and every sampled token that trains is trained once")
        if keep:
            click.echo(f"kept: {trial.run.path}")
        return
    click.echo("\nnot good:")
    for problem in problems:
        click.echo(f"  - {problem}")
    said = {name: last_lines(trial.folder / name, _TAIL_LINES) for name in ("stderr.txt", "stdout.txt")}
    for line in _refusals(trial, "\n".join(line for lines in said.values() for line in lines)):
        click.echo(f"  {line}")
    for name, lines in said.items():
        if lines and trial.ran:  # else there is only what failed to start it, which is said above
            click.echo(f"the end of {trial.folder / name}:")
            click.echo("\n".join(f"  | {line}" for line in lines))
    for advice in next_steps(trial, base):
        click.echo(f"next: {advice}")


def _refusals(trial: Trial, said: str) -> Iterator[str]:
    """Each refusal once, with its words unless the program has repeated them in what it `said`."""
    refused = [r for r in trial.requests if r.refused]
    counts = Counter((r.method, r.path, r.status, r.words) for r in refused)
    for (method, path, status, words), count in counts.items():
        times = f" ({count} times)" if count > 1 else ""
        yield f"{method} {path}: {status}{times}" + ("" if words and words in said else f" {words}")


def next_steps(trial: Trial, base: Path) -> Iterator[str]:
    if not trial.ran:
        yield "nothing of it ran: correct what could not be started, as said above"
    elif not trial.requests:
        yield _unheard(trial, base)
    if any(b"model_not_found" in request.refusal for request in trial.requests):
        yield "take the name from CANTER_MODEL, or list it in model.aliases"
    if any(attempt.outcome is Outcome.TIMED_OUT for attempt in trial.attempts):
        yield "if it was still at work, give it more time: --timeout SECONDS"
    if trial.untrained or trial.faults or any("unknown" in problem for problem in trial.verdict()):
        yield f"compare the calls: canter rollouts show {trial.run.path} {trial.rollout.id} --json"
    yield f"everything it left is in {trial.run.path}; remove the folder when you are done with it"


def _unheard(trial: Trial, base: Path) -> str:
    """What to do about a program that ran and sent no request."""
    said = [line for name in ("stdout.txt", "stderr.txt") for line in last_lines(trial.folder / name, _TAIL_LINES)]
    failed = trial.attempts[-1].outcome is Outcome.EXITED and trial.attempts[-1].exit_code != 0
    if failed and (advice := start_advice(said, base.resolve(), (trial.folder / "work").resolve())):
        return advice
    return (
        "it never called the gateway: it must take its endpoint from OPENAI_BASE_URL or ANTHROPIC_BASE_URL and its "
        "key from OPENAI_API_KEY or ANTHROPIC_API_KEY (docs/harnesses.md)"
    )


def as_row(trial: Trial, problems: Sequence[str]) -> dict[str, Any]:
    """The check for programs."""
    return {
        "good": not problems,
        "problems": list(problems),
        "folder": str(trial.run.path),
        "wall_s": round(trial.wall_s, 2),
        "attempts": [{"outcome": a.outcome, "exit_code": a.exit_code, "message": a.message} for a in trial.attempts],
        "requests": [_request_row(request) for request in trial.requests],
        "samples": [
            {"label": s.label, "calls": len(s.calls), "tokens": len(s.ids), "trained": s.trained}
            for s in trial.batch.samples
        ],
        "report": trial.batch.report.to_json(),
        "offered": list(trial.offered),
        "files": list(trial.made),
    }


def _request_row(request: Seen) -> dict[str, Any]:
    row: dict[str, Any] = {
        "method": request.method,
        "path": request.path,
        "status": request.status,
        "user_agent": request.user_agent,
        "refusal": request.refusal.decode("utf-8", "replace"),
    }
    call, body = request.call, request.body
    if body:
        row |= {"stream": bool(body.get("stream")), "model": body.get("model"), "tools": _tools(body)}
    if call is None:
        return row
    return row | {
        "call": call.id,
        "ordinal": call.ordinal,
        "label": call.label,
        "fork": call.fork,
        "prompt_tokens": call.prompt_len,
        "sampled_tokens": len(call.sampled),
        "trained": call.untrainable is None,
    }
