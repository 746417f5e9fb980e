"""The backend's loss and gradient are those of the plain loop, however the samples are laid out, bucketed and split."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canter.trainer.model import prepare
from canter.trainer.torch_backend import TorchBackend
from canter.types import Sample
from tiny_policy import VOCABULARY, PlainLoop, gradients, make_group, make_sample, norm, tiny_config, tiny_llama

MODEL = tiny_llama()
INITIAL = tiny_llama(seed=1)


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    """Groups that share a prompt (or nothing), conversations of up to three turns, some rollouts cut into forks."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples: list[Sample] = []
    for group in range(draw(st.integers(1, 3))):
        prompt = random.integers(0, VOCABULARY, draw(st.integers(1, 40)))
        for index in range(draw(st.integers(1, 5))):
            turns = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=3))
            sample = make_sample(random, prompt, turns, f"g{group}", index)
            samples.append(replace(sample, advantage=draw(st.sampled_from([sample.advantage, 0.0, -1.5]))))
            if draw(st.booleans()):  # a fork: the same tokens, then others; what was trained is context
                fork = make_sample(random, sample.ids, [(3, 0)], f"g{group}", index)
                samples.append(replace(fork, chain=1, advantage=samples[-1].advantage))
    order = draw(st.permutations(range(len(samples))))
    return [samples[i] for i in order]


settings = st.fixed_dictionaries(
    {
        "trainer.token_budget": st.sampled_from([64, 100, 256, 8192]),
        "trainer.share_prefix": st.sampled_from(["true", "false"]),
        "trainer.tis_cap": st.sampled_from(["2.0", "0.7", "none"]),
        "trainer.dual_clip": st.sampled_from(["3.0", "1.1", "none"]),
        "trainer.clip_low": st.sampled_from([0.2, 0.05]),
        "trainer.kl": st.sampled_from([0.0, 0.1]),
        "trainer.entropy": st.sampled_from([0.0, 0.01]),
        "trainer.gradient_checkpointing": st.sampled_from(["false", "true"]),
        "sampling.temperature": st.sampled_from([1.0, 0.7]),
    }
)


@given(samples=batches(), chosen=settings, several_epochs=st.booleans(), cuts=st.sets(st.integers(1, 20), max_size=3))
def test_loss_and_gradient_are_those_of_the_plain_loop(
    samples: list[Sample], chosen: dict[str, object], several_epochs: bool, cuts: set[int]
) -> None:
    config = tiny_config(*(f"{name}={value}" for name, value in chosen.items()))
    rollouts = len({sample.rollout_id for sample in samples})
    random = np.random.default_rng(len(samples))
    old = (
        [s.logprobs + random.normal(0, 0.3, len(s.ids)).astype(np.float32) for s in samples] if several_epochs else None
    )

    model = copy.deepcopy(INITIAL)
    backend = TorchBackend(prepare(model, config), config)
    model.load_state_dict(MODEL.state_dict())
    found, edges = 0.0, sorted({0, *(cut for cut in cuts if cut < len(samples)), len(samples)})
    for start, stop in itertools.pairwise(edges):
        part_old = None if old is None else old[start:stop]
        found += backend.forward_backward(samples[start:stop], rollouts=rollouts, old=part_old)["loss"]

    plain = copy.deepcopy(MODEL)
    expected = PlainLoop(plain, config, INITIAL if config.trainer.kl else None).loss(samples, rollouts, old)
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    compare_gradients(gradients(model), gradients(plain))


def compare_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal to 1e-5 of the whole gradient's norm, as a whole and parameter by parameter."""
    scale = norm(expected)
    if not found:  # every advantage is 0
        assert scale == 0
        return
    assert norm(found) == pytest.approx(scale, rel=1e-5, abs=1e-7)
    difference = {name: found[name] - gradient for name, gradient in expected.items()}
    assert norm(difference) <= 1e-5 * scale + 1e-7


@pytest.mark.parametrize("share", ["true", "false"])
def test_forward_gives_the_logprob_of_every_trained_token(share: str) -> None:
    config = tiny_config(f"trainer.share_prefix={share}", "trainer.token_budget=100", "sampling.temperature=0.8")
    samples = [*make_group(0), *make_group(1, group="h")]
    found = TorchBackend(prepare(copy.deepcopy(MODEL), config), config).forward(samples)
    for sample, logprobs in zip(samples, found, strict=True):
        rows = PlainLoop(MODEL, config).all_logprobs(MODEL, sample).detach().numpy()
        expected = [rows[t - 1, sample.ids[t]] if sample.mask[t] else 0.0 for t in range(len(sample.ids))]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_a_wrong_gradient_would_be_seen() -> None:
    config = tiny_config()
    samples = make_group(0)
    model, plain = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    wrong: Sequence[Sample] = [replace(samples[0], weight=samples[0].weight * 1.001), *samples[1:]]
    TorchBackend(prepare(model, config), config).forward_backward(wrong, rollouts=4)
    PlainLoop(plain, config).loss(samples, 4).backward()
    with pytest.raises(AssertionError):
        compare_gradients(gradients(model), gradients(plain))
