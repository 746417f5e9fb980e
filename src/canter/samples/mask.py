"""Which calls may be trained, and if not, why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from canter.types import Call, CallStatus, Reason, VersionSpan


def whole(call: Call) -> int:
    """Length of a call's prompt and reply together: where a call that extends it starts."""
    return call.prompt_len + len(call.sampled)


def untrained(calls: Iterable[Call], labels: Collection[str] | None = None) -> dict[str, Reason]:
    """The calls of one attempt that may not be trained, by id, with the reason.

    Bad data is never an error here. `labels` are the call labels that are trained, `None` for all. A call is
    `ORPHANED` if its prompt cannot be rebuilt: its parent is missing, is orphaned itself, or is shorter than the
    prefix.
    """
    calls = list(calls)
    sound = _sound(calls)
    judged = ((call.id, why_untrained(call, labels) if call.id in sound else Reason.ORPHANED) for call in calls)
    return {call_id: reason for call_id, reason in judged if reason is not None}


def why_untrained(call: Call, labels: Collection[str] | None = None) -> Reason | None:
    """The reason for which this call, seen alone, may not be trained; `None` if it may."""
    if call.untrainable is not None:
        return call.untrainable
    if call.status is CallStatus.CANCELLED:
        return Reason.CLIENT_GONE
    if call.status is not CallStatus.OK:
        return Reason.ENGINE_UNAVAILABLE
    if labels is not None and call.label not in labels:
        return Reason.LABEL_EXCLUDED
    if len(call.logprobs) != len(call.sampled):
        return Reason.LENGTH_MISMATCH if len(call.logprobs) else Reason.MISSING_LOGPROBS
    if not np.isfinite(call.logprobs).all():
        return Reason.NOT_FINITE
    if not covers(call.versions, len(call.sampled)):
        return Reason.MISSING_VERSION
    return None


def covers(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether the spans name exactly one policy version (>= 0) for each of `length` tokens."""
    end = 0
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if span.start != end or span.end < span.start or span.version < 0:
            return False
        end = span.end
    return end == length


def _sound(calls: Sequence[Call]) -> set[str]:
    """The ids of the calls whose prompts can be rebuilt: found from the roots down, so a circle is never sound."""
    children: dict[str, list[Call]] = defaultdict(list)
    ready: list[Call] = []
    for call in calls:
        if call.prefix_len == 0:
            ready.append(call)
        elif call.prefix_len > 0 and call.parent_id is not None:
            children[call.parent_id].append(call)
    sound: set[str] = set()
    while ready:
        call = ready.pop()
        sound.add(call.id)
        ready.extend(child for child in children.pop(call.id, ()) if child.prefix_len <= whole(call))
    return sound
