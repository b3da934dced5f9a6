"""The plan of the land: a warped net of roads, and parcels between them.

The land is laid out on straight lines in a plane (u, v) and drawn in the plane (x, y) of the raster, metres to the
right and down; u and v are x and y bent by smooth noise, so straight roads come out curved and still meet. Lines
u = U_i and v = V_j are roads that cut the plane into cells of about 240 m. Each cell is halved again and again, across
its longer side; in villages the first cuts are streets. Every cut ends on an older one: the net is connected.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.synthetic.noise import hash32, pick, uniform

SPACING, JITTER, ORIGIN = 240.0, 38.0, -40.0
DEPTH = 7
NODES, LEAVES = 2**DEPTH - 1, 2**DEPTH
RIVER_EVERY, RIVER_ROW = 5, 2
KEPT_CELLS = 600
"""Cells that a process keeps in memory."""

FARMLAND, VILLAGE, FOREST, RIVER = range(4)
LOT, FIELD, WOOD, POND, MEADOW = range(5)


def line(seed: int, axis: int, index: int) -> float:
    """Where road line `index` runs: u (axis 0) or v (axis 1), metres."""
    return SPACING * index + ORIGIN + JITTER * (pick(seed, 20 + axis, index) - 0.5)


def _lines(seed: int, axis: int, low: float, high: float) -> tuple[int, list[float]]:
    """The index of the last line at or before `low`, and the lines from it to the first beyond `high`."""
    first = int((low - ORIGIN) // SPACING) - 1
    while line(seed, axis, first + 1) <= low:
        first += 1
    lines = [line(seed, axis, first), line(seed, axis, first + 1)]
    while lines[-1] <= high:
        lines.append(line(seed, axis, first + len(lines)))
    return first, lines


def cell_kind(seed: int, i: int, j: int) -> int:
    """What the cell is; the one at the origin is a village, so that a small scene has a bit of everything."""
    if (i, j) == (0, 0):
        return VILLAGE
    if j % RIVER_EVERY == RIVER_ROW:
        return RIVER
    region, own = pick(seed, 30, i // 2, j // 2), pick(seed, 31, i, j)
    if own < 0.06 or (region < 0.40 and own < 0.75):
        return VILLAGE
    return FOREST if own > 0.93 or (region > 0.82 and own < 0.8) else FARMLAND


def road_half_width(seed: int, axis: int, index: int, across: int) -> float:
    """Half the width in metres of line `index` of `axis` along the cell `across`; 0 where the road is left out.

    Even lines are main roads and always there; an odd line ends on even ones, so that leaving parts of it out, where
    no street may lead to it, disconnects nothing.
    """
    if index % 2 == 0:
        return 3.6
    beside = [(index - 1, across), (index, across)] if axis == 0 else [(across, index - 1), (across, index)]
    streets = any(cell_kind(seed, *cell) == VILLAGE for cell in beside)
    return 2.7 if streets or pick(seed, 40 + axis, index, across) < 0.3 else 0.0


class Leaf(NamedTuple):
    """The columns of a cell's table of parcels: extent and half widths of the roads on its sides, metres."""

    u0: NDArray
    u1: NDArray
    v0: NDArray
    v1: NDArray
    road_u0: NDArray
    road_u1: NDArray
    road_v0: NDArray
    road_v1: NDArray
    kind: NDArray


@dataclass(frozen=True)
class Cell:
    """One cell's cuts and parcels, in (u, v) relative to its corner; parcels are numbered by the cuts that made them.

    A node's cut is at `cut_u` or `cut_v`, the other being infinite; both are where the node is not cut any more.
    """

    i: int
    j: int
    kind: int
    corner: tuple[float, float]
    cut_u: NDArray[np.float32]
    cut_v: NDArray[np.float32]
    leaf: Leaf
    used: NDArray[np.bool_]
    """False for the parcels left over where a node was not cut: they repeat another and hold no place."""


@lru_cache(maxsize=KEPT_CELLS)
def make_cell(seed: int, i: int, j: int) -> Cell:
    """The cell's cuts and parcels; its arrays are not to be written into."""
    kind = cell_kind(seed, i, j)
    corner = line(seed, 0, i), line(seed, 1, j)
    size = line(seed, 0, i + 1) - corner[0], line(seed, 1, j + 1) - corner[1]
    extents = np.zeros((NODES + LEAVES, 8))
    extents[0, :4] = 0, size[0], 0, size[1]
    roads = [road_half_width(seed, 0, i + side, j) for side in (0, 1)]
    roads += [road_half_width(seed, 1, j + side, i) for side in (0, 1)]
    extents[0, 4:] = roads
    kinds = np.full(NODES + LEAVES, -1)
    used = np.zeros(NODES + LEAVES, bool)
    used[0] = True
    cuts = np.full((NODES, 2), np.inf)
    random = uniform(seed, 50, i, j, np.arange(NODES + LEAVES))
    # Nodes 7 to 14 are the blocks between a village's streets, of which one may become a pond.
    pond = 7 + int(pick(seed, 52, i, j) * 8) if kind == VILLAGE and pick(seed, 53, i, j) < 0.35 else -1
    for node in range(NODES):
        first, second = 2 * node + 1, 2 * node + 2
        extents[[first, second]] = extents[node]
        is_pond = node == pond if (i, j) != (0, 0) else 7 <= node < 15 and _holds(extents[node], 95.0)
        kinds[[first, second]] = POND if is_pond and used[node] else kinds[node]
        used[first] = used[node]
        if not used[node] or kinds[first] == POND or not _is_cut(kind, extents[node], node, float(random[node])):
            continue
        used[second] = True
        axis = int(extents[node, 3] - extents[node, 2] > extents[node, 1] - extents[node, 0])
        low, high = extents[node, 2 * axis : 2 * axis + 2]
        spread = 0.16 if kind == VILLAGE else 0.36
        at = low + (high - low) * (0.5 + spread * (float(random[node]) * 7919 % 1 - 0.5))
        cuts[node, axis] = at
        width = 2.4 if kind == VILLAGE and node < 7 else 0.0
        extents[first, [2 * axis + 1, 5 + 2 * axis]] = at, width
        extents[second, [2 * axis, 4 + 2 * axis]] = at, width
    leaves = slice(NODES, None)
    choice = uniform(seed, 51, i, j, np.arange(LEAVES))
    final = np.where(kinds[leaves] == POND, POND, _leaf_kinds(kind, choice))
    columns = extents[leaves].astype(np.float32).T
    cut = cuts.astype(np.float32)
    return Cell(i, j, kind, corner, cut[:, 0], cut[:, 1], Leaf._make([*columns, final.astype(np.uint8)]), used[leaves])


