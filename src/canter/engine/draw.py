"""Drawing tokens: which token a row takes depends on its logits, its sampling parameters, its seed and the position
alone, so a generation is the same whatever else is in the batch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from canter.types import Sampling


@dataclass(frozen=True, slots=True)
class Turn:
    """What the draw of one token depends on besides the logits; `position` counts the sampled tokens from 0."""

    sampling: Sampling
    seed: int
    position: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """`logprob` is under the distribution that was sampled from: after temperature, top-k and top-p. At temperature 0
    that is a point mass, so it is 0. It is NaN where the logits were not finite; `token` then means nothing."""

    token: int
    logprob: float


def draw(logits_BV: Tensor, turns: Sequence[Turn]) -> list[Drawn]:
    """One token for each row of float32 logits."""
    device = logits_BV.device
    scale = [turn.sampling.temperature or 1.0 for turn in turns]
    scale_B = torch.tensor(scale, dtype=torch.float32, device=device)
    logprobs_BV = torch.log_softmax(logits_BV / scale_B[:, None], dim=-1)
    broken_B = logprobs_BV[:, 0].isnan()  # one logit that is not finite makes the whole row NaN
    logprobs_BV = _truncate(logprobs_BV, [turn.sampling for turn in turns])

    uniform_B = torch.tensor([uniform(t.seed, t.position) for t in turns], dtype=torch.float64, device=device)
    token_B = _invert(logprobs_BV, uniform_B)
    logprob_B = logprobs_BV.gather(1, token_B[:, None])[:, 0]
    greedy = [row for row, turn in enumerate(turns) if turn.sampling.temperature == 0]
    if greedy:
        token_B[greedy] = logits_BV[greedy].argmax(dim=-1)
        logprob_B[greedy] = 0.0
    logprob_B[broken_B] = torch.nan
    return [Drawn(token, logprob) for token, logprob in zip(token_B.tolist(), logprob_B.tolist(), strict=True)]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter: the first 53 bits of a hash of (seed, position)."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _truncate(logprobs_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Applies top-k, then top-p, and renormalises; rows that use neither stay as they are."""
    width = logprobs_BV.shape[1]
    rows = [i for i, s in enumerate(samplings) if 0 < s.top_k < width or s.top_p < 1]
    if not rows:
        return logprobs_BV
    device = logprobs_BV.device
    top_k = torch.tensor([samplings[i].top_k or width for i in rows], device=device)
    top_p = torch.tensor([samplings[i].top_p for i in rows], dtype=torch.float64, device=device)
    # a stable sort: among equal logprobs the lower id comes first, whatever the batch
    sorted_RV, order_RV = logprobs_BV[rows].sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(width, device=device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k[:, None], -torch.inf).log_softmax(dim=-1)
    mass_RV = sorted_RV.double().exp()
    before_RV = mass_RV.cumsum(dim=-1) - mass_RV
    # the token that crosses top_p stays, and so does the first
    sorted_RV = sorted_RV.masked_fill((before_RV >= top_p[:, None]) & (rank_V > 0), -torch.inf).log_softmax(dim=-1)
    kept_BV = logprobs_BV.clone()
    kept_BV[rows] = torch.empty_like(sorted_RV).scatter_(1, order_RV, sorted_RV)
    return kept_BV


def _invert(logprobs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The inverse of the cumulative distribution at `uniform_B`; never a token of probability 0."""
    mass_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    total_B = mass_BV[:, -1]
    # rounding may lift u * total to the total itself, beyond the last token
    target_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    found_B = torch.searchsorted(mass_BV, target_B[:, None], right=True)[:, 0]
    return found_B.clamp(max=logprobs_BV.shape[1] - 1)
