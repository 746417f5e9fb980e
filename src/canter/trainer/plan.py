"""Which rollouts a step or an evaluation consists of: pure functions of the settings and the step number.

Ids and seeds are the same however often they are asked for, which is what makes a step repeatable: a resumed trainer
asks for the same rollouts and finds in the store those that have already run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from canter.config import Config
from canter.trainer.data import TaskOrder
from canter.trainer.seeds import seed_of
from canter.types import Rollout, Split, Task

EvaluationName = Literal["before", "after"]


def step_rollouts(config: Config, order: TaskOrder, step: int) -> list[Rollout]:
    """The rollouts of step `step` (the first is 1): `trainer.groups` tasks, `trainer.rollouts_per_group` of each."""
    groups = config.trainer.groups
    tasks = order.take((step - 1) * groups, groups)
    return [
        Rollout(
            id=f"s{step:05d}-g{group:03d}-r{index:02d}",
            group=f"s{step:05d}-g{group:03d}",
            task=task,
            split=Split.TRAIN,
            step=step,
            index=index,
            seed=seed_of(config.run.seed, step, group, index),
            max_attempts=config.runner.max_attempts,
        )
        for group, task in enumerate(tasks)
        for index in range(config.trainer.rollouts_per_group)
    ]


def evaluation_rollouts(config: Config, tasks: Sequence[Task], name: EvaluationName) -> list[Rollout]:
    """The rollouts of the evaluation `before` or `after` training; both have the same tasks and seeds."""
    return [
        Rollout(
            id=f"eval-{name}-t{number:05d}-r{index:02d}",
            group=f"eval-{name}-t{number:05d}",
            task=task,
            split=Split.EVAL,
            step=0 if name == "before" else config.trainer.steps,
            index=index,
            seed=seed_of(config.run.seed, "eval", number, index),
            max_attempts=config.runner.max_attempts,
        )
        for number, task in enumerate(tasks)
        for index in range(config.evaluate.rollouts_per_task)
    ]
