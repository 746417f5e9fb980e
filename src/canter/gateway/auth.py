"""Who may do what: from the key that a request shows to what it may do here."""

from __future__ import annotations

from typing import NamedTuple

from canter.errors import Forbidden, Refused, Unauthorized
from canter.gateway.http import Request
from canter.store import Key, Store
from canter.types import KeyKind

SERVICE = (KeyKind.SERVICE, KeyKind.ADMIN)


class AttemptRef(NamedTuple):
    """Names one attempt of one rollout."""

    rollout_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.rollout_id}/{self.number}"


async def identify(request: Request, store: Store) -> Key:
    """The key's rights. Raises `Unauthorized` without a key or with one that this store never issued."""
    secret = request.key()
    if secret is None:
        raise Unauthorized("no key: send it in the Authorization header (scheme Bearer), or in x-api-key")
    key = await store.key(secret)
    if key is None:
        raise Unauthorized("this key was never issued here; use the one that the attempt or the run was given")
    return key


def agent_of(key: Key) -> AttemptRef:
    """The attempt that an agent key speaks for. Raises `Forbidden` for other kinds, `Refused` once it is sealed."""
    if key.kind is not KeyKind.AGENT:
        raise Forbidden(f"the model is called with an agent key, this is a {key.kind} key")
    ref = _attempt_of(key)
    if key.revoked:
        raise Refused(
            f"attempt {ref.number} of rollout {ref.rollout_id} is closed: it ended, or another took its place"
        )
    return ref


def check_service(key: Key, *, admin: bool = False) -> None:
    """Raises `Forbidden` unless the key is the controller's, the trainer's or an administrator's."""
    allowed = (KeyKind.ADMIN,) if admin else SERVICE
    if key.kind not in allowed:
        raise Forbidden(f"this route needs a {' or '.join(allowed)} key, this is a {key.kind} key")
    if key.revoked:
        raise Unauthorized("this key has been revoked")


def check_grader(key: Key, ref: AttemptRef) -> None:
    """Raises `Forbidden` unless the key is the grader's of this attempt, or a service key."""
    if key.kind in SERVICE:
        return check_service(key)
    if key.kind is not KeyKind.GRADER:
        raise Forbidden(f"this route needs the attempt's grader key or a service key, this is an {key.kind} key")
    if _attempt_of(key) != ref:
        raise Forbidden(f"this grader key is for attempt {_attempt_of(key)}, not for {ref}")
    if key.revoked:
        raise Unauthorized(f"the grader key of attempt {ref} has been revoked")
    return None


def _attempt_of(key: Key) -> AttemptRef:
    if key.rollout_id is None or key.attempt is None:
        raise Unauthorized(f"this {key.kind} key names no attempt")
    return AttemptRef(key.rollout_id, key.attempt)
