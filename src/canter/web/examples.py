"""Example rollouts as readable conversations, from the raw requests and replies of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from canter.gateway.transcript import asked, replied
from canter.types import Call, CallBodies, Rollout, RolloutState

Turn = tuple[str, str, bool]
"""Role, text, and whether the policy sampled the text."""


@dataclass(frozen=True, slots=True)
class Example:
    """One rollout to read; `reward` is None where there is none."""

    title: str
    reward: float | None
    turns: tuple[Turn, ...]


def choose(rollouts: Sequence[Rollout], count: int = 3) -> list[Rollout]:
    """Scored rollouts spread evenly from the highest reward to the lowest, latest steps first among equals."""
    scored = [r for r in rollouts if r.state is RolloutState.SCORED and r.reward is not None]
    ranked = sorted(scored, key=lambda r: (-(r.reward or 0.0), -r.step, r.group, r.index))
    if len(ranked) <= count or count < 2:
        return ranked[:count]
    return [ranked[round(place * (len(ranked) - 1) / (count - 1))] for place in range(count)]


def conversation(calls: Sequence[tuple[Call, CallBodies]]) -> tuple[Turn, ...]:
    """The turns of a rollout: the messages of its last request, then the last reply (none if that call has no reply).

    An assistant message counts as sampled where an earlier reply has the same text; others (a harness's own worked
    examples) do not.
    """
    if not calls:
        return ()
    replies = [replied(call, bodies) for call, bodies in calls]
    turns = [(role, text, role == "assistant" and text in replies) for role, text in asked(*calls[-1])]
    said = "completion" if turns and turns[0][0] == "prompt" else "assistant"
    return (*turns, *([(said, last, True)] if (last := replies[-1]) is not None else []))
