"""Version spans from the version of each token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from canter.types import VersionSpan


def to_spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Maximal runs of one version, in order; they cover `[0, len(versions))`."""
    spans: list[VersionSpan] = []
    for version, run in groupby(versions):
        start = spans[-1].end if spans else 0
        spans.append(VersionSpan(version, start, start + sum(1 for _ in run)))
    return tuple(spans)
