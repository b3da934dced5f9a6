"""The integers of an image in blocks: the windows that each block reads, and the strips that other blocks own of them.

A block stands in the place of a rank of `spatial.network`: the windows are those of `layer_windows`, the actions those
of `actions`. Only the exchange differs, since a segment reads its whole halo with its window. Where ranks share the
image, each has a rectangle of its blocks. All of them compile the same integers, so both ends of a message know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import ContextPart
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import leaving_partition, partitions_of, segment_windows
from tiledseg.geometry.sharing.segments import Segment, segments
from tiledseg.models.layers.block import BlockPlace, DimPlace
from tiledseg.spatial.actions import Action, compile_actions

ImageParts = tuple[Sequence[ContextPart], Sequence[ContextPart]]


class Strip(NamedTuple):
    """A part of a block that another block reads; boxes are in positions of the whole tensor."""

    block: int
    box: Box


class Window(NamedTuple):
    """The box of a tensor that a block reads: `own` is the part that the block has itself, `others` the rest."""

    box: Box
    own: Box | None
    others: tuple[Strip, ...]


class BlockRun(NamedTuple):
    """A segment on one block: the actions of its nodes, and the window of each tensor that enters."""

    actions: tuple[Action, ...]
    windows: Mapping[int, Window]


@dataclass(frozen=True)
class ImageRanks:
    """The ranks of an image: `rows` x `cols` of them, and the place of this one, `at` (row, col)."""

    rows: int = 1
    cols: int = 1
    at: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        return self.rows * self.cols

    @property
    def index(self) -> int:
        """This rank's number, row by row."""
        return self.at[0] * self.cols + self.at[1]

    def owner(self, at: tuple[int, int], blocks: tuple[int, int]) -> int:
        """Return the rank of the block at (row, col) of `blocks`."""
        return at[0] * self.rows // blocks[0] * self.cols + at[1] * self.cols // blocks[1]


@dataclass(frozen=True)
class BlockTraffic:
    """The strips of one tensor that this rank sends to and receives from each other rank (by `ImageRanks.index`), in an
    order that both know. Gradients go the other way."""

    sends: dict[int, list[Strip]] = field(default_factory=dict)
    receives: dict[int, list[Strip]] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockProgram:
    """The work of one rank on an image that `rows` x `cols` cut (a partition for each tensor).

    `own`: this rank's blocks. `runs`: for each segment the run of each own block. `strips`: the boxes that others read
    of (tensor, own block). `traffic`: for each tensor the strips between ranks. Blocks count row by row over the image.
    """

    rows: tuple[Partition, ...]
    cols: tuple[Partition, ...]
    ranks: ImageRanks
    own: tuple[int, ...]
    segments: tuple[Segment, ...]
    runs: tuple[Mapping[int, BlockRun], ...]
    strips: Mapping[tuple[int, int], tuple[Box, ...]]
    traffic: Mapping[int, BlockTraffic]

    @property
    def blocks(self) -> int:
        """The number of blocks of all ranks."""
        return self.rows[0].parts * self.cols[0].parts

    @property
    def own_box(self) -> Box:
        """This rank's part of the input, in positions of the whole input."""
        first, last = self.box(0, self.own[0]), self.box(0, self.own[-1])
        return Box(first.row.hull(last.row), first.col.hull(last.col))

    def box(self, tensor: int, block: int) -> Box:
        """Return a block of a tensor, in positions of the whole tensor."""
        return _box(self.rows[tensor], self.cols[tensor], divmod(block, self.cols[0].parts))

    def leaving_box(self, segment: Segment, tensor: int, block: int) -> Box:
        """Return a block of a tensor that leaves a segment: outputs of one size cover the same."""
        rows, cols = (leaving_partition(cuts, segment, tensor) for cuts in (self.rows, self.cols))
        return _box(rows, cols, divmod(block, self.cols[0].parts))

    def measuring_place(self, source: int, made: int, block: int) -> BlockPlace:
        """Return the place of a block without any halo, for a layer that measures `source` and gives `made`."""

        def dim(cuts: Sequence[Partition], index: int) -> DimPlace:
            read, given = cuts[source].owned(index), cuts[made].owned(index)
            return DimPlace(read, given, read, (cuts[source].size, cuts[made].size), cuts[source].parts == 1)

        row, col = divmod(block, self.cols[0].parts)
        return BlockPlace(dim(self.rows, row), dim(self.cols, col))


