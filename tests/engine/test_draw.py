import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.engine.draw import Turn, draw, exponential
from canter.types import Sampling

WIDTH = 12

rows = st.lists(st.floats(-8, 8, width=32), min_size=WIDTH, max_size=WIDTH)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9513, 0.5137, 0.0119]),
    top_k=st.integers(0, WIDTH + 2),
)


def expected_logprobs(logits: list[float], sampling: Sampling) -> np.ndarray:
    """Temperature, top-k, top-p, one after the other, by the definition. Ties go to the lower id."""
    scores = np.asarray(logits, np.float64) / sampling.temperature
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    kept = order[: sampling.top_k or len(order)]
    mass = np.exp(scores[kept] - scores[kept].max())
    mass /= mass.sum()
    size = 1 + int((np.cumsum(mass) < sampling.top_p).sum()) if sampling.top_p < 1 else len(kept)
    logprobs = np.full(len(scores), -np.inf)
    logprobs[kept[:size]] = np.log(mass[:size] / mass[:size].sum())
    return logprobs


@settings(max_examples=150)
@given(logits=rows, sampling=samplings, seed=st.integers(0, 2**64 - 1), position=st.integers(0, 10_000))
def test_the_logprob_is_that_of_the_distribution_that_is_sampled_from(logits, sampling, seed, position):
    ((token, logprob),) = [(d.token, d.logprob) for d in draw(torch.tensor([logits]), [Turn(sampling, seed, position)])]
    expected = expected_logprobs([float(np.float32(x)) for x in logits], sampling)
    assert math.isfinite(logprob)
    assert logprob == pytest.approx(expected[token], abs=2e-4)


@settings(max_examples=50)
@given(batch=st.lists(st.tuples(rows, samplings, st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=6))
def test_a_row_does_not_see_the_others(batch):
    turns = [Turn(sampling, seed, position) for _, sampling, seed, position in batch]
    together = draw(torch.tensor([logits for logits, *_ in batch]), turns)
    alone = [draw(torch.tensor([logits]), [turn])[0] for (logits, *_), turn in zip(batch, turns, strict=True)]
    assert [d.token for d in together] == [d.token for d in alone]
    assert [d.logprob for d in together] == pytest.approx([d.logprob for d in alone], abs=1e-6)


def test_frequencies_follow_the_distribution():
    sampling = Sampling(temperature=0.8, top_k=4)
    logits = [1.0, 0.2, -0.5, 0.9, 0.0, -3.0]
    count = 8000
    drawn = draw(torch.tensor([logits] * count), [Turn(sampling, seed, 3) for seed in range(count)])
    found = np.bincount([d.token for d in drawn], minlength=len(logits)) / count
    expected = np.exp(expected_logprobs(logits, sampling))
    assert np.abs(found - expected).max() < 4 * 0.5 / math.sqrt(count)
    assert (found[expected == 0] == 0).all()


def test_seed_and_position_change_the_draw():
    logits = torch.zeros(1, 1000)
    drawn = {(s, p): draw(logits, [Turn(Sampling(), s, p)])[0].token for s in range(10) for p in range(10)}
    assert len(set(drawn.values())) > 90


def lowbias32(x: int, key: int) -> int:
    """The hash by its definition, on unsigned integers."""
    x ^= x >> 16
    x = (x * 0x7FEB352D + key) % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_the_noise_is_a_fixed_function_of_key_and_column():
    keys = [(3, 5), (-1, 2**31 - 1), (2**31 - 1, -(2**31))]
    found = exponential(keys, 50, torch.device("cpu"))
    for row, (first, second) in enumerate(keys):
        for column in range(50):
            bits = lowbias32((column + first) % 2**32, second % 2**32)
            uniform = (np.float32(bits % 2**31) + np.float32(0.5)) * np.float32(2.0**-31)
            assert found[row, column].item() == pytest.approx(-math.log1p(-float(uniform)), rel=1e-5)


def test_the_noise_is_exponential_and_uncorrelated():
    keys = [Turn(Sampling(), seed, 0).key() for seed in range(200)]
    noise = exponential(keys, 2000, torch.device("cpu")).double().numpy()
    count = noise.size
    assert noise.min() > 0
    assert noise.mean() == pytest.approx(1, abs=5 / math.sqrt(count))
    assert noise.var() == pytest.approx(1, abs=5 * math.sqrt(8 / count))
    for limit in (1e-4, 0.1, 1.0, 5.0):
        expected = 1 - math.exp(-limit)
        assert (noise < limit).mean() == pytest.approx(expected, abs=5 * math.sqrt(expected / count))
    centred = noise - 1
    for other in (np.roll(centred, 1, axis=0), np.roll(centred, 1, axis=1)):
        assert abs((centred * other).mean()) < 5 / math.sqrt(count)


def test_rounding_of_logits_turns_hardly_any_draw():
    torch.manual_seed(0)
    logits = torch.randn(200, 20_000)  # nearly flat, the worst case
    turns = [Turn(Sampling(), seed, 0) for seed in range(200)]
    near = draw(logits + 1e-5 * torch.randn_like(logits), turns)
    assert sum(a.token != b.token for a, b in zip(draw(logits, turns), near, strict=True)) <= 1


def test_greedy_takes_the_largest_with_certainty():
    (drawn,) = draw(torch.tensor([[0.0, 3.0, 1.0]]), [Turn(Sampling(temperature=0), 1, 1)])
    assert (drawn.token, drawn.logprob) == (1, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=0.5)])
def test_a_logit_that_is_not_finite_shows(bad, at, sampling):
    logits = torch.zeros(2, 4)
    logits[0, at] = bad
    broken, sound = draw(logits, [Turn(sampling, 1, 1)] * 2)
    assert math.isnan(broken.logprob)
    assert math.isfinite(sound.logprob)


def test_masked_logits_are_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(500, 1)
    drawn = draw(logits, [Turn(Sampling(), seed, 0) for seed in range(500)])
    assert {d.token for d in drawn} == {1, 3}
