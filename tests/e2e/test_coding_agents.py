"""Training inside the real Claude Code and the real Codex: SmolLM2, the local engine, the torch trainer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from whole_run import WholeRun

from canter.config import load
from canter.engine.models import resolve
from canter.errors import ConfigError
from canter.harness import recipe
from canter.types import CallStatus, RolloutState

RECIPES = Path(__file__).parents[2] / "recipes" / "coding-agents"
# a reward that differs between rollouts whatever a model of this size says: it is the update that is looked at here
REWARD = "import os; print(os.path.getsize('../stdout.txt') % 97 / 96)"
SMALL = (
    "trainer.groups=1",
    "trainer.rollouts_per_group=3",
    "trainer.steps=2",
    "sampling.max_tokens=48",
    "grader.function=none",
    f'grader.command=["{sys.executable}", "-c", "{REWARD}"]',
)


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "dialect"), [("claude-code", "messages"), ("codex", "responses")])
def test_two_updates_inside_a_coding_agent(name: str, dialect: str, tmp_path: Path) -> None:
    file = RECIPES / f"{name}.toml"
    config = load(file)
    try:
        recipe(config)
    except ConfigError as error:
        pytest.skip(f"{name} is not installed: {error}")
    run = WholeRun(tmp_path, file)
    run.start(*SMALL, f"run.dir={tmp_path / 'runs'}")
    assert run.finish(timeout_s=800) == 0, run.output()

    rollouts, calls = run.recorded()
    assert [r.state for r in rollouts] == [RolloutState.SCORED] * 6
    assert {call.dialect for call in calls} == {dialect}
    assert all(call.status is CallStatus.OK and call.untrainable is None for call in calls)
    assert {call.rollout_id for call in calls} == {r.id for r in rollouts}
    rows = run.rows()
    assert [row["version"] for row in rows] == [1, 2]
    assert sum(row["trained_tokens"] for row in rows) == sum(len(call.sampled) for call in calls)
    assert all(row["grad_norm"] > 0 for row in rows)
    run.verify()
    assert differ(resolve(config.model.path, base=config.base), run.run.path)


def differ(before: Path, run: Path) -> bool:
    """Whether the last checkpoint's weights are others than the model's, and as many."""
    [after] = run.glob("checkpoints/step-00002/model.safetensors")
    old, new = load_file(before / "model.safetensors"), load_file(after)
    shared = old.keys() & new.keys()
    assert len(shared) > 100
    return any(not torch.equal(old[name].float(), new[name].float()) for name in shared)
