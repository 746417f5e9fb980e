"""Seeds that depend on the run's seed and a position alone, so that a resumed run draws the same ones."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: int | str) -> int:
    """64 bits from the parts; the same in every process, on every machine, under every Python version."""
    digest = hashlib.blake2b("/".join(map(repr, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big")


def seed_of(*parts: int | str) -> int:
    """A seed in `[0, 2**31)`, which every generator and every JSON reader takes."""
    return stable_hash(*parts) >> 33
