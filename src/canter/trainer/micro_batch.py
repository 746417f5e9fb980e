"""A micro-batch as tensors: padded rows, the places they score, and sums for the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canter.errors import TrainingDiverged
from canter.trainer.loss import Loss, Tokens
from canter.trainer.rows import Index, Row
from canter.types import Logprobs, Sample

PADDING = -1
"""Branch number of padding."""


def pad(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Token ids, positions and branches [B, T], padded on the right; branches are None where all rows are plain."""
    shape = (len(rows), max(map(len, rows)))
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    branches = np.full(shape, PADDING, np.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row)], positions[b, : len(row)], branches[b, : len(row)] = row.ids, row.positions, row.branches
    plain = all(row.plain for row in rows)
    tensors = [torch.from_numpy(array).to(device) for array in (ids, positions, branches)]
    return tensors[0], tensors[1], None if plain else tensors[2]


@dataclass(frozen=True, slots=True)
class Places:
    """The N tokens that a micro-batch scores.

    sample, token  which sample and which entry of its arrays; on the CPU, int64[N]
    row, at        the place whose hidden state predicts the token; int64[N]
    ids            the token itself; int64[N]
    """

    sample: Index
    token: Index
    row: Tensor
    at: Tensor
    ids: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], samples: Sequence[Sample], device: torch.device) -> Places:
        scored = [(b, part) for b, row in enumerate(rows) for part in row.scored]
        counts = [len(part.tokens) for _, part in scored]
        ids = np.concatenate([samples[part.sample].ids[part.tokens] for _, part in scored]).astype(np.int64)
        row = np.repeat([b for b, _ in scored], counts)
        return cls(
            sample=np.repeat([part.sample for _, part in scored], counts),
            token=np.concatenate([part.tokens for _, part in scored]),
            row=torch.from_numpy(row).to(device),
            at=torch.from_numpy(np.concatenate([part.at for _, part in scored])).to(device),
            ids=torch.from_numpy(ids).to(device),
        )

    def tokens(self, samples: Sequence[Sample], old: Sequence[Logprobs] | None, reference: Tensor | None) -> Tokens:
        """What is known of these tokens. Raises TrainingDiverged for an advantage or weight that is no number."""
        weights = np.array([sample.weight for sample in samples], np.float32)
        advantages = np.array([sample.advantage for sample in samples], np.float32)
        if not (np.isfinite(weights).all() and np.isfinite(advantages).all()):
            bad = samples[int(np.argmin(np.isfinite(weights + advantages)))]
            raise TrainingDiverged(f"{_name(bad)} has advantage {bad.advantage} and weight {bad.weight}")
        return Tokens(
            behaviour=self._tensor(self._pick([sample.logprobs for sample in samples])),
            advantage=self._tensor(advantages[self.sample]),
            weight=self._tensor(weights[self.sample]),
            old=None if old is None else self._tensor(self._pick(old)),
            reference=reference,
        )

    def check(self, values: Tensor, what: str, samples: Sequence[Sample], offset: int = 0) -> None:
        """Raises TrainingDiverged naming the first token from `offset` on whose entry of `values` is not finite."""
        finite = torch.isfinite(values)
        if bool(finite.all()):
            return
        place = offset + int(torch.nonzero(~finite)[0, 0])
        sample, token = samples[self.sample[place]], self.token[place]
        raise TrainingDiverged(
            f"the {what} at token {token} of {_name(sample)} is {values[place - offset].sum().item()} (sampled with "
            f"logprob {sample.logprobs[token]:.4g}, advantage {sample.advantage:.4g}); resume from the checkpoint "
            "with a lower trainer.lr"
        )

    def _pick(self, arrays: Sequence[Logprobs]) -> NDArray[np.float32]:
        starts = np.cumsum([0, *map(len, arrays)])
        return np.concatenate(arrays)[starts[self.sample] + self.token]

    def _tensor(self, values: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self.ids.device)


@dataclass(slots=True)
class Sums:
    """Sums over the tokens of an update, from which its metrics come."""

    tokens: int = 0
    gap_max: float = 0.0
    values: dict[str, float] = field(default_factory=dict)

    def add(self, loss: Loss, entropy: Tensor) -> None:
        parts = {
            "loss": loss.total.detach(),
            "policy_loss": loss.policy,
            "kl": loss.kl,
            "entropy": entropy,
            "ratio_mean": loss.ratio,
            "clip_share": loss.clipped.float(),
            "tis_mean": loss.tis,
            "logprob_gap": loss.gap,
        }
        found = torch.stack([*(part.double().sum() for part in parts.values()), loss.gap.double().max()]).tolist()
        for name, value in zip(parts, found, strict=False):
            self.values[name] = self.values.get(name, 0.0) + value
        self.tokens += len(loss.total)
        self.gap_max = max(self.gap_max, found[-1])

    def metrics(self, rollouts: int) -> Mapping[str, float]:
        """`loss` and `policy_loss` are those of the formula in `loss`; the others are means over the trained tokens
        that were forwarded, and are left out where there were none."""
        losses = {name: self.values.get(name, 0.0) / rollouts for name in ("loss", "policy_loss")}
        if not self.tokens:
            return losses | {"tokens": 0.0}
        means = {name: value / self.tokens for name, value in self.values.items() if name not in losses}
        return losses | means | {"logprob_gap_max": self.gap_max, "tokens": float(self.tokens)}


def _name(sample: Sample) -> str:
    return f"sample {sample.chain} of rollout {sample.rollout_id}"
