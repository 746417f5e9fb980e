"""Replies that an earlier gateway had committed and perhaps not sent: after kill -9 nobody knows.

A client that never got its reply asks again, with the same request. It gets the recorded one then, once; it would
otherwise be answered with a second sample, and the first would be a turn that nobody has read.
"""

from __future__ import annotations

from collections.abc import Sequence

from canter.gateway.dialects.routes import BY_NAME
from canter.gateway.http import json_object
from canter.gateway.identity import request_digest
from canter.types import Call, CallBodies, CallStatus


def find_unsent(calls: Sequence[tuple[Call, CallBodies]], since: float) -> dict[bytes, str]:
    """Request digest → id of the call, of those that were committed before `since` (Unix seconds) and that nothing goes
    on from. `calls` are all of an attempt in their order, with complete requests; of equal requests the last counts."""
    gone_on_from = {id_ for call, _ in calls for id_ in (call.parent_id, call.proposed_parent_id)}
    return {
        request_digest(BY_NAME[call.dialect].parse(json_object(bodies.request))): call.id
        for call, bodies in calls
        if call.status is CallStatus.OK and call.finished_at < since and call.id not in gone_on_from
    }
