"""The plan of the land: a bent net of roads, parcels between them, and what each parcel holds.

The land is laid out on straight lines in a plane (u, v), metres to the right and down. It is drawn in the raster's
plane: u and v are its x and y bent by smooth noise. Lines every 160 m cut the plane into cells; a cell has up to 4 x 4
parcels. The content of a parcel is a row of a table, which each pixel looks up: no pixel depends on another.

Random numbers have no state: hashes and smooth noise are functions of a seed and a place. Only additions,
multiplications, divisions, square roots and comparisons, which IEEE 754 rounds in one way: the same place gives the
same bits in any window, on any machine. No BLAS and no library sine, which may not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.samples.draws import mixed


def hash32(seed: int, *keys: ArrayLike) -> NDArray[np.uint32]:
    """Return 32 well-mixed bits for each combination of integer keys (broadcast together).

    Each key is folded in by `draws.mixed`.
    """
    bits = mixed(np.array([seed & 0xFFFFFFFF], np.uint32))
    for key in keys:
        word = np.atleast_1d(np.asarray(key)).astype(np.int64).astype(np.uint32)
        bits = mixed(bits ^ (word * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15)))
    return bits


def uniform(seed: int, *keys: ArrayLike) -> NDArray[np.float32]:
    """Return a uniform number in [0, 1), float32, for each combination of keys."""
    return (hash32(seed, *keys) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def normal_CHW(seed: int, box: Box) -> NDArray[np.float32]:
    """Return four nearly normal values, sums of four bytes, for every pixel of `box`, shape (4, H, W)."""
    rows, cols = np.arange(box.row.start, box.row.stop), np.arange(box.col.start, box.col.stop)
    bits_CHW = np.stack([hash32(seed + band, rows[:, None], cols) for band in range(4)])
    sums_CHW = bits_CHW.view(np.uint8).reshape(*bits_CHW.shape, 4).sum(-1, dtype=np.int32)
    return (sums_CHW - 510).astype(np.float32) * np.float32(1 / 147.8)


def _smooth(t: NDArray) -> NDArray:
    """Evaluate Perlin's quintic 6t^5 - 15t^4 + 10t^3: first and second derivative 0 at both ends."""
    return t * t * t * (t * (t * 6 - 15) + 10)


def grid_noise(seed: int, box: Box, period: int) -> NDArray[np.float32]:
    """Return smooth value noise in [-1, 1] at every pixel of `box`, with one random value every `period` pixels."""
    rows, cols = np.arange(box.row.start, box.row.stop), np.arange(box.col.start, box.col.stop)
    i, j = rows // period, cols // period
    row_weights, col_weights = (_smooth((at % period).astype(np.float32) / np.float32(period)) for at in (rows, cols))
    lattice = _lattice(seed, np.arange(i[0], i[-1] + 2)[:, None], np.arange(j[0], j[-1] + 2))
    lines = lattice[:, j - j[0]]
    lines = lines + (lattice[:, j - j[0] + 1] - lines) * col_weights
    steps = lines[1:] - lines[:-1]
    return lines[i - i[0]] + steps[i - i[0]] * row_weights[:, None]


def _lattice(seed: int, rows: ArrayLike, cols: ArrayLike) -> NDArray[np.float32]:
    return uniform(seed, rows, cols) * np.float32(2) - np.float32(1)


