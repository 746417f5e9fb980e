from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.evaluate.statistics import bootstrap_mean, mean_pass_at_k, pass_at_k, sign_test, wilson


@given(st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_solved_rollout(data):
    n = data.draw(st.integers(1, 8))
    solved, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    hits = sum(any(i < solved for i in draw) for draw in combinations(range(n), k))
    assert pass_at_k(n, solved, k) == pytest.approx(hits / comb(n, k))


def test_pass_at_k_refuses_what_it_cannot_know():
    with pytest.raises(ValueError, match="k=5"):
        pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="solved=5"):
        pass_at_k(4, 5, 1)
    with pytest.raises(ValueError, match="no task"):
        mean_pass_at_k([], 1)
    assert mean_pass_at_k([(4, 4), (4, 0)], 2) == 0.5


def test_wilson_against_published_values():
    # Newcombe 1998, Two-sided confidence intervals for the single proportion, table I, method 3
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert wilson(1 / 29, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


@given(n=st.integers(1, 1000), share=st.floats(0, 1))
def test_wilson_holds_its_share_and_stays_in_range(n, share):
    low, high = wilson(share, n)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1


def test_wilson_needs_a_trial():
    with pytest.raises(ValueError, match="n=0"):
        wilson(0.5, 0)


def test_bootstrap_agrees_with_the_normal_interval_where_that_holds():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = bootstrap_mean(values.tolist())
    half = 1.96 * values.std(ddof=1) / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)
    assert bootstrap_mean(values.tolist()) == (low, high)
    assert bootstrap_mean([1.0, 1.0]) == (1.0, 1.0)
    with pytest.raises(ValueError, match="no values"):
        bootstrap_mean([])


def test_bootstrap_in_pieces_covers_every_draw():
    low, high = bootstrap_mean([0.0, 1.0] * 5000, draws=1000)
    assert (low, high) == pytest.approx((0.49, 0.51), abs=0.002)


def test_sign_test_by_hand():
    assert sign_test(0, 0) == 1.0
    assert sign_test(3, 3) == 1.0
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(1, 7) == sign_test(7, 1) == pytest.approx(2 * 9 / 256)
