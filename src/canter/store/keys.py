"""Keys: random secrets that say their kind, kept only as SHA-256."""

from __future__ import annotations

import hashlib
import secrets

from canter.types import KeyKind


def new_secret(kind: KeyKind) -> str:
    """A fresh key with 256 random bits, e.g. `ck-agent-…`."""
    return f"ck-{kind}-{secrets.token_urlsafe(32)}"


def digest(secret: str) -> bytes:
    """What the store keeps of a key: the SHA-256 of its text. (A key has full entropy, so no salt or stretching.)"""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
