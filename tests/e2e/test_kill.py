"""kill -9 at random points: the run goes on, no committed call is lost, none is trained twice.

The fake engine, the seeds and the harness are deterministic, so a run that was killed must learn exactly what an
uninterrupted one learns: the same losses and gradient norms, bit for bit.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import write_run
from whole_run import WholeRun, wait_until

from canter.types import RolloutState

STEPS = 8
KILLS = int(os.environ.get("CANTER_KILLS", "20"))
PATIENT = ("runner.max_attempts=99", "runner.retry_delay_s=0.05")

pytestmark = pytest.mark.timeout(900)


def learned(run: WholeRun) -> list[tuple[int, int, float, float]]:
    return [(row["step"], row["version"], row["loss"], row["grad_norm"]) for row in run.rows()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = WholeRun(folder, write_run(folder, steps=STEPS))
    run.start(*PATIENT)
    assert run.finish() == 0, run.output()
    return run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[WholeRun]:
    run = new_run(tmp_path)
    yield run
    run.stop()


def new_run(folder: Path) -> WholeRun:
    folder.mkdir(exist_ok=True)
    return WholeRun(folder, write_run(folder, steps=STEPS))


def check(run: WholeRun) -> None:
    rollouts, calls = run.recorded()
    assert {r.state for r in rollouts} == {RolloutState.SCORED}
    lost = run.received() - {call.id for call in calls}
    assert not lost, f"replies were read that are not recorded: {lost}"
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    run.verify()


def test_the_whole_tree_killed_at_random_points(tmp_path: Path, undisturbed: WholeRun) -> None:
    """One run after another until there were as many kills as wanted; each is finished and checked."""
    seed = int(os.environ.get("CANTER_KILL_SEED", "0")) or random.randrange(1, 10**6)
    chance = random.Random(seed)
    kills = 0
    while kills < KILLS:
        run = new_run(tmp_path / f"after-{kills}")
        kills += kill_until_done(run, chance, KILLS - kills)
        assert run.finish() == 0, f"CANTER_KILL_SEED={seed}\n{run.output()}"
        check(run)
        assert learned(run) == learned(undisturbed), f"CANTER_KILL_SEED={seed}"


def kill_until_done(run: WholeRun, chance: random.Random, most: int) -> int:
    """Kills and resumes; half of the points lie anywhere from the start on, half where calls are being made."""
    for kills in range(most):
        run.start(*PATIENT)
        if chance.random() < 0.5:
            seen = len(run.received())
            wait_until(lambda seen=seen: len(run.received()) > seen or not run.running(), 60)
        wait_until(lambda: not run.running(), chance.uniform(0, 2.0))
        if not run.running():
            return kills
        run.kill_all()
    run.start(*PATIENT)
    return most


@pytest.mark.parametrize("name", ["gateway", "controller", "trainer"])
def test_one_process_killed_twice_in_a_run(name: str, run: WholeRun, undisturbed: WholeRun) -> None:
    """It is started again by itself, and nothing else stops."""
    run.start(*PATIENT)
    for step in (2, 4):
        assert wait_until(lambda step=step: any(r["step"] >= step for r in run.rows()) or not run.running(), 120)
        assert run.kill_one(name), run.output()
    assert run.finish() == 0, run.output()
    check(run)
    assert learned(run) == learned(undisturbed)
