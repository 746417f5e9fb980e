"""The five invariants of samples, on arbitrary call forests: each is stated against what the engine saw."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from call_forests import TRAINED_LABELS, World, worlds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from canter.samples import Batch, audit, build
from canter.samples.advantages import ADVANTAGES
from canter.samples.weights import WEIGHTS
from canter.types import NO_IDS, Call, Reason, RolloutState, as_ids

thorough = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
ARRAYS = ("ids", "mask", "logprobs", "versions")
OPTIONS = {
    "advantage": st.sampled_from([*ADVANTAGES]),
    "normalise": st.sampled_from([*WEIGHTS]),
    "keep_flat_groups": st.booleans(),
    "max_tokens": st.none() | st.integers(1, 30),
}


def batch_of(world: World, **options: object) -> Batch:
    return build(world.rollouts, world.calls, labels=TRAINED_LABELS, **options)  # type: ignore[arg-type]


def kept(batch: Batch) -> set[str]:
    return {sample.rollout_id for sample in batch.samples}


@thorough
@given(world=worlds(), options=st.fixed_dictionaries(OPTIONS))
def test_1_every_trainable_token_is_trained_once_with_its_own_logprob_and_version(world, options):
    batch = batch_of(world, **options)
    trained: Counter[int] = Counter()
    for sample in batch.samples:
        at = np.flatnonzero(sample.mask)
        for token, logprob, version in zip(sample.ids[at], sample.logprobs[at], sample.versions[at], strict=True):
            assert world.truth.owner[int(token)].startswith(f"{sample.rollout_id}/")
            assert logprob == np.float32(world.truth.logprob[int(token)])
            assert version == world.truth.version[int(token)]
            trained[int(token)] += 1
    expected = [token for r in world.rollouts if r.id in kept(batch) for token in world.trainable(r)]
    assert trained == Counter(expected)
    assert batch.report.tokens.trained == len(expected)
    assert batch.report.tokens.sampled == sum(len(call.sampled) for call in world.calls)
    assert audit(batch, world.calls) == []


@thorough
@given(world=worlds())
def test_2_a_sample_is_exactly_what_the_engine_saw(world):
    for sample in batch_of(world).samples:
        last = world.truth.owner[int(sample.ids[-1])]
        assert sample.mask[-1]
        assert sample.ids.tolist() == world.truth.full[last]
        assert sample.calls[-1] == last


@thorough
@given(world=worlds(), rng=st.randoms(use_true_random=False), ranks=st.integers(1, 4))
def test_3_a_rollout_weighs_the_same_however_it_is_spread(world, rng, ranks):
    batch = batch_of(world, normalise="rollout_mean")
    shares: list[dict[str, float]] = [defaultdict(float) for _ in range(ranks)]
    for sample in rng.sample(batch.samples, len(batch.samples)):
        padding = rng.randint(0, 9)
        mask = np.append(sample.mask, np.zeros(padding, np.bool_))
        rng.choice(shares)[sample.rollout_id] += float((sample.weight * mask).sum())
    totals: Counter[str] = Counter()
    for share in shares:
        totals.update(share)
    assert set(totals) == kept(batch)
    assert all(total == pytest.approx(1) for total in totals.values())
    assert batch.rollouts == len(totals)


@thorough
@given(world=worlds(), rng=st.randoms(use_true_random=False), normalise=st.sampled_from(["rollout_mean", "token_mean"]))
def test_3_a_rollout_weighs_the_same_however_it_is_cut(world, rng, normalise):
    """Any call may be cut off its parent (its whole prompt recorded as a chain of its own): same tokens, same sums."""
    orphans = {call_id for call_id, reason in batch_of(world).untrained.items() if reason is Reason.ORPHANED}
    calls = [call for call in world.calls if call.id not in orphans]
    cut = [cut_off(world, call) if rng.random() < 0.5 else call for call in calls]
    whole, parts = (
        build(world.rollouts, some, labels=TRAINED_LABELS, normalise=normalise, advantage="grpo_no_std")
        for some in (calls, cut)
    )
    assert token_weights(whole) == pytest.approx(token_weights(parts))
    assert whole.rollouts == parts.rollouts


def cut_off(world: World, call: Call) -> Call:
    prompt = world.truth.full[call.id][: call.prompt_len]
    return replace(call, parent_id=None, prefix_len=0, suffix=as_ids(prompt))


def token_weights(batch: Batch) -> dict[int, float]:
    return {int(token): s.weight for s in batch.samples for token in s.ids[s.mask]}


@thorough
@given(world=worlds(), options=st.fixed_dictionaries(OPTIONS))
def test_4_advantages_come_from_the_whole_group_and_only_whole_rollouts_are_dropped(world, options):
    batch = batch_of(world, **options)
    groups = defaultdict(list)
    for rollout in world.rollouts:
        if rollout.state is RolloutState.SCORED:
            groups[rollout.group].append(rollout)
    for group in groups.values():
        rewards = [rollout.reward for rollout in group]
        expected = expected_advantages(rewards, options["advantage"])
        for rollout, advantage in zip(group, expected, strict=True):
            samples = [sample for sample in batch.samples if sample.rollout_id == rollout.id]
            assert [s.advantage for s in samples] == pytest.approx([advantage] * len(samples), abs=1e-6)
            if len(set(rewards)) == 1:
                assert {s.advantage for s in samples} <= {0.0}
            assert not samples or len(rewards) > 1
            assert not samples or options["keep_flat_groups"] or len(set(rewards)) > 1
            tokens = sorted(int(token) for sample in samples for token in sample.ids[sample.mask])
            assert tokens in ([], sorted(world.trainable(rollout)))
    report = batch.report
    assert report.rollouts == len(world.rollouts) == batch.rollouts + sum(report.dropped.values())
    assert kept(batch) <= {r.id for group in groups.values() for r in group}
    if options["max_tokens"] is None and options["keep_flat_groups"]:
        members = [r for group in groups.values() if len(group) > 1 for r in group]
        assert kept(batch) == {r.id for r in members if world.trainable(r)}


def expected_advantages(rewards: list[float], name: str) -> list[float]:
    """The formulas once more, in plain Python."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    if name == "rloo":
        return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    if name == "grpo_no_std":
        return [r - mean for r in rewards]
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return [(r - mean) / (std + 1e-6) for r in rewards]


@thorough
@given(world=worlds(), rng=st.randoms(use_true_random=False), options=st.fixed_dictionaries(OPTIONS))
def test_5_the_order_in_which_calls_finished_changes_nothing(world, rng, options):
    batch = batch_of(world, **options)
    finished = [replace(call, finished_at=rng.random()) for call in world.calls]
    other = batch_of(World(shuffled(rng, world.rollouts), shuffled(rng, finished), world.truth), **options)
    assert plain(other) == plain(batch)


def shuffled(rng, values):
    return rng.sample(values, len(values))


def plain(batch: Batch) -> tuple[object, ...]:
    samples = [
        (replace(s, **dict.fromkeys(ARRAYS, NO_IDS)), [getattr(s, name).tolist() for name in ARRAYS])
        for s in batch.samples
    ]
    return samples, batch.rollouts, dict(batch.untrained), batch.report.to_json()
