"""The tiling of a raster: cores that cover every pixel once, each in a context from which its outputs are computed.

Core edges lie on multiples of the network's alignment, so the pooling grids of every tile are those of the whole
raster. A raster with other sides is extended to the next multiple by mirroring its last rows and columns; the extension
is context, never core. "The network on the whole raster" means the context of the tiling with grid 1 x 1. Runs, their
plans and rehearsals deal tiles to ranks by one function, `deal`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.halo import Footprint, round_up


@dataclass(frozen=True)
class Tile:
    """One tile, in raster positions (row, col).

    `core`: the pixels it owns. `context`: the network's input; positions outside the raster are mirrored. `output`: the
    network's output, which contains the core. `whole`: the input for the whole raster, of a tile without a tiling.
    """

    index: int
    position: tuple[int, int]
    core: Box
    context: Box
    output: Box
    whole: Box | None = None

    @property
    def core_in_output(self) -> Box:
        """The core, counted from the output's first pixel: the crop of the tile's own predictions."""
        return self.core.relative_to(self.output)


@dataclass(frozen=True)
class TileSpan:
    """A row or a column of tiles, along its dim: see `Tile`."""

    core: Interval
    context: Interval
    output: Interval


@dataclass(frozen=True)
class Tiling:
    """All tiles of one raster of shape (height, width): the products of `rows` and `cols`, row-major over `grid`."""

    raster: tuple[int, int]
    footprint: Footprint
    rows: tuple[TileSpan, ...]
    cols: tuple[TileSpan, ...]

    def __len__(self) -> int:
        return len(self.rows) * len(self.cols)

    @property
    def grid(self) -> tuple[int, int]:
        return len(self.rows), len(self.cols)

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        spans = itertools.product(enumerate(self.rows), enumerate(self.cols))
        return tuple(
            Tile(index, (i, j), Box(row.core, col.core), Box(row.context, col.context), Box(row.output, col.output))
            for index, ((i, row), (j, col)) in enumerate(spans)
        )

    @property
    def whole(self) -> Box:
        """The network's input for the whole raster; positions beyond the raster are mirrored."""
        return Box(*(hull_of([span.context for span in spans]) for spans in (self.rows, self.cols)))

    def tile_at(self, row: float, col: float) -> Tile:
        """Return the tile whose core contains the place (row, col), or the nearest tile."""
        i, j = (
            next((k for k, span in enumerate(spans) if place < span.core.stop), len(spans) - 1)
            for spans, place in ((self.rows, row), (self.cols, col))
        )
        return self.tiles[i * len(self.cols) + j]

    @property
    def core_max(self) -> tuple[int, int]:
        return max(span.core.size for span in self.rows), max(span.core.size for span in self.cols)

    @property
    def context_max(self) -> tuple[int, int]:
        return max(span.context.size for span in self.rows), max(span.context.size for span in self.cols)

    @property
    def contexts(self) -> list[tuple[int, int]]:
        """The (height, width) of each tile's context."""
        return [(row.context.size, col.context.size) for row, col in itertools.product(self.rows, self.cols)]


def hull_of(intervals: Sequence[Interval]) -> Interval:
    """Return the hull of intervals that follow one another."""
    return Interval(intervals[0].start, intervals[-1].stop)


@lru_cache(maxsize=8)
def make_tiling(raster: tuple[int, int], grid: tuple[int, int], footprint: Footprint) -> Tiling:
    """Cut a raster of shape (height, width) into grid = (rows, cols) tiles for a network of this footprint.

    Raises GeometryError for an empty raster, or a grid finer than the alignment.
    """
    words = zip(("rows", "columns"), raster, grid, strict=True)
    rows, cols = (_tile_dim(word, size, parts, footprint) for word, size, parts in words)
    return Tiling(raster, footprint, rows, cols)


def tile_around(core: Box, raster: tuple[int, int], footprint: Footprint, index: int = 0) -> Tile:
    """Return a tile with any `core` of a raster of shape (height, width). Its context is aligned, so its outputs are
    those of any other tile; its position in a grid has no meaning."""
    rows, cols = (_span_around(part, size, footprint) for part, size in zip((core.row, core.col), raster, strict=True))
    whole = Box(*(_span_around(Interval(0, size), size, footprint).context for size in raster))
    return Tile(index, (0, 0), core, Box(rows.context, cols.context), Box(rows.output, cols.output), whole)


def window_tile(raster: tuple[int, int], at: tuple[int, int], side: int, footprint: Footprint, index: int = 0) -> Tile:
    """Return the window of `side` pixels that begins at `at` (row, col), multiples of the alignment, as a tile; it is
    clipped at the raster's end."""
    rows, cols = (Interval(start, min(start + side, size)) for start, size in zip(at, raster, strict=True))
    return tile_around(Box(rows, cols), raster, footprint, index)


def largest_window(raster: tuple[int, int], side: int, footprint: Footprint) -> tuple[int, int]:
    """Return the shape of a raster that, as one tile, has the largest context of any window of `side` pixels in
    `raster`."""
    aligned = round_up(side, footprint.alignment)
    around = 0 if footprint.mirror else footprint.before + footprint.after
    most = tuple(min(aligned + around, round_up(size, footprint.alignment)) for size in raster)
    return most[0], most[1]