def wave(position: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a smooth wave of period 1 in [-1, 1], out of parabolas: -1 at integers, 1 half way."""
    t = position - np.floor(position)
    return t * (1 - t) * 8 - 1


OPEN, ROAD, BUILDING, TREE, WATER = range(5)
CLASSES = ("field", "road", "building", "tree", "water")
CLASS_COLOURS = ((158, 188, 94), (70, 70, 74), (196, 64, 50), (24, 104, 44), (44, 110, 196))
IGNORED = 255

METRES = 0.5
"""Side of a pixel, metres."""

FARMLAND, VILLAGE, FOREST, RIVER = range(4)
FIELD, LOT, MEADOW, WOOD, POND = range(5)

_SPACING, _PARTS = 160.0, 4
_RIVER_EVERY, _RIVER_ROW = 5, 2
_BENDS = ((3000, 90.0), (700, 22.0))
"""(period in pixels, amplitude in metres) of the noise that bends the plan. Its slope is at most 3.75 amplitudes a
period, 0.46 in all: the plan never folds."""
_STRAIGHT = Box(Interval(96, 97), Interval(96, 97))
"""The pixel where nothing is bent: every scene begins in a village."""
_NO_ROAD = -50.0
_DRY = -1000.0

_CROPS_C = np.array(
    [
        (0.080, 0.125, 0.055, 0.42),  # cereals
        (0.065, 0.110, 0.050, 0.50),  # maize, beets
        (0.170, 0.175, 0.090, 0.36),  # ripening
        (0.310, 0.265, 0.160, 0.38),  # stubble
        (0.205, 0.155, 0.110, 0.25),  # ploughed
        (0.330, 0.270, 0.195, 0.37),  # dry soil
        (0.290, 0.285, 0.060, 0.47),  # rape in flower
    ],
    np.float32,
)
_LAWNS_C = np.array([(0.085, 0.130, 0.058, 0.44), (0.110, 0.145, 0.070, 0.42), (0.150, 0.160, 0.090, 0.36)], np.float32)
_ROOFS_C = np.array(
    [
        (0.36, 0.190, 0.125, 0.40),
        (0.29, 0.165, 0.120, 0.33),
        (0.24, 0.120, 0.085, 0.28),
        (0.56, 0.560, 0.550, 0.55),
    ],
    np.float32,
)
"""Reflectance in red, green, blue and near infrared."""

Noise = Callable[[int, int], NDArray[np.float32]]
"""Noise in [-1, 1] by a number of its own and its period in pixels."""


def noise_of(seed: int, box: Box) -> Noise:
    """Return the noise at the pixels of `box`."""
    return lambda number, period: grid_noise(seed + number, box, period)


def bend(seed: int, box: Box) -> tuple[NDArray, NDArray]:
    """Return (u, v) of the pixels of `box`, metres."""
    here, straight = noise_of(seed, box), noise_of(seed, _STRAIGHT)
    v = ((np.arange(box.row.start, box.row.stop) + 0.5) * METRES)[:, None]
    u = ((np.arange(box.col.start, box.col.stop) + 0.5) * METRES)[None, :]
    for k, (period, amplitude) in enumerate(_BENDS):
        u = u + amplitude * (here(k, period) - straight(k, period))
        v = v + amplitude * (here(10 + k, period) - straight(10 + k, period))
    return u, v


class Parcels(NamedTuple):
    """The parcels of some cells: columns of one entry each, `_PARTS` squared a cell. Lengths in metres, in the cell."""

    use: NDArray[np.int64]
    u0: NDArray[np.float64]
    v0: NDArray[np.float64]
    wide: NDArray[np.float64]
    tall: NDArray[np.float64]
    bits: NDArray[np.uint32]  # random
    colour_C: NDArray[np.float32]
    house_u: NDArray[np.float64]  # centre of its building
    house_v: NDArray[np.float64]
    half_u: NDArray[np.float64]  # half the building's extent; 0 for none
    half_v: NDArray[np.float64]
    eaves: NDArray[np.float64]
    pitch: NDArray[np.float64]  # rise of the roof, metres a metre
    roof_C: NDArray[np.float32]


class Plan(NamedTuple):
    """The cells from (first_i, first_j) on: their kinds, the roads at their sides, and their parcels."""

    first_i: int
    first_j: int
    kinds: NDArray[np.int64]
    parts_u: NDArray[np.int64]
    parts_v: NDArray[np.int64]
    roads_u: NDArray[np.float64]  # half the width of the road at the cell's low u
    roads_v: NDArray[np.float64]
    parcels: Parcels


def _cell_kind(seed: int, i: NDArray, j: NDArray) -> NDArray[np.int64]:
    region, own = uniform(seed, 30, i // 2, j // 2), uniform(seed, 31, i, j)
    village = (own < 0.12) | ((region < 0.50) & (own < 0.75))
    forest = (own > 0.93) | ((region > 0.82) & (own < 0.8))
    kind = np.select([j % _RIVER_EVERY == _RIVER_ROW, village, forest], [RIVER, VILLAGE, FOREST], FARMLAND)
    return np.where((i == 0) & (j == 0), VILLAGE, kind)


def _road_half(seed: int, axis: int, line: NDArray, i: NDArray, j: NDArray) -> NDArray[np.float64]:
    """Return half the width of a road line along a cell (i, j): even lines are main roads, odd ones may be missing
    away from villages. `axis` is 0 for lines of u."""
    village = _cell_kind(seed, i, j) == VILLAGE
    village |= _cell_kind(seed, i - (axis == 0), j - (axis == 1)) == VILLAGE
    side = np.where(village | (uniform(seed, 40 + axis, i, j) < 0.4), 2.7, _NO_ROAD)
    return np.where(line % 2 == 0, 3.6, side)


def plan_of(seed: int, u: NDArray, v: NDArray) -> Plan:
    """Plan the cells that hold the places (u, v)."""
    i, j = (np.arange(int(at.min() // _SPACING), int(at.max() // _SPACING) + 2) for at in (u, v))
    first_i, first_j = int(i[0]), int(j[0])
    i, j = i[:, None], j[None, :]
    kind = _cell_kind(seed, i, j)
    cut = [1 + (hash32(seed, 45 + axis, i, j) % 3).astype(np.int64) for axis in (0, 1)]
    parts_u, parts_v = (np.where(kind == VILLAGE, _PARTS, n) for n in cut)
    roads = _road_half(seed, 0, i, i, j), _road_half(seed, 1, j, i, j)
    return Plan(first_i, first_j, kind, parts_u, parts_v, *roads, _parcels(seed, i, j, kind, parts_u, parts_v))


def _parcels(seed: int, i: NDArray, j: NDArray, kind: NDArray, parts_u: NDArray, parts_v: NDArray) -> Parcels:
    p, q = np.arange(_PARTS)[:, None], np.arange(_PARTS)
    i, j, kind, parts_u, parts_v = (at[..., None, None] for at in (i, j, kind, parts_u, parts_v))

    def random(number: int) -> NDArray[np.float64]:
        return uniform(seed, number, i, j, p, q).astype(np.float64)

    use = _use(kind, random(51))
    at_origin = (i == 0) & (j == 0)  # where a small scene has a bit of everything
    use = np.where(at_origin, np.where((p == 1) & (q == 1), POND, np.where((p == 1) & (q == 0), WOOD, LOT)), use)
    wide, tall = _SPACING / parts_u + 0 * use, _SPACING / parts_v + 0 * use
    u0, v0 = p * wide, q * tall
    tone = (0.86 + 0.28 * random(52))[..., None].astype(np.float32)
    crop, lawn = ((random(53) * len(table)).astype(np.int64) for table in (_CROPS_C, _LAWNS_C))
    colour = np.where((use == FIELD)[..., None], _CROPS_C[crop], _LAWNS_C[lawn]) * tone
    hall = random(54) < 0.12
    house = (use == LOT) & (random(55) < 0.93)
    half_u = np.where(house, np.where(hall, 10 + 4 * random(56), 5.5 + 4 * random(56)), 0.0)
    half_v = np.where(house, np.where(hall, 8 + 4 * random(57), 5.0 + 3 * random(57)), 0.0)
    house_u = u0 + wide / 2 + (wide / 2 - 5 - half_u) * (2 * random(58) - 1)
    house_v = v0 + tall / 2 + (tall / 2 - 5 - half_v) * (2 * random(59) - 1)
    flat = np.where(hall, random(60) < 0.5, random(60) < 0.2)
    eaves = np.where(hall, 5.0, 3.2) + 3.2 * random(61) + 1.5 * flat
    pitch = np.where(flat, 0.0, np.where(hall, 0.25, 0.75))
    shade = (0.85 + 0.3 * random(63))[..., None].astype(np.float32)
    roof = _ROOFS_C[(random(62) * len(_ROOFS_C)).astype(np.int64)] * shade
    bits = hash32(seed, 64, i, j, p, q)
    columns: list[Any] = [use, u0, v0, wide, tall, bits, colour, house_u, house_v, half_u, half_v, eaves, pitch, roof]
    return Parcels(*(column.reshape(use.size, *column.shape[use.ndim :]) for column in columns))


def _use(kind: NDArray, choice: NDArray) -> NDArray[np.int64]:
    village = np.select([choice < 0.84, choice < 0.92, choice < 0.96], [LOT, MEADOW, WOOD], POND)
    farmland = np.select([choice < 0.08, choice < 0.11, choice < 0.25], [WOOD, POND, MEADOW], FIELD)
    river = np.select([choice < 0.2, choice < 0.65], [WOOD, MEADOW], FIELD)
    forest = np.where(choice < 0.88, WOOD, MEADOW)
    return np.select([kind == VILLAGE, kind == FARMLAND, kind == RIVER], [village, farmland, river], forest)


class BuildingSite(NamedTuple):
    """The land at some places; arrays of one shape, lengths in metres."""

    parcel: NDArray[np.int64]  # row of the plan's parcels
    a: NDArray[np.float64]  # u within the cell
    b: NDArray[np.float64]
    border: NDArray[np.float64]  # distance to the parcel's border
    road: NDArray[np.float64]  # distance to the edge of a road, positive on it
    depth: NDArray[np.float64]  # distance to a shore, positive in water
    height: NDArray[np.float64]  # of the building that stands there; 0 for none


def survey(plan: Plan, noise: Noise, u: NDArray, v: NDArray) -> BuildingSite:
    """Look up what lies at the places (u, v), which the plan must cover."""
    ci, cj = np.floor(u / _SPACING).astype(np.int64), np.floor(v / _SPACING).astype(np.int64)
    a, b = u - ci * _SPACING, v - cj * _SPACING
    ci, cj = ci - plan.first_i, cj - plan.first_j
    kind = plan.kinds[ci, cj]
    p = np.minimum((a * plan.parts_u[ci, cj] / _SPACING).astype(np.int64), _PARTS - 1)
    q = np.minimum((b * plan.parts_v[ci, cj] / _SPACING).astype(np.int64), _PARTS - 1)
    at = ((ci * plan.kinds.shape[1] + cj) * _PARTS + p) * _PARTS + q
    of = plan.parcels
    in_u, in_v, wide, tall = a - of.u0[at], b - of.v0[at], of.wide[at], of.tall[at]
    border = np.minimum(np.minimum(in_u, wide - in_u), np.minimum(in_v, tall - in_v))
    half_u = plan.roads_u[ci + (a > _SPACING / 2), cj]
    half_v = plan.roads_v[ci, cj + (b > _SPACING / 2)]
    street = np.where(kind == VILLAGE, 2.4, _NO_ROAD)
    road_u = np.maximum(half_u - np.minimum(a, _SPACING - a), street - np.abs(a - _SPACING / 2))
    road_v = np.maximum(half_v - np.minimum(b, _SPACING - b), street - np.abs(b - _SPACING / 2))
    river = 9 + 3 * noise(101, 520) - np.abs(b - _SPACING / 2 - 34 * noise(100, 300))
    round_u, round_v = 2 * in_u / wide - 1, 2 * in_v / tall - 1
    pond = (0.68 + 0.16 * noise(102, 50) - np.sqrt(round_u * round_u + round_v * round_v)) * np.minimum(wide, tall) / 2
    depth = np.select([kind == RIVER, of.use[at] == POND], [river, pond], _DRY) + 0.8 * noise(103, 11)
    rise_u, rise_v = of.half_u[at] - np.abs(a - of.house_u[at]), of.half_v[at] - np.abs(b - of.house_v[at])
    rise = np.where(of.half_u[at] > of.half_v[at], rise_v, rise_u)  # a gable's ridge runs along the longer side
    height = np.where((rise_u > 0) & (rise_v > 0), of.eaves[at] + of.pitch[at] * rise, 0.0)
    return BuildingSite(at, a, b, border, np.maximum(road_u, road_v), depth, height)
