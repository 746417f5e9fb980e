"""The embedded training backend: torch on one device, full fine-tune or LoRA."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from canter.config import Config
from canter.errors import CheckpointError, TrainingDiverged
from canter.trainer.loss import LossSettings, entropy_of, log_softmax_at, token_loss
from canter.trainer.micro_batch import Places, Sums, pad
from canter.trainer.model import Policy, hidden_states
from canter.trainer.prefix import shared_rows
from canter.trainer.rows import Row, micro_batches, plain_row
from canter.types import Logprobs, Sample

STATE = "trainer.pt"

Sync = Callable[[nn.Module, int], None]
"""Hands the policy's weights to the engine in this process as version n; returns when they are in use."""

LOGITS_AT_ONCE = 2**24
"""Entries of the logits that exist at any time: 64 MiB in float32, a few times that with their gradients."""


class TorchBackend:
    """Implements `Backend`. Weights, gradients and optimizer state are float32; with `trainer.dtype = "bfloat16"` the
    forward and backward passes run under autocast.

    The result does not depend on how samples fall into rows and micro-batches, but for the order of float additions.
    `sync` is how weights reach the engine of this process; None where there is none.
    """

    def __init__(self, policy: Policy, config: Config, *, sync: Sync | None = None) -> None:
        self.version = 0
        self._policy = policy
        self._config = config.trainer
        self._loss = LossSettings.of(config.trainer)
        self._temperature = config.sampling.temperature
        self._sync = sync
        self._reference = (
            _frozen_copy(policy.decoder, policy.head) if self._loss.kl and policy.adapted is None else None
        )
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            _decayed(self._parameters, config.trainer.weight_decay),
            lr=config.trainer.lr,
            betas=config.trainer.betas,
            fused=True,
        )
        self._done: list[tuple[Sequence[Sample], int, Sequence[Logprobs] | None]] = []

    def forward(self, samples: Sequence[Sample]) -> list[Logprobs]:
        logprobs = [np.zeros(len(sample.ids), np.float32) for sample in samples]
        for rows in self._micro_batches(samples):
            places = Places.of(rows, samples, self._policy.device)
            found = self._logprobs(rows, places).cpu().numpy()
            for sample, token, value in zip(places.sample, places.token, found, strict=True):
                logprobs[sample][token] = value
        return logprobs

    def forward_backward(
        self, samples: Sequence[Sample], *, rollouts: int, old: Sequence[Logprobs] | None = None
    ) -> Mapping[str, float]:
        """As the protocol says. Samples of advantage 0 have no gradient unless there is a KL or entropy term, so they
        are not forwarded; `tokens_without_gradient` counts their trained tokens."""
        live = [i for i, s in enumerate(samples) if s.advantage != 0 or self._loss.regularised]
        chosen = [samples[i] for i in live]
        chosen_old = None if old is None else [old[i] for i in live]
        sums = Sums()
        for rows in self._micro_batches(chosen):
            self._micro_batch(rows, chosen, rollouts, chosen_old, sums)
        self._done.append((chosen, rollouts, chosen_old))
        idle = sum(sample.trained for sample in samples) - sum(sample.trained for sample in chosen)
        return {**sums.metrics(rollouts), "tokens_without_gradient": float(idle)}

    def optim_step(self) -> Mapping[str, float]:
        for parameter in self._parameters:
            if parameter.grad is None:  # a batch without gradient still moves by momentum, as one of zeros does
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        if not torch.isfinite(norm):
            raise TrainingDiverged(f"the gradient norm of version {self.version + 1} is {norm}: {self._culprit()}")
        lr = self._config.lr * min(1.0, (self.version + 1) / max(1, self._config.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._done.clear()
        return {"grad_norm": float(norm), "lr": lr}

    def publish(self) -> Path | None:
        if self._sync is not None:
            self._sync(self._policy.model, self.version)
        return None

    def save(self, folder: Path) -> None:
        """Under full fine-tuning the folder is a model folder that `transformers` loads; under LoRA, peft's adapter."""
        try:
            self._policy.save(folder)
            random = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
            state = {"version": self.version, "optimizer": self._optimizer.state_dict(), "random": random}
            torch.save(state, folder / STATE)
        except (RuntimeError, SafetensorError) as error:  # what torch and safetensors make of a failed write
            raise CheckpointError(f"cannot write {folder}: {error}") from error

    def load(self, folder: Path) -> None:
        device = self._policy.device
        try:
            state = torch.load(folder / STATE, map_location=device, weights_only=True)
            self._policy.restore(folder)
            self._optimizer.load_state_dict(state["optimizer"])
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint {folder} does not fit this model and these settings: {error}") from error
        torch.set_rng_state(state["random"]["cpu"].cpu())
        torch.cuda.set_rng_state_all([one.cpu() for one in state["random"]["cuda"]])
        self.version = state["version"]

    # -- inside --

    def _micro_batches(self, samples: Sequence[Sample]) -> list[list[Row]]:
        budget = self._config.token_budget
        if self._config.share_prefix and self._policy.shares_prefix:
            rows = shared_rows(samples, width=self._policy.width, token_budget=budget)
        else:
            rows = [plain_row(samples, index) for index in range(len(samples))]
        return micro_batches(rows, budget)

    def _micro_batch(
        self, rows: list[Row], samples: Sequence[Sample], rollouts: int, old: Sequence[Logprobs] | None, sums: Sums
    ) -> None:
        """Forward and backward of one micro-batch. The head's part is done in pieces, each with its own backward to the
        hidden states, so that only one piece of logits exists at a time."""
        places = Places.of(rows, samples, self._policy.device)
        reference = self._reference_logprobs(rows, places) if self._loss.kl else None
        tokens = places.tokens(samples, old, reference)
        hidden = self._hidden(self._policy.decoder, rows, places)
        leaf = hidden.detach().requires_grad_()
        for start, stop in self._pieces(len(places.ids)):
            with self._autocast():
                logits = self._policy.head(leaf[start:stop]).float() / self._temperature
            logprobs, normaliser = log_softmax_at(logits, places.ids[start:stop])
            with torch.set_grad_enabled(self._loss.entropy != 0):
                entropy = entropy_of(logits, normaliser)
            loss = token_loss(logprobs, entropy, tokens.slice(start, stop), self._loss)
            places.check(loss.total, "loss", samples, offset=start)
            torch.autograd.backward(loss.total.sum() / rollouts)
            sums.add(loss, entropy.detach())
        assert leaf.grad is not None
        places.check(leaf.grad.sum(-1), "gradient", samples)
        torch.autograd.backward(hidden, leaf.grad)

    def _hidden(self, decoder: nn.Module, rows: list[Row], places: Places) -> Tensor:
        """Hidden states [N, D] at the places that predict the scored tokens."""
        ids, positions, branches = pad(rows, self._policy.device)
        with self._autocast():
            states = hidden_states(decoder, ids, positions, branches)
        return states[places.row, places.at]

    @torch.no_grad()
    def _logprobs(
        self, rows: list[Row], places: Places, decoder: nn.Module | None = None, head: nn.Module | None = None
    ) -> Tensor:
        """Logprobs [N] of the scored tokens without gradient; of the policy unless other parts are given."""
        hidden = self._hidden(decoder or self._policy.decoder, rows, places)
        found = []
        for start, stop in self._pieces(len(places.ids)):
            with self._autocast():
                logits = (head or self._policy.head)(hidden[start:stop]).float() / self._temperature
            found.append(log_softmax_at(logits, places.ids[start:stop])[0])
        return torch.cat(found)

    def _reference_logprobs(self, rows: list[Row], places: Places) -> Tensor:
        """Of the initial policy: the frozen copy, or the model with its adapters off."""
        if self._reference is not None:
            return self._logprobs(rows, places, *self._reference)
        with self._policy.without_adapter():
            return self._logprobs(rows, places)

    def _pieces(self, count: int) -> Iterator[tuple[int, int]]:
        size = max(1, LOGITS_AT_ONCE // self._policy.vocabulary)
        yield from ((start, min(start + size, count)) for start in range(0, count, size))

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._policy.device.type, torch.bfloat16, enabled=self._config.dtype == "bfloat16")

    def _culprit(self) -> str:
        """Which sample alone already gives a gradient that is not finite."""
        for samples, rollouts, old in list(self._done):
            for index, sample in enumerate(samples):
                self._optimizer.zero_grad(set_to_none=True)
                one_old = None if old is None else [old[index]]
                self._micro_batch([plain_row([sample], 0)], [sample], rollouts, one_old, Sums())
                norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
                if not torch.isfinite(norm):
                    return f"sample {sample.chain} of rollout {sample.rollout_id} is the first to give it"
        return "no single sample gives it; lower trainer.lr or trainer.max_grad_norm, or use trainer.dtype = 'float32'"


def _frozen_copy(decoder: nn.Module, head: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The initial policy, for the KL term. Copied as one, so that tied weights stay tied."""
    parts = copy.deepcopy((decoder, head))
    for part in parts:
        part.requires_grad_(False)
    return parts


def _decayed(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups: matrices decay, norms and biases do not."""
    groups = [([p for p in parameters if p.ndim >= 2], weight_decay), ([p for p in parameters if p.ndim < 2], 0.0)]
    return [{"params": some, "weight_decay": decay} for some, decay in groups if some]
