import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.samples.weights import WEIGHTS, rollout_mean, sequence_mean, token_mean

COUNTS = st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=6), min_size=1, max_size=12)


def test_by_hand():
    trained = [[1, 3], [4]]
    assert rollout_mean(trained) == [[1 / 4, 1 / 4], [1 / 4]]
    assert token_mean([[1, 3], [6]]) == [[2 / 10, 2 / 10], [2 / 10]]
    assert sequence_mean(trained) == [[2 / 3, 2 / 9], [2 / 12]]


@given(trained=COUNTS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_weights_of_a_batch_sum_to_its_rollouts(name, trained):
    weights = WEIGHTS[name](trained)
    total = sum(w * t for ws, ts in zip(weights, trained, strict=True) for w, t in zip(ws, ts, strict=True))
    assert total == pytest.approx(len(trained))


def test_an_empty_batch_has_no_weights():
    assert [normalise([]) for normalise in WEIGHTS.values()] == [[], [], []]
