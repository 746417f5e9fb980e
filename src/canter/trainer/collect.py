"""Getting rollouts done: ask for them, wait on the store's events, cancel the late ones, refuse a step gone bad."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from canter.errors import Refused, TooManyDrops
from canter.samples import Report
from canter.types import Call, Event, PolicyVersion, Reason, Rollout, RolloutState

log = logging.getLogger(__name__)

_AT_ONCE = 256
"""Rollouts per request; keeps the body small."""
_LONGEST_WAIT_S = 30.0

TERMINAL = frozenset(state.value for state in RolloutState if state.terminal)


class Rollouts(Protocol):
    """What the trainer needs of a `Store`, or of the `Client` of the gateway that owns it."""

    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]: ...

    async def rollouts(self, *, ids: Sequence[str] = (), limit: int = 1000) -> list[Rollout]: ...

    async def cancel(self, rollout_id: str, message: str = "") -> Rollout: ...

    async def calls(self, rollout_ids: Sequence[str]) -> list[Call]: ...

    async def events(self, after: int, *, timeout_s: float = 0, limit: int = 1000) -> list[Event]: ...

    async def add_version(self, version: PolicyVersion) -> None: ...

    async def versions(self) -> list[PolicyVersion]: ...


class Collector:
    """Waits for rollouts. Reads the event log from its start once, then goes on from where it was."""

    def __init__(self, client: Rollouts, *, timeout_s: float, max_invalid: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._max_invalid = max_invalid
        self._seq = 0

    async def collect(self, wanted: Sequence[Rollout], what: str) -> list[Rollout]:
        """These rollouts, all in a final state, in order of id. Those that exist already are used as they are.

        After `timeout_s` the rest is cancelled (reason `cancelled`). Raises TooManyDrops, naming `what`.
        """
        pending: set[str] = set()
        for start in range(0, len(wanted), _AT_ONCE):
            known = await self._client.create_rollouts(wanted[start : start + _AT_ONCE])
            pending |= {rollout.id for rollout in known if not rollout.state.terminal}
        late = await self._wait(pending)
        if late:
            log.warning("%s: %d rollouts are late and cancelled: %s", what, len(late), ", ".join(sorted(late)[:5]))
            await self._cancel(late)
        rollouts = await self._client.rollouts(ids=[rollout.id for rollout in wanted], limit=len(wanted))
        check_drops(rollouts, self._max_invalid, what)
        return rollouts

    async def _wait(self, pending: set[str]) -> set[str]:
        """Returns those that are not final at the deadline."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        while pending and (left := deadline - clock()) > 0:
            for event in await self._client.events(self._seq, timeout_s=min(left, _LONGEST_WAIT_S)):
                self._seq = event.seq
                if event.kind in TERMINAL and event.rollout_id is not None:
                    pending.discard(event.rollout_id)
        return pending

    async def _cancel(self, late: Collection[str]) -> None:
        for rollout_id in sorted(late):
            with contextlib.suppress(Refused):  # it ended just now
                await self._client.cancel(rollout_id, f"not done within trainer.step_timeout_s = {self._timeout_s:g}")


def check_batch(report: Report, max_invalid: float, what: str) -> None:
    """Raises TooManyDrops when more than the share `max_invalid` of a step's rollouts gives nothing to train. Groups
    without spread do not count: they are the policy's doing."""
    lost = {reason: count for reason, count in report.dropped.items() if reason is not Reason.NO_SPREAD}
    if sum(lost.values()) <= max_invalid * report.rollouts:
        return
    reason = max(lost, key=lambda name: lost[name])
    raise TooManyDrops(
        f"{what}: {sum(lost.values())} of {report.rollouts} rollouts give nothing to train, more than "
        f"trainer.max_invalid = {max_invalid:g} allows; most often {reason} ({lost[reason]}): docs/troubleshooting.md"
    )


def check_drops(rollouts: Sequence[Rollout], max_invalid: float, what: str) -> None:
    """Raises TooManyDrops when more than the share `max_invalid` of the rollouts has no reward."""
    lost = [rollout for rollout in rollouts if rollout.state is not RolloutState.SCORED]
    if len(lost) <= max_invalid * len(rollouts):
        return
    reason, count = Counter(r.reason.value if r.reason else r.state.value for r in lost).most_common(1)[0]
    example = next(r for r in lost if (r.reason.value if r.reason else r.state.value) == reason)
    raise TooManyDrops(
        f"{what}: {len(lost)} of {len(rollouts)} rollouts have no reward, more than trainer.max_invalid = "
        f"{max_invalid:g} allows; most often {reason} ({count}), for example {example.id}: "
        f"{example.message or 'no message'}"
    )
