"""Roads with kerbs, markings and cars."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.synthetic.classes import ROAD
from tiledseg.synthetic.noise import hash32, wave
from tiledseg.synthetic.parcels import Places, SitePlan

_ASPHALT_C = np.array((0.128, 0.126, 0.124, 0.140), np.float32)
_KERB_C = np.array((0.260, 0.250, 0.230, 0.280), np.float32)
_PAINT_C = np.array((0.480, 0.480, 0.460, 0.480), np.float32)
_CARS_C = np.array(
    [
        (0.55, 0.55, 0.55, 0.52),
        (0.33, 0.33, 0.34, 0.33),
        (0.03, 0.03, 0.035, 0.04),
        (0.32, 0.05, 0.05, 0.32),
        (0.06, 0.10, 0.25, 0.12),
        (0.12, 0.12, 0.13, 0.14),
    ],
    np.float32,
)


class _Surface(NamedTuple):
    """The pixels that roads cover, one entry each; lengths in metres."""

    found: NDArray[np.intp]
    """Where in the window, flattened."""
    leaf: NDArray[np.intp]
    by_u: NDArray[np.bool_]
    """Whether the road is a line of u."""
    lower: NDArray[np.bool_]
    """Whether the pixel lies beyond the road's line: on its right, or below."""
    half: NDArray[np.float32]
    """Half the road's width."""
    offset: NDArray[np.float32]
    """Distance from the road's line."""
    along: NDArray[np.float32]
    crossing: NDArray[np.bool_]


def paint_roads(
    seed: int,
    plan: SitePlan,
    places: Places,
    stretch: tuple[NDArray, NDArray],
    fine_HW: NDArray,
    colour: NDArray,
    classes: NDArray,
) -> None:
    surface = _surface(plan, places, stretch)
    if surface.found.size == 0:
        return
    half, offset, open_road = surface.half, surface.offset, ~surface.crossing
    inward = half - offset
    tone = 1 + np.float32(0.10) * fine_HW.ravel()[surface.found] + np.float32(0.10) * wave(offset / np.float32(1.9))
    road = _ASPHALT_C[:, None] * tone * np.where(half < 2.6, np.float32(1.18), np.float32(1.0))
    kerb = (inward < 0.55) & open_road
    road[:, kerb] = _KERB_C[:, None] * tone[kerb]
    dashed = surface.along - np.floor(surface.along / 9) * 9 < 4.5
    painted = (half > 3) & open_road & (((offset < 0.28) & dashed) | ((inward > 0.75) & (inward < 1.05)))
    road[:, painted] += (_PAINT_C[:, None] - road[:, painted]) * np.float32(0.75)
    _paint_cars(seed, plan, surface, road)
    colour.reshape(4, -1)[:, surface.found] = road
    classes.reshape(-1)[surface.found] = ROAD


def _surface(plan: SitePlan, places: Places, stretch: tuple[NDArray, NDArray]) -> _Surface:
    leaf, at = plan.leaf, places.leaf
    nearest = []
    for sides, roads, position, scale in (
        ((leaf.u0, leaf.u1), (leaf.road_u0, leaf.road_u1), places.a, stretch[0]),
        ((leaf.v0, leaf.v1), (leaf.road_v0, leaf.road_v1), places.b, stretch[1]),
    ):
        low, high = position - sides[0].take(at, mode="clip"), sides[1].take(at, mode="clip") - position
        lower = low < high
        half = np.where(lower, roads[0].take(at, mode="clip"), roads[1].take(at, mode="clip"))
        nearest.append((np.minimum(low, high) / scale, half, lower))
    (offset_u, half_u, _), (offset_v, half_v, _) = nearest
    found = np.flatnonzero((offset_u < half_u) | (offset_v < half_v))
    offset_u, half_u, lower_u, offset_v, half_v, lower_v = (part.ravel()[found] for axis in nearest for part in axis)
    inward_u, inward_v = half_u - offset_u, half_v - offset_v
    by_u = (half_u > 0) & (inward_u >= np.where(half_v > 0, inward_v, -1))
    return _Surface(
        found,
        at.ravel()[found],
        by_u,
        np.where(by_u, lower_u, lower_v),
        np.where(by_u, half_u, half_v),
        np.where(by_u, offset_u, offset_v),
        np.where(by_u, places.b.ravel()[found], places.a.ravel()[found]),
        (half_u > 0) & (half_v > 0) & (np.minimum(inward_u, inward_v) > -3.0),
    )


def _paint_cars(seed: int, plan: SitePlan, surface: _Surface, road: NDArray) -> None:
    """A car in an eighth of the 12 m stretches of each lane."""
    at, by_u, lower, along = surface.leaf, surface.by_u, surface.lower, surface.along
    # The road's place and the corner of its cell: the same seen from both of its sides.
    which = np.where(by_u, np.where(lower, 0, 1), np.where(lower, 2, 3))
    corner_u, corner_v = (corners[at] for corners in plan.corners)
    place = np.stack(plan.leaf[:4])[which, at] + np.where(by_u, corner_u, corner_v)
    name = np.floor(place * 4 + 0.5).astype(np.int64) * 2 + by_u
    cell = np.floor(np.where(by_u, corner_v, corner_u)).astype(np.int64)
    stretch = np.floor(along / 12)
    bits = hash32(seed, 110, cell, name, stretch.astype(np.int64) * 2 + lower)
    spot = (stretch + np.float32(0.25) + (bits >> np.uint32(24)).astype(np.float32) * np.float32(0.5 / 256)) * 12
    car = (bits & np.uint32(7) == 0) & ~surface.crossing
    car &= (np.abs(along - spot) < 2.1) & (np.abs(surface.offset - surface.half * np.float32(0.52)) < 0.9)
    chosen = np.flatnonzero(car)
    body = _CARS_C[((bits[chosen] >> np.uint32(8)) & np.uint32(255)).astype(np.int64) * len(_CARS_C) // 256]
    glass = np.abs(along[chosen] - spot[chosen] - np.float32(0.5)) < 0.5
    road[:, chosen] = (body * np.where(glass, np.float32(0.45), np.float32(1.0))[:, None]).T
