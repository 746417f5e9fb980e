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


class Unsent:
    """Such replies of one attempt, each to be taken once. Of equal requests (two sub-agents with one task) the last
    is taken first: it is the one that is least likely to have arrived."""

    def __init__(self, calls: Sequence[tuple[Call, CallBodies]] = (), since: float = 0.0) -> None:
        """`calls` are all of the attempt in their order, with complete requests. What was committed before `since`
        (Unix seconds) and nothing goes on from may not have been sent. Of equal requests, one that came after another's
        reply shows that this had arrived."""
        gone_on_from = {id_ for call, _ in calls for id_ in (call.parent_id, call.proposed_parent_id)}
        equal: dict[bytes, list[Call]] = {}
        for call, bodies in calls:
            if call.status is CallStatus.OK and call.finished_at < since and call.id not in gone_on_from:
                asked = BY_NAME[call.dialect].parse(json_object(bodies.request))
                equal.setdefault(request_digest(asked), []).append(call)
        self._ids = {
            digest: [call.id for call in found if call.finished_at > max(c.started_at for c in found)]
            for digest, found in equal.items()
        }

    def take(self, request: bytes) -> str | None:
        """The call that answered a request (its digest)."""
        ids = self._ids.get(request)
        return ids.pop() if ids else None

    def arrived(self, *call_ids: str | None) -> None:
        """Something goes on from these calls, so the harness has their replies."""
        for ids in self._ids.values():
            ids[:] = [id_ for id_ in ids if id_ not in call_ids]
