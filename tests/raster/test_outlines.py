"""Polygons of a class map: strip by strip they are those of the whole map, as rasterio outlines it at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rasterio.features import rasterize, shapes

from tiledseg.raster.maps.outlines import ClassPolygon, class_polygons

IGNORED = 255


def strips_of(classes_HW: NDArray[np.uint8], heights: list[int]) -> Iterator[NDArray[np.uint8]]:
    start = 0
    for height in heights:
        yield classes_HW[start : start + height]
        start += height
    yield classes_HW[start:]


def at_once(classes_HW: NDArray[np.uint8]) -> list[ClassPolygon]:
    """Rasterio's outlines of the whole map."""
    found = shapes(classes_HW, classes_HW != IGNORED, connectivity=4)
    return [ClassPolygon(int(number), shapely.geometry.shape(shape)) for shape, number in found]


def as_set(polygons: list[ClassPolygon]) -> set[tuple[int, bytes]]:
    """Polygons but for the order of their rings and points."""
    return {(number, shapely.to_wkb(shapely.normalize(outline))) for number, outline in polygons}


@st.composite
def maps(draw: st.DrawFn) -> NDArray[np.uint8]:
    """Any shape; from single pixels to patches, with and without pixels without data."""
    height, width, patch = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 5))
    values = draw(st.sampled_from([(0, 1), (0, 1, 2), (0, 7, IGNORED), (3,), (IGNORED,), (0, 0, 0, 0, 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    coarse_HW = rng.choice(values, (-(-height // patch), -(-width // patch)))
    return np.kron(coarse_HW, np.ones((patch, patch)))[:height, :width].astype(np.uint8)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(classes_HW=maps(), heights=st.lists(st.integers(1, 15), max_size=6))
def test_strips_give_the_polygons_of_the_whole_map(classes_HW: NDArray[np.uint8], heights: list[int]) -> None:
    while sum(heights) >= len(classes_HW) and heights:
        heights = heights[:-1]
    found = list(class_polygons(strips_of(classes_HW, heights), IGNORED))
    assert as_set(found) == as_set(at_once(classes_HW))
    assert all(outline.is_valid for _, outline in found)
    assert sum(outline.area for _, outline in found) == (classes_HW != IGNORED).sum()


def test_a_spiral_and_rings_within_rings() -> None:
    """An area that comes back to a strip again and again, and holes that strips cut."""
    size = 41
    far_HW = np.maximum(
        *(abs(np.arange(size) - size // 2)[axis] for axis in ((slice(None), None), (None, slice(None))))
    )
    rings_HW = (far_HW % 2).astype(np.uint8)
    spiral_HW = rings_HW.copy()
    spiral_HW[size // 2, : size // 2] = 1  # joins the rings of one class, and cuts those of the other
    for classes_HW in (rings_HW, spiral_HW, spiral_HW.T.copy()):
        expected = as_set(at_once(classes_HW))
        for height in (1, 2, 3, 7, 20):
            found = list(class_polygons(strips_of(classes_HW, [height] * (size // height - 1)), IGNORED))
            assert as_set(found) == expected
    (comb,) = (one for one in at_once(spiral_HW) if one.number == 1)
    assert len(comb.outline.interiors) > 1


def test_areas_that_touch_at_a_corner_are_two() -> None:
    classes_HW = np.array([[1, 0], [0, 1]], np.uint8)
    found = list(class_polygons(strips_of(classes_HW, [1]), IGNORED))
    assert sorted((number, outline.area) for number, outline in found) == [(0, 1), (0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize("heights", [[], [5, 5, 5]])
def test_polygons_cover_each_pixel_once(heights: list[int]) -> None:
    """Burnt back into a raster they are the map."""
    classes_HW = np.random.default_rng(5).integers(0, 4, (23, 31)).astype(np.uint8)
    found = list(class_polygons(strips_of(classes_HW, heights), IGNORED))
    back_HW = rasterize(((o, n) for n, o in found), classes_HW.shape, fill=99, dtype=np.uint8)
    np.testing.assert_array_equal(back_HW, classes_HW)
    assert sum(outline.area for _, outline in found) == classes_HW.size


def test_no_more_is_held_than_a_strip_and_what_reaches_its_edge() -> None:
    """Polygons come as soon as their last row has."""
    classes_HW = np.zeros((30, 9), np.uint8)
    classes_HW[::3] = 1  # bars: each class in each strip ends
    given = []

    def strips() -> Iterator[NDArray[np.uint8]]:
        for row in range(0, 30, 3):
            given.append(row)
            yield classes_HW[row : row + 3]

    come = [len(given) for _ in class_polygons(strips(), IGNORED)]
    assert come == sorted(come)
    assert come.count(1) == 1, "the first bar is complete with its strip; what touches the edge waits for the next"
    assert come[:3] == [1, 2, 2]
