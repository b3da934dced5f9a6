"""What one rank does with an image cut into blocks: which segments, on which windows, and who needs what of whom.

Where several ranks share the image, each has a rectangle of its blocks. All of them compile the same integers, so that
who sends what to whom needs no word between them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tiledseg.geometry.box import Box
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.receptive_field import ContextPart
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import leaving_partition, partitions_of, segment_windows
from tiledseg.geometry.sharing.segments import Segment, segments
from tiledseg.models.layers.block import BlockPlace, DimPlace
from tiledseg.spatial.actions import Action, compile_actions


@dataclass(frozen=True)
class WindowPart:
    """What lies in a block: `there`, counted from the block's first pixel, `here` from the window's."""

    block: int
    there: Box
    here: Box


@dataclass(frozen=True)
class Window:
    """What a block reads of a tensor: `own`, of its own block of it, and `others`, in the blocks' order."""

    box: Box
    own: WindowPart | None
    others: tuple[WindowPart, ...]


@dataclass(frozen=True)
class BlockRun:
    """A segment on one block: the actions of its nodes, and what is read of each tensor that enters."""

    actions: tuple[Action, ...]
    windows: Mapping[int, Window]


@dataclass(frozen=True)
class ImageRanks:
    """The ranks of an image: so many `rows` and `cols` of them, and the place of this one, `at` (row, col)."""

    rows: int = 1
    cols: int = 1
    at: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        return self.rows * self.cols

    @property
    def index(self) -> int:
        """This rank's, of a row after the other."""
        return self.at[0] * self.cols + self.at[1]


class Strip(NamedTuple):
    """A part of a block, counted from its first pixel, that another block reads."""

    block: int
    there: Box


@dataclass(frozen=True)
class BlockTraffic:
    """Of one tensor, what this rank sends to and receives from each other one (by its `ImageRanks.index`), in an order
    that both know. Gradients go the other way."""

    sends: Mapping[int, tuple[Strip, ...]]
    receives: Mapping[int, tuple[Strip, ...]]


@dataclass(frozen=True)
class BlockProgram:
    """Of an image that `rows` x `cols` cut, each tensor by an entry: this rank's blocks, `own`; of each segment a run
    on each of them; `strips[tensor, block]`, what other blocks read of that one; and what travels. Blocks count row by
    row over the whole image."""

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
        """Of all ranks."""
        return self.rows[0].parts * self.cols[0].parts

    @property
    def own_box(self) -> Box:
        """What this rank owns of the input, in positions of the whole input."""
        first, last = self.box(0, self.own[0]), self.box(0, self.own[-1])
        return Box(first.row.hull(last.row), first.col.hull(last.col))

    def box(self, tensor: int, block: int) -> Box:
        """A block of a tensor, in positions of the whole tensor."""
        row, col = self.position(block)
        return Box(self.rows[tensor].owned(row), self.cols[tensor].owned(col))

    def leaving_box(self, segment: Segment, tensor: int, block: int) -> Box:
        """A block of a tensor that leaves a segment: outputs of one size cover the same."""
        row, col = self.position(block)
        rows, cols = (leaving_partition(cuts, segment, tensor) for cuts in (self.rows, self.cols))
        return Box(rows.owned(row), cols.owned(col))

    def position(self, block: int) -> tuple[int, int]:
        return divmod(block, self.cols[0].parts)

    def measuring_place(self, source: int, made: int, block: int) -> BlockPlace:
        """Of a layer that takes statistics of `source` and makes `made`: a block of it, without any halo."""
        row, col = self.position(block)
        return BlockPlace(_own_place(self.rows, source, made, row), _own_place(self.cols, source, made, col))


def compile_program(
    rows_graph: Graph,
    cols_graph: Graph,
    rows: Partition,
    cols: Partition,
    where: tuple[Sequence[ContextPart], Sequence[ContextPart]] | None = None,
    ranks: ImageRanks | None = None,
    together: bool = False,
) -> BlockProgram:
    """The program for an input that `rows` x `cols` cut, of which each of `ranks` has as many. Raises GeometryError
    where a block of some tensor would be empty, or tensors that meet do not fit.

    `where` the tensors lie in those of the whole image along rows and columns, where the input is a tile of one.
    `together` with other inputs it goes through segments that do not depend on how it is cut.
    """
    cuts = partitions_of(rows_graph, rows), partitions_of(cols_graph, cols)
    ranks = ranks or ImageRanks()
    blocks = rows.parts, cols.parts
    owner = [_owner(ranks, blocks, divmod(block, cols.parts)) for block in range(rows.parts * cols.parts)]
    own = tuple(block for block, rank in enumerate(owner) if rank == ranks.index)
    found = segments(rows_graph, blocks == (1, 1) and not together)
    runs, windows = [], []
    for segment in found:
        each, read = _runs(rows_graph, cols_graph, cuts, segment, own)
        if where is not None:
            each = {block: _placed(run, rows_graph, segment, where) for block, run in each.items()}
        runs.append(each)
        windows.append(read)
    whole = tuple(cuts[0]), tuple(cuts[1])
    return BlockProgram(
        *whole, ranks, own, found, tuple(runs), _strips(windows, set(own)), _traffic(windows, owner, ranks)
    )


