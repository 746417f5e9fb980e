import json

import pytest

from canter.evaluate import compare, evaluation, summarise
from canter.types import Reason, Rollout, RolloutState, Split, Task


def held_out(**rewards: list[float | None]) -> list[Rollout]:
    """Rollouts by task; `None` is one that the grader failed."""
    return [
        Rollout(
            id=f"{task}-{index}",
            group=task,
            task=Task(task, "p"),
            split=Split.EVAL,
            index=index,
            state=RolloutState.INVALID if reward is None else RolloutState.SCORED,
            reward=reward,
            reason=Reason.GRADER_ERROR if reward is None else None,
        )
        for task, values in rewards.items()
        for index, reward in enumerate(values)
    ]


def test_invalid_rollouts_leave_the_share_and_are_counted():
    summary = summarise(held_out(a=[1.0], b=[0.5], c=[None], d=[0.0]))
    assert (summary.solved, summary.n, summary.tasks) == (pytest.approx(1 / 3), 3, 3)
    assert summary.invalid == {"grader_error": 1}
    assert summary.mean_reward == 0.5
    low, high = summary.interval
    assert 0 < low < 1 / 3 < high < 1
    assert summarise(held_out(a=[1.0], b=[0.5]), solved_at=0.5).solved == 1.0


def test_tasks_count_the_same_however_many_rollouts_survive():
    summary = summarise(held_out(a=[1.0, 1.0, 0.0, 0.0], b=[1.0, None, None, None]))
    assert summary.solved == 0.75
    assert summary.n == 5
    assert summary.pass_at == {1: 0.75}


def test_rollouts_of_one_task_are_not_independent_trials():
    once = summarise(held_out(a=[1.0], b=[0.0]))
    often = summarise(held_out(a=[1.0] * 50, b=[0.0] * 50))
    assert often.interval == once.interval


def test_pass_at_k_as_far_as_every_task_has_rollouts():
    summary = summarise(held_out(a=[1.0, 0.0, 0.0, 0.0], b=[0.0] * 5))
    assert summary.pass_at == pytest.approx({1: 0.125, 2: 0.25, 4: 0.5})


def test_nothing_scored():
    summary = summarise(held_out(a=[None]))
    assert (summary.solved, summary.interval, summary.n, summary.mean_reward) == (None, None, 0, None)
    assert summarise([]).to_json()["solved"] is None


def test_the_comparison_is_paired():
    before = held_out(a=[0.0], b=[0.0], c=[1.0], d=[1.0], gone=[None], e=[0.0])
    after = held_out(a=[1.0], b=[1.0], c=[1.0], d=[0.0], gone=[1.0], f=[1.0])
    comparison = compare(before, after)
    assert (comparison.tasks, comparison.better, comparison.worse, comparison.same) == (4, 2, 1, 1)
    assert comparison.difference == 0.25
    assert comparison.interval[0] < 0.25 < comparison.interval[1]
    assert comparison.p == 1.0
    nothing = compare(before, held_out(z=[1.0]))
    assert (nothing.difference, nothing.interval, nothing.tasks) == (None, None, 0)


def test_a_clear_rise_is_told_from_chance():
    names = [f"t{n}" for n in range(40)]
    comparison = compare(
        held_out(**{name: [float(n < 8)] for n, name in enumerate(names)}),
        held_out(**{name: [float(n < 32)] for n, name in enumerate(names)}),
    )
    assert comparison.difference == pytest.approx(0.6)
    assert comparison.interval[0] > 0.4
    assert comparison.p < 1e-6


def test_the_manifest_section():
    before, after = held_out(a=[0.0], b=[1.0]), held_out(a=[1.0], b=[1.0])
    section = json.loads(json.dumps(evaluation(before, after)))
    assert (section["before"], section["after"]) == (0.5, 1.0)
    assert section["details"]["before"]["n"] == 2
    assert section["details"]["after"]["pass_at"] == {"1": 1.0}
    assert section["comparison"]["difference"] == 0.5
    alone = evaluation(None, after)
    assert (alone["before"], alone["after"], "comparison" in alone) == (None, 1.0, False)
