"""What the controller knows: the rollouts that are wanted and the processes that it sees. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from canter.controller.reconcile import Queued, Seen, View
from canter.types import Event, Rollout, RolloutState

_STATES = frozenset(state.value for state in RolloutState)
_ORDER = {RolloutState.RUNNING: 1, RolloutState.GRADING: 2, RolloutState.QUEUED: 3}


class Board:
    """Rollouts only ever move forward here: what was read before a change that is known already is ignored."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}
        self.busy: set[str] = set()
        self._queued: dict[str, Queued] = {}
        self._open: dict[str, Rollout] = {}

    @property
    def view(self) -> View:
        return View(self._queued, self._open, self.seen, self.busy)

    def rollout(self, rollout_id: str) -> Rollout | None:
        """The rollout as it is known, None if nothing is wanted of it."""
        waiting = self._queued.get(rollout_id)
        return waiting.rollout if waiting is not None else self._open.get(rollout_id)

    def running(self) -> list[Rollout]:
        return [rollout for rollout in self._open.values() if rollout.state is RolloutState.RUNNING]

    def take(self, rollout: Rollout, now: float) -> None:
        """Notes a rollout as the store has it; `now` in monotonic seconds."""
        known = self.rollout(rollout.id)
        if known is not None and _progress(rollout) < _progress(known):
            return
        if rollout.state is RolloutState.QUEUED:
            self._open.pop(rollout.id, None)
            if known is None or _progress(rollout) > _progress(known):
                self._queued[rollout.id] = Queued(rollout, now)
        else:
            self._queued.pop(rollout.id, None)
            self._open[rollout.id] = rollout
            self.settle(rollout.id)

    def hear(self, events: Sequence[Event], now: float) -> list[str]:
        """Notes the changes of state that events tell of; returns the rollouts that have to be read for more."""
        unknown: dict[str, None] = {}
        for event in events:
            if event.rollout_id is None or event.kind not in _STATES:
                continue
            known = self.rollout(event.rollout_id)
            if known is not None:
                self.take(replace(known, state=RolloutState(event.kind), attempt=event.attempt or 0), now)
            elif not RolloutState(event.kind).terminal:
                unknown[event.rollout_id] = None
        return list(unknown)

    def drop(self, rollout_id: str) -> None:
        """The store knows no such rollout."""
        self._queued.pop(rollout_id, None)
        self._open.pop(rollout_id, None)

    def settle(self, rollout_id: str) -> None:
        """Lets a rollout go that has ended and has nothing left here."""
        rollout = self._open.get(rollout_id)
        if (
            rollout is not None
            and rollout.state.terminal
            and rollout_id not in self.seen
            and rollout_id not in self.busy
        ):
            del self._open[rollout_id]


def _progress(rollout: Rollout) -> tuple[int, int]:
    """Grows with every change of state: attempt after attempt, each running, grading, then queued again or over."""
    return rollout.attempt, _ORDER.get(rollout.state, 4)
