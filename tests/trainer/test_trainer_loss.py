"""What each term of the loss is, on numbers that can be checked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canter.trainer.loss import (
    LossSettings,
    Tokens,
    entropy_of,
    importance_weight,
    is_clipped,
    k3,
    log_softmax_at,
    ppo_loss,
    token_loss,
)

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=3.0, tis_cap=2.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.0),
        (1.5, 2.0, -2.56, 0.0),  # clipped above at 1.28
        (0.5, 2.0, -1.0, -2.0),  # a good token that became rare may come back
        (0.9, -1.0, 0.9, 1.0),
        (0.5, -1.0, 0.8, 0.0),  # clipped below at 0.8
        (2.9, -1.0, 2.9, 1.0),
        (9.0, -1.0, 3.0, 0.0),  # dual clip at 3
    ],
)
def test_ppo_is_clipped_on_the_side_it_should_be(ratio: float, advantage: float, loss: float, slope: float) -> None:
    r = tensor(ratio).requires_grad_()
    found = ppo_loss(r, tensor(advantage), SETTINGS)
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert r.grad is not None
    assert r.grad.item() == pytest.approx(slope)
    assert is_clipped(tensor(ratio), tensor(advantage), SETTINGS).item() == (slope == 0)


def test_without_dual_clip_a_bad_token_is_pushed_down_without_bound() -> None:
    free = LossSettings(dual_clip=None)
    assert ppo_loss(tensor(9.0), tensor(-1.0), free).item() == 9.0
    assert not is_clipped(tensor(9.0), tensor(-1.0), free).item()


def test_the_importance_weight_is_truncated_and_constant() -> None:
    old = tensor(-1.0, -1.0, -1.0).requires_grad_()
    weight = importance_weight(old, tensor(-1.0, -2.0, -0.5), cap=2.0)
    assert weight.tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5)])
    assert not weight.requires_grad
    assert importance_weight(old, tensor(-9.0, -9.0, -9.0), cap=None).tolist() == [1.0, 1.0, 1.0]


def test_in_the_first_epoch_the_ratio_is_one_and_the_gradient_is_that_of_reinforce() -> None:
    new = tensor(-1.0, -2.0).requires_grad_()
    tokens = Tokens(behaviour=tensor(-1.5, -2.0), advantage=tensor(2.0, -1.0), weight=tensor(0.5, 0.25))
    loss = token_loss(new, None, tokens, SETTINGS)
    loss.total.sum().backward()
    w = math.exp(0.5)
    assert loss.ratio.tolist() == [1.0, 1.0]
    assert loss.clipped.tolist() == [False, False]
    assert loss.total.tolist() == pytest.approx([-0.5 * w * 2.0, 0.25])
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.5 * w * 2.0, 0.25])  # -weight · w · A · d(log π)
    assert loss.gap.tolist() == [0.5, 0.0]


def test_later_epochs_clip_against_the_policy_before_the_update_not_against_the_sampler() -> None:
    new = tensor(-1.0).requires_grad_()
    tokens = Tokens(tensor(-1.1), tensor(1.0), tensor(1.0), old=tensor(-1.5))
    loss = token_loss(new, None, tokens, SETTINGS)
    loss.total.sum().backward()
    assert loss.ratio.item() == pytest.approx(math.exp(0.5))
    assert loss.clipped.item()
    assert loss.tis.item() == pytest.approx(math.exp(-0.4))
    assert loss.total.item() == pytest.approx(-math.exp(-0.4) * 1.28)
    assert new.grad is not None
    assert new.grad.item() == 0


def test_kl_and_entropy_are_added_outside_the_importance_weight() -> None:
    settings = LossSettings(tis_cap=2.0, kl=0.1, entropy=0.01)
    tokens = Tokens(tensor(-5.0), tensor(0.0), tensor(0.5), reference=tensor(-1.0))
    loss = token_loss(tensor(-2.0), tensor(3.0), tokens, settings)
    assert loss.total.item() == pytest.approx(0.5 * (0.1 * (math.e - 2) - 0.03))
    assert loss.policy.item() == 0


def test_missing_terms_are_refused() -> None:
    tokens = Tokens(tensor(-1.0), tensor(1.0), tensor(1.0))
    with pytest.raises(ValueError, match="reference"):
        token_loss(tensor(-1.0), None, tokens, LossSettings(kl=0.1))
    with pytest.raises(ValueError, match="entropy"):
        token_loss(tensor(-1.0), None, tokens, LossSettings(entropy=0.1))


@given(new=st.floats(-20, 0), reference=st.floats(-20, 0))
def test_k3_is_never_negative_and_zero_only_where_both_agree(new: float, reference: float) -> None:
    found = k3(torch.tensor(new, dtype=torch.double), torch.tensor(reference, dtype=torch.double)).item()
    assert found >= -1e-9
    assert k3(tensor(new), tensor(new)).item() == 0


def test_the_mean_of_k3_is_the_kl_divergence() -> None:
    torch.manual_seed(0)
    p, q = (torch.log_softmax(torch.randn(8, dtype=torch.double), -1) for _ in range(2))
    mean = (p.exp() * k3(p, q)).sum()
    assert mean.item() == pytest.approx((p.exp() * (p - q)).sum().item())


def test_logprobs_and_entropy_of_logits() -> None:
    logits = torch.randn(5, 7, dtype=torch.bfloat16)
    logprobs, normaliser = log_softmax_at(logits, torch.tensor([0, 1, 2, 3, 6]))
    expected = torch.log_softmax(logits.float(), -1)
    torch.testing.assert_close(logprobs, expected[range(5), [0, 1, 2, 3, 6]])
    torch.testing.assert_close(entropy_of(logits, normaliser), -(expected.exp() * expected).sum(-1))
