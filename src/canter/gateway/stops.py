"""Stop strings: where a sampled text ends, also when the string lies across tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from canter.types import FinishReason, Generation, Ids, VersionSpan

Decode = Callable[[Ids], str]


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The stop string that ends `text`, if any does."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def cut_text(text: str, stops: Sequence[str]) -> str:
    """`text` before the first of the stop strings in it."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text


def cut_generation(generation: Generation, stops: Sequence[str], decode: Decode) -> Generation:
    """The generation up to the token that completes the first stop string, for engines that sample on behind it."""
    if not stops or not _holds(decode(generation.ids), stops):
        return generation
    count = bisect_left(range(len(generation.ids) + 1), True, key=lambda n: _holds(decode(generation.ids[:n]), stops))
    spans = (VersionSpan(s.version, s.start, min(s.end, count)) for s in generation.versions if s.start < count)
    return replace(
        generation,
        ids=generation.ids[:count],
        logprobs=generation.logprobs[:count],
        finish_reason=FinishReason.STOP,
        versions=tuple(spans),
    )


def _holds(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)
