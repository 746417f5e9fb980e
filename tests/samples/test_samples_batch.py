import json
from dataclasses import replace

import numpy as np
import pytest
from recorded_calls import Recorder, scored

from canter.samples import Report, Tokens, audit, build
from canter.types import NO_LOGPROBS, ForkCause, Reason, RolloutState


def recorded(*lengths: int, rollout_id: str = "r0", attempt: int = 1, **changes):
    """A linear conversation with replies of these lengths."""
    recorder, call = Recorder(rollout_id, attempt), None
    for length in lengths:
        call = recorder.call([1, 2], length, after=call, **changes)
    return recorder.calls


def pair(*, rewards=(1.0, 0.0)):
    rollouts = [scored(f"r{i}", reward, index=i) for i, reward in enumerate(rewards)]
    return rollouts, [call for r in rollouts for call in recorded(2, 3, rollout_id=r.id)]


def test_a_group_becomes_samples_in_order():
    rollouts, calls = pair()
    batch = build(reversed(rollouts), reversed(calls), advantage="grpo_no_std")
    assert [(s.rollout_id, s.chain, s.advantage, s.reward) for s in batch.samples] == [
        ("r0", 0, 0.5, 1.0),
        ("r1", 0, -0.5, 0.0),
    ]
    assert [s.weight * s.trained for s in batch.samples] == [1.0, 1.0]
    assert batch.samples[0].calls == ("r0-1-0", "r0-1-1")
    assert (batch.rollouts, batch.untrained, audit(batch, calls)) == (2, {}, [])


def test_calls_may_come_by_rollout():
    rollouts, calls = pair()
    flat = build(rollouts, calls)
    by_rollout = build(rollouts, {r.id: [c for c in calls if c.rollout_id == r.id] for r in rollouts})
    assert by_rollout.report == flat.report


def test_the_baseline_is_that_of_the_whole_group():
    rollouts, calls = pair(rewards=(1.0, 0.0, 0.5))
    calls = [c for c in calls if c.rollout_id != "r0"]
    batch = build(rollouts, calls, advantage="grpo_no_std")
    assert [(s.rollout_id, s.advantage) for s in batch.samples] == [("r1", -0.5), ("r2", 0.0)]
    assert batch.report.dropped == {Reason.NO_CALLS: 1}
    assert batch.rollouts == 2


def test_unscored_rollouts_leave_the_baseline_with_their_own_reason():
    rollouts, calls = pair(rewards=(1.0, 0.0, 1.0, 1.0, 1.0, None, float("nan")))
    rollouts[2] = replace(rollouts[2], state=RolloutState.INVALID, reason=Reason.GRADER_ERROR)
    rollouts[3] = replace(rollouts[3], state=RolloutState.CANCELLED)
    rollouts[4] = replace(rollouts[4], state=RolloutState.RUNNING, reward=None)
    batch = build(rollouts, calls, advantage="grpo_no_std")
    assert [(s.rollout_id, s.advantage) for s in batch.samples] == [("r0", 0.5), ("r1", -0.5)]
    assert batch.report.dropped == {
        Reason.GRADER_ERROR: 1,
        Reason.CANCELLED: 1,
        Reason.NO_REWARD: 2,
        Reason.NOT_FINITE: 1,
    }
    assert batch.report.rewards == {"g": (1.0, 0.0)}
    assert batch.untrained["r2-1-0"] is Reason.GRADER_ERROR
    assert audit(batch, calls) == []


def test_small_and_flat_groups():
    alone = build([scored()], recorded(2))
    assert (alone.samples, alone.report.dropped) == ((), {Reason.GROUP_TOO_SMALL: 1})
    rollouts, calls = pair(rewards=(0.1, 0.1))
    kept = build(rollouts, calls)
    assert [s.advantage for s in kept.samples] == [0.0, 0.0]
    assert kept.rollouts == 2
    left_out = build(rollouts, calls, keep_flat_groups=False)
    assert (left_out.samples, left_out.rollouts, left_out.report.dropped) == ((), 0, {Reason.NO_SPREAD: 2})


def test_absurd_rewards_drop_their_group():
    rollouts, calls = pair(rewards=(1e308, 1e308, -1e308))
    assert build(rollouts, calls).report.dropped == {Reason.NOT_FINITE: 3}


def test_a_rollout_with_one_long_sample_is_dropped_whole():
    rollouts, calls = pair()
    recorder = Recorder("r0")
    first = recorder.call([1], 1)
    recorder.call([2] * 50, 1)
    calls = [*recorder.calls, *(c for c in calls if c.rollout_id == "r1")]
    batch = build(rollouts, calls, max_tokens=50, advantage="grpo_no_std")
    assert [(s.rollout_id, s.advantage) for s in batch.samples] == [("r1", -0.5)]
    assert batch.report.dropped == {Reason.TOO_LONG: 1}
    assert batch.untrained[first.id] is Reason.TOO_LONG
    assert build(rollouts, calls, max_tokens=51).rollouts == 2


