"""Hypothesis strategies: groups of rollouts whose calls form arbitrary forests, and what the engine really saw.

Every sampled token has an id of its own, so a trained token names the call and the place that it comes from without
asking the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from canter.types import NO_LOGPROBS, Call, CallStatus, Reason, Rollout, RolloutState, Task, VersionSpan, as_ids

LABELS = ("main", "sub", "title")
TRAINED_LABELS = frozenset({"main", "sub"})

FAULTS: dict[str, Callable[[Call], Call]] = {
    "frozen": lambda call: replace(call, untrainable=Reason.FROZEN_MODEL),
    "cancelled": lambda call: replace(call, status=CallStatus.CANCELLED),
    "failed": lambda call: replace(call, status=CallStatus.ERROR),
    "no logprobs": lambda call: replace(call, logprobs=NO_LOGPROBS),
    "too many logprobs": lambda call: replace(call, logprobs=np.append(call.logprobs, np.float32(-1))),
    "nan": lambda call: replace(call, logprobs=np.full(len(call.sampled), np.nan, np.float32)),
    "inf": lambda call: replace(call, logprobs=np.full(len(call.sampled), -np.inf, np.float32)),
    "no version": lambda call: replace(call, versions=()),
    "gap": lambda call: replace(call, versions=(VersionSpan(0, 1, len(call.sampled)),)),
    "overlap": lambda call: replace(call, versions=(*call.versions, VersionSpan(9, 0, len(call.sampled)))),
}
"""Ways in which a call with at least one sampled token becomes untrainable."""


@dataclass
class Truth:
    """What the engine saw: by call the whole sequence, by sampled token its call, logprob and version; and which
    calls nothing speaks against."""

    full: dict[str, list[int]] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    logprob: dict[int, float] = field(default_factory=dict)
    version: dict[int, int] = field(default_factory=dict)
    good: set[str] = field(default_factory=set)


@dataclass
class World:
    rollouts: list[Rollout]
    calls: list[Call]
    truth: Truth

    def trainable(self, rollout: Rollout) -> list[int]:
        """The sampled tokens of a rollout's current attempt that should be trained if the rollout is kept."""
        return [
            int(token)
            for call in self.calls
            if call.rollout_id == rollout.id and call.attempt == rollout.attempt and call.id in self.truth.good
            for token in call.sampled
        ]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    truth, rollouts, calls = Truth(), [], []
    for group in range(draw(st.integers(1, 3))):
        for index in range(draw(st.integers(1, 4))):
            rollout = draw(_rollouts(f"g{group}", index))
            rollouts.append(rollout)
            for attempt in range(1, rollout.attempt + 1):
                calls += draw(_forests(rollout.id, attempt, truth))
    return World(rollouts, calls, truth)


@st.composite
def _rollouts(draw: st.DrawFn, group: str, index: int) -> Rollout:
    state = draw(st.sampled_from([RolloutState.SCORED] * 6 + [*RolloutState]))
    reward = draw(st.sampled_from([0.0, 0.1, 1.0]) | st.floats(-5, 5)) if state is RolloutState.SCORED else None
    reason = draw(st.sampled_from([Reason.NODE_LOST, Reason.GRADER_ERROR])) if state is RolloutState.INVALID else None
    attempt = draw(st.sampled_from([1, 1, 1, 2, 3]))
    task = Task(id=group, prompt="p")
    return Rollout(
        f"{group}.{index}", group, task, index=index, state=state, reward=reward, reason=reason, attempt=attempt
    )


@st.composite
def _forests(draw: st.DrawFn, rollout_id: str, attempt: int, truth: Truth) -> list[Call]:
    """Calls of one attempt: linear turns, interleaved conversations, forks anywhere, faults."""
    calls: list[Call] = []
    sound: set[str] = set()
    for ordinal in range(draw(st.integers(0, 7))):
        call_id = f"{rollout_id}/{attempt}/{draw(st.integers(0, 9))}.{ordinal}"
        parent = draw(st.sampled_from([None, *calls, *calls[-1:] * 3]))
        before = truth.full[parent.id] if parent else []
        keep = draw(st.sampled_from([len(before)] * 3 + [0]) | st.integers(0, len(before)))
        suffix = draw(st.lists(st.integers(0, 3), max_size=4))
        sampled = [1000 + len(truth.owner) + n for n in range(draw(st.integers(0, 4)))]
        truth.full[call_id] = before[:keep] + suffix + sampled
        call = Call(
            id=call_id,
            rollout_id=rollout_id,
            attempt=attempt,
            ordinal=ordinal,
            parent_id=parent.id if parent else None,
            prefix_len=keep,
            suffix=as_ids(suffix),
            sampled=as_ids(sampled),
            logprobs=-np.asarray(sampled, np.float32) / 1000,
            versions=draw(_spans(len(sampled))),
            label=draw(st.sampled_from(["main", *LABELS])),
        )
        _remember(truth, call)
        fault = draw(st.sampled_from([None] * 12 + [*FAULTS, "lost parent", "short parent"]))
        if keep and fault == "lost parent":
            call = replace(call, parent_id="never-committed")
        elif keep and fault == "short parent":
            call = replace(call, prefix_len=len(before) + 1)
        elif keep == 0 or call.parent_id in sound:
            sound.add(call_id)
            if fault in FAULTS and sampled:
                call = FAULTS[fault](call)
            elif call.label in TRAINED_LABELS:
                truth.good.add(call_id)
        calls.append(call)
    return calls


@st.composite
def _spans(draw: st.DrawFn, length: int) -> tuple[VersionSpan, ...]:
    cuts = draw(st.lists(st.integers(0, length), max_size=2))
    edges = [0, *sorted(cuts), length]
    first = draw(st.integers(0, 5))
    return tuple(VersionSpan(first + n, start, end) for n, (start, end) in enumerate(pairwise(edges)))


def _remember(truth: Truth, call: Call) -> None:
    for place, (token, logprob) in enumerate(zip(call.sampled.tolist(), call.logprobs.tolist(), strict=True)):
        truth.owner[token] = call.id
        truth.logprob[token] = logprob
        truth.version[token] = next(span.version for span in call.versions if span.start <= place < span.end)
