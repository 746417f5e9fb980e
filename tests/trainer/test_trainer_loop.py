"""The loop from end to end with a tiny model: what it learns, what it refuses, and that it survives being killed."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_world import (
    TASKS,
    Fuse,
    Judge,
    Killed,
    MortalBackend,
    MortalClient,
    TinyEngine,
    TinyWorld,
    low_tokens,
    weights,
)

from canter.config import Config
from canter.errors import CheckpointError, TooManyDrops
from canter.runs import RunFolder
from canter.trainer.loop import Result, train
from canter.types import Reason, RolloutState, Task
from tiny_policy import tiny_config

STEPS = 5
SETTINGS = (
    "trainer.groups=2",
    "trainer.rollouts_per_group=3",
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=2",
    "trainer.lr=0.003",
    "runner.max_attempts=1",
)
MakeWorld = Callable[..., TinyWorld]


@pytest.fixture
async def make_world() -> AsyncIterator[MakeWorld]:
    worlds: list[TinyWorld] = []

    def make(judge: Judge = low_tokens) -> TinyWorld:
        worlds.append(TinyWorld(judge))
        return worlds[-1]

    yield make
    for world in worlds:
        await world.close()


async def run(
    world: TinyWorld,
    folder: Path,
    config: Config,
    fuse: Fuse | None = None,
    tasks: list[Task] = TASKS,
    heldout: list[Task] | None = None,
) -> tuple[Result, MortalBackend]:
    """One life of the trainer; its engine dies with it."""
    folder.mkdir(exist_ok=True)
    fuse = fuse or Fuse()
    engine = TinyEngine()
    old, world.engine = world.engine, engine
    await old.close()
    backend = MortalBackend(config, engine, fuse)
    client = MortalClient(world.store, fuse)
    result = await train(config, client, backend, engine, RunFolder(folder), tasks=tasks, heldout=heldout or [])
    return result, backend


def lasting(row: Any) -> dict[str, Any]:
    """A row without the times."""
    return {name: value for name, value in row.items() if name != "time" and not name.endswith("_s")}


async def test_the_reward_rises(make_world: MakeWorld, tmp_path: Path) -> None:
    config = tiny_config(*SETTINGS[:2], "trainer.steps=12", "trainer.lr=0.01", "trainer.rollouts_per_group=8")
    result, _ = await run(make_world(), tmp_path, config)
    rewards = [row["reward_mean"] for row in result.rows]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6
    assert all(row["logprob_gap_max"] < 1e-5 for row in result.rows if "logprob_gap_max" in row)


async def test_a_step_leaves_a_row_a_version_and_checkpoints(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world()
    result, backend = await run(world, tmp_path, tiny_config(*SETTINGS))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["version"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["rollouts"] == 6 and row["trained_tokens"] == 24 and row["step_s"] > 0 for row in rows)
    assert [v.version for v in await world.store.versions()] == list(range(STEPS + 1))
    assert world.engine.synced == list(range(STEPS + 1))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00004", "step-00005"]
    assert backend.version == STEPS
    assert result.train_wall_s >= sum(row["step_s"] for row in rows)


async def test_killed_anywhere_and_resumed_it_ends_with_the_same_weights(make_world: MakeWorld, tmp_path: Path) -> None:
    config = tiny_config(*SETTINGS)
    fuse = Fuse()
    expected, whole = await run(make_world(), tmp_path / "whole", config, fuse)
    points = random.Random(0).sample(range(1, fuse.burnt), 20)
    for point in points:
        folder, world = tmp_path / f"at-{point}", make_world()
        with pytest.raises(Killed):
            await run(world, folder, config, Fuse(point))
        with contextlib.suppress(Killed):  # and, unless it ends before, once more while it recovers
            await run(world, folder, config, Fuse(8))
        found, resumed = await run(world, folder, config)
        assert [lasting(row) for row in found.rows] == [lasting(row) for row in expected.rows]
        assert_same_weights(whole, resumed)
        assert resumed.lineage == whole.lineage
        assert len(set(resumed.lineage)) == len(resumed.lineage) == STEPS * 6
        assert [v.version for v in await world.store.versions()] == list(range(STEPS + 1))


def assert_same_weights(a: MortalBackend, b: MortalBackend) -> None:
    others = weights(b)
    for name, tensor in weights(a).items():
        assert torch.equal(tensor, others[name]), name


async def test_a_finished_run_runs_no_step_again(make_world: MakeWorld, tmp_path: Path) -> None:
    world, config = make_world(), tiny_config(*SETTINGS)
    first, _ = await run(world, tmp_path, config)
    events = len(await world.store.events(0, limit=10**6))
    second, backend = await run(world, tmp_path, config)
    assert [lasting(row) for row in second.rows] == [lasting(row) for row in first.rows]
    assert len(await world.store.events(0, limit=10**6)) == events
    assert backend.version == STEPS


async def test_several_epochs_are_one_version(make_world: MakeWorld, tmp_path: Path) -> None:
    result, backend = await run(make_world(), tmp_path, tiny_config(*SETTINGS, "trainer.epochs=2", "trainer.steps=2"))
    assert backend.version == 2
    assert all(row["ratio_mean"] != 1 for row in result.rows)


async def test_other_tasks_than_those_of_the_checkpoint_are_refused(make_world: MakeWorld, tmp_path: Path) -> None:
    world, config = make_world(), tiny_config(*SETTINGS)
    await run(world, tmp_path, config)
    with pytest.raises(CheckpointError, match="made with tasks = "):
        await run(world, tmp_path, config, tasks=TASKS[:3])


async def test_a_store_that_knows_less_than_the_checkpoint_is_refused(make_world: MakeWorld, tmp_path: Path) -> None:
    config = tiny_config(*SETTINGS)
    await run(make_world(), tmp_path, config)
    with pytest.raises(CheckpointError, match="do not belong together"):
        await run(make_world(), tmp_path, config)


async def test_invalid_rollouts_are_counted_and_left_out(make_world: MakeWorld, tmp_path: Path) -> None:
    def judge(rollout: Any, ids: Any) -> float | Reason:
        return Reason.GRADER_ERROR if rollout.index == 0 else low_tokens(rollout, ids)

    result, _ = await run(make_world(judge), tmp_path, tiny_config(*SETTINGS))
    assert all(row["dropped"] == {"grader_error": 2} and row["in_batch"] == 4 for row in result.rows)


async def test_too_many_invalid_rollouts_stop_the_run_with_their_reason(make_world: MakeWorld, tmp_path: Path) -> None:
    def judge(rollout: Any, ids: Any) -> float | Reason:
        bad = Reason.GRADER_ERROR if rollout.index == 1 else Reason.NO_REWARD
        return bad if rollout.step == 2 and rollout.index else low_tokens(rollout, ids)

    message = r"step 2: 4 of 6 rollouts .* most often grader_error \(2\), for example s00002-g000-r01: scripted"
    with pytest.raises(TooManyDrops, match=message):
        await run(make_world(judge), tmp_path, tiny_config(*SETTINGS))


async def test_a_step_with_nothing_to_train_stops_the_run(make_world: MakeWorld, tmp_path: Path) -> None:
    """Scored rollouts are no use where their calls cannot be trained."""
    world = make_world()
    world.untrainable = Reason.MISSING_VERSION
    with pytest.raises(TooManyDrops, match=r"step 1: 6 of 6 rollouts give nothing to train.*missing_version \(6\)"):
        await run(world, tmp_path, tiny_config(*SETTINGS))


async def test_late_rollouts_are_cancelled_and_counted(make_world: MakeWorld, tmp_path: Path) -> None:
    def judge(rollout: Any, ids: Any) -> float | None:
        return None if rollout.index == 2 else low_tokens(rollout, ids)

    world = make_world(judge)
    result, _ = await run(world, tmp_path, tiny_config(*SETTINGS, "trainer.steps=1", "trainer.step_timeout_s=0.5"))
    assert result.rows[0]["dropped"] == {"cancelled": 2}
    late = await world.store.rollout("s00001-g000-r02")
    assert late.state is RolloutState.CANCELLED
    assert "trainer.step_timeout_s = 0.5" in late.message


async def test_a_step_without_a_batch_makes_no_version(make_world: MakeWorld, tmp_path: Path) -> None:
    def judge(rollout: Any, ids: Any) -> float:
        return 1.0 if rollout.step == 2 else float(rollout.index)

    world, config = make_world(judge), tiny_config(*SETTINGS, "trainer.steps=3", "trainer.keep_flat_groups=false")
    for _ in range(2):  # and resuming after it works
        result, backend = await run(world, tmp_path, config)
        assert [row["version"] for row in result.rows] == [1, 1, 2]
        assert result.rows[1]["dropped"] == {"no_spread": 6}
        assert backend.version == 2


async def test_evaluation_goes_the_same_way_before_and_after(make_world: MakeWorld, tmp_path: Path) -> None:
    world, heldout = make_world(), [Task(id="h0", prompt="held out"), Task(id="h1", prompt="too")]
    overrides = ("tasks.eval=h.jsonl", "evaluate.before=true", "evaluate.after=true", "evaluate.rollouts_per_task=2")
    await run(world, tmp_path, tiny_config(*SETTINGS, *overrides), heldout=heldout)
    found = [r for r in await world.store.rollouts() if r.id.startswith("eval-")]
    assert [r.id for r in found] == [
        f"eval-{name}-t{task:05d}-r{index:02d}" for name in ("after", "before") for task in (0, 1) for index in (0, 1)
    ]
    calls = {c.rollout_id: c for c in await world.store.calls([r.id for r in found])}
    assert {calls[r.id].versions[0].version for r in found if "before" in r.id} == {0}
    assert {calls[r.id].versions[0].version for r in found if "after" in r.id} == {STEPS}
    assert [r.seed for r in found[:4]] == [r.seed for r in found[4:]]


async def test_calls_whose_label_does_not_train_are_left_out_and_counted(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world()
    world.side_calls = True
    config = tiny_config(*SETTINGS, 'harness.train_labels=["main"]')
    result, backend = await run(world, tmp_path / "run", config)
    assert len(backend.lineage) == STEPS * 6
    assert all(call.endswith("-c0") for call in backend.lineage)
    for row in result.rows:
        assert row["untrained_calls"] == {"label_excluded": 6}
        assert row["sampled_tokens"] == 2 * row["trained_tokens"] == 48


async def test_every_call_of_a_function_of_the_users_trains(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world()
    world.side_calls = True
    result, backend = await run(world, tmp_path / "run", tiny_config(*SETTINGS))
    assert len(backend.lineage) == STEPS * 12
    assert all(row["untrained_calls"] == {} for row in result.rows)
