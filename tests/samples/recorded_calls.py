"""A recorder that writes calls the way the gateway does: full prompts in, deltas against the parent out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from canter.types import Call, Rollout, RolloutState, Task, VersionSpan, as_ids


class Recorder:
    """Calls of one rollout; `full[call_id]` is what the engine saw and sampled, prompt and reply."""

    def __init__(self, rollout_id: str = "r0", attempt: int = 1) -> None:
        self.rollout_id, self.attempt = rollout_id, attempt
        self.calls: list[Call] = []
        self.full: dict[str, list[int]] = {}
        self._next_token = 1000

    def call(
        self,
        new: Sequence[int],
        reply: int | Sequence[int] = 2,
        *,
        after: Call | None = None,
        keep: int | None = None,
        **changes: Any,
    ) -> Call:
        """A call whose prompt is the first `keep` tokens of `after` (default: all of it) and then `new`; `reply` is
        the sampled ids or how many fresh ones."""
        ordinal = len(self.calls)
        call_id = f"{self.rollout_id}-{self.attempt}-{ordinal}"
        before = self.full[after.id] if after else []
        shared = before[: len(before) if keep is None else keep]
        sampled = self._fresh(reply) if isinstance(reply, int) else list(reply)
        self.full[call_id] = [*shared, *new, *sampled]
        fields: dict[str, Any] = {
            "id": call_id,
            "rollout_id": self.rollout_id,
            "attempt": self.attempt,
            "ordinal": ordinal,
            "parent_id": after.id if after else None,
            "prefix_len": len(shared),
            "suffix": as_ids(list(new)),
            "sampled": as_ids(sampled),
            "logprobs": -np.asarray(sampled, np.float32) / 1000,
            "versions": (VersionSpan(ordinal, 0, len(sampled)),) if sampled else (),
        }
        made = Call(**(fields | changes))
        self.calls.append(made)
        return made

    def _fresh(self, count: int) -> list[int]:
        self._next_token += count
        return list(range(self._next_token - count, self._next_token))


def scored(
    rollout_id: str = "r0", reward: float | None = 1.0, *, group: str = "g", index: int = 0, **changes: Any
) -> Rollout:
    fields: dict[str, Any] = {
        "id": rollout_id,
        "group": "g",
        "task": Task(id="t", prompt="p"),
        "index": index,
        "state": RolloutState.SCORED,
        "attempt": 1,
        "reward": reward,
    }
    return Rollout(**(fields | changes))
