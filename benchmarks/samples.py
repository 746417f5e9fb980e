"""How fast rollouts become samples, and that the cost is linear in their tokens.

64 rollouts of 30 calls that grow to 30k tokens each, built into one batch; then half the calls (15k tokens) and twice
the calls (60k tokens) for the shape of the curve, and 30 calls with a fork back to the middle after every tenth. CPU
time, best of some repeats. `unique` counts the tokens of the samples, `prompts` the sum of all prompts and replies as
the engine saw them (what a system without deltas would handle). Samples of 15k tokens are the cheapest per token:
their arrays fit memory that the allocator keeps, longer ones are fresh pages.

    python benchmarks/samples.py [--json] [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from canter.samples import Batch, audit, build
from canter.types import Call, Rollout, RolloutState, Task, VersionSpan

ROLLOUTS, GROUP = 64, 8
GROWTH, REPLY = 1000, 300
TARGET_TOKENS_PER_S = 10e6


@dataclass(frozen=True)
class Timing:
    seconds: float
    unique: int
    prompts: int

    @property
    def rate(self) -> float:
        return self.unique / self.seconds


def rollouts() -> list[Rollout]:
    return [
        Rollout(
            id=f"r{n:03}",
            group=f"g{n // GROUP}",
            task=Task(id="t", prompt="p"),
            index=n % GROUP,
            state=RolloutState.SCORED,
            attempt=1,
            reward=float(n % 3),
        )
        for n in range(ROLLOUTS)
    ]


def conversation(rollout_id: str, calls: int, rng: np.random.Generator, fork_every: int | None) -> list[Call]:
    """Calls that each add 700 tokens of prompt and 300 of reply; a fork keeps half of what was there."""
    made: list[Call] = []
    whole = 0
    for n in range(calls):
        forks = fork_every is not None and n > 0 and n % fork_every == 0
        prefix = whole // 2 if forks else whole
        made.append(
            Call(
                id=f"{rollout_id}-{n}",
                rollout_id=rollout_id,
                attempt=1,
                ordinal=n,
                parent_id=made[-1].id if made else None,
                prefix_len=prefix,
                suffix=rng.integers(0, 150_000, GROWTH - REPLY, np.int32),
                sampled=rng.integers(0, 150_000, REPLY, np.int32),
                logprobs=-rng.random(REPLY, np.float32),
                versions=(VersionSpan(3, 0, REPLY),),
            )
        )
        whole = prefix + GROWTH
    return made


def measure(calls_per_rollout: int, repeats: int, fork_every: int | None = None) -> Timing:
    rng = np.random.default_rng(0)
    members = rollouts()
    calls = [c for r in members for c in conversation(r.id, calls_per_rollout, rng, fork_every)]
    batch = build(members, calls)
    if wrong := audit(batch, calls):
        raise SystemExit(f"the batch is wrong: {wrong[0]}")
    seconds = best(lambda: build(members, calls), repeats)
    return Timing(seconds, sum(len(s.ids) for s in batch.samples), sum(c.prompt_len + len(c.sampled) for c in calls))


def best(work: Callable[[], Batch], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object of named figures with units")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    half, full, double = (measure(calls, args.repeats) for calls in (15, 30, 60))
    forked = measure(30, args.repeats, fork_every=10)
    for name, t in {"15 calls": half, "30 calls": full, "60 calls": double, "30 calls, forks": forked}.items():
        print(f"{name:16} {t.unique:>9,} tokens {t.seconds * 1e3:7.1f} ms {t.rate / 1e6:7.1f} M unique tokens/s")
    print(
        f"target           {TARGET_TOKENS_PER_S / 1e6:.0f} M unique tokens/s: {full.rate / TARGET_TOKENS_PER_S:.1f} x"
    )
    if args.json:
        figures = {
            "unique_tokens_per_s": (full.rate, "tokens/s"),
            "prompt_tokens_per_s": (full.prompts / full.seconds, "tokens/s"),
            "forked_unique_tokens_per_s": (forked.rate, "tokens/s"),
            "unique_tokens": (full.unique, "tokens"),
            "cpu_s": (full.seconds, "s"),
            "half_cpu_s": (half.seconds, "s"),
            "double_cpu_s": (double.seconds, "s"),
            "time_ratio_full_to_half": (full.seconds / half.seconds, "ratio"),
            "time_ratio_double_to_full": (double.seconds / full.seconds, "ratio"),
            "rate_to_target": (full.rate / TARGET_TOKENS_PER_S, "ratio"),
        }
        print(json.dumps({name: {"value": value, "unit": unit} for name, (value, unit) in figures.items()}))


if __name__ == "__main__":
    main()
