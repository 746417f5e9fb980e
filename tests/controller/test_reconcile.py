"""The decisions of the controller, as a table and as properties of whole histories."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.controller.exit import Exit
from canter.controller.reconcile import (
    Adopt,
    Check,
    End,
    Fail,
    Forget,
    Grade,
    Limits,
    Queued,
    Score,
    Seen,
    Start,
    Stop,
    View,
    Wait,
    grader_fault,
    reconcile,
    retry_delay_s,
)
from canter.graders import GraderExit
from canter.types import RETRYABLE, Outcome, Reason, Rollout, RolloutState, Task

LIMITS = Limits(concurrency=2, retry_delay_s=1.0, timeout_reward=0.0, gradings=2)
OK = Exit(Outcome.EXITED, 0)
BAD = Exit(Outcome.EXITED, 3, "oops")
LATE = Exit(Outcome.TIMED_OUT)
LOST = Exit(Outcome.LOST, message="gone")
FAILED = Exit(Outcome.EXITED, int(GraderExit.FAILED), "not finite")


def rollout(state: RolloutState, attempt: int = 1, id: str = "r") -> Rollout:
    return Rollout(id, "g", Task("t", "p"), state=state, attempt=attempt)


def one(state: RolloutState, seen: Seen | None, attempt: int = 1) -> View:
    known = rollout(state, attempt)
    processes = {} if seen is None else {"r": seen}
    if state is RolloutState.QUEUED:
        return View(queued={"r": Queued(known)}, seen=processes)
    return View(open={"r": known}, seen=processes)


QUEUED, RUNNING, GRADING = RolloutState.QUEUED, RolloutState.RUNNING, RolloutState.GRADING
SCORED, CANCELLED = RolloutState.SCORED, RolloutState.CANCELLED

TABLE = [
    ("a new rollout starts at once", one(QUEUED, None, 0), [Start("r", 1)]),
    ("a failed attempt's successor waits", one(QUEUED, None, 2), [Wait(2.0)]),
    ("not before the old process is gone", one(QUEUED, Seen(1)), [Stop("r")]),
    ("nor before its folder is cleared", one(QUEUED, Seen(1, exit=LOST)), [Forget("r", 1)]),
    ("running, unknown here", one(RUNNING, None), [Adopt("r", 1)]),
    ("running", one(RUNNING, Seen(1)), []),
    ("ended", one(RUNNING, Seen(1, exit=OK)), [End("r", 1, OK)]),
    ("a bad exit code is the agent's own", one(RUNNING, Seen(1, exit=BAD)), [End("r", 1, BAD)]),
    ("so is a time-out", one(RUNNING, Seen(1, exit=LATE)), [End("r", 1, LATE)]),
    ("lost", one(RUNNING, Seen(1, exit=LOST)), [End("r", 1, LOST, Reason.NODE_LOST)]),
    (
        "killed by somebody else",
        one(RUNNING, Seen(1, exit=Exit(Outcome.KILLED))),
        [End("r", 1, Exit(Outcome.KILLED), Reason.NODE_LOST)],
    ),
    (
        "could not start",
        one(RUNNING, Seen(1, exit=Exit(Outcome.SPAWN_FAILED))),
        [End("r", 1, Exit(Outcome.SPAWN_FAILED), Reason.SPAWN_ERROR)],
    ),
    ("another attempt than the store's", one(RUNNING, Seen(1), attempt=2), [Stop("r")]),
    ("another attempt, gone", one(RUNNING, Seen(1, exit=OK), attempt=2), [Forget("r", 1)]),
    ("to be graded", one(GRADING, Seen(1, exit=OK)), [Grade("r", 1)]),
    ("to be graded, unknown here", one(GRADING, None), [Adopt("r", 1)]),
    ("timed out: the run's rule", one(GRADING, Seen(1, exit=LATE)), [Score("r", 1, 0.0)]),
    ("never graded while the harness lives", one(GRADING, Seen(1)), [Stop("r")]),
    ("nothing left to grade", one(GRADING, Seen(1, exit=LOST)), [Fail("r", 1, Reason.NODE_LOST, "gone")]),
    ("being graded", one(GRADING, Seen(1, 1)), []),
    ("graded, as it says", one(GRADING, Seen(1, 1, OK)), [Check("r")]),
    ("it said so, but it is not true", one(GRADING, Seen(1, 1, OK, checked=True)), [Grade("r", 1)]),
    ("grader failed: once more", one(GRADING, Seen(1, 1, FAILED)), [Grade("r", 1)]),
    ("and again", one(GRADING, Seen(1, 2, FAILED)), [Fail("r", 1, Reason.GRADER_ERROR, "not finite")]),
    (
        "without a reward",
        one(GRADING, Seen(1, 2, OK, checked=True)),
        [Fail("r", 1, Reason.GRADER_ERROR, "the grader ended without posting a reward")],
    ),
    (
        "grader too slow",
        one(GRADING, Seen(1, 2, LATE)),
        [Fail("r", 1, Reason.GRADER_TIMEOUT, "the grader took longer than grader.timeout_s")],
    ),
    (
        "grader lost with its machine",
        one(GRADING, Seen(1, 2, LOST)),
        [Fail("r", 1, Reason.NODE_LOST, "gone")],
    ),
    (
        "gateway away for too long",
        one(GRADING, Seen(1, 2, Exit(Outcome.EXITED, int(GraderExit.GATEWAY_UNAVAILABLE), "no route"))),
        [Fail("r", 1, Reason.GATEWAY_UNAVAILABLE, "no route")],
    ),
    (
        "no calls: nothing to try again",
        one(GRADING, Seen(1, 1, Exit(Outcome.EXITED, int(GraderExit.NO_CALLS), "no calls"))),
        [Fail("r", 1, Reason.NO_CALLS, "no calls")],
    ),
    ("scored", one(SCORED, Seen(1, 1, OK)), [Forget("r", 1)]),
    ("scored while it still runs", one(SCORED, Seen(1)), [Stop("r")]),
    ("cancelled", one(CANCELLED, Seen(1)), [Stop("r")]),
    ("cancelled, already told", one(CANCELLED, Seen(1, stopping=True)), []),
    ("over", one(CANCELLED, None), []),
    ("a process of no rollout", View(seen={"r": Seen(1)}), [Stop("r")]),
]


@pytest.mark.parametrize(("view", "actions"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(view: View, actions: list[object]) -> None:
    assert reconcile(view, now=0.5, limits=LIMITS) == actions


def test_only_what_is_not_the_graders_own_fault_runs_the_harness_again() -> None:
    own = [FAILED, LATE, OK, Exit(Outcome.EXITED, 1), Exit(Outcome.EXITED, -11), Exit(Outcome.SPAWN_FAILED)]
    away = Exit(Outcome.EXITED, int(GraderExit.GATEWAY_UNAVAILABLE))
    assert not {grader_fault(exit) for exit in own} & RETRYABLE
    assert {grader_fault(exit) for exit in (away, LOST, Exit(Outcome.KILLED))} <= RETRYABLE


@pytest.mark.parametrize("view", [row[1] for row in TABLE], ids=[row[0] for row in TABLE])
def test_busy_rollouts_are_left_alone(view: View) -> None:
    assert reconcile(dataclasses.replace(view, busy={"r"}), now=1e6, limits=LIMITS) == []


def test_starts_fill_the_free_slots_in_the_order_of_the_queue() -> None:
    queued = {id: Queued(rollout(QUEUED, 0, id)) for id in ("c", "a", "b")}
    running = {"x": rollout(RUNNING, id="x")}
    actions = reconcile(View(queued, running, {"x": Seen(1)}), 0.0, LIMITS)
    assert actions == [Start("c", 1)]
    assert reconcile(View(queued), 0.0, LIMITS) == [Start("c", 1), Start("a", 1)]


def test_a_delayed_rollout_does_not_hold_up_the_others() -> None:
    queued = {"a": Queued(rollout(QUEUED, 1, "a"), since=5.0), "b": Queued(rollout(QUEUED, 0, "b"))}
    assert reconcile(View(queued), 5.5, LIMITS) == [Start("b", 1), Wait(6.0)]
    assert reconcile(View(queued), 6.0, LIMITS) == [Start("a", 2), Start("b", 1)]


def test_without_a_rule_a_timed_out_attempt_is_graded() -> None:
    limits = replace(LIMITS, timeout_reward=None)
    assert reconcile(one(GRADING, Seen(1, exit=LATE)), 0.0, limits) == [Grade("r", 1)]


def test_delays_double_and_stay_finite() -> None:
    assert [retry_delay_s(n, LIMITS) for n in (0, 1, 2, 3)] == [0.0, 1.0, 2.0, 4.0]
    assert retry_delay_s(10**6, LIMITS) < 1e6


# -- whole histories: a world that carries actions out, in which everything that can go wrong does --

EXITS = [OK, BAD, LATE, LOST, Exit(Outcome.KILLED), Exit(Outcome.SPAWN_FAILED)]
GRADER_EXITS = [OK, FAILED, LATE, LOST, Exit(Outcome.EXITED, int(GraderExit.NO_CALLS))]


class World:
    """A store and the processes of a machine. `chance` decides what each process comes to."""

    def __init__(self, count: int, limits: Limits, chance: st.DataObject) -> None:
        self.limits = limits
        self.chance = chance
        self.now = 0.0
        self.rollouts = {f"r{i}": replace(rollout(QUEUED, 0, f"r{i}"), max_attempts=2) for i in range(count)}
        self.since = dict.fromkeys(self.rollouts, 0.0)
        self.seen: dict[str, Seen] = {}
        self.live: dict[str, tuple[int, int]] = {}
        """The truth: (attempt, grading) of the process of a rollout; `seen` forgets it in a restart."""
        self.dead: dict[str, tuple[int, Exit]] = {}

    def view(self) -> View:
        queued = {id: Queued(r, self.since[id]) for id, r in self.rollouts.items() if r.state is QUEUED}
        return View(queued, {id: r for id, r in self.rollouts.items() if id not in queued}, self.seen)

    def step(self) -> bool:
        """Carries out what `reconcile` says; False when nothing is left to do or to wait for."""
        actions = reconcile(self.view(), self.now, self.limits)
        for action in actions:
            self.carry_out(action)
            assert len(self.live) <= self.limits.concurrency
        if not actions and not self.live:
            return False
        if self.live and (not actions or self.chance.draw(st.booleans())):  # every process ends at some time
            self.end(self.chance.draw(st.sampled_from(sorted(self.live))))
        for action in actions:
            if isinstance(action, Wait):
                assert action.until > self.now
                self.now = action.until
        return True

    def end(self, id: str, exit: Exit | None = None) -> None:
        _, grading = self.live.pop(id)
        exit = exit or self.chance.draw(st.sampled_from(GRADER_EXITS if grading else EXITS))
        if grading and exit.clean and self.chance.draw(st.booleans()) and self.rollouts[id].state is GRADING:
            self.move(id, SCORED)
        self.dead[id] = (grading, exit)
        if id in self.seen:
            self.seen[id] = replace(self.seen[id], exit=exit)

    def move(self, id: str, state: RolloutState) -> None:
        assert not self.rollouts[id].state.terminal
        self.rollouts[id] = replace(self.rollouts[id], state=state)

    def fail(self, id: str, reason: Reason) -> None:
        again = reason in RETRYABLE and self.rollouts[id].attempt < self.rollouts[id].max_attempts
        self.move(id, QUEUED if again else RolloutState.INVALID)
        self.since[id] = self.now

    def carry_out(self, action: object) -> None:
        match action:
            case Start(id, attempt):
                assert id not in self.live, "two processes for one rollout"
                assert self.rollouts[id].attempt == attempt - 1
                self.rollouts[id] = replace(self.rollouts[id], state=RUNNING, attempt=attempt)
                self.dead.pop(id, None)
                if self.chance.draw(st.booleans()):  # else the controller died in between, and nothing was launched
                    self.live[id], self.seen[id] = (attempt, 0), Seen(attempt)
            case Adopt(id, attempt):
                if id in self.live:
                    assert self.live[id][0] == attempt
                    self.seen[id] = Seen(*self.live[id])
                else:
                    grading, exit = self.dead.get(id, (0, LOST))
                    self.seen[id] = Seen(attempt, grading, exit)
            case Stop(id):
                self.seen[id] = replace(self.seen[id], stopping=True)
                self.end(id, Exit(Outcome.KILLED))
            case End(id, _, _, reason):
                assert id not in self.live
                if reason is None:
                    self.move(id, GRADING)
                else:
                    self.fail(id, reason)
            case Grade(id, attempt):
                assert id not in self.live, "graded beside a live harness or grader"
                grading = self.seen[id].grading + 1
                assert grading <= self.limits.gradings
                self.live[id], self.seen[id] = (attempt, grading), Seen(attempt, grading)
            case Score(id):
                self.move(id, SCORED)
            case Check(id):
                self.seen[id] = replace(self.seen[id], checked=True)
            case Fail(id, _, reason):
                self.fail(id, reason)
            case Forget(id):
                assert id not in self.live
                del self.seen[id]


@given(st.data(), st.integers(0, 5), st.integers(1, 3))
def test_every_history_ends_with_every_rollout_over(chance: st.DataObject, count: int, concurrency: int) -> None:
    """Never more processes than slots, never two for one rollout, no grader beside a live harness, and an end, whatever
    exits, cancellations and restarts of the controller there are."""
    world = World(count, replace(LIMITS, concurrency=concurrency), chance)
    mishaps = 6
    for _ in range(2000):
        if not world.step():
            break
        if mishaps and count and chance.draw(st.integers(0, 9)) == 0:
            mishaps -= 1
            if chance.draw(st.booleans()):
                world.seen.clear()  # the controller has been restarted
            else:
                id = chance.draw(st.sampled_from(sorted(world.rollouts)))
                if not world.rollouts[id].state.terminal:
                    world.move(id, CANCELLED)
    else:
        pytest.fail("it does not end")
    assert all(r.state.terminal for r in world.rollouts.values())
    assert not world.live
