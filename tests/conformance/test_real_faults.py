"""What the real harnesses do when something breaks: three rollouts each, all side by side, and the table in the docs.

Each rollout has its troubles in turns of their own, so that one cannot hide the other. The wall time is about that of
the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cutting_proxy import CuttingProxy, Trouble, turn_of
from real_harnesses import CASES, Case, settings, written_text

from canter.cli.trial import Model, Trial, run_trial, scripted_model, trial_folder
from canter.engine import Engine, Health, PauseMode
from canter.engine.fake import Fault
from canter.errors import EngineUnavailable
from canter.gateway.stream import Timing
from canter.types import CallStatus, ForkCause, Generation, Ids, Outcome, Reason, Sampling

pytestmark = pytest.mark.timeout(1500)

PAUSE_S = float(os.environ.get("CANTER_PAUSE_S", "90"))
AWAY_S = 12.0
AT_ONCE = 6
TIMEOUT_S = 600.0
DOCS = Path(__file__).parents[2] / "docs" / "harnesses.md"
HARNESSES = {
    "Codex": "codex",
    "Claude Code": "claude-code",
    "OpenCode": "opencode",
    "OpenHands": "openhands",
    "mini-SWE-agent": "mini-tools",
}
"""Column of the table → case."""

# -- troubles of the engine --


class Frail:
    """An engine that can be gone for a while, with all that it was doing."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self._back_at = 0.0

    async def crash(self, seconds: float) -> None:
        self._back_at = time.monotonic() + seconds
        await self.inner.pause("abort")
        await self.inner.resume()

    async def generate(self, prompt: Ids, sampling: Sampling, *, request_id: str, cache_salt: str = "") -> Generation:
        self._check()
        return await self.inner.generate(prompt, sampling, request_id=request_id, cache_salt=cache_salt)

    async def abort(self, request_id: str) -> None:
        await self.inner.abort(request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self.inner.pause(mode)

    async def resume(self) -> None:
        await self.inner.resume()

    async def load_weights(self, version: int, path: str | None = None) -> None:
        await self.inner.load_weights(version, path)

    async def health(self) -> Health:
        self._check()
        return await self.inner.health()

    async def close(self) -> None:
        await self.inner.close()

    def _check(self) -> None:
        if time.monotonic() < self._back_at:
            raise EngineUnavailable("the engine has crashed")


@dataclass
class Incident:
    """Something that happens to the engine once, a moment after the first request of a turn has come."""

    turn: int
    what: Callable[[Frail], Any]
    engine: Frail | None = None
    done: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def on_turn(self, turn: int) -> None:
        if turn == self.turn and not self.done:
            self.done = True
            self.tasks.append(asyncio.create_task(self._happen()))

    async def _happen(self) -> None:
        await asyncio.sleep(0.2)
        await self.what(self.engine)


async def pause(engine: Frail) -> None:
    await engine.pause("keep")
    await asyncio.sleep(PAUSE_S)
    await engine.resume()


async def crash(engine: Frail) -> None:
    await engine.crash(AWAY_S)


# -- rollouts --


@dataclass(frozen=True)
class Scenario:
    """A rollout: what the proxy does at which turn, what the engine fails at, what happens to it, and the gateway's
    settings. `rows`: row of the table → turn."""

    rows: Mapping[str, int]
    plan: Mapping[int, list[Trouble]] = field(default_factory=dict)
    faults: Mapping[int, list[Fault]] = field(default_factory=dict)
    incident: Callable[[], Incident] = lambda: Incident(-1, pause)
    timing: Timing = field(default_factory=Timing)
    engine_wait_s: float = 30.0


SCENARIOS = {
    "held": Scenario(
        {
            "the request arrives 30 times at once": 0,
            "the engine pauses for 90 s": 1,
            "the client hangs up right behind the terminal event": 2,
        },
        plan={0: [Trouble.STORM], 2: [Trouble.HANG_UP]},
        incident=lambda: Incident(1, pause),
    ),
    "lost": Scenario(
        {
            "the connection is reset before the request is through": 0,
            "the connection is lost while the reply is made": 1,
            "the engine fails when the stream has begun": 2,
        },
        plan={0: [Trouble.REFUSE] * 2, 1: [Trouble.DROP]},
        faults={2: [Fault.CUT, Fault.CUT]},
        timing=Timing(headers_after_s=0.01, keep_alive_s=1.0),
    ),
    "gone": Scenario(
        {
            "the engine is away for 12 s, longer than `gateway.engine_wait_s`": 0,
            "the reply is cut in the middle": 1,
            "the reply is cut right before its terminal event": 2,
        },
        plan={1: [Trouble.CUT], 2: [Trouble.CUT_END]},
        incident=lambda: Incident(0, crash),
        engine_wait_s=3.0,
    ),
}


@dataclass(frozen=True)
class Broken:
    """A rollout with troubles, and the turns of the requests that reached the proxy."""

    trial: Trial
    carried: tuple[int, ...]

    def cell(self, turn: int) -> str:
        """What the harness did at a turn, in the words of the table."""
        requests = self.carried.count(turn)
        bodies = {request.call.id: request.body for request in self.trial.requests if request.call}
        calls = [call for call in self.trial.calls if turn_of(bodies.get(call.id, {})) == turn]
        made = sum(call.status is CallStatus.OK for call in calls)
        lost = any(call.status is CallStatus.CANCELLED for call in calls)
        asked = "one request" if requests == 1 else "asks again"
        replies = f"{made} replies" if made != 1 else "1 reply"
        return f"{asked}, {replies}" + (" and one cancelled" if lost else "")


async def run_scenario(case: Case, scenario: Scenario) -> Broken:
    folder = Path(tempfile.mkdtemp(prefix="ct-"))
    model = scripted_model(token_delay_s=0.003, faults=scenario.faults)
    incident = scenario.incident()
    incident.engine = Frail(model.engine)
    proxy = CuttingProxy(scenario.plan, incident.on_turn)
    config = settings(
        case,
        folder,
        gateway={"engine_wait_s": scenario.engine_wait_s},
        runner={"keep_dirs": "all", "max_attempts": 1},
    )
    config = config.model_copy(update={"harness": config.harness.model_copy(update={"timeout_s": TIMEOUT_S})})
    trial = await run_trial(
        config,
        trial_folder(folder, "c", config),
        case.task,
        Model(model.tokenizer, model.rendering, incident.engine),
        timing=scenario.timing,
        between=proxy.between,
    )
    for task in incident.tasks:
        task.cancel()
    return Broken(trial, tuple(turn for turn, _ in proxy.carried))


@pytest.fixture(scope="module")
def broken(missing: dict[str, str]) -> Iterator[dict[tuple[str, str], Broken]]:
    """(case, scenario) → what came of it, for the harnesses that are here."""
    found = asyncio.run(_run_all([name for name in HARNESSES.values() if CASES[name].harness not in missing]))
    yield found
    for one in found.values():
        shutil.rmtree(one.trial.run.path.parent, ignore_errors=True)


async def _run_all(names: list[str]) -> dict[tuple[str, str], Broken]:
    gate = asyncio.Semaphore(AT_ONCE)

    @contextlib.asynccontextmanager
    async def place(scenario: str) -> AsyncIterator[None]:
        if scenario == "held":  # it waits nearly all of the time
            yield
        else:
            async with gate:
                yield

    async def one(name: str, scenario: str) -> tuple[tuple[str, str], Broken]:
        async with place(scenario):
            began = time.monotonic()
            ran = await run_scenario(CASES[name], SCENARIOS[scenario])
            sys.stderr.write(f"{name} {scenario}: {len(ran.carried)} requests, {time.monotonic() - began:.1f} s\n")
            return (name, scenario), ran

    return dict(await asyncio.gather(*(one(name, scenario) for scenario in SCENARIOS for name in names)))


def of(broken: Mapping[tuple[str, str], Broken], column: str, scenario: str) -> Broken:
    found = broken.get((HARNESSES[column], scenario))
    if found is None:
        pytest.skip(f"{column} cannot be installed here")
    return found


each = pytest.mark.parametrize("column", HARNESSES)


@each
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_gets_through(column: str, scenario: str, broken: dict[tuple[str, str], Broken]) -> None:
    trial = of(broken, column, scenario).trial
    [attempt] = trial.attempts
    assert (attempt.outcome, attempt.exit_code) == (Outcome.EXITED, 0), written_text(trial.folder)
    assert trial.made == trial.expected
    assert trial.errors == ()


@each
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_it_sampled_is_trained_once(column: str, scenario: str, broken: dict[tuple[str, str], Broken]) -> None:
    trial = of(broken, column, scenario).trial
    report = trial.batch.report
    assert trial.faults == ()
    assert report.forks[ForkCause.UNKNOWN] == 0
    assert {reason for _, reason in trial.untrained} <= {Reason.CLIENT_GONE, Reason.ENGINE_UNAVAILABLE}
    assert {call.status for call, _ in trial.untrained} <= {CallStatus.CANCELLED, CallStatus.ERROR}
    assert report.tokens.trained == sum(len(c.sampled) for c in trial.calls if c.id not in trial.batch.untrained)


@each
def test_it_does_what_the_table_says(column: str, broken: dict[tuple[str, str], Broken]) -> None:
    told = table(DOCS.read_text(encoding="utf-8"))
    seen = {
        row: of(broken, column, name).cell(turn)
        for name, scenario in SCENARIOS.items()
        for row, turn in scenario.rows.items()
    }
    assert seen == {row: cells[column] for row, cells in told.items()}


def table(text: str) -> dict[str, dict[str, str]]:
    """Row → column → cell of the first table of the section on faults."""
    section = text.partition("## When something breaks\n")[2]
    first = "|" + section.partition("\n|")[2].partition("\n\n")[0]
    names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines()]
    return {row[0]: dict(zip(names[1:], row[1:], strict=True)) for row in rows}
