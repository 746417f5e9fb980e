"""A step in which too little can be learned ends the run with the reason, however the rollouts were lost."""

from __future__ import annotations

import pytest

from canter.errors import TooManyDrops
from canter.samples import build
from canter.trainer.collect import check_batch
from canter.types import Rollout, RolloutState, Task


def scored(index: int) -> Rollout:
    return Rollout(f"r{index}", "g", Task("t", "p"), index=index, state=RolloutState.SCORED, attempt=1, reward=0.0)


def test_rollouts_that_were_scored_without_a_call_count() -> None:
    report = build([scored(i) for i in range(4)], []).report
    with pytest.raises(TooManyDrops, match=r"step 3: 4 of 4 .* no_calls \(4\)"):
        check_batch(report, 0.5, "step 3")
    check_batch(report, 1.0, "step 3")


def test_an_empty_step_is_no_fault() -> None:
    check_batch(build([], []).report, 0.5, "step 1")
