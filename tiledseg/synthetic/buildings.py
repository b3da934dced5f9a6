"""Buildings: houses on the lots of villages, barns by the fields, each along its street."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.geometry.box import Box
from tiledseg.synthetic.noise import uniform
from tiledseg.synthetic.parcels import FARMLAND, FIELD, LEAVES, LOT, MEADOW, VILLAGE, Cell
from tiledseg.synthetic.warp import METRES, Warp

REACH = 34.0
"""No building reaches further than this from its centre, metres."""

GABLE, HIP, FLAT = range(3)

ROOFS_C = np.array(
    [
        (0.36, 0.190, 0.125, 0.40),
        (0.29, 0.165, 0.120, 0.33),
        (0.24, 0.120, 0.085, 0.28),
        (0.15, 0.145, 0.150, 0.17),
        (0.21, 0.205, 0.205, 0.23),
        (0.40, 0.390, 0.370, 0.40),
        (0.56, 0.560, 0.550, 0.55),
        (0.30, 0.270, 0.230, 0.31),
    ],
    np.float32,
)
"""Reflectance of roofs in red, green, blue and near infrared: tiles, slate, concrete, metal."""

PAVING_C = np.array((0.27, 0.255, 0.235, 0.29), np.float32)


class Buildings(NamedTuple):
    """Rectangles with a roof; one entry each. Lengths in metres."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    along_x: NDArray[np.float64]
    """Unit vector along the ridge."""
    along_y: NDArray[np.float64]
    half_length: NDArray[np.float64]
    half_width: NDArray[np.float64]
    eaves: NDArray[np.float64]
    pitch: NDArray[np.float64]
    """Rise of the roof, metres a metre."""
    shape: NDArray[np.int64]
    colour_C: NDArray[np.float32]
    yard: NDArray[np.float64]
    """Width of paving around it; 0 for none."""


def make_buildings(seed: int, warp: Warp, cell: Cell) -> Buildings:
    leaf, numbers = cell.leaf, np.arange(LEAVES)
    random = [uniform(seed, 70 + k, cell.i, cell.j, numbers).astype(np.float64) for k in range(12)]
    u0, u1, v0, v1 = (np.asarray(side, np.float64) for side in leaf[:4])
    u0, u1, v0, v1 = u0 + leaf.road_u0 + 2.5, u1 - leaf.road_u1 - 2.5, v0 + leaf.road_v0 + 2.5, v1 - leaf.road_v1 - 2.5
    room_u, room_v = u1 - u0, v1 - v0
    beside_road = (leaf.road_u0 > 0) | (leaf.road_u1 > 0) | (leaf.road_v0 > 0) | (leaf.road_v1 > 0)
    house = cell.used & (leaf.kind == LOT) & (random[0] < 0.93)
    farm = cell.used & (cell.kind == FARMLAND) & np.isin(leaf.kind, (FIELD, MEADOW)) & beside_road & (random[0] < 0.12)
    hall = house & (random[1] < 0.10)
    large = hall | farm
    size_u = np.where(large, np.minimum(room_u, 16 + 26 * random[2]), np.minimum(room_u * 0.72, 8.5 + 7 * random[2]))
    size_v = np.where(large, np.minimum(room_v, 13 + 16 * random[3]), np.minimum(room_v * 0.72, 8.0 + 6 * random[3]))
    # Houses stand near their street, a few metres back.
    u = _toward(u0, u1, size_u, leaf.road_u0, leaf.road_u1, random[4])
    v = _toward(v0, v1, size_v, leaf.road_v0, leaf.road_v1, random[5])
    keep = cell.kind in (VILLAGE, FARMLAND) and ((house | farm) & (np.minimum(size_u, size_v) > 6.0))
    main = _place(warp, cell, np.flatnonzero(keep), u, v, size_u, size_v, random, large)
    wing_u = np.where(random[10] < 0.5, u - 0.32 * size_u, u + 0.32 * size_u)
    wing_v = np.where(random[11] < 0.5, v - 0.62 * size_v, v + 0.62 * size_v)
    fits = (wing_v - 0.3 * size_v > v0) & (wing_v + 0.3 * size_v < v1)
    winged = np.flatnonzero(keep & ~large & fits & (random[9] < 0.55))
    wing = _place(warp, cell, winged, wing_u, wing_v, size_u * 0.36, size_v * 0.66, random, large)
    wing = wing._replace(eaves=wing.eaves - 0.7)
    return joined([main, wing])


def _toward(
    low: NDArray, high: NDArray, size: NDArray, road_low: NDArray, road_high: NDArray, random: NDArray
) -> NDArray:
    """Centre of a building of `size` between `low` and `high`: set back 2-4 m from a road, or anywhere."""
    back = 1.5 + 2.5 * random
    middle = low + size / 2 + (high - low - size) * random
    near_low, near_high = low + size / 2 + back, high - size / 2 - back
    wanted = np.where(road_low > 0, near_low, np.where(road_high > 0, near_high, middle))
    return np.minimum(np.maximum(wanted, low + size / 2), high - size / 2)


