"""A step in which too little can be learned ends the run with the reason, however the rollouts were lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from canter.errors import TooManyDrops
from canter.samples import build
from canter.store.memory import MemoryStore
from canter.trainer.collect import Collector, check_batch, example_of
from canter.types import Outcome, Reason, Reward, Rollout, RolloutState, Task


def scored(index: int) -> Rollout:
    return Rollout(f"r{index}", "g", Task("t", "p"), index=index, state=RolloutState.SCORED, attempt=1, reward=0.0)


def test_rollouts_that_were_scored_without_a_call_count() -> None:
    report = build([scored(i) for i in range(4)], []).report
    with pytest.raises(TooManyDrops, match=r"step 3: 4 of 4 .* no_calls \(4\)"):
        check_batch(report, 0.5, "step 3")
    check_batch(report, 1.0, "step 3")
    with pytest.raises(TooManyDrops, match=r"for example r0: its harness ended .* `canter harness check FILE`"):
        check_batch(report, 0.5, "step 3", [scored(i) for i in range(4)], [])


def test_an_example_is_a_rollout_that_was_lost_for_this_reason() -> None:
    lost = replace(scored(1), state=RolloutState.INVALID, reason=Reason.NO_CALLS, message="its last words: no")
    assert example_of(Reason.NO_CALLS, [lost], []) == ", for example r1: its last words: no"
    assert example_of(Reason.TOO_LONG, [lost, scored(2)], []) == ""


async def test_a_long_wait_gives_signs_of_life() -> None:
    store, said = MemoryStore(), list[str]()
    collector = Collector(store, timeout_s=0.5, max_invalid=1, say=said.append, sign_s=0.1)
    wanted = [Rollout(f"r{i}", "g", Task("t", "p"), index=i) for i in range(3)]
    await store.create_rollouts(wanted)
    await store.start_attempt("r0", 1)
    await store.end_attempt("r0", 1, Outcome.EXITED, exit_code=0)
    await store.post_reward(Reward("r0", 1, 1.0))
    await collector.collect(wanted, "step 7")
    assert said == ["step 7: 1 of 3 rollouts done after 0 s"] * 2, "after 0.1 and 0.3 s: the wait doubles"


def test_an_empty_step_is_no_fault() -> None:
    check_batch(build([], []).report, 0.5, "step 1")
