from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval

law = settings(derandomize=True, max_examples=100, deadline=None)
intervals = st.tuples(st.integers(-30, 30), st.integers(0, 30)).map(lambda p: Interval(p[0], p[0] + p[1]))


def positions(interval: Interval) -> set[int]:
    return set(range(interval.start, interval.stop))


@law
@given(intervals, intervals)
def test_operations_are_those_of_sets_of_positions(a: Interval, b: Interval) -> None:
    assert positions(a.clip(b)) == positions(a) & positions(b)
    assert positions(a.hull(b)) >= positions(a) | positions(b)
    assert positions(a.shift(3)) == {p + 3 for p in positions(a)}
    assert positions(a.relative_to(b.start)) == {p - b.start for p in positions(a)}
    if positions(a) and positions(b):
        assert a.contains(b) == (positions(a) >= positions(b))
        hull = a.hull(b)
        assert {hull.start, hull.stop - 1} <= positions(a) | positions(b)


@law
@given(intervals, intervals)
def test_a_clip_stays_inside_even_where_nothing_meets(a: Interval, b: Interval) -> None:
    assert b.contains(a.clip(b))


@law
@given(intervals, st.integers(0, 9), st.integers(0, 9))
def test_expand_grows_each_side(a: Interval, before: int, after: int) -> None:
    grown = a.expand(before, after)
    assert grown.size == a.size + before + after
    assert grown.contains(a)
    assert list(range(100))[grown.shift(40).slice] == [p + 40 for p in range(grown.start, grown.stop)]


def test_stop_before_start_names_both() -> None:
    with pytest.raises(GeometryError, match=r"2.*5"):
        Interval(5, 2)