def test_a_rollout_with_nothing_to_train_is_dropped_for_the_reason_of_most_of_its_tokens():
    rollouts, calls = pair()
    recorder = Recorder("r0")
    first = recorder.call([1], 5, logprobs=NO_LOGPROBS)
    recorder.call([1], 3, after=first, untrainable=Reason.FROZEN_MODEL)
    batch = build(rollouts, [*recorder.calls, *(c for c in calls if c.rollout_id == "r1")])
    assert batch.report.dropped == {Reason.MISSING_LOGPROBS: 1}
    assert batch.report.tokens.untrained == {Reason.MISSING_LOGPROBS: 5, Reason.FROZEN_MODEL: 3}
    assert build(rollouts, recorded(0, 0)).report.dropped == {Reason.NO_CALLS: 2}


def test_superseded_attempts_are_counted_and_never_trained():
    rollouts, calls = pair()
    rollouts[0] = replace(rollouts[0], attempt=2)
    calls += recorded(4, rollout_id="r0", attempt=2)
    batch = build(rollouts, calls)
    assert batch.samples[0].calls == ("r0-2-0",)
    assert batch.report.tokens.untrained == {Reason.SUPERSEDED_ATTEMPT: 5}
    assert batch.report.untrained_calls == {Reason.SUPERSEDED_ATTEMPT: 2}
    assert audit(batch, calls) == []


def test_only_labelled_calls_are_trained():
    rollouts, calls = pair()
    recorder = Recorder("r0")
    first = recorder.call([1])
    recorder.call([7], 4, label="title")
    recorder.call([2], after=first, label="main")
    batch = build(rollouts, [*recorder.calls, *(c for c in calls if c.rollout_id == "r1")], labels={"main"})
    assert [len(s.calls) for s in batch.samples] == [2, 2]
    assert batch.report.tokens.untrained == {Reason.LABEL_EXCLUDED: 4}


def test_the_report_counts_everything_and_is_json():
    rollouts, calls = pair()
    recorder = Recorder("r0")
    first = recorder.call([1, 1], 2)
    recorder.call([1], 3, after=first, keep=1, fork=ForkCause.COMPACTION)
    recorder.call([1], 3, after=first, keep=3)
    report = build(rollouts, [*recorder.calls, *(c for c in calls if c.rollout_id == "r1")]).report
    assert report.samples_per_rollout == {3: 1, 1: 1}
    assert report.forks == {ForkCause.COMPACTION: 1, ForkCause.UNKNOWN: 1}
    assert report.tokens == Tokens(sampled=13, trained=13, untrained={}, context=2 + 2 + 4 + 4)
    assert (report.samples, report.mean_reward, report.calls) == (4, 0.5, 5)
    flat = json.loads(json.dumps(report.to_json()))
    assert flat["samples_per_rollout"] == {"1": 1, "3": 1}
    assert flat["forks"] == {"compaction": 1, "unknown": 1}
    assert flat["rewards"] == {"g": [1.0, 0.0]}


def test_an_empty_batch():
    batch = build([], [])
    assert (batch.samples, batch.rollouts, batch.report.mean_reward) == ((), 0, None)


def test_a_report_that_does_not_add_up_cannot_be_made():
    with pytest.raises(ValueError, match="5 sampled tokens, but 4"):
        Tokens(sampled=5, trained=3, untrained={Reason.NOT_FINITE: 1}, context=0)
    report = build(*pair()).report
    with pytest.raises(ValueError, match="3 rollouts, but 2"):
        replace(report, rollouts=3)
    assert isinstance(report, Report)


def test_the_audit_notices_what_is_wrong():
    rollouts, calls = pair()
    batch = build(rollouts, calls)
    first, second = batch.samples
    changed = first.ids.copy()
    changed[2] += 1
    part = first.mask.copy()
    part[3] = False
    context = first.mask.copy()
    context[0] = True

    def complaints(*samples, untrained=None):
        return audit(replace(batch, samples=samples, untrained=untrained or {}), calls)

    assert complaints(first, second) == []
    assert complaints(first) == [
        "call r1-1-0 is not trained, and no reason says why",
        "call r1-1-1 is not trained, and no reason says why",
    ]
    assert "call r0-1-0 is trained 2 times" in complaints(first, first, second)
    assert "call r0-1-0 is trained although it is stale" in complaints(
        first, second, untrained={"r0-1-0": Reason.STALE}
    )
    assert "not those that call r0-1-0 sampled" in complaints(replace(first, ids=changed), second)[0]
    assert "trains 1 of the 2 tokens of call r0-1-0" in complaints(replace(first, mask=part), second)[0]
    assert "trains 1 tokens that nobody sampled" in complaints(replace(first, mask=context), second)[0]
    assert "logprobs of call r0-1-0" in complaints(replace(first, logprobs=first.logprobs * 2), second)[0]
    assert "do not have version 0" in complaints(replace(first, versions=first.versions + 1), second)[0]
    assert "never committed: lost" in complaints(replace(first, calls=("lost",)), second)[0]
    longer = {n: np.append(getattr(first, n), getattr(first, n)[:1]) for n in ("ids", "mask", "logprobs", "versions")}
    assert "has 10 tokens, its calls 9" in complaints(replace(first, **longer), second)[0]
