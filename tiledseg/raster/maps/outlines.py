"""A class map as polygons: strip by strip, and merged where they meet, as if the whole map had been outlined at once.

A polygon is an area of one class whose pixels touch by their sides (connectivity 4: areas that only touch at a corner
are two). In memory are one strip, and the polygons that reach its lower edge and may go on in the next. All is counted
in pixels, whole numbers, so nothing is rounded where strips meet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import shapely
from affine import Affine
from numpy.typing import NDArray
from rasterio.features import shapes

_NOBODY = -1


class ClassPolygon(NamedTuple):
    """`outline` in pixels, (col, row) from the raster's corner, y downwards."""

    number: int
    outline: Any


@dataclass
class _Open:
    """Areas that reach the lower edge of all strips so far: of each its class and parts, and whose each column is."""

    numbers: list[int]
    parts: list[list[Any]]
    edge_W: NDArray[np.int64]


def class_polygons(strips: Iterable[NDArray[np.uint8]], ignored: int) -> Iterator[ClassPolygon]:
    """The polygons of a map, given as its strips of rows from the top, each of shape (rows, width); pixels of the class
    `ignored` have none. A polygon comes once its last row has; the order depends on the map and its strips alone."""
    row, waiting = 0, None
    for strip_HW in strips:
        if waiting is None:
            waiting = _Open([], [], np.full(strip_HW.shape[1], _NOBODY))
        done, waiting = _next(strip_HW, row, waiting, ignored)
        yield from done
        row += len(strip_HW)
    if waiting is not None:
        yield from (_whole(*one) for one in zip(waiting.numbers, waiting.parts, strict=True))


def _next(strip_HW: NDArray[np.uint8], row: int, above: _Open, ignored: int) -> tuple[list[ClassPolygon], _Open]:
    """What is complete with the strip that begins at `row`, and what may go on after it."""
    numbers_P, outlines_P = _outlines(strip_HW, row, ignored)
    top_W = _owners(outlines_P, row, strip_HW.shape[1])
    bottom_W = _owners(outlines_P, row + len(strip_HW), strip_HW.shape[1])
    areas = _joined(above, numbers_P, top_W)
    parts: dict[int, list[Any]] = defaultdict(list)
    for old, own in enumerate(above.parts):
        parts[areas.of(old)] += own
    shift = len(above.parts)
    for new, outline in enumerate(outlines_P):
        parts[areas.of(shift + new)].append(outline)
    numbers = [*above.numbers, *map(int, numbers_P)]
    going_on = {areas.of(shift + int(new)) for new in np.unique(bottom_W) if new != _NOBODY}
    done = [_whole(numbers[area], own) for area, own in parts.items() if area not in going_on]
    order = {area: at for at, area in enumerate(sorted(going_on))}
    edge = np.array([*(order.get(areas.of(shift + new), _NOBODY) for new in range(len(outlines_P))), _NOBODY])
    return done, _Open([numbers[a] for a in order], [parts[a] for a in order], edge[bottom_W])


def _outlines(strip_HW: NDArray[np.uint8], row: int, ignored: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Class and outline of each area of a strip by itself."""
    found = list(shapes(strip_HW, strip_HW != ignored, connectivity=4, transform=Affine.translation(0, row)))
    rings = [ring for shape, _ in found for ring in shape["coordinates"]]
    if not rings:
        return np.empty(0, np.int64), np.empty(0, object)
    points = np.concatenate([np.asarray(ring, float) for ring in rings])
    lines = shapely.linearrings(points, indices=np.repeat(np.arange(len(rings)), [len(ring) for ring in rings]))
    owners = np.repeat(np.arange(len(found)), [len(shape["coordinates"]) for shape, _ in found])
    return np.array([int(value) for _, value in found]), shapely.polygons(lines, indices=owners)


def _owners(outlines_P: NDArray[Any], y: int, width: int) -> NDArray[np.int64]:
    """For each column the outline that has an edge there on the line `y`."""
    owner_W = np.full(width, _NOBODY)
    if not len(outlines_P):
        return owner_W
    points, outline = shapely.get_coordinates(shapely.get_exterior_ring(outlines_P), return_index=True)
    on_line = (points[:-1, 1] == y) & (points[1:, 1] == y) & (outline[:-1] == outline[1:])
    for at in np.flatnonzero(on_line):
        left, right = sorted((int(points[at, 0]), int(points[at + 1, 0])))
        owner_W[left:right] = outline[at]
    return owner_W


class _Areas:
    """Which parts are one area: each set is called by its least member."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def of(self, part: int) -> int:
        while self._parent[part] != part:
            self._parent[part] = self._parent[self._parent[part]]
            part = self._parent[part]
        return part

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.of(one), self.of(other)))
        self._parent[high] = low


def _joined(above: _Open, numbers_P: NDArray[np.int64], top_W: NDArray[np.int64]) -> _Areas:
    """The areas above and, counted on, the new outlines: joined where they meet and have one class."""
    shift = len(above.parts)
    areas = _Areas(shift + len(numbers_P))
    meet_W = (above.edge_W != _NOBODY) & (top_W != _NOBODY)
    for old, new in np.unique(np.stack([above.edge_W[meet_W], top_W[meet_W]]), axis=1).T:
        if above.numbers[old] == numbers_P[new]:
            areas.join(int(old), shift + int(new))
    return areas


def _whole(number: int, parts: list[Any]) -> ClassPolygon:
    if len(parts) == 1:
        return ClassPolygon(number, parts[0])
    return ClassPolygon(number, _without_seams(shapely.union_all(parts, grid_size=1)))


def _without_seams(outline: Any) -> Any:
    """The same area without the points that a strip's edge has left on straight lines."""
    shell, *holes = (_corners(ring) for ring in shapely.get_rings(outline))
    return shapely.Polygon(shell, holes)


def _corners(ring: Any) -> NDArray[np.float64]:
    points = shapely.get_coordinates(ring)[:-1]
    upright = (points != np.roll(points, 1, axis=0))[:, 1]  # the side that ends in a point
    return points[upright != np.roll(upright, -1)]
