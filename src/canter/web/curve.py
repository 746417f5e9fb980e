"""A curve as numbers for an inline SVG: where its lines, dots and labels lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 480.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, 10.0, 10.0, 26.0
MOST_DOTS = 80
SMOOTH_FROM = 12


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Coordinates in a `WIDTH` x `HEIGHT` box; `lines` and `smooth` are values of a polyline's `points`, one for each
    stretch without missing values."""

    lines: tuple[str, ...]
    smooth: tuple[str, ...]
    dots: tuple[tuple[float, float, str], ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    bottom: float = HEIGHT - BOTTOM


Point = tuple[float, float | None]


def draw(points: Sequence[Point]) -> Curve | None:
    """The curve of (x, y) points in order of x; a y of None is a gap. None if there is nothing to draw.

    The y axis holds [0, 1] whenever the values do, so that curves of different runs look alike. From a dozen points
    on, `smooth` is the mean of up to five points around each.
    """
    values = [y for _, y in points if y is not None and math.isfinite(y)]
    if not values:
        return None
    points = [(x, y if y is not None and math.isfinite(y) else None) for x, y in points]
    y_ticks = ticks(min(0.0, *values), max(1.0, *values), 5)
    x_ticks = ticks(points[0][0], max(points[-1][0], points[0][0] + 1), 6, whole=True, inside=True)
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    low, high = y_ticks[0], y_ticks[-1]

    def x_at(x: float) -> float:
        return round(LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT), 2)

    def y_at(y: float) -> float:
        return round(TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM), 2)

    placed = [None if y is None else (x_at(x), y_at(y)) for x, y in points]
    average = [None if y is None else (x_at(x), y_at(y)) for x, y in smoothed(points)]
    dots = [(x_at(x), y_at(y), f"step {x:g}: {y:.3f}") for x, y in points if y is not None]
    return Curve(
        lines=stretches(placed),
        smooth=stretches(average) if len(values) >= SMOOTH_FROM else (),
        dots=tuple(dots) if len(dots) <= MOST_DOTS else (),
        x_ticks=tuple(Tick(x_at(tick), f"{tick:g}") for tick in x_ticks),
        y_ticks=tuple(Tick(y_at(tick), f"{tick:g}") for tick in y_ticks),
    )


def smoothed(points: Sequence[Point]) -> list[Point]:
    """The mean of up to two neighbours on each side; gaps stay gaps."""
    means: list[Point] = []
    for place, (x, y) in enumerate(points):
        near = [v for _, v in points[max(0, place - 2) : place + 3] if v is not None]
        means.append((x, None if y is None else sum(near) / len(near)))
    return means


def stretches(points: Sequence[tuple[float, float] | None]) -> tuple[str, ...]:
    """Runs of present points, each as the text of a polyline."""
    runs: list[list[str]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(f"{point[0]:g},{point[1]:g}")
    return tuple(" ".join(run) for run in runs if run)


def ticks(low: float, high: float, most: int, *, whole: bool = False, inside: bool = False) -> list[float]:
    """Round numbers, at most about `most`, that cover `[low, high]` (or lie `inside` it)."""
    raw = (high - low) / (most - 1)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step), math.ceil(high / step)
    found = [round(n * step, 10) for n in range(first, last + 1)]
    return [tick for tick in found if low <= tick <= high] if inside else found
