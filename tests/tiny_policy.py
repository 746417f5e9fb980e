"""A tiny random llama, samples for it, and the loss of DESIGN.md as a plain loop: what the trainer's tests compare
with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from canter.config import Config, resolve
from canter.types import Logprobs, Sample

VOCABULARY = 32


def tiny_llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = LlamaForCausalLM(
        LlamaConfig(**{**sizes, **heads, "initializer_range": 0.3, "attn_implementation": "sdpa"} | settings)
    )
    return model.eval()


def tiny_config(*overrides: str) -> Config:
    tree = {"model": {"path": "x"}, "tasks": {"train": "t.jsonl"}, "harness": {"command": ["x"]}}
    return resolve({**tree, "grader": {"use": "exact"}}, overrides)


def make_sample(
    random: np.random.Generator,
    prompt: Sequence[int],
    turns: Sequence[tuple[int, int]],
    group: str = "g",
    index: int = 0,
) -> Sample:
    """A conversation: after the prompt, `(sampled, appended)` tokens for each turn, of which the sampled ones are
    trained."""
    mask = [False] * len(prompt)
    for sampled, appended in turns:
        mask += [True] * sampled + [False] * appended
    length = len(mask)
    ids = np.concatenate([prompt, random.integers(0, VOCABULARY, length - len(prompt))]).astype(np.int32)
    logprobs = np.where(mask, random.normal(-3.4, 0.4, length), 0).astype(np.float32)
    return Sample(
        rollout_id=f"{group}-{index}",
        group=group,
        chain=0,
        ids=ids,
        mask=np.array(mask),
        logprobs=logprobs,
        versions=np.where(mask, 0, -1).astype(np.int32),
        weight=1 / sum(mask),
        advantage=float(random.normal()),
    )


def make_group(seed: int, size: int = 4, prompt: int = 20, reply: int = 5, group: str = "g") -> list[Sample]:
    """A GRPO group: one prompt, `size` replies of up to `reply` tokens, advantages that sum to 0."""
    random = np.random.default_rng(seed)
    shared = random.integers(0, VOCABULARY, prompt)
    turns = [[(int(random.integers(1, reply + 1)), 0)] for _ in range(size)]
    samples = [make_sample(random, shared, turn, group, index) for index, turn in enumerate(turns)]
    mean = sum(sample.advantage for sample in samples) / size
    return [replace(sample, advantage=sample.advantage - mean) for sample in samples]


@dataclass(frozen=True)
class PlainLoop:
    """The loss one token at a time, straight from the formula. Slow on purpose."""

    model: LlamaForCausalLM
    config: Config
    initial: LlamaForCausalLM | None = None

    def loss(self, samples: Sequence[Sample], rollouts: int, old: Sequence[Logprobs] | None = None) -> torch.Tensor:
        total = torch.zeros(())
        for number, sample in enumerate(samples):
            logprobs = self.all_logprobs(self.model, sample)
            initial = self.all_logprobs(self.initial, sample).detach() if self.initial is not None else None
            for t in np.flatnonzero(sample.mask):
                row, token = logprobs[t - 1], int(sample.ids[t])
                before = row[token].detach() if old is None else torch.tensor(old[number][t])
                reference = None if initial is None else initial[t - 1][token]
                total = total + sample.weight * self.token(sample, int(t), row, before, reference)
        return total / rollouts

    def token(
        self, sample: Sample, t: int, row: torch.Tensor, old: torch.Tensor, reference: torch.Tensor | None
    ) -> torch.Tensor:
        c, a = self.config.trainer, sample.advantage
        new = row[int(sample.ids[t])]
        ratio = torch.exp(new - old)
        gain = torch.minimum(ratio * a, torch.clamp(ratio, 1 - c.clip_low, 1 + c.clip_high) * a)
        if a < 0 and c.dual_clip is not None:
            gain = torch.maximum(gain, torch.tensor(c.dual_clip * a))
        behaviour = float(sample.logprobs[t])
        w = 1.0 if c.tis_cap is None else min(float(torch.exp(old - behaviour)), c.tis_cap)
        loss = -w * gain
        if reference is not None:
            loss = loss + c.kl * (torch.exp(reference - new) - (reference - new) - 1)
        return loss - c.entropy * -(row.exp() * row).sum()

    def all_logprobs(self, model: LlamaForCausalLM, sample: Sample) -> torch.Tensor:
        ids = torch.from_numpy(sample.ids.astype(np.int64))[None]
        return torch.log_softmax(model(input_ids=ids).logits[0] / self.config.sampling.temperature, dim=-1)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def norm(gradient: dict[str, torch.Tensor]) -> float:
    return float(
        torch.sqrt(sum(((g.double() ** 2).sum() for g in gradient.values()), torch.zeros((), dtype=torch.double)))
    )
