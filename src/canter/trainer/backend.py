"""The verbs that the training loop needs of a backend; `torch_backend` is the embedded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from canter.types import Logprobs, Sample


class Backend(Protocol):
    """Holds the policy, its optimizer and its version. Methods block; the loop calls them in a thread.

    `version` counts the updates of the policy, 0 being the model as given. The loop raises it after each update (which
    may be several optimizer steps); `load` restores it.
    """

    version: int

    def forward(self, samples: Sequence[Sample]) -> list[Logprobs]:
        """Logprobs float32[T] of every trained token of each sample given the tokens before it, under the current
        weights and the sampling temperature; 0 elsewhere."""
        ...

    def forward_backward(
        self, samples: Sequence[Sample], *, rollouts: int, old: Sequence[Logprobs] | None = None
    ) -> Mapping[str, float]:
        """Adds the gradient of the loss of these samples; `rollouts` is N of the loss (all rollouts of the batch).
        `old` are the logprobs that `forward` gave before the first optimizer step of this update; None says that this
        is the first. Returns metrics (`loss`, `entropy`, `tis_mean`, `clip_share`, `logprob_gap`, `tokens`, …).
        Raises TrainingDiverged where a loss or gradient is not finite."""
        ...

    def optim_step(self) -> Mapping[str, float]:
        """Clips, steps AdamW, zeroes gradients. Returns `grad_norm` and `lr`. Raises TrainingDiverged."""
        ...

    def publish(self) -> Path | None:
        """Makes the current weights visible to the engine as `version` (in process: under the engine's lock)."""
        ...

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer, RNG and version under `folder` (which exists and is empty)."""
        ...

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. Raises `CheckpointError`."""
        ...
