"""The formulas of evaluation. Shares are in [0, 1]; an interval is `(low, high)`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist, fmean

import numpy as np

Interval = tuple[float, float]


def pass_at_k(n: int, solved: int, k: int) -> float:
    """The chance that at least one of `k` rollouts, drawn from `n` of which `solved` are solved, is solved.

    `1 - C(n - solved, k) / C(n, k)`, the unbiased estimator of Chen et al. 2021, Evaluating Large Language Models
    Trained on Code, arXiv:2107.03374. Raises ValueError unless `0 <= solved <= n` and `1 <= k <= n`.
    """
    if not 0 <= solved <= n or not 1 <= k <= n:
        raise ValueError(f"Pass@k needs 0 <= solved <= n and 1 <= k <= n, got n={n}, solved={solved}, k={k}")
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def mean_pass_at_k(results: Iterable[tuple[int, int]], k: int) -> float:
    """Pass@k over tasks, each given as (rollouts, solved) and counting the same. Raises ValueError for none."""
    values = [pass_at_k(n, solved, k) for n, solved in results]
    if not values:
        raise ValueError("Pass@k of no task is undefined; evaluate at least one")
    return fmean(values)


def wilson(share: float, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a share observed in `n` independent trials.

    Wilson 1927, Probable Inference, the Law of Succession, and Statistical Inference. It keeps its coverage for
    shares near 0 and 1 and few trials, where `share ± z * standard error` does not. Raises ValueError for `n < 1`.
    """
    if n < 1 or not 0 <= share <= 1:
        raise ValueError(f"an interval needs n >= 1 and a share in [0, 1], got n={n}, share={share}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def bootstrap_mean(
    values: Sequence[float], confidence: float = 0.95, *, draws: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of the mean of independent values; the same values give the same interval.

    Efron 1979, Bootstrap Methods: Another Look at the Jackknife. Too narrow for fewer than about 20 values.
    Raises ValueError for none.
    """
    if not values:
        raise ValueError("the mean of no values has no interval")
    data = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    rows = max(1, 4_000_000 // len(data))  # draws at a time: bounds the memory of the index array to 32 MB
    means = [
        data[rng.integers(0, len(data), (min(rows, draws - start), len(data)))].mean(axis=1)
        for start in range(0, draws, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def sign_test(better: int, worse: int) -> float:
    """Two-sided exact sign test: the chance of a split at least this uneven if better and worse are equally likely.

    For shares of 0 or 1 per task this is McNemar's exact test. 1.0 where nothing changed.
    """
    n, least = better + worse, min(better, worse)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(least + 1)) / (1 << n))
