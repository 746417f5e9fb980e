"""The verbs that the training loop needs of a backend; `torch` is the embedded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from canter.types import Logprobs, Sample


class Backend(Protocol):
    """Holds the policy, its optimizer and its version. Methods block; the loop calls them in a thread."""

    version: int

    def forward(self, samples: Sequence[Sample]) -> list[Logprobs]:
        """Logprobs float32[T] of every token of each sample given the tokens before it, under the current weights and the
        sampling temperature (entry 0 is 0)."""
        ...

    def forward_backward(self, samples: Sequence[Sample], *, rollouts: int) -> Mapping[str, float]:
        """Adds the gradient of the loss of these samples; `rollouts` is N of the loss (all rollouts of the batch). Returns
        metrics (`loss`, `policy_loss`, `kl`, `entropy`, `ratio_mean`, `clip_share`, `logprob_gap`, `tokens`, …)."""
        ...

    def optim_step(self) -> Mapping[str, float]:
        """Clips, steps AdamW, zeroes gradients, raises `version` by 1. Returns `grad_norm` and `lr`."""
        ...

    def publish(self) -> Path | None:
        """Makes the current weights visible to the engine as `version` (in process: under the engine's lock)."""
        ...

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer and RNG under `folder` (which exists and is empty)."""
        ...

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. Raises `CheckpointError`."""
        ...