def _place(
    warp: Warp,
    cell: Cell,
    chosen: NDArray[np.intp],
    u: NDArray,
    v: NDArray,
    size_u: NDArray,
    size_v: NDArray,
    random: list[NDArray],
    large: NDArray[np.bool_],
) -> Buildings:
    at_u, at_v = cell.corner[0] + u[chosen], cell.corner[1] + v[chosen]
    # Where it stands, and where one metre further along u would be: its direction.
    (x, x_next), (y, y_next) = warp.inverse(np.stack([at_u, at_u + 1]), np.stack([at_v, at_v]))
    step_x, step_y = x_next - x, y_next - y
    norm = np.sqrt(step_x * step_x + step_y * step_y)
    step_x, step_y = step_x / norm, step_y / norm
    length, width = size_u[chosen], size_v[chosen]
    turned = width > length
    random = [part[chosen] for part in random]
    big = large[chosen]
    shape = np.where(
        big, np.where(random[6] < 0.5, FLAT, GABLE), np.select([random[6] < 0.58, random[6] < 0.82], [GABLE, HIP], FLAT)
    )
    colour = np.where(big, 5 + (random[7] * 3).astype(int), (random[7] * 6).astype(int))
    tone = (0.85 + 0.3 * random[8])[:, None].astype(np.float32)
    return Buildings(
        x,
        y,
        np.where(turned, -step_y, step_x),
        np.where(turned, step_x, step_y),
        np.maximum(length, width) / 2,
        np.minimum(length, width) / 2,
        np.where(big, 5.0, 3.2) + 3.2 * random[8] * random[2] + np.where(shape == FLAT, 1.5, 0.0),
        np.where(shape == FLAT, 0.0, np.where(big, 0.25, 0.75)),
        shape,
        ROOFS_C[colour] * tone,
        np.where(random[9] < 0.6, 0.5 + 2.0 * random[7], 0.0) + np.where(big, 3.0, 0.0),
    )


def joined(parts: list[Buildings]) -> Buildings:
    return Buildings._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


def near(buildings: Buildings, box: Box) -> Buildings:
    """Those that may reach into `box`."""
    distance = [
        np.maximum(side.start * METRES - centre, centre - side.stop * METRES)
        for centre, side in ((buildings.x, box.col), (buildings.y, box.row))
    ]
    chosen = np.flatnonzero(np.maximum(*distance) < REACH)
    return Buildings._make(column[chosen] for column in buildings)


def raise_buildings(
    buildings: Buildings, box: Box, height_HW: NDArray[np.float32], paved_HW: NDArray[np.bool_]
) -> NDArray[np.int16]:
    """Build them: heights into `height_HW` (metres), paving into `paved_HW`; returns who stands where, -1 for none.

    Where two overlap the higher one shows; equal ones, the first of the list.
    """
    owner_HW = np.full(box.shape, -1, np.int16)
    for k in range(len(buildings.x)):
        half_length, half_width = buildings.half_length[k], buildings.half_width[k]
        reach = half_length + half_width + buildings.yard[k]
        rows, cols = (
            slice(
                max(int((centre - reach) / METRES), side.start) - side.start,
                min(int((centre + reach) / METRES) + 2, side.stop) - side.start,
            )
            for centre, side in ((buildings.y[k], box.row), (buildings.x[k], box.col))
        )
        if rows.stop <= rows.start or cols.stop <= cols.start:
            continue
        dy = ((np.arange(rows.start, rows.stop) + box.row.start + 0.5) * METRES - buildings.y[k])[:, None]
        dx = (np.arange(cols.start, cols.stop) + box.col.start + 0.5) * METRES - buildings.x[k]
        along = np.abs(dx * buildings.along_x[k] + dy * buildings.along_y[k])
        across = np.abs(dy * buildings.along_x[k] - dx * buildings.along_y[k])
        inside = (along <= half_length) & (across <= half_width)
        if buildings.yard[k] > 0:
            yard = buildings.yard[k]
            paved_HW[rows, cols] |= (along <= half_length + yard) & (across <= half_width + yard * 0.6)
        rise = half_width - across
        if buildings.shape[k] == HIP:
            rise = np.minimum(rise, half_length - along)
        top = buildings.eaves[k] + buildings.pitch[k] * rise
        if buildings.shape[k] == FLAT:
            top = top + 0.5 * ((along > half_length - 0.5) | (across > half_width - 0.5))
        top = np.where(inside, top, 0.0).astype(np.float32)
        present = height_HW[rows, cols]
        higher = top > present
        present[higher] = top[higher]
        owner_HW[rows, cols][higher] = k
    return owner_HW
