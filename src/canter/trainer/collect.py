"""Getting rollouts done: ask for them, wait on the store's events, cancel the late ones, refuse a step gone bad."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from canter.errors import Refused, TooManyDrops
from canter.samples import Report
from canter.types import Call, Event, PolicyVersion, Reason, Rollout, RolloutState

log = logging.getLogger(__name__)

_AT_ONCE = 256
"""Rollouts per request; keeps the body small."""
_LONGEST_WAIT_S = 30.0
SIGN_S = 30.0
"""Before the first sign of life while rollouts run; the wait doubles with each, up to `LONGEST_SIGN_S`."""
LONGEST_SIGN_S = 300.0

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
    """Waits for rollouts. Reads the event log from its start once, then goes on from where it was.

    `say` takes the signs of life: how many rollouts are done, the first after `sign_s` seconds.
    """

    def __init__(
        self,
        client: Rollouts,
        *,
        timeout_s: float,
        max_invalid: float,
        say: Callable[[str], None] = log.info,
        sign_s: float = SIGN_S,
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._max_invalid = max_invalid
        self._say = say
        self._sign_s = sign_s
        self._seq = 0

    async def collect(self, wanted: Sequence[Rollout], what: str) -> list[Rollout]:
        """These rollouts, all in a final state, in order of id. Those that exist already are used as they are.

        After `timeout_s` the rest is cancelled (reason `cancelled`). Raises TooManyDrops, naming `what`.
        """
        pending: set[str] = set()
        for start in range(0, len(wanted), _AT_ONCE):
            known = await self._client.create_rollouts(wanted[start : start + _AT_ONCE])
            pending |= {rollout.id for rollout in known if not rollout.state.terminal}
        late = await self._wait(pending, len(wanted), what)
        if late:
            log.warning("%s: %d rollouts are late and cancelled: %s", what, len(late), ", ".join(sorted(late)[:5]))
            await self._cancel(late)
        rollouts = await self._client.rollouts(ids=[rollout.id for rollout in wanted], limit=len(wanted))
        check_drops(rollouts, self._max_invalid, what)
        return rollouts

    async def _wait(self, pending: set[str], wanted: int, what: str) -> set[str]:
        """Returns those that are not final at the deadline."""
        clock = asyncio.get_running_loop().time
        start = clock()
        deadline = start + self._timeout_s
        gap, sign = self._sign_s, start + self._sign_s
        while pending and (left := deadline - clock()) > 0:
            wait = max(0.0, min(left, _LONGEST_WAIT_S, sign - clock()))
            for event in await self._client.events(self._seq, timeout_s=wait):
                self._seq = event.seq
                if event.kind in TERMINAL and event.rollout_id is not None:
                    pending.discard(event.rollout_id)
            if pending and clock() >= sign:
                self._say(f"{what}: {wanted - len(pending)} of {wanted} rollouts done after {clock() - start:.0f} s")
                gap = min(2 * gap, LONGEST_SIGN_S)
                sign = clock() + gap
        return pending

    async def _cancel(self, late: Collection[str]) -> None:
        for rollout_id in sorted(late):
            with contextlib.suppress(Refused):  # it ended just now
                await self._client.cancel(rollout_id, f"not done within trainer.step_timeout_s = {self._timeout_s:g}")


def check_batch(
    report: Report, max_invalid: float, what: str, rollouts: Sequence[Rollout] = (), calls: Sequence[Call] = ()
) -> None:
    """Raises TooManyDrops when more than the share `max_invalid` of a step's rollouts gives nothing to train. Groups
    without spread do not count: they are the policy's doing. `rollouts` and `calls` are where the message's example is
    looked for."""
    lost = {reason: count for reason, count in report.dropped.items() if reason is not Reason.NO_SPREAD}
    if sum(lost.values()) <= max_invalid * report.rollouts:
        return
    reason = max(lost, key=lambda name: lost[name])
    example = example_of(reason, rollouts, calls)
    raise TooManyDrops(
        f"{what}: {sum(lost.values())} of {report.rollouts} rollouts give nothing to train, more than "
        f"trainer.max_invalid = {max_invalid:g} allows; most often {reason} ({lost[reason]}){example} "
        "(docs/troubleshooting.md)"
    )


def example_of(reason: Reason, rollouts: Sequence[Rollout], calls: Sequence[Call]) -> str:
    """What an error says of one rollout that was lost for this reason; nothing where none of them surely was."""
    with_calls = {call.rollout_id for call in calls}
    marked = {call.rollout_id for call in calls if call.untrainable is reason}
    for rollout in rollouts:
        if rollout.reason is reason or rollout.id in marked:
            return f", for example {rollout.id}{': ' + rollout.message if rollout.message else ''}"
        if reason is Reason.NO_CALLS and rollout.state is RolloutState.SCORED and rollout.id not in with_calls:
            return (
                f", for example {rollout.id}: its harness ended and had never called the model; it must take its "
                "endpoint from OPENAI_BASE_URL or ANTHROPIC_BASE_URL, which `canter harness check FILE` tries"
            )
    return ""


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