def finest_grid(raster: tuple[int, int], footprint: Footprint) -> tuple[int, int]:
    """Return the largest grid (rows, cols) that the alignment allows."""
    rows, cols = (round_up(n, footprint.alignment) // footprint.alignment for n in raster)
    return rows, cols


@lru_cache(maxsize=1 << 14)
def context_sizes(size: int, parts: int, footprint: Footprint) -> tuple[int, int]:
    """Return the size of the largest context of `parts` tiles along a dim of `size` pixels, and the sum of all; errors
    as `make_tiling`."""
    sizes = [span.context.size for span in _tile_dim("pixels", size, parts, footprint)]
    return max(sizes), sum(sizes)


def _tile_dim(word: str, size: int, parts: int, footprint: Footprint) -> tuple[TileSpan, ...]:
    if size < 1:
        raise GeometryError(f"the raster has {size} {word}; a raster of at least 1 x 1 pixels is needed")
    if parts < 1:
        raise GeometryError(f"the grid has {parts} tiles along the {word}; give at least 1")
    units = round_up(size, footprint.alignment) // footprint.alignment
    if parts > units:
        raise GeometryError(
            f"grid of {parts} tiles along {size} {word} is finer than the alignment of {footprint.alignment} pixels; "
            f"give at most {units}"
        )
    last, unit = units * footprint.alignment, footprint.unit
    if unit == 1 or 2 * parts > -(-last // unit):  # too coarse for tiles of about one size
        unit = footprint.alignment
    edges = [min(i * -(-last // unit) // parts * unit, last) for i in range(parts + 1)]
    extended = Interval(0, last)
    return tuple(_span(Interval(a, b), size, extended, footprint) for a, b in itertools.pairwise(edges))


def _span_around(core: Interval, size: int, footprint: Footprint) -> TileSpan:
    unit = footprint.alignment
    aligned = Interval(core.start // unit * unit, round_up(core.stop, unit))
    return _span(aligned, size, Interval(0, round_up(size, unit)), footprint)


def _span(aligned: Interval, size: int, extended: Interval, footprint: Footprint) -> TileSpan:
    core = aligned.clip(Interval(0, size))
    context = aligned.expand(footprint.before, footprint.after)
    if not footprint.mirror:
        clipped = context.clip(extended)
        return TileSpan(core, clipped, clipped)
    start = context.start + footprint.offset
    # The input's legal size may give outputs after the aligned core.
    return TileSpan(core, context, Interval(start, context.stop - footprint.offset))


def tiling_efficiency(tiling: Tiling) -> float:
    """Return the efficiency E of a tiling: context pixels over core pixels. Ideally 1."""
    context = sum(span.context.size for span in tiling.rows) * sum(span.context.size for span in tiling.cols)
    return context / (tiling.raster[0] * tiling.raster[1])


def batches(shapes: Sequence[Any], most: int) -> list[tuple[int, ...]]:
    """Return the numbers of parts that run at once: at most `most` of one shape. They are ordered by shape; batches of
    one keep the parts' order."""
    numbers = range(len(shapes))
    if most == 1:
        return [(number,) for number in numbers]
    by_shape = itertools.groupby(sorted(numbers, key=shapes.__getitem__), key=shapes.__getitem__)
    alike = (list(same) for _, same in by_shape)
    return [tuple(same[first : first + most]) for same in alike for first in range(0, len(same), most)]


def deal(
    contexts: Sequence[tuple[int, int]], owners: int, batch: int = 1, in_runs: bool = False
) -> list[tuple[int, ...]]:
    """Deal a step's tiles, with contexts of (height, width), to `owners`: ranks, or pipelines of stages. Return the
    numbers of each owner's tiles; some owners may get none. Every rank computes the same.

    Batches of at most `batch` tiles follow from the step alone and are dealt whole, so that float32 gradients, which a
    kernel sums over a batch, do not depend on the number of ranks. Greedy: the batch of most pixels first, each to the
    least loaded owner (Graham 1969: at most 4/3 of the optimum). `in_runs`: neighbours go to one owner instead, for
    modules that keep crops between tiles (`tracing.crops.kept_between_tiles`).
    """
    together = batches(contexts, batch)
    pixels = [len(each) * math.prod(contexts[each[0]]) for each in together]
    shares: list[list[int]] = [[] for _ in range(owners)]
    if in_runs:
        ends = list(itertools.accumulate(pixels))
        for number, end in enumerate(ends):
            shares[(2 * end - pixels[number]) * owners // (2 * ends[-1])].append(number)  # by its middle
    else:
        loads = [(0, owner) for owner in range(owners)]  # a heap
        for number in sorted(range(len(pixels)), key=pixels.__getitem__, reverse=True):
            load, owner = loads[0]
            shares[owner].append(number)
            heapq.heapreplace(loads, (load + pixels[number], owner))
    return [tuple(tile for number in sorted(share) for tile in together[number]) for share in shares]
