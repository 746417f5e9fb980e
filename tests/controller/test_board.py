"""What the controller remembers of the store, whatever the order in which it hears of it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from canter.controller.board import Board
from canter.controller.reconcile import Queued, Seen
from canter.types import Event, Rollout, RolloutState, Task

NEW = Rollout("r", "g", Task("t", "p"))
HISTORY = [
    NEW,
    replace(NEW, state=RolloutState.RUNNING, attempt=1),
    replace(NEW, state=RolloutState.GRADING, attempt=1),
    replace(NEW, state=RolloutState.QUEUED, attempt=1),
    replace(NEW, state=RolloutState.RUNNING, attempt=2),
    replace(NEW, state=RolloutState.SCORED, attempt=2),
]


def event(rollout: Rollout, seq: int = 1) -> Event:
    return Event(seq, 0.0, rollout.state.value, rollout.id, rollout.attempt or None, {})


@given(st.lists(st.integers(0, len(HISTORY) - 1), min_size=1), st.booleans())
def test_it_only_ever_moves_forward(order: list[int], by_events: bool) -> None:
    board = Board()
    board.seen["r"] = Seen(1)  # so that the rollout stays when it is over
    board.take(HISTORY[order[0]], 0.0)
    for index in order[1:]:
        if by_events:
            assert board.hear([event(HISTORY[index])], 0.0) == []
        else:
            board.take(HISTORY[index], 0.0)
    assert board.rollout("r") == HISTORY[max(order)]
    view = board.view
    assert ("r" in view.queued) is (HISTORY[max(order)].state is RolloutState.QUEUED)
    assert ("r" in view.queued) is not ("r" in view.open)


def test_a_rollout_waits_from_when_it_was_first_seen_waiting() -> None:
    board = Board()
    board.take(HISTORY[0], 1.0)
    board.take(HISTORY[0], 2.0)
    assert board.view.queued == {"r": Queued(HISTORY[0], 1.0)}
    board.take(HISTORY[1], 3.0)
    board.take(HISTORY[3], 4.0)
    board.take(HISTORY[3], 5.0)
    assert board.view.queued == {"r": Queued(HISTORY[3], 4.0)}


def test_only_unknown_live_rollouts_have_to_be_read() -> None:
    board = Board()
    other = [replace(HISTORY[0], id="new"), replace(HISTORY[5], id="over"), replace(HISTORY[1], id="new")]
    calls = Event(9, 0.0, "call", "r", 1, {})
    assert board.hear([*map(event, other), calls, Event(10, 0.0, "version", None, None, {})], 0.0) == ["new"]


def test_what_is_over_is_forgotten_once_nothing_of_it_is_left() -> None:
    board = Board()
    board.take(HISTORY[1], 0.0)
    board.seen["r"] = Seen(2)
    board.busy.add("r")
    board.take(HISTORY[5], 0.0)
    board.settle("r")
    assert board.rollout("r") is not None
    del board.seen["r"]
    board.settle("r")
    assert board.rollout("r") is not None
    board.busy.clear()
    board.settle("r")
    assert board.rollout("r") is None
    board.take(HISTORY[5], 0.0)
    assert not board.view.open
