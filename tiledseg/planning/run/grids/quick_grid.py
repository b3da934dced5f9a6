"""The grid of least predicted time, where a machine has a profile: not always that of the fewest tiles.

A larger tile has less halo, but its tensors fill no cache, and a map clears the memory that it takes first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tiling, finest_grid, make_tiling
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.map_time import forward_peak, map_seconds
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.run.grids.grid import LONGEST_TILE

FINER = (1, 2, 3, 4, 6, 8, 12, 16)  # times the tiles along a dim of the grid of the fewest
LEAST_GAIN = 0.03  # of the time: below it the fewest tiles stay

Grid = tuple[int, int]


def quickest_grid(
    fewest: Grid,
    raster: Grid,
    footprint: Footprint,
    graph: Graph,
    bands: int,
    value_bytes: int,
    machine: Machine,
    ranks: int,
    trains: bool,
) -> Grid:
    """The grid, among `fewest` and finer ones, whose training step or map is predicted to be the quickest.

    Every tile of a finer grid fits where one of `fewest` does. Depends on nothing but its arguments, so every rank
    chooses the same.
    """
    prices = Prices(graph, bands, value_bytes, machine, ranks)
    grids = _candidates(fewest, raster, footprint)
    found = {grid: predicted_seconds(make_tiling(raster, grid, footprint), prices, trains) for grid in grids}
    best = min(found, key=lambda grid: (found[grid], grid[0] * grid[1]))
    return best if found[best] < (1 - LEAST_GAIN) * found[fewest] else fewest


def _candidates(fewest: Grid, raster: Grid, footprint: Footprint) -> Iterator[Grid]:
    finest = finest_grid(raster, footprint)
    rows, cols = ([min(most, few * times) for times in FINER] for few, most in zip(fewest, finest, strict=True))
    yield fewest
    for (i, row), (j, col) in itertools.product(enumerate(rows), enumerate(cols)):
        sides = raster[0] / row, raster[1] / col
        if abs(i - j) <= 1 and max(sides) <= LONGEST_TILE * min(sides):
            yield row, col


def predicted_seconds(tiling: Tiling, prices: Prices, trains: bool) -> float:
    """Of a training step, or of a map, on the rank that has most tiles, were they all alike."""

    @cache
    def tile(context: Grid, owned: int) -> float:
        return prices.tile(context, owned).seconds if trains else map_seconds(prices, context, owned)

    shapes = Counter((each.context.shape, each.core.area) for each in tiling.tiles)
    total = sum(count * tile(*shape) for shape, count in shapes.items())
    own = total * -(-len(tiling) // prices.ranks) / len(tiling)
    return own if trains else own + _first_touch(tiling, prices)


def _first_touch(tiling: Tiling, prices: Prices) -> float:
    """Of the memory that a rank's largest tile takes."""
    known = prices.machine.profile
    peak = forward_peak(prices.graph, prices.bands, tiling.context_max, prices.width)
    return known.first_touch * peak if known else 0.0
