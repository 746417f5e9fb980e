"""The same with real parts: SmolLM2, the unmodified mini-SWE-agent, the local engine, the torch trainer."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from whole_run import WholeRun, wait_until

from canter.types import CallStatus, RolloutState

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "quickstart.toml"
SMALL = (
    "trainer.groups=2",
    "trainer.rollouts_per_group=4",
    "trainer.steps=3",
    "trainer.checkpoint_every=2",
    "evaluate.before=false",
    "evaluate.after=false",
    "runner.max_attempts=99",
    "engine.journal=true",
)
KILLS = 3


@pytest.mark.real
@pytest.mark.timeout(900)
def test_the_quickstart_killed_three_times_in_mid_step(tmp_path: Path) -> None:
    seed = int(os.environ.get("CANTER_KILL_SEED", "0")) or random.randrange(1, 10**6)
    chance = random.Random(seed)
    run = WholeRun(tmp_path, RECIPE)
    settings = (*SMALL, f"run.dir={tmp_path / 'runs'}")
    for kill in range(KILLS):
        run.start(*settings)
        drawn = journal(run)
        assert wait_until(lambda drawn=drawn: len(journal(run)) > len(drawn) or not run.running(), 180)
        wait_until(lambda: not run.running(), chance.uniform(0, 1.5))
        assert run.running(), f"over before kill {kill + 1}, CANTER_KILL_SEED={seed}\n{run.output()}"
        run.kill_all()
    run.start(*settings)
    assert run.finish() == 0, f"CANTER_KILL_SEED={seed}\n{run.output()}"

    rollouts, calls = run.recorded()
    assert {r.state for r in rollouts} == {RolloutState.SCORED}
    assert [row["step"] for row in run.rows()] == [1, 2, 3]
    run.verify()
    drawn_ids = {tuple(line["ids"]) for line in journal(run)}
    answered = [call for call in calls if call.status is CallStatus.OK]
    assert {call.rollout_id for call in answered} == {r.id for r in rollouts}
    assert all(tuple(call.sampled.tolist()) in drawn_ids for call in answered)
    assert all(call.untrainable for call in calls if call.status is not CallStatus.OK)  # a kill hit them in mid-call


def journal(run: WholeRun) -> list[dict[str, list[int]]]:
    """What the engine drew; a line that a kill cut off is left out."""
    files = list(run.folder.glob("runs/*/logs/engine.jsonl"))
    lines = files[0].read_text().splitlines() if files else []
    return [json.loads(line) for line in lines if line.endswith("}")]
