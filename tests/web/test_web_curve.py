import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.web.curve import HEIGHT, WIDTH, draw, smoothed, ticks


def coordinates(line: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (point.split(",") for point in line.split())]


def test_shares_fill_the_unit_range():
    curve = draw([(1.0, 0.0), (2.0, 0.5), (3.0, 1.0)])
    assert [tick.label for tick in curve.y_ticks] == ["0", "0.25", "0.5", "0.75", "1"]
    assert [tick.label for tick in curve.x_ticks] == ["1", "2", "3"]
    (line,) = curve.lines
    assert coordinates(line) == [(curve.left, curve.bottom), ((curve.left + curve.right) / 2, 97), (curve.right, 10)]
    assert curve.smooth == ()


def test_gaps_are_gaps_and_nothing_is_nothing():
    curve = draw([(1.0, 0.5), (2.0, None), (3.0, float("nan")), (4.0, 0.5), (5.0, 0.5)])
    assert [len(coordinates(line)) for line in curve.lines] == [1, 2]
    assert len(curve.dots) == 3
    assert draw([]) is None
    assert draw([(1.0, None)]) is None


def test_long_runs_are_smoothed_and_lose_their_dots():
    curve = draw([(float(n), n % 2) for n in range(200)])
    assert len(curve.smooth) == 1
    assert curve.dots == ()
    assert smoothed([(0.0, 1.0), (1.0, None), (2.0, 0.0)]) == [(0.0, 0.5), (1.0, None), (2.0, 0.5)]


@given(
    ys=st.lists(st.none() | st.floats(-1e9, 1e9), min_size=1, max_size=30),
    start=st.integers(0, 1000),
)
def test_everything_lies_inside_the_box(ys, start):
    curve = draw([(float(start + n), y) for n, y in enumerate(ys)])
    if curve is None:
        return
    places = [place for line in (*curve.lines, *curve.smooth) for place in coordinates(line)]
    places += [(x, y) for x, y, _ in curve.dots]
    assert all(curve.left <= x <= curve.right and 0 <= y <= curve.bottom for x, y in places)
    assert all(0 <= tick.at <= HEIGHT for tick in curve.y_ticks)
    assert all(0 <= tick.at <= WIDTH for tick in curve.x_ticks)
    assert 2 <= len(curve.y_ticks) <= 9


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (0, 3, [0, 1, 2, 3]), (-0.2, 1, [-0.5, 0, 0.5, 1])]
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high, 5) == expected


def test_steps_are_whole():
    assert ticks(1, 3, 6, whole=True, inside=True) == [1, 2, 3]
    assert ticks(1, 30, 6, whole=True, inside=True) == [10, 20, 30]
