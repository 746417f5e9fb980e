"""The loss: pure functions over tensors with one entry per trained token (shape [N]).

    L = 1/R · Σ_tokens weight · ( w · ppo(r, A) + kl · k3 − entropy · H )

R is the number of rollouts of the batch. `weight` and `A` come from `canter.samples`; under `rollout_mean` the
weights of a rollout's T_r trained tokens are 1/T_r each, which makes this the mean over rollouts of the mean over
tokens.

Three policies are at work (decoupled PPO: Hilton et al. 2021, arXiv:2110.00641):

* `μ` sampled the token; its logprob was recorded by the engine;
* `π_old` is the trainer's policy at the start of the update;
* `π` is the policy being updated.

`r = π/π_old` is what PPO clips; `w = min(π_old/μ, cap)` corrects for what lies between sampling and this update: an
older policy version, other kernels, other rounding. Neither term is asked to do the other's work.

In the synchronous case with one epoch, `π` *is* `π_old`: no second forward pass is made, `π_old` is `π` held
constant, so r = 1 in value (nothing is clipped) with the gradient ∇log π, and w is close to 1, off by what the engine
and the trainer disagree. With several epochs, `π_old` is computed once before the first optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from canter.config.tree import TrainerConfig


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The coefficients of the formula above; None switches dual clip or TIS off."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    tis_cap: float | None = 2.0
    kl: float = 0.0
    entropy: float = 0.0

    @classmethod
    def of(cls, config: TrainerConfig) -> LossSettings:
        return cls(config.clip_low, config.clip_high, config.dual_clip, config.tis_cap, config.kl, config.entropy)

    @property
    def regularised(self) -> bool:
        """Whether a token of advantage 0 has a gradient."""
        return bool(self.kl or self.entropy)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of N trained tokens before the policy is asked; float32[N] each.

    `old` is log π_old, None where it is the policy itself held constant; `reference` is the initial policy's logprob,
    needed where `kl` is not 0.
    """

    behaviour: Tensor
    advantage: Tensor
    weight: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None

    def slice(self, start: int, stop: int) -> Tokens:
        return Tokens(
            self.behaviour[start:stop],
            self.advantage[start:stop],
            self.weight[start:stop],
            None if self.old is None else self.old[start:stop],
            None if self.reference is None else self.reference[start:stop],
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """`total` [N] carries the gradient and sums to R · L; the rest [N] is detached, for metrics."""

    total: Tensor
    policy: Tensor
    kl: Tensor
    ratio: Tensor
    clipped: Tensor
    tis: Tensor
    gap: Tensor


def token_loss(logprobs: Tensor, entropy: Tensor | None, tokens: Tokens, settings: LossSettings) -> Loss:
    """The loss of each token. `logprobs` (log π) carries the gradient; so does `entropy` where its weight is not 0."""
    old = logprobs.detach() if tokens.old is None else tokens.old
    ratio = torch.exp(logprobs - old)
    tis = importance_weight(old, tokens.behaviour, settings.tis_cap)
    surrogate = ppo_loss(ratio, tokens.advantage, settings)
    total = tis * surrogate
    kl = torch.zeros_like(logprobs)
    if settings.kl:
        if tokens.reference is None:
            raise ValueError("a KL term needs the reference policy's logprobs")
        kl = k3(logprobs, tokens.reference)
        total = total + settings.kl * kl
    if settings.entropy:
        if entropy is None:
            raise ValueError("an entropy term needs the entropy of each token")
        total = total - settings.entropy * entropy
    return Loss(
        total=tokens.weight * total,
        policy=(tokens.weight * tis * surrogate).detach(),
        kl=kl.detach(),
        ratio=ratio.detach(),
        clipped=is_clipped(ratio.detach(), tokens.advantage, settings),
        tis=tis,
        gap=(old - tokens.behaviour).abs(),
    )


def ppo_loss(ratio: Tensor, advantage: Tensor, settings: LossSettings) -> Tensor:
    """−min(r·A, clip(r, 1−ε_low, 1+ε_high)·A), the clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347)
    with the asymmetric bounds of DAPO (Yu et al. 2025, arXiv:2503.14476). Where A < 0 the loss is at most −c·A, the
    dual clip of Ye et al. 2020, arXiv:1912.09729."""
    clipped = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    loss = torch.maximum(-ratio * advantage, -clipped * advantage)
    if settings.dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -settings.dual_clip * advantage), loss)


def is_clipped(ratio: Tensor, advantage: Tensor, settings: LossSettings) -> Tensor:
    """bool[N]: where the PPO loss is cut off and has no gradient."""
    high = (advantage > 0) & (ratio > 1 + settings.clip_high)
    low = (advantage < 0) & (ratio < 1 - settings.clip_low)
    if settings.dual_clip is None:
        return high | low
    return high | low | ((advantage < 0) & (ratio > settings.dual_clip))


def importance_weight(old: Tensor, behaviour: Tensor, cap: float | None) -> Tensor:
    """min(π_old/μ, cap) per token, without gradient: truncated importance sampling (Ionides 2008; for engines that
    disagree with the trainer, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"). All ones where `cap` is None."""
    if cap is None:
        return torch.ones_like(old)
    return torch.exp(old - behaviour).clamp(max=cap).detach()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(π ‖ π_ref) at each sampled token, e^d − d − 1 with d = log π_ref − log π: unbiased, never
    negative (Schulman 2020, "Approximating KL divergence")."""
    d = reference - logprobs
    return torch.exp(d) - d - 1


def log_softmax_at(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(log p(ids), log-normaliser), both [N], of logits [N, V]; float32 whatever the logits are."""
    logits = logits.float()
    normaliser = torch.logsumexp(logits, dim=-1)
    return logits.gather(-1, ids[:, None]).squeeze(-1) - normaliser, normaliser


def entropy_of(logits: Tensor, normaliser: Tensor) -> Tensor:
    """Entropy in nats of each row's distribution, [N]."""
    logits = logits.float()
    return normaliser - (torch.exp(logits - normaliser[:, None]) * logits).sum(-1)
