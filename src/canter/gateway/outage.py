"""Whether a harness that failed may have failed for want of the model: then that is no verdict on the agent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from canter.types import Attempt, Call, CallStatus, Outcome, Reason


@dataclass(frozen=True, slots=True)
class Outage:
    """Why an attempt is made again rather than graded."""

    reason: Reason
    message: str


class Uptime:
    """`since`: from when on (Unix seconds) this gateway has been there without a break."""

    def __init__(self) -> None:
        self.since = time.time()

    def interrupted(self) -> None:
        """It could not do its work just now, and could perhaps not even record that."""
        self.since = time.time()


def outage(
    attempt: Attempt, outcome: Outcome, exit_code: int | None, calls: Sequence[Call], up_since: float
) -> Outage | None:
    """What was missing while the harness of `attempt` ran, `None` where its end is its own doing.

    A harness that succeeded, with at least one of its `calls` answered, has coped; one that was killed or ran out of
    time did not end on its own. Any other may have given up because a call was answered with a 5xx (such calls are
    recorded as errors), or because nobody answered: the gateway was away until `up_since`. One whose last call came
    after all that, and was answered, has coped, too. Pure.
    """
    answered = any(call.status is CallStatus.OK for call in calls)
    if outcome is not Outcome.EXITED or (exit_code == 0 and answered):
        return None
    ended = f"the harness ended with exit code {exit_code}"
    failures = [call for call in calls if call.status is CallStatus.ERROR]
    trouble_until = max([up_since, *(call.finished_at for call in failures)])
    last = max(calls, key=lambda call: call.started_at, default=None)
    if last is not None and last.status is CallStatus.OK and last.started_at > trouble_until:
        return None
    failed = Counter(call.untrainable for call in failures)
    if failed:
        engine = Reason.ENGINE_UNAVAILABLE in failed
        what = f"{failed.total()} of its model calls failed: the {'engine' if engine else 'gateway'} was not available"
        return Outage(Reason.ENGINE_UNAVAILABLE if engine else Reason.GATEWAY_UNAVAILABLE, f"{ended} after {what}")
    if attempt.started_at < up_since:
        back = time.strftime("%H:%M:%S", time.gmtime(up_since))
        return Outage(Reason.GATEWAY_UNAVAILABLE, f"{ended}, and the gateway was away while it ran (until {back} UTC)")
    return None
