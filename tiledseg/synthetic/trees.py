"""Trees: at most one a cell of a jittered 5 m grid, dense in woods, thin in gardens and along hedges and banks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.geometry.box import Box
from tiledseg.synthetic.buildings import Buildings
from tiledseg.synthetic.ground import wood_edge
from tiledseg.synthetic.noise import point_noise, uniform
from tiledseg.synthetic.parcels import LOT, MEADOW, POND, WOOD, SitePlan, covering
from tiledseg.synthetic.warp import METRES, Warp, pixels
from tiledseg.synthetic.water import water_depth_at

GRID = 5.0
MAX_RADIUS = 4.6
MAX_HEIGHT = 18.0

CROWNS_C = np.array(
    [
        (0.050, 0.085, 0.040, 0.44),
        (0.060, 0.100, 0.042, 0.50),
        (0.078, 0.112, 0.045, 0.47),
        (0.036, 0.062, 0.036, 0.30),
        (0.045, 0.075, 0.038, 0.38),
        (0.105, 0.115, 0.050, 0.43),
    ],
    np.float32,
)
"""Reflectance of crowns in red, green, blue and near infrared; the fourth is a conifer's."""


class Trees(NamedTuple):
    """One entry each; lengths in metres."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    radius: NDArray[np.float32]
    height: NDArray[np.float32]
    colour_C: NDArray[np.float32]


def find_trees(seed: int, warp: Warp, buildings: Buildings, box: Box) -> Trees:
    """The trees whose grid cells touch `box`, in the grid's order (row by row)."""
    first_row, last_row = (int(side * METRES // GRID) for side in (box.row.start, box.row.stop))
    first_col, last_col = (int(side * METRES // GRID) for side in (box.col.start, box.col.stop))
    rows, cols = (part.ravel() for part in np.mgrid[first_row : last_row + 1, first_col : last_col + 1])
    y = (rows + 0.12 + 0.76 * uniform(seed, 80, rows, cols).astype(np.float64)) * GRID
    x = (cols + 0.12 + 0.76 * uniform(seed, 81, rows, cols).astype(np.float64)) * GRID
    u, v = warp.points(x, y)
    plan = covering(seed, u, v)
    woods, density = _density(seed, plan, x, y, u, v)
    chosen = np.flatnonzero(uniform(seed, 82, rows, cols) < density)
    chosen = chosen[~_built(buildings, x[chosen], y[chosen])]
    rows, cols, x, y, woods = rows[chosen], cols[chosen], x[chosen], y[chosen], woods[chosen]
    spread = uniform(seed, 83, rows, cols)
    radius = np.where(woods, 2.3 + 1.7 * spread, 1.3 + 3.0 * spread * spread + 0.2).astype(np.float32)
    kind = (uniform(seed, 84, rows, cols) * 6).astype(int)
    tone = 0.82 + 0.36 * uniform(seed, 85, rows, cols)
    height = np.where(woods, 8.0, 2.0) + radius * 1.6 + 2.0 * uniform(seed, 86, rows, cols)
    return Trees(x, y, radius, height.astype(np.float32), CROWNS_C[kind] * tone[:, None])


def _density(
    seed: int, plan: SitePlan, x: NDArray, y: NDArray, u: NDArray, v: NDArray
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """(whether a place is in a wood, chance of a tree there)."""
    places = plan.locate(u, v)
    at, leaf = places.leaf, plan.leaf
    kind = leaf.kind[at]
    sides = np.stack([places.a - leaf.u0[at], leaf.u1[at] - places.a, places.b - leaf.v0[at], leaf.v1[at] - places.b])
    roads = np.stack([leaf.road_u0[at], leaf.road_u1[at], leaf.road_v0[at], leaf.road_v1[at]])
    verge = np.where(roads > 0, sides - roads, np.inf).min(axis=0)
    border = sides.min(axis=0)
    bits = plan.leaf_hash[at]
    clump = point_noise(seed + 90, pixels(y), pixels(x), 60)
    bank = -water_depth_at(seed, plan, places, x, y)
    woods = (kind == WOOD) & (np.minimum(verge - 2.0, border) > wood_edge(clump))
    hedged = ((bits >> np.uint32(8)) & np.uint32(3)) < 2
    density = np.select(
        [woods, kind == LOT, kind == MEADOW, kind == POND],
        [0.97, np.where(border < 3.5, 0.30, 0.12), 0.006 + 0.10 * (clump > 0.45), 0.10 + 0.25 * (clump > 0.1)],
        0.0012,
    )
    density = np.where((kind != LOT) & hedged & (border < 2.0) & (verge > 2.0), 0.3 + 0.5 * (clump > -0.1), density)
    density = np.where((verge > 1.5) & (verge < 5.0) & (bits & np.uint32(7) < 2), 0.6, density)
    density = np.where((bank > 1.0) & (bank < 9.0) & ~woods, 0.06 + 0.55 * (clump > 0.0), density)
    density = np.where((verge < 1.8) | (bank < 0.8), 0.0, density)
    return woods, density


def _built(buildings: Buildings, x: NDArray, y: NDArray) -> NDArray[np.bool_]:
    """Whether a building stands within a metre of each place."""
    built = np.zeros(x.shape, bool)
    for k in range(len(buildings.x)):
        near = np.flatnonzero((np.abs(x - buildings.x[k]) < 40) & (np.abs(y - buildings.y[k]) < 40))
        dx, dy = x[near] - buildings.x[k], y[near] - buildings.y[k]
        along = np.abs(dx * buildings.along_x[k] + dy * buildings.along_y[k])
        across = np.abs(dy * buildings.along_x[k] - dx * buildings.along_y[k])
        built[near] |= (along < buildings.half_length[k] + 1.2) & (across < buildings.half_width[k] + 1.2)
    return built


def raise_trees(
    trees: Trees, box: Box, rough_HW: NDArray[np.float32], height_HW: NDArray[np.float32]
) -> NDArray[np.int32]:
    """Plant them: heights into `height_HW` (metres) where they rise above it; returns who stands where, -1 for none.

    `rough_HW` in [-1, 1] makes the crowns' edges and tops uneven. Where crowns overlap the higher one shows.
    """
    owner_HW = np.full(box.shape, -1, np.int32)
    if trees.x.size == 0:
        return owner_HW
    half = int(MAX_RADIUS * 1.2 / METRES) + 1
    offsets = np.arange(-half, half + 1)
    keys = np.full(box.shape, -1, np.int64)
    width = box.shape[1]
    for start in range(0, trees.x.size, 512):  # bounds the memory of the stamps
        part = slice(start, start + 512)
        numbers = np.arange(trees.x.size)[part, None, None]
        rows = np.floor(trees.y[part] / METRES).astype(np.int64)[:, None] + offsets
        cols = np.floor(trees.x[part] / METRES).astype(np.int64)[:, None] + offsets
        dy = ((rows + 0.5) * METRES - trees.y[part, None]).astype(np.float32)
        dx = ((cols + 0.5) * METRES - trees.x[part, None]).astype(np.float32)
        rows, cols = rows - box.row.start, cols - box.col.start
        inside = ((rows >= 0) & (rows < box.shape[0]))[:, :, None] & ((cols >= 0) & (cols < width))[:, None, :]
        square = (dy * dy)[:, :, None] + (dx * dx)[:, None, :]
        radius = trees.radius[part, None, None]
        inside &= square < radius * radius * 1.44
        tree, r, c = np.nonzero(inside)
        at = rows[tree, r] * width + cols[tree, c]
        rough = rough_HW.ravel()[at]
        ratio = square[tree, r, c] / (radius * radius)[tree, 0, 0]
        crown = ratio < 1.0 + 0.4 * rough
        at, tree, ratio, rough = at[crown], tree[crown], ratio[crown], rough[crown]
        top = trees.height[part][tree] * (1 - 0.42 * ratio) + 0.7 * rough
        key = (top * 64).astype(np.int64) << 32 | (np.int64(1 << 31) - numbers[tree, 0, 0])
        np.maximum.at(keys.reshape(-1), at, key)
    top_HW = (keys >> 32).astype(np.float32) / 64
    taller = (keys >= 0) & (top_HW > height_HW)
    height_HW[taller] = top_HW[taller]
    owner_HW[taller] = ((1 << 31) - (keys[taller] & 0xFFFFFFFF)).astype(np.int32)
    return owner_HW
