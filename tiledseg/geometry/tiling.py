"""The tiling of a raster: cores that cover every pixel once, each in a context that its outputs can be computed from.

Core edges are snapped to the network's alignment, so the pooling grids of every tile are those of the whole raster. A
raster whose sides are no multiples of the alignment is extended to the next one by mirroring its last rows and columns;
the extension is context only, never core. The whole raster is the tiling of grid 1 x 1: "the same network on the whole
raster" means on that context.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.halo import Footprint, round_up


@dataclass(frozen=True)
class Tile:
    """One tile, in absolute raster positions (row, col).

    `core`: the pixels it owns. `context`: what the network reads; positions outside the raster are mirrored.
    `output`: what the network's output covers; contains the core. `whole`: of a tile of no tiling, what the network
    reads of its raster in all.
    """

    index: int
    position: tuple[int, int]
    core: Box
    context: Box
    output: Box
    whole: Box | None = None

    @property
    def core_in_output(self) -> Box:
        """The core, counted from the output's first pixel: the crop that gives the tile's own predictions."""
        return self.core.relative_to(self.output)


@dataclass(frozen=True)
class Tiling:
    """All tiles of one raster of shape (height, width), row-major over `grid` (rows, cols)."""

    raster: tuple[int, int]
    grid: tuple[int, int]
    footprint: Footprint
    tiles: tuple[Tile, ...]

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def whole(self) -> Box:
        """The pixels that the network reads in all; beyond the raster they are mirrored."""
        first, last = self.tiles[0].context, self.tiles[-1].context
        return Box(Interval(first.row.start, last.row.stop), Interval(first.col.start, last.col.stop))

    def tile_at(self, row: float, col: float) -> Tile:
        """Return the tile whose core has this place, or the nearest one."""
        rows = [self.tiles[i * self.grid[1]].core.row for i in range(self.grid[0])]
        cols = [tile.core.col for tile in self.tiles[: self.grid[1]]]
        at = [
            next((k for k, interval in enumerate(dim) if place < interval.stop), len(dim) - 1)
            for dim, place in ((rows, row), (cols, col))
        ]
        return self.tiles[at[0] * self.grid[1] + at[1]]

    @property
    def core_max(self) -> tuple[int, int]:
        return max(t.core.height for t in self.tiles), max(t.core.width for t in self.tiles)

    @property
    def context_max(self) -> tuple[int, int]:
        return max(t.context.height for t in self.tiles), max(t.context.width for t in self.tiles)


@lru_cache(maxsize=8)
def make_tiling(raster: tuple[int, int], grid: tuple[int, int], footprint: Footprint) -> Tiling:
    """Cut a raster of shape (height, width) into grid = (rows, cols) tiles for a network of this footprint.

    Raises GeometryError where the raster is empty or the grid is finer than the alignment.
    """
    rows = _tile_dim("rows", raster[0], grid[0], footprint)
    cols = _tile_dim("columns", raster[1], grid[1], footprint)
    tiles = tuple(
        Tile(
            index=i * grid[1] + j,
            position=(i, j),
            core=Box(row.core, col.core),
            context=Box(row.context, col.context),
            output=Box(row.output, col.output),
        )
        for i, row in enumerate(rows)
        for j, col in enumerate(cols)
    )
    return Tiling(raster, grid, footprint, tiles)


def tile_around(core: Box, raster: tuple[int, int], footprint: Footprint, index: int = 0) -> Tile:
    """Return a tile that owns any `core` of a raster of shape (height, width): its context is aligned, its edges need
    not be.

    Its pixels are those of any other tile that has them: its position in a grid says nothing.
    """
    rows, cols = (_span_around(part, size, footprint) for part, size in zip((core.row, core.col), raster, strict=True))
    whole = Box(*(_span_around(Interval(0, size), size, footprint).context for size in raster))
    return Tile(index, (0, 0), core, Box(rows.context, cols.context), Box(rows.output, cols.output), whole)


def window_tile(raster: tuple[int, int], at: tuple[int, int], side: int, footprint: Footprint, index: int = 0) -> Tile:
    """Return the window of `side` pixels that begins at `at` (row, col), multiples of the alignment, as a tile with its
    exact halo; where the raster ends earlier, so does the window."""
    rows, cols = (Interval(start, min(start + side, size)) for start, size in zip(at, raster, strict=True))
    return tile_around(Box(rows, cols), raster, footprint, index)


def largest_window(raster: tuple[int, int], side: int, footprint: Footprint) -> tuple[int, int]:
    """Return a raster that, as one tile, has the largest context of any window of `side` pixels in `raster`."""
    aligned = round_up(side, footprint.alignment)
    around = 0 if footprint.mirror else footprint.before + footprint.after
    most = tuple(min(aligned + around, round_up(size, footprint.alignment)) for size in raster)
    return most[0], most[1]


def finest_grid(raster: tuple[int, int], footprint: Footprint) -> tuple[int, int]:
    """Return the largest grid (rows, cols) that the alignment allows."""
    rows, cols = (round_up(n, footprint.alignment) // footprint.alignment for n in raster)
    return rows, cols


def context_sizes(size: int, parts: int, footprint: Footprint) -> list[int]:
    """Return the context's pixels of each of `parts` tiles along a dim of `size` pixels; errors as make_tiling."""
    return [span.context.size for span in _tile_dim("pixels", size, parts, footprint)]


@dataclass(frozen=True)
class _Span:
    """One tile along one dim."""

    core: Interval
    context: Interval
    output: Interval


def _tile_dim(word: str, size: int, parts: int, footprint: Footprint) -> list[_Span]:
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
    edges = [i * units // parts * footprint.alignment for i in range(parts + 1)]
    extended = Interval(0, edges[-1])
    return [_span(Interval(a, b), size, extended, footprint) for a, b in itertools.pairwise(edges)]


def _span_around(core: Interval, size: int, footprint: Footprint) -> _Span:
    unit = footprint.alignment
    aligned = Interval(core.start // unit * unit, round_up(core.stop, unit))
    return _span(aligned, size, Interval(0, round_up(size, unit)), footprint)


def _span(aligned: Interval, size: int, extended: Interval, footprint: Footprint) -> _Span:
    core = aligned.clip(Interval(0, size))
    context = aligned.expand(footprint.before, footprint.after)
    if not footprint.mirror:
        clipped = context.clip(extended)
        return _Span(core, clipped, clipped)
    start = context.start + footprint.offset
    return _Span(core, context, Interval(start, aligned.stop + footprint.surplus))


def tiling_efficiency(tiling: Tiling) -> float:
    """Return the efficiency E of a raster: context pixels over core pixels, computed over owned. Ideally 1."""
    return sum(t.context.area for t in tiling.tiles) / sum(t.core.area for t in tiling.tiles)
