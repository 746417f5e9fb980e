import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.samples.advantages import ADVANTAGES, grpo, grpo_no_std, rloo

REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16).map(lambda values: np.array(values, np.float64))


def test_by_hand():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    assert grpo_no_std(rewards).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert grpo(rewards) == pytest.approx([0.8660, -0.8660, -0.8660, 0.8660], abs=1e-4)
    assert grpo(np.array([1e308, -1e308])) == pytest.approx([2**-0.5, -(2**-0.5)])
    assert rloo(rewards) == pytest.approx([1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3])


@given(rewards=REWARDS)
def test_rloo_is_the_reward_minus_the_mean_of_the_others(rewards):
    others = [np.delete(rewards, i).mean() for i in range(len(rewards))]
    assert rloo(rewards) == pytest.approx(rewards - np.array(others), abs=1e-6)


@given(rewards=REWARDS)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(name, rewards):
    values = ADVANTAGES[name](rewards)
    assert values.sum() == pytest.approx(0, abs=1e-7 * max(1, np.abs(rewards).max()) * len(rewards))
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(values[order]) >= 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.0, -7.3, 1e300])
def test_a_flat_group_is_exactly_zero(name, value):
    assert ADVANTAGES[name](np.full(7, value)).tolist() == [0.0] * 7


def test_rounding_is_no_spread():
    assert np.abs(grpo(np.array([0.3, 0.1 + 0.2, 0.3]))).max() < 1e-9
