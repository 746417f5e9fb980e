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

    def key(self) -> tuple[int, int]:
        """Two 32-bit integers from seed and position."""
        counter = struct.pack("<QQ", self.seed & (2**64 - 1), self.position)
        first, second = struct.unpack("<ii", hashlib.blake2b(counter, digest_size=8).digest())
        return first, second


@dataclass(frozen=True, slots=True)
class Drawn:
    """`logprob` is under the distribution that was sampled from: after temperature, top-k and top-p. At temperature 0
    that is a point mass, so it is 0. It is NaN where the logits were not finite; `token` then means nothing."""

    token: int
    logprob: float


def draw(logits_BV: Tensor, turns: Sequence[Turn]) -> list[Drawn]:
    """One token for each row of float32 logits: the winner of an exponential race, where token i with probability p_i
    finishes at E_i / p_i and the E_i are independent exponential variables (Gumbel-max in another scale).

    Its outcome changes with the rounding of logits only where the two first are as close as that, unlike an inverted
    cumulative sum, every step of which moves with all tokens before it.
    """
    device = logits_BV.device
    scale = [turn.sampling.temperature or 1.0 for turn in turns]
    scale_B = torch.tensor(scale, dtype=torch.float32, device=device)
    logprobs_BV = torch.log_softmax(logits_BV / scale_B[:, None], dim=-1)
    broken_B = logprobs_BV[:, 0].isnan()  # one logit that is not finite makes the whole row NaN
    logprobs_BV = _truncate(logprobs_BV, [turn.sampling for turn in turns])

    finish_BV = exponential([turn.key() for turn in turns], logits_BV.shape[1], device) / logprobs_BV.exp()
    token_B = finish_BV.argmin(dim=-1)
    logprob_B = logprobs_BV.gather(1, token_B[:, None])[:, 0]
    greedy = [row for row, turn in enumerate(turns) if turn.sampling.temperature == 0]
    if greedy:
        token_B[greedy] = logits_BV[greedy].argmax(dim=-1)
        logprob_B[greedy] = 0.0
    logprob_B[broken_B] = torch.nan
    return [Drawn(token, logprob) for token, logprob in zip(token_B.tolist(), logprob_B.tolist(), strict=True)]


def exponential(keys: Sequence[tuple[int, int]], width: int, device: torch.device) -> Tensor:
    """float32 [B, width]: standard exponential variables that depend on a row's key and the column alone, the same on
    every device. A key is two 32-bit integers."""
    keys_2B = torch.tensor(keys, dtype=torch.int32, device=device).T
    bits_BV = _mix(torch.arange(width, dtype=torch.int32, device=device) + keys_2B[0][:, None], keys_2B[1][:, None])
    uniform_BV = (bits_BV & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)  # finest where it is small, as a race needs
    return uniform_BV.neg_().log1p_().neg_()


def _mix(bits: Tensor, key: Tensor) -> Tensor:
    """Hashes int32 counters in place: the "lowbias32" rounds of Wellons (2018) with `key` added between them."""
    bits ^= (bits >> 16) & 0xFFFF  # a logical shift: >> keeps the sign
    bits *= 0x7FEB352D
    bits += key
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= 0x846CA68B - 2**32
    bits ^= (bits >> 16) & 0xFFFF
    return bits


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
