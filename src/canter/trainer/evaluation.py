"""How good the policy is on held-out tasks, as one small value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from canter.types import Rollout, RolloutState


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rollouts of held-out tasks under one policy version.

    solved       share (0..1) of the scored rollouts whose reward is at least `evaluate.solved_at`; None without any
    mean_reward  over the scored rollouts; None without any
    dropped      rollouts without a reward, by reason; `rollouts == scored + sum(dropped.values())`
    """

    version: int
    tasks: int
    rollouts: int
    scored: int
    solved: float | None
    mean_reward: float | None
    dropped: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(rollouts: Sequence[Rollout], *, version: int, solved_at: float) -> Evaluation:
    """The numbers of finished rollouts."""
    rewards = [r.reward for r in rollouts if r.state is RolloutState.SCORED and r.reward is not None]
    lost = Counter((r.reason or r.state).value for r in rollouts if r.state is not RolloutState.SCORED)
    return Evaluation(
        version=version,
        tasks=len({rollout.group for rollout in rollouts}),
        rollouts=len(rollouts),
        scored=len(rewards),
        solved=sum(reward >= solved_at for reward in rewards) / len(rewards) if rewards else None,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        dropped=dict(sorted(lost.items())),
    )
