"""The grid that `auto` means: the fewest tiles whose training step fits the memory and that give every rank one."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from functools import cache

from tiledseg.errors import GeometryError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tiling, context_sizes, finest_grid, largest_window
from tiledseg.planning.walk.rank_steps import check_countable, largest_tensor
from tiledseg.planning.walk.step_memory import training_memory
from tiledseg.units import size

USUAL_SIDE, USUAL_HALOS = 512, 8  # default side of a training tile: pixels, or halos where these are longer
ENOUGH_TILES = 256  # fewer default tiles than this are made half as long
MAP_SIDE, MAP_HALOS = 2048, 16  # longest side of a map's tile on a CPU, in pixels or halos: longer ones are slower
CROPS_SIDE, CROPS_BATCHED = 672, 2048  # side of a tile of crops on a CPU, and on a GPU, whose batches are larger
MOST_TILES_A_SIDE = 2**18  # along a side of the finest grid that is searched
MOST_TRIALS, MOST_STEPS = 2**20, 2**13  # grids tried; contexts whose memory is calculated, a few ms each
LONGEST_TILE = 2.0  # a tile's length by its width: narrow strips sometimes need fewer tiles, but compute far more halo

Grid = tuple[int, int]


def choose_grid(
    raster: Grid,
    graph: Graph,
    footprint: Footprint,
    memory_bytes: int,
    bytes_per_value: int,
    least_tiles: int,
    bands: int = 4,
) -> Grid:
    """Return the grid (rows, cols) with the fewest tiles. A training step on each tile fits `memory_bytes`, and no
    tensor is too large for a kernel.

    The grid has at least `least_tiles`, where the alignment allows so many. No tile is more than twice as long as it is
    wide, unless the raster is. Of equally many tiles, those with the fewest computed pixels are chosen, then those in
    the fewest columns. The arguments alone decide, so every rank chooses the same. Raises GeometryError where not even
    the smallest context fits.
    """
    finest = finest_grid(raster, footprint)
    too_many = GeometryError(
        f"a raster of {raster[0]} x {raster[1]} pixels has too many grids to try them all for {size(memory_bytes)} of "
        "memory; give a grid in place of auto"
    )
    if max(finest) > MOST_TILES_A_SIDE:
        raise too_many
    trials, longest = itertools.count(), max(LONGEST_TILE, max(raster) / max(1, min(raster)))

    @cache
    def step_bytes(height: int, width: int) -> int:
        return training_memory(graph, bands, (height, width), bytes_per_value).total

    def pixels(rows: int, cols: int) -> int | None:
        """Return the pixels that a grid computes in all; None where it is not acceptable."""
        if next(trials) > MOST_TRIALS or step_bytes.cache_info().misses > MOST_STEPS:
            raise too_many
        sides = raster[0] / rows, raster[1] / cols
        if max(sides) > longest * min(sides):
            return None
        height, along = context_sizes(raster[0], rows, footprint)
        width, across = context_sizes(raster[1], cols, footprint)
        fits = largest_tensor(graph, bands, (height, width)).is_countable and step_bytes(height, width) <= memory_bytes
        return along * across if fits else None

    # Each tile of a coarser grid contains a tile of the finest grid, and its context: if this is too large, so are all.
    height, width = (
        context_sizes(side, 1, footprint)[0] for side in largest_window(raster, footprint.alignment, footprint)
    )
    check_countable(largest_tensor(graph, bands, (height, width)), "use a smaller network")
    if step_bytes(height, width) > memory_bytes:
        raise GeometryError(
            f"a training step on the smallest context of {height} x {width} pixels needs "
            f"{size(step_bytes(height, width))}, but the memory is {size(memory_bytes)}; use a smaller network, a "
            "narrower precision, or a device with more memory"
        )
    wanted, most = min(least_tiles, math.prod(finest)), math.prod(finest)
    best, grid = (most + 1, 0, 0), finest
    widest = longest * raster[1] / max(1, raster[0])
    for rows in range(1, finest[0] + 1):
        for cols in range(math.ceil(wanted / rows), min(finest[1], best[0] // rows, int(widest * rows) + 1) + 1):
            computed = pixels(rows, cols)
            if computed is not None:
                if (rows * cols, computed, cols) < best:
                    best, grid = (rows * cols, computed, cols), (rows, cols)
                break
    return grid


def near_squares(shape: tuple[int, int], finest: Grid, most: int, count: int) -> list[Grid]:
    """Return the `count` best grids of at most `most` parts: the largest part has the fewest pixels, then the shortest
    edges."""
    (height, width), square = shape, math.sqrt(most * shape[0] / shape[1])
    ordered = []
    for rows in range(max(1, int(square / LONGEST_TILE)), int(square * LONGEST_TILE) + 2):
        cols = most // rows
        if rows <= finest[0] and 1 <= cols <= finest[1] and (height != width or rows >= cols):
            part = -(-height // rows), -(-width // cols)
            ordered.append((math.prod(part), sum(part), (rows, cols)))
    return [grid for *_, grid in sorted(ordered)[:count]]


def usual_grids(rasters: Sequence[Grid], footprint: Footprint) -> list[Grid]:
    """Return the default grids (rows, cols) of training rasters. They depend on the rasters and the halo alone, so the
    result of the training does not depend on the machine."""

    def cut(side: int) -> list[Grid]:
        return [
            (min(finest[0], max(1, round(shape[0] / side))), min(finest[1], max(1, round(shape[1] / side))))
            for shape, finest in ((shape, finest_grid(shape, footprint)) for shape in rasters)
        ]

    side = max(USUAL_SIDE, USUAL_HALOS * max(footprint.before, footprint.after))
    grids = cut(side)
    return grids if sum(rows * cols for rows, cols in grids) >= ENOUGH_TILES else cut(side // 2)


def finer_grid(tiling: Tiling, graph: Graph, bands: int, memory_bytes: int, bytes_per_value: int) -> str:
    """Return the remedy that names the grid of the fewest tiles that fit the memory."""
    try:
        rows, cols = choose_grid(tiling.raster, graph, tiling.footprint, memory_bytes, bytes_per_value, 1, bands)
    except GeometryError:
        return "no grid does; use a smaller network or a narrower precision"
    return f"use --grid {rows} {cols}"


def check_tiles(
    tiling: Tiling, graph: Graph, bands: int, memory_bytes: int | None = None, bytes_per_value: int = 1
) -> None:
    """Raise GeometryError where a tensor of a tile is too large for a kernel. The message names a grid without such a
    tensor, which also fits the memory where that is known."""
    largest = largest_tensor(graph, bands, tiling.context_max)
    if largest.is_countable:
        return
    memory = memory_bytes or sys.maxsize
    rows, cols = choose_grid(tiling.raster, graph, tiling.footprint, memory, bytes_per_value, 1, bands)
    use = f"use a finer grid than {tiling.grid[0]} x {tiling.grid[1]}: [{rows},{cols}] does, or parallel.halo layer on "
    check_countable(largest, f"{use}more ranks")
