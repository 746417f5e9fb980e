"""What became of the rollouts, calls and tokens of a batch, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from canter.types import ForkCause, Reason, RolloutState


@dataclass(frozen=True, slots=True)
class Tokens:
    """Every token counted once: `sampled == trained + sum(untrained.values())`.

    sampled    tokens that the policy sampled, over all committed calls of the rollouts
    trained    those that are trained, each in exactly one sample
    untrained  those that are not, by reason
    context    entries of samples that are not trained (prompts, and sampled tokens trained elsewhere or not at all)
    """

    sampled: int
    trained: int
    untrained: Mapping[Reason, int]
    context: int

    def __post_init__(self) -> None:
        accounted = self.trained + sum(self.untrained.values())
        if accounted != self.sampled:
            raise ValueError(f"{self.sampled} sampled tokens, but {accounted} trained or untrained with a reason")


@dataclass(frozen=True, slots=True)
class Report:
    """The account of one batch.

    rollouts             rollouts that were given, of which `in_batch` count as N of the loss
    states               rollouts by state
    dropped              rollouts left out of the batch, by reason; `rollouts == in_batch + sum(dropped.values())`
    samples_per_rollout  how many rollouts of the batch became how many samples
    calls                committed calls, those of superseded attempts included
    untrained_calls      calls whose sampled tokens are not trained, by reason
    forks                calls that do not extend their proposed parent, by cause
    rewards              rewards of the scored rollouts, by group, in the order of their index
    """

    rollouts: int
    in_batch: int
    states: Mapping[RolloutState, int]
    dropped: Mapping[Reason, int]
    samples_per_rollout: Mapping[int, int]
    calls: int
    untrained_calls: Mapping[Reason, int]
    forks: Mapping[ForkCause, int]
    tokens: Tokens
    rewards: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        accounted = self.in_batch + sum(self.dropped.values())
        if accounted != self.rollouts:
            raise ValueError(f"{self.rollouts} rollouts, but {accounted} in the batch or dropped with a reason")

    @property
    def samples(self) -> int:
        return sum(samples * rollouts for samples, rollouts in self.samples_per_rollout.items())

    @property
    def mean_reward(self) -> float | None:
        """Mean over all scored rollouts, dropped ones included; `None` where there are none."""
        rewards = [reward for group in self.rewards.values() for reward in group]
        return sum(rewards) / len(rewards) if rewards else None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; histogram keys become strings."""
        return {
            "rollouts": self.rollouts,
            "in_batch": self.in_batch,
            "samples": self.samples,
            "mean_reward": self.mean_reward,
            "states": _plain(self.states),
            "dropped": _plain(self.dropped),
            "samples_per_rollout": _plain(self.samples_per_rollout),
            "calls": self.calls,
            "untrained_calls": _plain(self.untrained_calls),
            "forks": _plain(self.forks),
            "tokens": {
                "sampled": self.tokens.sampled,
                "trained": self.tokens.trained,
                "untrained": _plain(self.tokens.untrained),
                "context": self.tokens.context,
            },
            "rewards": {group: list(rewards) for group, rewards in sorted(self.rewards.items())},
        }


def _plain(counts: Mapping[Any, int]) -> dict[str, int]:
    """Counts with string keys, in the order of the keys."""
    return {str(key): counts[key] for key in sorted(counts)}
