"""Group-relative advantages, over the rewards of all scored rollouts of one group (n >= 2).

Each function takes rewards float64[n] and returns advantages float64[n] that sum to 0. A group without spread gets
exactly 0, whatever rounding does to its mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
AdvantageName = Literal["grpo", "grpo_no_std", "rloo"]

STD_FLOOR = 1e-6
"""Added to the standard deviation, so that differences of rounding size do not become advantages of 1."""


def grpo(rewards: Rewards) -> Rewards:
    """`(r - mean(r)) / (std(r) + 1e-6)` with the sample standard deviation (n - 1).

    Shao et al. 2024, DeepSeekMath, arXiv:2402.03300.
    """
    centred = grpo_no_std(rewards)
    return centred / (_std(centred) + STD_FLOOR)


def grpo_no_std(rewards: Rewards) -> Rewards:
    """`r - mean(r)`: no division by the standard deviation, which favours tasks that are nearly solved or unsolved.

    Liu et al. 2025, Understanding R1-Zero-Like Training (Dr. GRPO), arXiv:2503.20783.
    """
    if flat(rewards):
        return np.zeros_like(rewards)
    return rewards - float(rewards.mean())


def rloo(rewards: Rewards) -> Rewards:
    """`r_i - mean(r_j, j != i) = n / (n - 1) * (r_i - mean(r))`: the baseline leaves the rollout itself out.

    Kool et al. 2019, Buy 4 REINFORCE Samples, Get a Baseline for Free!; Ahmadian et al. 2024, arXiv:2402.14740.
    """
    return grpo_no_std(rewards) * (len(rewards) / (len(rewards) - 1))


def flat(rewards: Rewards) -> bool:
    """Whether all rewards are the same."""
    return bool((rewards == rewards[0]).all())


def _std(centred: Rewards) -> float:
    """The sample standard deviation of values around 0; scaled first, so that no square overflows."""
    peak = float(np.abs(centred).max()) or 1.0
    return peak * float(np.sqrt(np.square(centred / peak).sum() / (len(centred) - 1)))


ADVANTAGES: Mapping[AdvantageName, Callable[[Rewards], Rewards]] = {
    "grpo": grpo,
    "grpo_no_std": grpo_no_std,
    "rloo": rloo,
}
"""By the name that `trainer.advantage` gives."""
