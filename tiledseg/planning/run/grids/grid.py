"""The grid that `auto` means: the fewest tiles whose training step fits the memory and that give every rank one."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiledseg.errors import GeometryError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tiling, context_sizes, finest_grid
from tiledseg.planning.step.tensor_limit import check_countable, is_countable, largest_tensor
from tiledseg.planning.walk.step_memory import training_memory

USUAL_SIDE, USUAL_HALOS = 512, 8  # of a tile to learn from: pixels, or halos where these are more
ENOUGH_TILES = 256  # to learn from: of fewer, tiles of half the side
MOST_TILES_A_SIDE = 2**18  # of the finest grid: more are not looked at
MOST_TRIALS, MOST_STEPS = 2**20, 2**13  # grids looked at; contexts whose memory is calculated, some ms each
LONGEST_TILE = 2.0  # sides of a tile: narrow strips would need fewer tiles now and then, but compute far more halo


@dataclass(frozen=True)
class _Cut:
    """One dim cut into tiles: the largest context, and the contexts of all of them together, in pixels."""

    largest: int
    total: int


def choose_grid(
    raster: tuple[int, int],
    graph: Graph,
    footprint: Footprint,
    memory_bytes: int,
    bytes_per_value: int,
    ranks: int,
    bands: int = 4,
) -> tuple[int, int]:
    """The grid (rows, cols) with the fewest tiles of which each fits `memory_bytes` in a training step, and has no
    tensor too large for a kernel.

    At least as many tiles as ranks, where the alignment allows so many. No tile is longer than twice its width, or
    than the raster is in proportion. Among equally many tiles: the fewest pixels computed, then the fewest columns.
    Depends on nothing but its arguments, so every rank chooses the same.

    Raises GeometryError, with both values, where not even the smallest context fits.
    """
    finest = finest_grid(raster, footprint)
    if max(finest) > MOST_TILES_A_SIDE:
        raise _too_many(raster, memory_bytes)
    longest = max(LONGEST_TILE, max(raster) / max(1, min(raster)))

    trials = itertools.count()

    @functools.cache
    def cut(dim: int, parts: int) -> _Cut:
        sizes = context_sizes(raster[dim], parts, footprint)
        return _Cut(max(sizes), sum(sizes))

    @functools.cache
    def step_bytes(height: int, width: int) -> int:
        return training_memory(graph, bands, (height, width), bytes_per_value).total

    @functools.cache
    def fits(height: int, width: int) -> bool:
        return is_countable(graph, bands, (height, width)) and step_bytes(height, width) <= memory_bytes

    def price(rows: int, cols: int) -> int | None:
        """Pixels that this grid computes in all; None where it is not acceptable."""
        if next(trials) > MOST_TRIALS or step_bytes.cache_info().misses > MOST_STEPS:
            raise _too_many(raster, memory_bytes)
        sides = raster[0] / rows, raster[1] / cols
        if max(sides) > longest * min(sides):
            return None
        row, col = cut(0, rows), cut(1, cols)
        return row.total * col.total if fits(row.largest, col.largest) else None

    # Every tile of a coarser grid contains one of the finest, and its context that one's context.
    height, width = cut(0, finest[0]).largest, cut(1, finest[1]).largest
    check_countable([largest_tensor(graph, bands, (height, width))], "use a smaller network")
    if step_bytes(height, width) > memory_bytes:
        raise GeometryError(
            f"a training step on the smallest context of {height} x {width} pixels needs "
            f"{step_bytes(height, width)} bytes, but the memory is {memory_bytes} bytes; use a smaller network, a "
            "lower precision, or a device with more memory"
        )
    return _fewest(finest, min(ranks, finest[0] * finest[1]), price)


def usual_grids(rasters: Sequence[tuple[int, int]], footprint: Footprint) -> list[tuple[int, int]]:
    """The grids (rows, cols) that a network learns from where nobody says another: see the constants above. They depend
    on the rasters and on the halo alone, and so does the result of the training."""

    def cut(side: int) -> list[tuple[int, int]]:
        return [
            (min(finest[0], max(1, round(shape[0] / side))), min(finest[1], max(1, round(shape[1] / side))))
            for shape, finest in ((shape, finest_grid(shape, footprint)) for shape in rasters)
        ]

    side = max(USUAL_SIDE, USUAL_HALOS * max(footprint.before, footprint.after))
    grids = cut(side)
    return grids if sum(rows * cols for rows, cols in grids) >= ENOUGH_TILES else cut(side // 2)


def _too_many(raster: tuple[int, int], memory_bytes: int) -> GeometryError:
    return GeometryError(
        f"a raster of {raster[0]} x {raster[1]} pixels has too many grids to try them all for {memory_bytes} bytes of "
        "memory; give a grid in place of auto"
    )


def finer_grid(tiling: Tiling, graph: Graph, bands: int, memory_bytes: int, bytes_per_value: int) -> str:
    """Return the remedy that names the grid of the fewest tiles that fit the memory."""
    try:
        rows, cols = choose_grid(tiling.raster, graph, tiling.footprint, memory_bytes, bytes_per_value, 1, bands)
    except GeometryError:
        return "no grid does; use a smaller network"
    return f"use --grid {rows} {cols}"


def check_tiles(
    tiling: Tiling, graph: Graph, bands: int, memory_bytes: int | None = None, bytes_per_value: int = 1
) -> None:
    """Raise GeometryError, with a grid that would do (and fit the memory, where it is known), where a tensor of a tile
    is too large for a kernel."""
    largest = largest_tensor(graph, bands, tiling.context_max)
    if is_countable(graph, bands, tiling.context_max):
        return
    rows, cols = choose_grid(
        tiling.raster, graph, tiling.footprint, memory_bytes or sys.maxsize, bytes_per_value, 1, bands
    )
    given = f"{tiling.grid[0]} x {tiling.grid[1]}"
    check_countable(
        [largest], f"use a finer grid than {given}: [{rows},{cols}] does, or parallel.halo layer on more ranks"
    )


def _fewest(finest: tuple[int, int], wanted: int, price: Callable[[int, int], int | None]) -> tuple[int, int]:
    """The acceptable grid of the fewest tiles, `wanted` or more; the finest grid must be acceptable."""
    best, grid = (finest[0] * finest[1] + 1, 0, 0), finest
    for rows in range(1, finest[0] + 1):
        for cols in range(math.ceil(wanted / rows), min(finest[1], best[0] // rows) + 1):
            pixels = price(rows, cols)
            if pixels is not None:
                found = rows * cols, pixels, cols
                if found < best:
                    best, grid = found, (rows, cols)
                break
    return grid