def _holds(extent: NDArray, place: float) -> bool:
    return bool(extent[0] <= place < extent[1] and extent[2] <= place < extent[3])


def _is_cut(kind: int, extent: NDArray, node: int, random: float) -> bool:
    longer = max(extent[1] - extent[0], extent[3] - extent[2])
    if kind == VILLAGE:
        return node < 7 or longer > 37
    if kind == RIVER:
        return longer > 110
    if kind == FOREST:
        return longer > 170
    return longer > 170 or (longer > 70 and random < 0.55)


def _leaf_kinds(kind: int, choice: NDArray[np.float32]) -> NDArray[np.int64]:
    if kind == VILLAGE:
        return np.where(choice < 0.9, LOT, MEADOW)
    if kind == FOREST:
        return np.where(choice < 0.88, WOOD, MEADOW)
    if kind == RIVER:
        return np.where(choice < 0.2, WOOD, np.where(choice < 0.65, MEADOW, FIELD))
    return np.select([choice < 0.08, choice < 0.11, choice < 0.25], [WOOD, POND, MEADOW], FIELD)


class Places(NamedTuple):
    """Where places lie in the plan; arrays of one shape. Lengths in metres."""

    leaf: NDArray[np.intp]
    """Row of the plan's tables."""
    u: NDArray[np.float64]
    a: NDArray[np.float32]
    """u relative to the cell's corner."""
    b: NDArray[np.float32]
    """v relative to the cell's corner."""


@dataclass(frozen=True)
class SitePlan:
    """The cells that some places touch, with their tables stacked: cell by cell, `LEAVES` parcels each."""

    seed: int
    u_lines: list[float]
    v_lines: list[float]
    cells: tuple[Cell, ...]

    @cached_property
    def leaf(self) -> Leaf:
        return Leaf._make(np.concatenate(columns) for columns in zip(*(cell.leaf for cell in self.cells), strict=True))

    @cached_property
    def leaf_hash(self) -> NDArray[np.uint32]:
        """32 random bits a parcel."""
        numbers = np.arange(LEAVES)
        return np.concatenate([hash32(self.seed, 60, cell.i, cell.j, numbers) for cell in self.cells])

    @cached_property
    def cell_kinds(self) -> NDArray[np.uint8]:
        """Kind of the cell of each parcel."""
        return np.repeat(np.array([cell.kind for cell in self.cells], np.uint8), LEAVES)

    @cached_property
    def corners(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(u, v) of the corner of the cell of each parcel, metres."""
        corner_u, corner_v = np.array([cell.corner for cell in self.cells]).T
        return np.repeat(corner_u, LEAVES), np.repeat(corner_v, LEAVES)

    @cached_property
    def cell_heights(self) -> NDArray[np.float32]:
        """Extent in v of the cell of each parcel, metres."""
        heights = [line(self.seed, 1, cell.j + 1) - cell.corner[1] for cell in self.cells]
        return np.repeat(np.array(heights, np.float32), LEAVES)

    @cached_property
    def _cuts(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return np.concatenate([c.cut_u for c in self.cells]), np.concatenate([c.cut_v for c in self.cells])

    def locate(self, u: NDArray[np.float64], v: NDArray[np.float64]) -> Places:
        """The parcels of places (u, v), which the plan must cover."""
        i, a = _cell_of(u, self.u_lines)
        j, b = _cell_of(v, self.v_lines)
        cell = i * (len(self.v_lines) - 1) + j
        cut_u, cut_v = self._cuts
        base = cell * NODES
        node = np.zeros(u.shape, np.intp)
        for _ in range(DEPTH):
            at = base + node
            beyond = a >= cut_u.take(at, mode="clip")
            beyond |= b >= cut_v.take(at, mode="clip")
            node *= 2
            node += 1
            node += beyond
        node += cell * LEAVES - NODES
        return Places(node, u, a, b)


def _cell_of(u: NDArray[np.float64], lines: list[float]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    index = np.zeros(u.shape, np.intp)
    for inner in lines[1:-1]:
        index += u >= inner
    return index, (u - np.array(lines).take(index, mode="clip")).astype(np.float32)


def covering(seed: int, u: NDArray[np.float64], v: NDArray[np.float64]) -> SitePlan:
    """The plan of the cells that hold the places (u, v)."""
    i, u_lines = _lines(seed, 0, float(u.min()), float(u.max()))
    j, v_lines = _lines(seed, 1, float(v.min()), float(v.max()))
    indices = [(i + m, j + n) for m in range(len(u_lines) - 1) for n in range(len(v_lines) - 1)]
    return SitePlan(seed, u_lines, v_lines, tuple(make_cell(seed, *index) for index in indices))
