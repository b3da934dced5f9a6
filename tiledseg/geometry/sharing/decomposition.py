"""Blocks that ranks own along one dim, and the messages after which every rank holds its window.

Positions are those of the whole tensor, from 0. A window may be wider than the rank's own block, by more than its
neighbours own: each part comes straight from its owner. It may be narrower (a crop). It may reach beyond the tensor,
where no rank owns anything: there the receiver fills in the layer's padding.

Three laws hold for any partition and windows. Rank r receives from q what q sends to r. The parts that a rank keeps and
receives cover its window within the tensor, each position once. Every part comes from its owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.graph import Node
from tiledseg.geometry.tiling import Tile, TileSpan, Tiling, hull_of

TileSizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Partition:
    """The positions 0, ..., edges[-1] - 1 of one dim, cut into blocks that are not empty: `edges` rise from 0."""

    edges: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.edges[0] != 0 or any(b <= a for a, b in pairwise(self.edges)) or len(self.edges) < 2:
            raise GeometryError(f"a partition with edges {list(self.edges)}; give edges that rise from 0")

    @staticmethod
    def even(size: int, parts: int) -> Partition:
        """Return `parts` blocks whose sizes differ by one at most."""
        return Partition(tuple(i * size // parts for i in range(parts + 1)))

    @property
    def size(self) -> int:
        return self.edges[-1]

    @property
    def parts(self) -> int:
        return len(self.edges) - 1

    @property
    def whole(self) -> Interval:
        return Interval(0, self.size)

    def owned(self, index: int) -> Interval:
        return Interval(self.edges[index], self.edges[index + 1])

    @property
    def blocks(self) -> tuple[Interval, ...]:
        return tuple(Interval(a, b) for a, b in pairwise(self.edges))


def partition_through(node: Node, inputs: Sequence[Partition]) -> Partition:
    """Return the partition of a node's outputs. Raises GeometryError, naming it, where a rank would own none."""
    try:
        size = node.layer.output_size(*(partition.size for partition in inputs))
    except GeometryError as error:
        raise GeometryError(f"layer '{node.name}': {error}") from None
    cuts = zip(*(partition.edges[1:-1] for partition in inputs), strict=True)
    inner = (min(max(node.layer.output_edge(*each), 0), size) for each in cuts)
    edges = (0, *inner, size)
    empty = next((i for i, (a, b) in enumerate(pairwise(edges)) if b <= a), None)
    if empty is not None:
        raise GeometryError(
            f"layer '{node.name}' gives {max(size, 0)} positions along a dim that {inputs[0].parts} ranks share, and "
            f"none of them to rank {empty} along it; use fewer ranks an image, larger images, or fewer levels"
        )
    return Partition(edges)


@dataclass(frozen=True)
class Transfer:
    """The positions `part` go to, or come from, the rank with index `peer` along the axis."""

    peer: int
    part: Interval


@dataclass(frozen=True)
class WindowExchange:
    """One rank's side of an exchange along one dim, after which it holds `window` of a tensor of `size` positions.

    `kept`: what of the window it owns itself; empty where it owns none of it.
    """

    size: int
    owned: Interval
    window: Interval
    kept: Interval
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]

    @property
    def is_identity(self) -> bool:
        """True if the rank's own block is its window and nobody needs any of it."""
        return self.owned == self.window and not self.sends

    @property
    def outside(self) -> tuple[int, int]:
        """The numbers of positions of the window before the tensor and after it."""
        return self.window.outside(Interval(0, self.size))


def plan_exchange(partition: Partition, windows: Sequence[Interval], index: int) -> WindowExchange:
    """Return rank `index`'s side of the exchange after which each rank i of the axis holds `windows[i]`."""
    whole, owned = partition.whole, partition.owned(index)
    inside = [window.clip(whole) for window in windows]
    others = [peer for peer in range(partition.parts) if peer != index]
    sends = tuple(Transfer(peer, part) for peer in others if (part := _common(owned, inside[peer])).size)
    receives = tuple(
        Transfer(peer, part) for peer in others if (part := _common(partition.owned(peer), inside[index])).size
    )
    return WindowExchange(partition.size, owned, windows[index], _common(owned, inside[index]), sends, receives)


def _common(one: Interval, other: Interval) -> Interval:
    start = max(one.start, other.start)
    return Interval(start, max(start, min(one.stop, other.stop)))


