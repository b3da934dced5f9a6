"""The grid of least predicted time, where a machine has a profile: not always that of the fewest tiles.

A larger tile has less halo, but a map clears the memory that it takes first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.geometry.tiling import Tiling, finest_grid, make_tiling
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.run.grids.grid import LONGEST_TILE
from tiledseg.planning.step.halo_traffic import tensors_of

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
    """Return the grid, among `fewest` and finer ones, whose training step or map is predicted to be the quickest.

    Every tile of a finer grid fits where one of `fewest` does. Every rank chooses the same.
    """
    prices = Prices(graph, bands, value_bytes, machine, ranks)
    grids = _candidates(fewest, raster, footprint)
    seconds = {grid: predicted_seconds(make_tiling(raster, grid, footprint), prices, trains) for grid in grids}
    best = min(seconds, key=lambda grid: (seconds[grid], grid[0] * grid[1]))
    return best if seconds[best] < (1 - LEAST_GAIN) * seconds[fewest] else fewest


def _candidates(fewest: Grid, raster: Grid, footprint: Footprint) -> Iterator[Grid]:
    finest = finest_grid(raster, footprint)
    rows, cols = ([min(most, few * times) for times in FINER] for few, most in zip(fewest, finest, strict=True))
    yield fewest
    for (i, row), (j, col) in itertools.product(enumerate(rows), enumerate(cols)):
        sides = raster[0] / row, raster[1] / col
        if abs(i - j) <= 1 and max(sides) <= LONGEST_TILE * min(sides):
            yield row, col


def predicted_seconds(tiling: Tiling, prices: Prices, trains: bool) -> float:
    """Predict a training step, or a map, on the rank that has most tiles, were they all alike."""

    @cache
    def tile(context: Grid, owned: int) -> float:
        time = prices.tile(context, owned)
        return time.seconds if trains else time.forward + time.reading

    shapes = Counter((each.context.shape, each.core.area) for each in tiling.tiles)
    total = sum(count * tile(*shape) for shape, count in shapes.items())
    own = total * -(-len(tiling) // prices.ranks) / len(tiling)
    if trains:
        return own
    peak = forward_peak(prices.graph, prices.bands, tiling.context_max, prices.width)
    return own + prices.machine.first_touch * peak


def forward_peak(graph: Graph, bands: int, context: tuple[int, int], width: int) -> int:
    """Return the most bytes of tensors that a forward pass without gradients holds at once."""
    sizes = [
        height * cols * tensor.pixel_bytes
        for (_, height, cols), tensor in zip(
            tensor_shapes(graph, bands, *context), tensors_of(graph, bands, width), strict=True
        )
    ]
    living, peak = {0: sizes[0]}, sizes[0]
    for k, layer in enumerate(graph.layers):
        source = graph.sources[k][0]
        taken = layer.hands_on or graph.overwrites[k]  # the same memory, by its newest name
        living[k + 1] = living.get(source, 0) if taken else sizes[k + 1]
        if taken:
            living[source] = 0
        peak = max(peak, sum(living.values()))
        for tensor in graph.released[k]:
            living.pop(tensor, None)
    return peak