def compile_program(
    rows_graph: Graph,
    cols_graph: Graph,
    rows: Partition,
    cols: Partition,
    where: ImageParts | None = None,
    ranks: ImageRanks | None = None,
    together: bool = False,
) -> BlockProgram:
    """Return the program for an input that `rows` x `cols` cut, of which each of `ranks` has as many blocks.

    `where`: the places of the tensors in those of the whole image, for a tile of one. `together` with other inputs the
    segments do not depend on the cut. Raises GeometryError where a block of some tensor would be empty, or tensors that
    meet do not fit.
    """
    cuts = tuple(partitions_of(rows_graph, rows)), tuple(partitions_of(cols_graph, cols))
    ranks = ranks or ImageRanks()
    shape = rows.parts, cols.parts
    owner = [ranks.owner(divmod(block, cols.parts), shape) for block in range(shape[0] * shape[1])]
    own = tuple(block for block, rank in enumerate(owner) if rank == ranks.index)
    parts = segments(rows_graph, shape == (1, 1) and not together)
    runs: list[dict[int, BlockRun]] = []
    strips: dict[tuple[int, int], dict[Box, None]] = {}
    traffic: dict[int, BlockTraffic] = {}
    for segment in parts:
        (row_nodes, row_reads), (col_nodes, col_reads) = (
            segment_windows(graph, cut, segment) for graph, cut in zip((rows_graph, cols_graph), cuts, strict=True)
        )
        runs.append({})
        for block in range(len(owner)):
            row, col = at = divmod(block, cols.parts)
            held = {tensor: Box(row_reads[tensor][row], col_reads[tensor][col]) for tensor in segment.entering}
            windows = {tensor: _window(box, cuts[0][tensor], cuts[1][tensor], at) for tensor, box in held.items()}
            if block in own:
                actions = compile_actions(row_nodes, col_nodes, rows_graph.sources, at, held, segment.nodes)
                actions = actions if where is None else _placed(actions, rows_graph, segment, where)
                runs[-1][block] = BlockRun(actions, windows)
            for tensor, strip in ((tensor, strip) for tensor, window in windows.items() for strip in window.others):
                if strip.block in own:
                    strips.setdefault((tensor, strip.block), {})[strip.box] = None
                _add(traffic, tensor, strip, owner[strip.block], owner[block], ranks.index)
    boxes = {key: tuple(each) for key, each in strips.items()}
    return BlockProgram(*cuts, ranks, own, parts, tuple(runs), boxes, traffic)


def _add(traffic: dict[int, BlockTraffic], tensor: int, strip: Strip, giver: int, taker: int, rank: int) -> None:
    """Add a strip to what travels. A tensor has an entry on all ranks, also on those that send none of it."""
    if giver == taker:
        return
    own = traffic.setdefault(tensor, BlockTraffic())
    for lists, here, peer in ((own.sends, giver, taker), (own.receives, taker, giver)):
        if here == rank and strip not in lists.setdefault(peer, []):
            lists[peer].append(strip)


def _placed(actions: tuple[Action, ...], graph: Graph, segment: Segment, where: ImageParts) -> tuple[Action, ...]:
    """Return the actions, in which layers that ask for their place have that in the whole image."""

    def moved(dim: DimPlace, source: ContextPart, made: ContextPart) -> DimPlace:
        read, given = dim.read.shift(source.at.start), dim.given.shift(made.at.start)
        return DimPlace(read, given, dim.owned.shift(source.at.start), (source.size, made.size), False)

    result = list(actions)
    for index, k in enumerate(segment.nodes):
        if graph.layers[k].asks_place:
            at, source = actions[index].place, graph.sources[k][0]
            row, col = (
                moved(dim, parts[source], parts[k + 1]) for dim, parts in zip((at.row, at.col), where, strict=True)
            )
            result[index] = replace(actions[index], place=BlockPlace(row, col))
    return tuple(result)


def _box(rows: Partition, cols: Partition, at: tuple[int, int]) -> Box:
    return Box(rows.owned(at[0]), cols.owned(at[1]))


def _window(box: Box, rows: Partition, cols: Partition, at: tuple[int, int]) -> Window:
    parts = {
        (row, col): _box(rows, cols, (row, col)).clip(box)
        for row in _meeting(box.row, rows)
        for col in _meeting(box.col, cols)
    }
    own = parts.pop(at, None)
    return Window(box, own, tuple(Strip(row * cols.parts + col, part) for (row, col), part in parts.items()))


def _meeting(interval: Interval, partition: Partition) -> Iterator[int]:
    for index, block in enumerate(partition.blocks):
        if max(block.start, interval.start) < min(block.stop, interval.stop):
            yield index
