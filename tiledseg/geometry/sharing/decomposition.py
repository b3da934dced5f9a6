"""Partitions of a dim over ranks, the exchanges that give every rank its window, and the mesh of ranks.

Positions are those of the whole tensor, from 0. A window may be wider than the rank's own block, by more than its
neighbours own: each part comes directly from its owner. It may be narrower (a crop). Beyond the tensor, where no rank
owns positions, the receiver fills in the layer's padding.

Three laws hold for any partition and windows: rank r receives from q the parts that q sends to r; the parts that a rank
keeps and receives cover its window within the tensor, each position once; every part comes from its owner.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.tiling import Tile, TileSpan, Tiling, hull_of


@dataclass(frozen=True)
class Partition:
    """The positions 0, ..., edges[-1] - 1 of one dim, cut into non-empty blocks: `edges` rise from 0."""

    edges: tuple[int, ...]
    size: int = field(init=False, compare=False, repr=False)
    parts: int = field(init=False, compare=False, repr=False)
    whole: Interval = field(init=False, compare=False, repr=False)
    blocks: tuple[Interval, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        edges = self.edges
        if edges[0] != 0 or any(b <= a for a, b in pairwise(edges)) or len(edges) < 2:
            raise GeometryError(f"a partition with edges {list(edges)}; give edges that rise from 0")
        blocks = tuple(Interval(a, b) for a, b in pairwise(edges))
        vars(self).update(size=edges[-1], parts=len(blocks), whole=Interval(0, edges[-1]), blocks=blocks)

    @staticmethod
    def even(size: int, parts: int) -> Partition:
        """Return `parts` blocks whose sizes differ by at most one."""
        return Partition(tuple(i * size // parts for i in range(parts + 1)))

    def owners(self, window: Interval) -> dict[int, Interval]:
        """Return the parts of a window in the blocks that it meets, by block."""
        edges, parts, start = self.edges, dict[int, Interval](), max(0, window.start)
        block = bisect_right(edges, start) - 1
        while start < min(window.stop, self.size):
            parts[block] = Interval(start, min(edges[block + 1], window.stop))
            start, block = edges[block + 1], block + 1
        return parts


@dataclass(frozen=True)
class Decomposition:
    """One image over rows x cols ranks, each of which owns a block of neighbouring tiles.

    `whole`: the network's input in raster positions; beyond the raster it is mirrored. `rows` and `cols` cut it at the
    edges of the blocks' cores, counted from its first pixel. The outer blocks also have the pixels outside the cores.
    """

    tiling: Tiling
    whole: Box
    rows: Partition
    cols: Partition

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of blocks along rows and columns."""
        return self.rows.parts, self.cols.parts

    def owned(self, row: int, col: int) -> Box:
        """Return the pixels that the rank at (row, col) reads, in raster positions."""
        box = Box(self.rows.blocks[row], self.cols.blocks[col])
        return box.shift(self.whole.row.start, self.whole.col.start)

    def _range(self, dim: int, block: int) -> range:
        """Return the numbers of a block's tiles along rows (`dim` 0) or columns."""
        tiles, parts = len((self.tiling.rows, self.tiling.cols)[dim]), (self.rows, self.cols)[dim].parts
        return range(block * tiles // parts, (block + 1) * tiles // parts)

    def spans(self, dim: int, block: int) -> tuple[TileSpan, ...]:
        """Return a block's tiles along rows (`dim` 0) or columns."""
        return tuple((self.tiling.rows, self.tiling.cols)[dim][i] for i in self._range(dim, block))

    def tiles(self, row: int, col: int) -> tuple[Tile, ...]:
        """Return the tiles of the block at (row, col), row-major."""
        width = self.tiling.grid[1]
        return tuple(self.tiling.tiles[i * width + j] for i in self._range(0, row) for j in self._range(1, col))

    def block(self, row: int, col: int) -> Tile:
        """Return the block at (row, col) as a tile: its tiles' cores together, read without a halo."""
        rows, cols = self.spans(0, row), self.spans(1, col)
        core = Box(hull_of([span.core for span in rows]), hull_of([span.core for span in cols]))
        output = Box(hull_of([span.output for span in rows]), hull_of([span.output for span in cols]))
        return Tile(row * self.cols.parts + col, (row, col), core, self.owned(row, col), output)

    def context_windows(self) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        """Return the hull of the contexts of each block's tiles, along rows and columns, in positions of `whole`."""
        rows, cols = (
            tuple(hull_of([span.context for span in self.spans(dim, i)]).shift(-origin) for i in range(cut.parts))
            for dim, cut, origin in ((0, self.rows, self.whole.row.start), (1, self.cols, self.whole.col.start))
        )
        return rows, cols


def decompose(tiling: Tiling, shape: tuple[int, int]) -> Decomposition:
    """Spread a tiling over `shape` (rows, cols) ranks. Raises GeometryError if the grid has fewer tiles along a dim."""
    for word, tiles, ranks in zip(("rows", "columns"), tiling.grid, shape, strict=True):
        if ranks > tiles:
            raise GeometryError(
                f"{ranks} {word} of ranks share an image of {tiles} {word} of tiles; use parallel.mesh with at most "
                f"[{tiling.grid[0]}, {tiling.grid[1]}], or a finer tiling.grid"
            )
    dims = zip((tiling.whole.row, tiling.whole.col), (tiling.rows, tiling.cols), shape, strict=True)
    rows, cols = (
        Partition((0, *(spans[i * len(spans) // n].core.start - whole.start for i in range(1, n)), whole.size))
        for whole, spans, n in dims
    )
    return Decomposition(tiling, tiling.whole, rows, cols)


_ALL = slice(None)
Patch = tuple[slice, slice]  # rows and columns of a part of a tensor
GridPosition = tuple[int, int]  # (row, col)
DimWindows = tuple[Partition, Sequence[Interval]] | None


@dataclass(frozen=True, eq=False)  # compared by identity
class BlockExchange:
    """One rank's side of an exchange along both dims.

    `owned`, `window`: sizes (rows, columns) before and after it; None along a dim without an exchange. `sends`: the
    part of the own block for each other rank. `receives`: the part of the window from each other rank. `kept`: the part
    that stays, in the block and in the window (None: nothing). `keeps_all`: it is all of the block. `outside`: the
    parts of the window beyond the tensor's ends.
    """

    owned: tuple[int | None, int | None]
    window: tuple[int | None, int | None]
    sends: Mapping[GridPosition, Patch]
    receives: Mapping[GridPosition, Patch]
    kept: tuple[Patch, Patch] | None
    keeps_all: bool
    outside: tuple[Patch, ...]


def block_exchange(rows: DimWindows, cols: DimWindows, at: GridPosition) -> BlockExchange | None:
    """Return the exchange after which the rank at (row, col) = `at` has its window; None if it has nothing to do.

    `rows`, `cols`: a dim's partition, and the windows of all its ranks; None: the dim is not exchanged.
    """
    has, gets, sends, receives, outside, idle = zip(*map(_along, (rows, cols), at), strict=True)
    if all(idle):
        return None
    sent, received = _patches(*sends), _patches(*receives)
    stays, kept = sent.pop(at, None), received.pop(at, None)
    keeps_all = all(size is None or sends[dim].get(at[dim]) == slice(0, size) for dim, size in enumerate(has))
    beyond = *((end, _ALL) for end in outside[0]), *((_ALL, end) for end in outside[1])
    return BlockExchange(has, gets, sent, received, (stays, kept) if stays and kept else None, keeps_all, beyond)


def _along(dim: DimWindows, index: int) -> tuple[Any, ...]:
    """Return, for rank `index` along a dim: the sizes of block and window, the parts sent to and received from each
    rank, itself included (no empty ones), the parts beyond the tensor, and True if it neither moves nor sends."""
    if dim is None:
        return None, None, {index: _ALL}, {index: _ALL}, [], True
    partition, windows = dim
    own, window = partition.blocks[index], windows[index]
    parts = ((peer, own.clip(wanted)) for peer, wanted in enumerate(windows))
    sends = {peer: part.relative_to(own.start).slice for peer, part in parts if part.size}
    receives = {peer: part.relative_to(window.start).slice for peer, part in partition.owners(window).items()}
    before, after = window.outside(partition.whole)
    ends = slice(0, before), slice(window.size - after, window.size)
    outside = [end for end in ends if end.start < end.stop]
    return own.size, window.size, sends, receives, outside, own == window and len(sends) == 1


@cache
def context_exchange(image: Decomposition, at: GridPosition) -> BlockExchange | None:
    """Return the exchange after which the rank at (row, col) = `at` has the contexts of all its tiles."""
    rows, cols = image.context_windows()
    return block_exchange((image.rows, rows), (image.cols, cols), at)


def _patches(rows: Mapping[int, slice], cols: Mapping[int, slice]) -> dict[GridPosition, Patch]:
    """Return every pair of a part along rows and one along columns, in the order of ranks."""
    return {(row, col): (rows[row], cols[col]) for row, col in product(rows, cols)}


class MeshPosition(NamedTuple):
    """The place of a rank: its replica, the row and column of its block in the image, and its stage of the pipeline."""

    replica: int
    row: int
    col: int
    stage: int = 0


@dataclass(frozen=True)
class MeshShape:
    """The shape of a mesh: `replicas` images in flight, each cut into `rows` x `cols` blocks, each computed by `stages`
    ranks in a pipeline.

    Ranks count along stages first, then columns, rows and replicas: the stages of a block, which exchange most data,
    are neighbours in the job and share a node, then the blocks of an image. Ranks of the job beyond the mesh own
    nothing.
    """

    replicas: int
    rows: int
    cols: int
    stages: int = 1

    def __post_init__(self) -> None:
        if min(self.replicas, self.rows, self.cols, self.stages) < 1:
            raise GeometryError(f"a mesh of {self}; give at least 1 along each axis")

    def __str__(self) -> str:
        if self.stages == 1:
            return f"{self.replicas} x {self.rows} x {self.cols} (replica x row x col)"
        return f"{self.replicas} x {self.rows} x {self.cols} x {self.stages} (replica x row x col x stage)"

    @property
    def ranks(self) -> int:
        return self.replicas * self.ranks_per_image * self.stages

    @property
    def ranks_per_image(self) -> int:
        """The number of ranks that share an image at one stage: that of its blocks."""
        return self.rows * self.cols

    def position(self, rank: int) -> MeshPosition | None:
        """Return the place of a rank of the job; None if it is outside the mesh."""
        if rank >= self.ranks:
            return None
        block, stage = divmod(rank, self.stages)
        replica, within = divmod(block, self.ranks_per_image)
        return MeshPosition(replica, *divmod(within, self.cols), stage)

    def rank_at(self, position: MeshPosition) -> int:
        """Return the rank of the job at `position`."""
        block = (position.replica * self.rows + position.row) * self.cols + position.col
        return block * self.stages + position.stage

    def blocks(self, replica: int, stage: int) -> list[int]:
        """Return the ranks of one image at one stage, row by row."""
        places = (MeshPosition(replica, row, col, stage) for row in range(self.rows) for col in range(self.cols))
        return [self.rank_at(place) for place in places]

    def pipeline(self, rank: int) -> list[int]:
        """Return the ranks of a rank's pipeline, stage by stage."""
        first = rank - rank % self.stages
        return list(range(first, first + self.stages))

    def holders(self, stage: int) -> list[int]:
        """Return all ranks that hold the layers of one stage."""
        return list(range(stage, self.ranks, self.stages))
