"""A tiny random llama for the local engine, and the plain forward pass that its logprobs must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from canter.types import Logprobs, Sampling, as_ids

VOCABULARY = 256
EOS = 2


def small_llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """Its weights are large, so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    tokens = {"eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": EOS}
    config = LlamaConfig(
        **{**sizes, **heads, **tokens, "initializer_range": 0.3, "attn_implementation": "sdpa"} | settings
    )
    return LlamaForCausalLM(config).eval()


def letters(ids: Sequence[int]) -> str:
    """A decoder: one character for each id."""
    return "".join(chr(256 + token) for token in ids)


def make_prompt(seed: int, length: int, vocabulary: int = VOCABULARY) -> np.ndarray:
    return as_ids(np.random.default_rng(seed).integers(3, vocabulary, length))


@torch.no_grad()
def dense_logprobs(model: Any, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling) -> Logprobs:
    """Logprobs of `ids` after `prompt` by one forward pass without a cache."""
    both = torch.tensor([[*map(int, prompt), *map(int, ids)]])
    logits = model(input_ids=both, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / sampling.temperature, dim=-1)
    found: Logprobs = logprobs.gather(1, both[0, len(prompt) :, None])[:, 0].numpy()
    return found