@dataclass(frozen=True)
class Decomposition:
    """One image over rows x cols ranks, each of which owns a block of neighbouring tiles.

    `whole`: the pixels that the network reads in all, in raster positions; beyond the raster they are mirrored. `rows`
    and `cols` cut it at the edges of the blocks' cores, counted from its first pixel; the first and the last block
    also have the pixels outside the cores.
    """

    tiling: Tiling
    whole: Box
    rows: Partition
    cols: Partition

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks along rows and columns."""
        return self.rows.parts, self.cols.parts

    def owned(self, row: int, col: int) -> Box:
        """Return the pixels that the rank at (row, col) reads, in raster positions."""
        box = Box(self.rows.owned(row), self.cols.owned(col))
        return box.shift(self.whole.row.start, self.whole.col.start)

    def _range(self, dim: int, block: int) -> range:
        """Return the numbers of a block's tiles along rows (`dim` 0) or columns."""
        tiles, parts = self.tiling.grid[dim], self.shape[dim]
        return range(block * tiles // parts, (block + 1) * tiles // parts)

    def spans(self, dim: int, block: int) -> tuple[TileSpan, ...]:
        """Return a block's tiles along rows (`dim` 0) or columns."""
        return tuple((self.tiling.rows, self.tiling.cols)[dim][i] for i in self._range(dim, block))

    def tiles(self, row: int, col: int) -> tuple[Tile, ...]:
        """Return the tiles of the block at (row, col), row-major."""
        width = self.tiling.grid[1]
        return tuple(self.tiling.tiles[i * width + j] for i in self._range(0, row) for j in self._range(1, col))

    def tile_sizes(self) -> tuple[list[TileSizes], list[TileSizes]]:
        """Return the sizes (context, core) of each block's tiles, along rows and along columns: a block's tiles are the
        products of both."""
        rows, cols = (
            [tuple((span.context.size, span.core.size) for span in self.spans(dim, i)) for i in range(self.shape[dim])]
            for dim in (0, 1)
        )
        return rows, cols

    def context_windows(self) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        """Return the window of each block's tiles, along rows and along columns, counted as the partitions are."""
        rows, cols = (
            tuple(
                hull_of([span.context for span in self.spans(dim, i)]).relative_to(origin)
                for i in range(self.shape[dim])
            )
            for dim, origin in ((0, self.whole.row.start), (1, self.whole.col.start))
        )
        return rows, cols


def decompose(tiling: Tiling, shape: tuple[int, int]) -> Decomposition:
    """Spread a tiling over `shape` (rows, cols) ranks. GeometryError where the grid has fewer tiles than that."""
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


class ExchangePiece(NamedTuple):
    """A part of a tensor, counted from its first row and column; `peer`: (row, col) of the rank it goes to or comes
    from."""

    peer: tuple[int, int]
    rows: slice = _ALL
    cols: slice = _ALL


@dataclass(frozen=True, eq=False)  # compared as an object: it is the key of what is made for it
class BlockExchange:
    """The side of the rank at (row, col) = `at` of an exchange along both dims.

    `owned`, `window`: rows and columns before and after it; None along a dim that does not travel. `sends`: pieces of
    the own block. `receives`: pieces of the window, both in the order of ranks. `kept`: what stays, in both (None:
    nothing). `keeps_all`: it is all of the block. `outside`: pieces of the window beyond the tensor's ends.
    """

    at: tuple[int, int]
    owned: tuple[int | None, int | None]
    window: tuple[int | None, int | None]
    sends: tuple[ExchangePiece, ...]
    receives: tuple[ExchangePiece, ...]
    kept: tuple[ExchangePiece, ExchangePiece] | None
    keeps_all: bool
    outside: tuple[ExchangePiece, ...]


def block_exchange(
    rows: WindowExchange | None, cols: WindowExchange | None, at: tuple[int, int]
) -> BlockExchange | None:
    """Return the exchange along both dims of the rank at (row, col) = `at`; None where it has nothing to do."""
    dims = tuple(zip((rows, cols), at, strict=True))
    if all(dim is None or dim.is_identity for dim, _ in dims):
        return None
    sends, stays = _pieces([_parts(i, dim, False) for dim, i in dims], at)
    receives, kept = _pieces([_parts(i, dim, True) for dim, i in dims], at)
    return BlockExchange(
        at,
        (rows.owned.size if rows else None, cols.owned.size if cols else None),
        (rows.window.size if rows else None, cols.window.size if cols else None),
        sends,
        receives,
        (stays, kept) if stays and kept else None,
        all(dim is None or dim.kept == dim.owned for dim, _ in dims),
        tuple(_outside(rows, cols, at)),
    )


@cache  # one object a raster: what is made for it is kept
def context_exchange(image: Decomposition, at: tuple[int, int]) -> BlockExchange | None:
    """Return the exchange after which the rank at (row, col) = `at` has the contexts of all its tiles."""
    rows, cols = image.context_windows()
    return block_exchange(plan_exchange(image.rows, rows, at[0]), plan_exchange(image.cols, cols, at[1]), at)


Parts = list[tuple[int, slice]]


def _parts(index: int, exchange: WindowExchange | None, arrives: bool) -> Parts:
    """Return the parts of the rank's own block and their receivers along one dim, or with `arrives` the parts of its
    window and their senders. Rank `index` itself is one of them, in the order of ranks. A dim that does not travel is
    one part."""
    if exchange is None:
        return [(index, _ALL)]
    transfers, origin = (exchange.receives, exchange.window) if arrives else (exchange.sends, exchange.owned)
    parts = [(each.peer, each.part) for each in transfers] + [(index, exchange.kept)] * (exchange.kept.size > 0)
    return [(peer, part.relative_to(origin.start).slice) for peer, part in sorted(parts)]


def _pieces(dims: Sequence[Parts], at: tuple[int, int]) -> tuple[tuple[ExchangePiece, ...], ExchangePiece | None]:
    """Return every pair of a part along rows and one along columns: those of others, and the rank's own."""
    every = [ExchangePiece((row, col), rows, cols) for (row, rows), (col, cols) in product(*dims)]
    own = next((piece for piece in every if piece.peer == at), None)
    return tuple(piece for piece in every if piece.peer != at), own


def _outside(rows: WindowExchange | None, cols: WindowExchange | None, at: tuple[int, int]) -> Iterator[ExchangePiece]:
    for dim, exchange in (("rows", rows), ("cols", cols)):
        if exchange is not None:
            (before, after), size = exchange.outside, exchange.window.size
            for part in (slice(0, before), slice(size - after, size)):
                if part.stop > part.start:
                    yield ExchangePiece(at, **{dim: part})
