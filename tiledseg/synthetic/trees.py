"""Trees: at most one a cell of a jittered 5 m grid, dense in woods, thin in gardens and along hedges and banks."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.geometry.box import Box, Interval
from tiledseg.synthetic.land import LOT, MEADOW, METRES, POND, WOOD, BuildingSite, Plan
from tiledseg.synthetic.noise import uniform

MAX_HEIGHT = 18.0

_GRID = 5.0
_CELL = int(_GRID / METRES)  # pixels

_CROWNS_C = np.array(
    [
        (0.050, 0.085, 0.040, 0.44),
        (0.060, 0.100, 0.042, 0.50),
        (0.078, 0.112, 0.045, 0.47),
        (0.036, 0.062, 0.036, 0.30),
        (0.105, 0.115, 0.050, 0.43),
    ],
    np.float32,
)
"""Reflectance of crowns in red, green, blue and near infrared; the fourth is a conifer's."""


class Trees(NamedTuple):
    """The trees of some grid cells: columns of shape (rows, cols), an entry a cell. Metres."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    radius: NDArray[np.float64]  # 0 where there is no tree
    height: NDArray[np.float64]
    colour_C: NDArray[np.float32]


def grown_to_cells(box: Box) -> Box:
    """Return the grid cells under `box` and their neighbours, of which a tree may reach into it."""
    rows, cols = (
        Interval((side.start // _CELL - 1) * _CELL, ((side.stop - 1) // _CELL + 2) * _CELL)
        for side in (box.row, box.col)
    )
    return Box(rows, cols)


def plant(seed: int, box: Box, plan: Plan, site: BuildingSite, clump_HW: NDArray[np.float32]) -> Trees:
    """Plant trees in the grid cells of `box`, by what lies at their trunks. `clump_HW` is noise in [-1, 1]."""
    row = np.arange(box.row.start // _CELL, box.row.stop // _CELL)[:, None]
    col = np.arange(box.col.start // _CELL, box.col.stop // _CELL)[None, :]

    def random(number: int) -> NDArray[np.float64]:
        return uniform(seed, number, row, col).astype(np.float64)

    y, x = (row + 0.12 + 0.76 * random(80)) * _GRID, (col + 0.12 + 0.76 * random(81)) * _GRID
    trunk = (y / METRES).astype(np.int64) - box.row.start, (x / METRES).astype(np.int64) - box.col.start
    border, road, depth, clump = site.border[trunk], site.road[trunk], site.depth[trunk], clump_HW[trunk]
    use, bits = plan.parcels.use[site.parcel[trunk]], plan.parcels.bits[site.parcel[trunk]]
    woods = (use == WOOD) & (border > wood_edge(clump))
    density = np.select(
        [woods, use == LOT, use == MEADOW, use == POND],
        [0.97, np.where(border < 3.5, 0.30, 0.12), 0.006 + 0.10 * (clump > 0.45), 0.10 + 0.25 * (clump > 0.1)],
        0.0012,
    )
    density = np.where((use != LOT) & (bits % 4 < 2) & (border < 2.0), 0.3 + 0.5 * (clump > -0.1), density)  # hedges
    density = np.where((depth > -9) & ~woods, 0.06 + 0.55 * (clump > 0.0), density)
    density = np.where((road > -1.8) | (depth > -0.8) | (site.height[trunk] > 0), 0.0, density)
    spread = random(83)
    radius = np.where(woods, 2.3 + 1.5 * spread, 1.4 + 2.4 * spread * spread)
    height = np.where(woods, 8.0, 2.0) + radius * 1.6 + 2.0 * random(86)
    tone = (0.82 + 0.36 * random(85))[..., None].astype(np.float32)
    colour = _CROWNS_C[(random(84) * len(_CROWNS_C)).astype(np.int64)] * tone
    return Trees(x, y, np.where(random(82) < density, radius, 0.0), height, colour)


def wood_edge(clump: NDArray) -> NDArray:
    """Return how far from its parcel's border a wood begins, metres: 0.5 to 12, uneven. `clump` is noise in [-1, 1]."""
    return np.maximum(4.0 + 8.0 * clump, 0.5)


def crowns(trees: Trees, box: Box, rough_HW: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return the height of the highest crown over each pixel (0 for none), and its colour (4, H, W), inside the outer
    cells of `box`. `rough_HW` in [-1, 1] makes the crowns' edges and tops uneven."""
    row, col = np.arange(box.row.start, box.row.stop), np.arange(box.col.start, box.col.stop)
    top_HW, tree_HW = np.zeros(box.shape), np.zeros(box.shape, np.int64)
    for down, right in itertools.product((-1, 0, 1), repeat=2):
        cell_row = np.clip(np.arange(box.height) // _CELL + down, 0, trees.x.shape[0] - 1)[:, None]
        cell_col = np.clip(np.arange(box.width) // _CELL + right, 0, trees.x.shape[1] - 1)
        at = cell_row, cell_col
        radius = trees.radius[at]
        dy, dx = ((row + 0.5) * METRES)[:, None] - trees.y[at], (col + 0.5) * METRES - trees.x[at]
        ratio = (dy * dy + dx * dx) / np.maximum(radius * radius, 1e-6)
        top = trees.height[at] * (1 - 0.42 * ratio) + 0.7 * rough_HW
        higher = (ratio < 1.0 + 0.4 * rough_HW) & (top > top_HW)
        top_HW[higher] = top[higher]
        tree_HW[higher] = (cell_row * trees.x.shape[1] + cell_col)[higher]
    return top_HW, np.moveaxis(trees.colour_C.reshape(-1, 4)[tree_HW], -1, 0)