def _owner(ranks: ImageRanks, blocks: tuple[int, int], at: tuple[int, int]) -> int:
    row, col = (
        index * count // parts for index, count, parts in zip(at, (ranks.rows, ranks.cols), blocks, strict=True)
    )
    return row * ranks.cols + col


def _runs(
    rows_graph: Graph,
    cols_graph: Graph,
    cuts: tuple[Sequence[Partition], Sequence[Partition]],
    segment: Segment,
    own: Sequence[int],
) -> tuple[dict[int, BlockRun], list[dict[int, Window]]]:
    """What is done on each block of `own`; what each block of all reads, by the tensor."""
    (rows, row_reads), (cols, col_reads) = (
        segment_windows(graph, cut, segment) for graph, cut in zip((rows_graph, cols_graph), cuts, strict=True)
    )
    runs, read = {}, []
    for block in range(cuts[0][0].parts * cuts[1][0].parts):
        row, col = at = divmod(block, cuts[1][0].parts)
        held = {tensor: Box(row_reads[tensor][row], col_reads[tensor][col]) for tensor in segment.entering}
        windows = {t: _window(box, cuts[0][t], cuts[1][t], at) for t, box in held.items()}
        if block in own:
            actions = compile_actions(rows, cols, rows_graph.sources, at, held, segment.nodes)
            runs[block] = BlockRun(actions, windows)
        read.append(windows)
    return runs, read


def _placed(
    run: BlockRun, graph: Graph, segment: Segment, where: tuple[Sequence[ContextPart], Sequence[ContextPart]]
) -> BlockRun:
    """Layers that ask for their place are told that in the whole image."""
    actions = list(run.actions)
    for index, k in enumerate(segment.nodes):
        if graph.layers[k].asks_place:
            at, source = actions[index].place, graph.sources[k][0]
            dims = zip((at.row, at.col), where, strict=True)
            place = BlockPlace(*(_moved(dim, parts[source], parts[k + 1]) for dim, parts in dims))
            actions[index] = replace(actions[index], place=place)
    return replace(run, actions=tuple(actions))


def _moved(dim: DimPlace, source: ContextPart, made: ContextPart) -> DimPlace:
    read, given = dim.read.shift(source.at.start), dim.given.shift(made.at.start)
    return DimPlace(read, given, dim.owned.shift(source.at.start), (source.size, made.size), False)


def _window(box: Box, rows: Partition, cols: Partition, at: tuple[int, int]) -> Window:
    pieces = {
        (row, col): _piece(box, Box(rows.owned(row), cols.owned(col)), row * cols.parts + col)
        for row in _meeting(box.row, rows)
        for col in _meeting(box.col, cols)
    }
    own = pieces.pop(at, None)
    return Window(box, own, tuple(pieces.values()))


def _meeting(interval: Interval, partition: Partition) -> list[int]:
    return [
        index
        for index, block in enumerate(partition.blocks)
        if max(block.start, interval.start) < min(block.stop, interval.stop)
    ]


def _piece(window: Box, block: Box, number: int) -> WindowPart:
    common = block.clip(window)
    return WindowPart(number, common.relative_to(block), common.relative_to(window))


Read = Sequence[Sequence[Mapping[int, Window]]]  # of each segment, of each block


def _strips(windows: Read, own: Container[int]) -> dict[tuple[int, int], tuple[Box, ...]]:
    found: dict[tuple[int, int], dict[Box, None]] = {}
    for tensor, _, piece in _pieces(windows):
        if piece.block in own:
            found.setdefault((tensor, piece.block), {})[piece.there] = None
    return {key: tuple(boxes) for key, boxes in found.items()}


def _traffic(windows: Read, owner: Sequence[int], ranks: ImageRanks) -> dict[int, BlockTraffic]:
    """Of the tensors of which something travels between any ranks, so that all of them take part in the same order."""
    found: dict[int, tuple[dict[int, dict[Strip, None]], dict[int, dict[Strip, None]]]] = {}
    for tensor, block, piece in _pieces(windows):
        giver, taker = owner[piece.block], owner[block]
        if giver == taker:
            continue
        sends, receives = found.setdefault(tensor, ({}, {}))
        if ranks.index == giver:
            sends.setdefault(taker, {})[Strip(piece.block, piece.there)] = None
        if ranks.index == taker:
            receives.setdefault(giver, {})[Strip(piece.block, piece.there)] = None
    return {
        tensor: BlockTraffic(*({peer: tuple(strips) for peer, strips in way.items()} for way in ways))
        for tensor, ways in found.items()
    }


def _pieces(windows: Read) -> Iterator[tuple[int, int, WindowPart]]:
    """Tensor, block, and what that reads of another block of it."""
    for segment in windows:
        for block, read in enumerate(segment):
            for tensor, window in read.items():
                yield from ((tensor, block, piece) for piece in window.others)


def _own_place(cuts: Sequence[Partition], source: int, made: int, index: int) -> DimPlace:
    read, given = cuts[source].owned(index), cuts[made].owned(index)
    return DimPlace(read, given, read, (cuts[source].size, cuts[made].size), cuts[source].parts == 1)
