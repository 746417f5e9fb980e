"""The lifecycle on arbitrary sequences of transitions, however late, wrong or repeated they are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from canter.errors import Refused
from canter.store.lifecycle import (
    Cancel,
    Change,
    End,
    Invalidate,
    Score,
    SetProcess,
    Start,
    Transition,
    apply,
    check_call,
    check_grading,
    live_keys,
)
from canter.types import RETRYABLE, Attempt, KeyKind, Outcome, Reason, Reward, Rollout, RolloutState, Task

numbers = st.integers(0, 4)
reasons = st.sampled_from(Reason)
transitions: st.SearchStrategy[Transition] = st.one_of(
    st.builds(Start, numbers),
    st.builds(SetProcess, numbers, st.just({"pid": 1})),
    st.builds(End, numbers, st.sampled_from(Outcome), reason=st.none() | reasons),
    st.builds(Score, st.builds(Reward, st.just("r"), numbers, st.floats(-1, 1))),
    st.builds(Invalidate, numbers, reasons, st.just("why")),
    st.builds(Cancel),
)


@dataclass
class History:
    """A rollout driven through transitions; `changes` are those that were allowed, `refused` the others."""

    rollout: Rollout
    attempts: dict[int, Attempt] = field(default_factory=dict)
    changes: list[tuple[Rollout, Transition, Change]] = field(default_factory=list)
    refused: list[tuple[Rollout, Transition]] = field(default_factory=list)

    def drive(self, transition: Transition, at: float) -> None:
        before, attempt = self.rollout, self.attempts.get(self.rollout.attempt)
        try:
            change = apply(before, attempt, transition, at)
        except Refused:
            self.refused.append((before, transition))
            return
        self.rollout = change.rollout
        if change.attempt is not None:
            self.attempts[change.attempt.number] = change.attempt
        self.changes.append((before, transition, change))


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Random transitions, most of them of the attempt that could take them, so that lives get long."""
    history = History(Rollout("r", "g", Task("t", "p"), max_attempts=draw(st.integers(1, 4))))
    for at in range(draw(st.integers(1, 15))):
        transition = draw(transitions)
        if draw(st.booleans()) or draw(st.booleans()):
            transition = _aimed(transition, history.rollout)
        history.drive(transition, float(at))
    return history


def _aimed(transition: Transition, rollout: Rollout) -> Transition:
    match transition:
        case Start():
            return Start(rollout.attempt + 1)
        case Score(reward):
            return Score(dataclasses.replace(reward, attempt=rollout.attempt))
        case Cancel():
            return transition
        case _:
            return dataclasses.replace(transition, number=rollout.attempt)


@given(histories())
def test_nothing_leaves_a_terminal_state(history: History) -> None:
    assert not any(before.state.terminal for before, _, _ in history.changes)
    if history.rollout.state.terminal:
        end = history.rollout
        for transition in (Start(end.attempt + 1), Cancel(), Invalidate(end.attempt, Reason.NODE_LOST)):
            history.drive(transition, 99.0)
        assert history.rollout == end


@given(histories())
def test_every_write_from_another_attempt_than_the_current_one_is_refused(history: History) -> None:
    for before, transition, change in history.changes:
        if isinstance(transition, Start):
            assert transition.number == before.attempt + 1 == change.rollout.attempt
        elif not isinstance(transition, Cancel):
            assert transition.number == before.attempt == change.rollout.attempt
    rollout = history.rollout
    for stale in range(1, rollout.attempt):
        for late in (End(stale, Outcome.EXITED), Score(Reward("r", stale, 1.0)), Invalidate(stale, Reason.NODE_LOST)):
            history.drive(late, 99.0)
    assert history.rollout == rollout


@given(histories())
def test_a_call_is_taken_exactly_while_its_attempt_runs(history: History) -> None:
    rollout = history.rollout
    for number in range(6):
        try:
            check_call(rollout, number)
            taken = True
        except Refused:
            taken = False
        assert taken == (rollout.state is RolloutState.RUNNING and number == rollout.attempt)
        assert not taken or not history.attempts[number].sealed


@given(histories())
def test_a_graders_key_is_made_exactly_while_its_attempt_is_graded(history: History) -> None:
    rollout = history.rollout
    for number in range(6):
        try:
            check_grading(rollout, number)
            made = True
        except Refused:
            made = False
        assert made == (rollout.state is RolloutState.GRADING and number == rollout.attempt)
        assert not made or history.attempts[number].sealed


@given(histories())
def test_a_failure_queues_again_exactly_while_it_is_retryable_and_attempts_are_left(history: History) -> None:
    for before, transition, change in history.changes:
        reason = transition.reason if isinstance(transition, End | Invalidate) else None
        if reason is None:
            assert change.rollout.state not in (RolloutState.QUEUED, RolloutState.INVALID)
            continue
        spared = reason is Reason.INTERRUPTED  # it does not count: there is one attempt more
        assert change.rollout.max_attempts == before.max_attempts + spared
        again = spared or (reason in RETRYABLE and before.attempt < before.max_attempts)
        assert change.rollout.state is (RolloutState.QUEUED if again else RolloutState.INVALID)
        assert change.attempt is not None
        assert change.attempt.reason is reason
    assert history.rollout.attempt <= history.rollout.max_attempts


@given(histories())
def test_only_a_scored_rollout_has_a_reward_and_only_an_unscored_end_a_reason(history: History) -> None:
    for _, _, change in history.changes:
        scored = change.rollout.state is RolloutState.SCORED
        assert (change.rollout.reward is not None) == scored == (change.reward is not None)
        assert (change.rollout.reason is not None) == (change.rollout.state.terminal and not scored)


@given(histories())
def test_keys_end_with_what_they_are_for(history: History) -> None:
    live: frozenset[KeyKind] = frozenset()
    for _, transition, change in history.changes:
        live = frozenset({KeyKind.AGENT}) if isinstance(transition, Start) else live - change.revoked
        if change.rollout.state is RolloutState.GRADING:
            live |= {KeyKind.GRADER}  # as soon as the controller asks for it
        assert live == live_keys(change.rollout.state)
        assert (KeyKind.AGENT in live) == (change.rollout.state is RolloutState.RUNNING)
        sealed = change.attempt is None or change.attempt.sealed
        assert sealed == (KeyKind.AGENT not in live)


@given(histories())
def test_every_change_of_state_has_its_event_and_every_other_attempt_is_over(history: History) -> None:
    for before, _, change in history.changes:
        moved = before.state is not change.rollout.state
        assert change.event.kind == (change.rollout.state.value if moved else "process")
        assert change.event.rollout_id == "r"
    for number, attempt in history.attempts.items():
        running = number == history.rollout.attempt and history.rollout.state is RolloutState.RUNNING
        assert (attempt.ended_at is None) == running


@given(histories())
def test_a_refusal_names_the_rollout_its_state_and_the_attempt(history: History) -> None:
    for before, transition in history.refused:
        try:
            apply(before, None, transition, 0.0)
        except Refused as refusal:
            message = str(refusal)
        assert all(part in message for part in (type(transition).__name__, "rollout r", before.state, "attempt"))
        assert str(before.attempt) in message
