"""What to do next, as a function of what the store wants and what runs here. Pure: no clock, no I/O.

`reconcile` is level-triggered: it looks at the whole state, never at what changed, so a missed event or a restart
costs nothing but time. An attempt holds its slot of `limits.concurrency` from its start until it is graded.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from canter.controller.exit import Exit
from canter.graders import GraderExit
from canter.types import Outcome, Reason, Rollout, RolloutState


@dataclass(frozen=True, slots=True)
class Limits:
    """`gradings` is how often a failing grader runs on one attempt before the rollout is given up. The harness, not at
    fault, is run again only where the gateway or the machine was."""

    concurrency: int
    retry_delay_s: float = 1.0
    timeout_reward: float | None = 0.0
    gradings: int = 2


@dataclass(frozen=True, slots=True)
class Queued:
    """A rollout that waits, since `since` by this controller's own monotonic clock (seconds)."""

    rollout: Rollout
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The process of a rollout's attempt: its harness (`grading` 0) or the `grading`-th run of its grader.

    It lives while `exit` is None. `stopping`: it has been asked to end. `checked`: the rollout was read from the store
    after the process ended.
    """

    attempt: int
    grading: int = 0
    exit: Exit | None = None
    stopping: bool = False
    checked: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """All that `reconcile` looks at. `queued` and `open` (running, grading, or ended with a process left) are what the
    store wants; `seen` is what runs here; `busy` are the rollouts that an action is under way for."""

    queued: Mapping[str, Queued] = field(default_factory=dict)
    open: Mapping[str, Rollout] = field(default_factory=dict)
    seen: Mapping[str, Seen] = field(default_factory=dict)
    busy: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Start:
    """Begin attempt `attempt` and launch its harness."""

    rollout_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """An attempt that nothing is known of here: look for its process, or for how it ended."""

    rollout_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Nobody wants this process any more: kill its tree."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class End:
    """The harness has ended; with a reason, it has failed."""

    rollout_id: str
    attempt: int
    exit: Exit
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The run's own rule gives the reward of a time-out."""

    rollout_id: str
    attempt: int
    value: float


@dataclass(frozen=True, slots=True)
class Grade:
    """Run the grader."""

    rollout_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Check:
    """The grader says that it has posted the reward: read the rollout."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The attempt cannot be graded."""

    rollout_id: str
    attempt: int
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The process is gone and nothing is left to do for its attempt: clear its folder."""

    rollout_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again at `until` (monotonic seconds), if nothing happens before."""

    until: float


Action = Start | Adopt | Stop | End | Score | Grade | Check | Fail | Forget | Wait


def reconcile(view: View, now: float, limits: Limits) -> list[Action]:
    """The actions that bring what runs closer to what is wanted; at most one for each rollout, none for busy ones."""
    actions: list[Action] = []
    for rollout_id in sorted({*view.open, *view.seen} - view.busy):
        rollout = view.open.get(rollout_id)
        seen = view.seen.get(rollout_id)
        action = _clear(rollout_id, seen) if rollout is None else _advance(rollout, seen, limits)
        if action is not None:
            actions.append(action)
    return actions + _starts(view, now, limits)


def _starts(view: View, now: float, limits: Limits) -> list[Action]:
    """Starts for the free slots, in the order of the queue; a failed attempt's successor only after its delay."""
    taken = {*view.seen, *view.busy, *(i for i, rollout in view.open.items() if not rollout.state.terminal)}
    free = limits.concurrency - len(taken)
    starts: list[Action] = []
    soonest: float | None = None
    for rollout_id, queued in view.queued.items():
        if free <= 0:
            break
        if rollout_id in taken:
            continue
        due = queued.since + retry_delay_s(queued.rollout.attempt, limits)
        if due > now:
            soonest = due if soonest is None else min(soonest, due)
            continue
        starts.append(Start(rollout_id, queued.rollout.attempt + 1))
        free -= 1
    return starts if soonest is None else [*starts, Wait(soonest)]


def retry_delay_s(attempts: int, limits: Limits) -> float:
    """The wait before the next attempt after `attempts` have failed: none, then doubling."""
    return 0.0 if attempts == 0 else limits.retry_delay_s * 2.0 ** min(attempts - 1, 16)


def _advance(rollout: Rollout, seen: Seen | None, limits: Limits) -> Action | None:
    """The next step of a rollout that the store holds open."""
    if rollout.state.terminal or (seen is not None and seen.attempt != rollout.attempt):
        return _clear(rollout.id, seen)
    if seen is None:
        return Adopt(rollout.id, rollout.attempt)
    if rollout.state is RolloutState.RUNNING and seen.grading == 0:
        return None if seen.exit is None else End(rollout.id, rollout.attempt, seen.exit, _blame(seen.exit))
    if rollout.state is RolloutState.GRADING:
        return _grade(rollout, seen, limits)
    return _clear(rollout.id, seen)


def _clear(rollout_id: str, seen: Seen | None) -> Action | None:
    """Gets rid of a process that nothing is wanted of."""
    if seen is None:
        return None
    if seen.exit is not None:
        return Forget(rollout_id, seen.attempt)
    return None if seen.stopping else Stop(rollout_id)


def _blame(exit: Exit) -> Reason | None:
    """The infrastructure's fault, if it was one. A bad exit code and a time-out are the harness's own doing."""
    match exit.outcome:
        case Outcome.SPAWN_FAILED:
            return Reason.SPAWN_ERROR
        case Outcome.LOST | Outcome.KILLED:  # not by us: then nothing more would be wanted of it
            return Reason.NODE_LOST
    return None


def _grade(rollout: Rollout, seen: Seen, limits: Limits) -> Action | None:
    """The next step of a rollout whose harness has ended."""
    if seen.exit is None:  # a harness has no business to live any more
        return None if seen.grading or seen.stopping else Stop(rollout.id)
    if seen.grading == 0:
        if seen.exit.outcome is Outcome.TIMED_OUT and limits.timeout_reward is not None:
            return Score(rollout.id, rollout.attempt, limits.timeout_reward)
        if seen.exit.outcome is Outcome.LOST:
            return Fail(rollout.id, rollout.attempt, Reason.NODE_LOST, seen.exit.message)
        return Grade(rollout.id, rollout.attempt)
    if seen.exit.clean and not seen.checked:
        return Check(rollout.id)
    reason = grader_fault(seen.exit)
    if seen.grading < limits.gradings and reason is not Reason.NO_CALLS:
        return Grade(rollout.id, rollout.attempt)
    return Fail(rollout.id, rollout.attempt, reason, grader_message(seen.exit))


def grader_fault(exit: Exit) -> Reason:
    """Why a grader that ended without a reward did so."""
    if exit.outcome is Outcome.TIMED_OUT:
        return Reason.GRADER_TIMEOUT
    if exit.outcome in (Outcome.LOST, Outcome.KILLED):  # with its keeper, or by somebody else
        return Reason.NODE_LOST
    if exit.outcome is Outcome.EXITED and exit.exit_code == GraderExit.NO_CALLS:
        return Reason.NO_CALLS
    if exit.outcome is Outcome.EXITED and exit.exit_code == GraderExit.GATEWAY_UNAVAILABLE:
        return Reason.GATEWAY_UNAVAILABLE
    return Reason.GRADER_ERROR


def grader_message(exit: Exit) -> str:
    """The message of a rollout that its grader could not grade."""
    if exit.outcome is Outcome.TIMED_OUT:
        return "the grader took longer than grader.timeout_s"
    if exit.clean:
        return "the grader ended without posting a reward"
    return exit.message or f"the grader ended with exit code {exit.exit_code}"
