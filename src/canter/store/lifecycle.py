"""The life of a rollout as one table and a pure function: no clock, no I/O.

    queued ── Start ──> running ── End ──> grading ── Score ──> scored
       ^                   │                  │
       └── retryable, attempts left ──────────┤
                           └── Invalidate, End with a reason ──> invalid
    any state that is not final ── Cancel ──> cancelled

Every transition but `Cancel` carries an attempt number. One from an attempt that is not the current one, or from a
state that `FROM` does not list, is `Refused`; nothing leaves a final state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from canter.errors import Refused
from canter.types import RETRYABLE, Attempt, KeyKind, Outcome, Reason, Reward, Rollout, RolloutState


@dataclass(frozen=True, slots=True)
class Start:
    """Begins attempt `number`, the last one plus 1."""

    number: int


@dataclass(frozen=True, slots=True)
class SetProcess:
    """Notes where attempt `number` runs."""

    number: int
    process: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """The harness of attempt `number` has ended; with a `reason`, it has failed."""

    number: int
    outcome: Outcome
    exit_code: int | None = None
    reason: Reason | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of an attempt is known."""

    reward: Reward

    @property
    def number(self) -> int:
        return self.reward.attempt


@dataclass(frozen=True, slots=True)
class Invalidate:
    """Attempt `number` cannot be scored."""

    number: int
    reason: Reason
    message: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants the rollout any more."""

    message: str = ""


Transition = Start | SetProcess | End | Score | Invalidate | Cancel

_RUNNING = frozenset({RolloutState.RUNNING})
_OPEN = frozenset({RolloutState.RUNNING, RolloutState.GRADING})

FROM: Mapping[type[Transition], frozenset[RolloutState]] = {
    Start: frozenset({RolloutState.QUEUED}),
    SetProcess: _OPEN,
    End: _RUNNING,
    Score: _OPEN,
    Invalidate: _OPEN,
    Cancel: _OPEN | {RolloutState.QUEUED},
}
"""The states that each transition may leave."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An event before the store has numbered it."""

    kind: str
    rollout_id: str | None = None
    attempt: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """What a transition makes: to be committed together, or not at all.

    `revoked` are the kinds of the attempt's keys that end here.
    """

    rollout: Rollout
    attempt: Attempt | None
    event: Draft
    reward: Reward | None = None
    revoked: frozenset[KeyKind] = frozenset()


def apply(rollout: Rollout, attempt: Attempt | None, transition: Transition, at: float) -> Change:
    """The change that `transition` makes at time `at` (Unix seconds).

    `attempt` is the rollout's current attempt, `None` before the first. Raises `Refused`.
    """
    check(rollout, transition)
    if isinstance(transition, Start):
        started = replace(rollout, state=RolloutState.RUNNING, attempt=transition.number, message="", updated_at=at)
        return _move(rollout, started, Attempt(rollout.id, transition.number, started_at=at))
    if isinstance(transition, Cancel):
        return _cancel(rollout, attempt, transition.message, at)
    if attempt is None or attempt.number != rollout.attempt:
        raise ValueError(f"rollout {rollout.id} is at attempt {rollout.attempt}, but was given {attempt}")
    match transition:
        case SetProcess(number, process):
            return Change(rollout, replace(attempt, process=process), Draft("process", rollout.id, number))
        case Score(reward):
            scored = replace(rollout, state=RolloutState.SCORED, reward=reward.value, updated_at=at)
            change = _move(rollout, scored, _sealed(attempt, at), reward=reward.value, source=reward.source)
            return replace(change, reward=reward)
        case Invalidate(_, reason, message):
            return _fail(rollout, _sealed(attempt, at), reason, message, at)
        case End(_, outcome, exit_code, reason, message):
            ended = replace(_sealed(attempt, at), outcome=outcome, exit_code=exit_code, message=message)
            if reason is not None:
                return _fail(rollout, ended, reason, message, at)
            grading = replace(rollout, state=RolloutState.GRADING, updated_at=at)
            return _move(rollout, grading, ended, outcome=outcome.value)


