"""Loss normalisations: the weight of each trained token in `L = 1/N * sum over tokens of weight * loss`.

N is the number of rollouts in the batch. Each function takes the trained tokens of every sample, by rollout
(`trained[r][s]` >= 1), and returns the weight of a token of each sample in the same shape. All weights of a batch,
summed over its tokens, make N, so that the learning rate means the same under each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

NormaliseName = Literal["rollout_mean", "token_mean", "sequence_mean"]
Counts = Sequence[Sequence[int]]
Weights = list[list[float]]


def rollout_mean(trained: Counts) -> Weights:
    """Each rollout counts 1, shared evenly by its T_r trained tokens: `1 / T_r`, however it is cut into samples."""
    return [[1 / sum(samples)] * len(samples) for samples in trained]


def token_mean(trained: Counts) -> Weights:
    """Each token of the batch counts the same: `N / sum of T_r`. Long rollouts count more; how they are cut does not
    matter (DAPO, Yu et al. 2025, arXiv:2503.14476)."""
    total = sum(map(sum, trained))
    return [[len(trained) / total] * len(samples) for samples in trained]


def sequence_mean(trained: Counts) -> Weights:
    """Each of the S samples of the batch counts the same: `N / (S * T_s)`.

    The only one under which a rollout counts more the more samples it was cut into. It is here to compare with
    systems that normalise over samples.
    """
    total = sum(map(len, trained))
    return [[len(trained) / (total * tokens) for tokens in samples] for samples in trained]


WEIGHTS: Mapping[NormaliseName, Callable[[Counts], Weights]] = {
    "rollout_mean": rollout_mean,
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
}
"""By the name that `trainer.normalise` gives."""