def check(rollout: Rollout, transition: Transition) -> None:
    """Raises `Refused` unless `FROM` and the attempt number allow the transition."""
    verb = type(transition).__name__
    if rollout.state.terminal:
        raise Refused(f"{verb}: rollout {rollout.id} is {rollout.state} (attempt {rollout.attempt}), which is final")
    if isinstance(transition, Start):
        if transition.number != rollout.attempt + 1:
            raise Refused(
                f"{verb}: attempt {transition.number} of rollout {rollout.id} cannot start: attempt {rollout.attempt} "
                f"is the last ({rollout.state}), the next is {rollout.attempt + 1}"
            )
    elif not isinstance(transition, Cancel):
        check_current(rollout, transition.number, verb)
    if rollout.state not in FROM[type(transition)]:
        allowed = " or ".join(sorted(FROM[type(transition)]))
        raise Refused(
            f"{verb}: rollout {rollout.id} is {rollout.state} (attempt {rollout.attempt}); this is only possible "
            f"while it is {allowed}"
        )


def check_current(rollout: Rollout, number: int, verb: str) -> None:
    """Raises `Refused` unless `number` is the rollout's current attempt."""
    if number < rollout.attempt:
        raise Refused(
            f"{verb}: attempt {number} of rollout {rollout.id} is superseded by attempt {rollout.attempt} "
            f"({rollout.state})"
        )
    if number > rollout.attempt:
        raise Refused(
            f"{verb}: attempt {number} of rollout {rollout.id} has not started; attempt {rollout.attempt} is the last "
            f"({rollout.state})"
        )


def check_call(rollout: Rollout, number: int) -> None:
    """Raises `Refused` unless attempt `number` may still call the model: it is current and not sealed."""
    check_current(rollout, number, "call")
    if rollout.state is not RolloutState.RUNNING:
        raise Refused(
            f"call: attempt {number} of rollout {rollout.id} is sealed: the rollout is {rollout.state}, and calls are "
            "only possible while it is running"
        )


def check_grading(rollout: Rollout, number: int) -> None:
    """Raises `Refused` unless attempt `number` may have a grader key: it is current and graded."""
    check_current(rollout, number, "grader key")
    if rollout.state is not RolloutState.GRADING:
        raise Refused(
            f"grader key: attempt {number} of rollout {rollout.id} is not graded: the rollout is {rollout.state}, and "
            "its grader has a key only while it is grading"
        )


def live_keys(state: RolloutState) -> frozenset[KeyKind]:
    """The kinds of key that the current attempt may have in this state."""
    if state is RolloutState.RUNNING:
        return frozenset({KeyKind.AGENT})
    if state is RolloutState.GRADING:
        return frozenset({KeyKind.GRADER})
    return frozenset()


def _sealed(attempt: Attempt, at: float) -> Attempt:
    return replace(attempt, sealed=True, ended_at=at if attempt.ended_at is None else attempt.ended_at)


def _cancel(rollout: Rollout, attempt: Attempt | None, message: str, at: float) -> Change:
    after = replace(rollout, state=RolloutState.CANCELLED, reason=Reason.CANCELLED, message=message, updated_at=at)
    if attempt is not None and rollout.state is not RolloutState.QUEUED:  # a failed attempt keeps its own reason
        attempt = replace(_sealed(attempt, at), reason=Reason.CANCELLED, message=message)
    return _move(rollout, after, attempt, reason=Reason.CANCELLED.value)


def _fail(rollout: Rollout, attempt: Attempt, reason: Reason, message: str, at: float) -> Change:
    """Back to the queue while the reason is retryable and attempts are left, else invalid; never a reward.

    An attempt that the end of the run interrupted does not count: the rollout may have one more.
    """
    attempt = replace(attempt, reason=reason, message=message)
    if reason is Reason.INTERRUPTED:
        rollout = replace(rollout, max_attempts=rollout.max_attempts + 1)
    if reason in RETRYABLE and rollout.attempt < rollout.max_attempts:
        after = replace(rollout, state=RolloutState.QUEUED, message=message, updated_at=at)
    else:
        after = replace(rollout, state=RolloutState.INVALID, reason=reason, message=message, updated_at=at)
    return _move(rollout, after, attempt, reason=reason.value)


def _move(before: Rollout, after: Rollout, attempt: Attempt | None, **data: Any) -> Change:
    """The change of state `before` → `after`, with its event and the keys that end."""
    event = Draft(after.state.value, after.id, after.attempt or None, {"from": before.state.value, **data})
    return Change(after, attempt, event, revoked=live_keys(before.state) - live_keys(after.state))
