"""What one rank does with an image cut into blocks: which segments, on which windows, and who needs what of whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tiledseg.geometry.box import Box
from tiledseg.geometry.decomposition import Partition
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer_windows import leaving_partition, partitions_of, segment_windows
from tiledseg.geometry.places import Part
from tiledseg.geometry.segments import Segment, segments
from tiledseg.models.block import DimPlace, Place
from tiledseg.spatial.actions import Action, compile_actions


@dataclass(frozen=True)
class Piece:
    """What lies in a block: `there`, counted from the block's first pixel, `here` from the window's."""

    block: int
    there: Box
    here: Box


@dataclass(frozen=True)
class Window:
    """What a block reads of a tensor: `own`, of its own block of it, and `others`, in the blocks' order."""

    box: Box
    own: Piece | None
    others: tuple[Piece, ...]


@dataclass(frozen=True)
class BlockRun:
    """A segment on one block: the actions of its nodes, and what is read of each tensor that enters."""

    actions: tuple[Action, ...]
    windows: Mapping[int, Window]


@dataclass(frozen=True)
class BlockProgram:
    """Of an image that `rows` x `cols` cut: the block of each tensor, `boxes[tensor][block]`; of each segment a run on
    each block; and `strips[tensor, block]`, what other blocks read of that one. Blocks count row by row."""

    rows: tuple[Partition, ...]
    cols: tuple[Partition, ...]
    segments: tuple[Segment, ...]
    runs: tuple[tuple[BlockRun, ...], ...]
    strips: Mapping[tuple[int, int], tuple[Box, ...]]

    @property
    def blocks(self) -> int:
        return self.rows[0].parts * self.cols[0].parts

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

    def measuring_place(self, source: int, made: int, block: int) -> Place:
        """Of a layer that takes statistics of `source` and makes `made`: a block of it, without any halo."""
        row, col = self.position(block)
        return Place(_own_place(self.rows, source, made, row), _own_place(self.cols, source, made, col))


def compile_program(
    rows_graph: Graph,
    cols_graph: Graph,
    rows: Partition,
    cols: Partition,
    where: tuple[Sequence[Part], Sequence[Part]] | None = None,
) -> BlockProgram:
    """The program for an input that `rows` x `cols` cut. Raises GeometryError where a block of some tensor would be
    empty, or tensors that meet do not fit.

    `where` the tensors lie in those of the whole image along rows and columns, where the input is a tile of one.
    """
    cuts = partitions_of(rows_graph, rows), partitions_of(cols_graph, cols)
    found = segments(rows_graph)
    runs = tuple(tuple(_runs(rows_graph, cols_graph, cuts, segment)) for segment in found)
    if where is not None:
        runs = tuple(
            tuple(_placed(run, rows_graph, segment, where) for run in each)
            for each, segment in zip(runs, found, strict=True)
        )
    return BlockProgram(tuple(cuts[0]), tuple(cuts[1]), found, runs, _strips(runs))


def _runs(
    rows_graph: Graph, cols_graph: Graph, cuts: tuple[Sequence[Partition], Sequence[Partition]], segment: Segment
) -> Iterator[BlockRun]:
    (rows, row_reads), (cols, col_reads) = (
        segment_windows(graph, cut, segment) for graph, cut in zip((rows_graph, cols_graph), cuts, strict=True)
    )
    for row in range(cuts[0][0].parts):
        for col in range(cuts[1][0].parts):
            held = {tensor: Box(row_reads[tensor][row], col_reads[tensor][col]) for tensor in segment.entering}
            actions = compile_actions(rows, cols, rows_graph.sources, (row, col), held, segment.nodes)
            windows = {t: _window(box, cuts[0][t], cuts[1][t], (row, col)) for t, box in held.items()}
            yield BlockRun(actions, windows)


def _placed(run: BlockRun, graph: Graph, segment: Segment, where: tuple[Sequence[Part], Sequence[Part]]) -> BlockRun:
    """Layers that ask for their place are told that in the whole image."""
    actions = list(run.actions)
    for index, k in enumerate(segment.nodes):
        if graph.layers[k].asks_place:
            at, source = actions[index].place, graph.sources[k][0]
            dims = zip((at.row, at.col), where, strict=True)
            place = Place(*(_moved(dim, parts[source], parts[k + 1]) for dim, parts in dims))
            actions[index] = replace(actions[index], place=place)
    return replace(run, actions=tuple(actions))


def _moved(dim: DimPlace, source: Part, made: Part) -> DimPlace:
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


def _piece(window: Box, block: Box, number: int) -> Piece:
    common = block.clip(window)
    return Piece(number, common.relative_to(block), common.relative_to(window))


def _strips(runs: Sequence[Sequence[BlockRun]]) -> dict[tuple[int, int], tuple[Box, ...]]:
    found: dict[tuple[int, int], dict[Box, None]] = {}
    for segment in runs:
        for run in segment:
            for tensor, window in run.windows.items():
                for piece in window.others:
                    found.setdefault((tensor, piece.block), {})[piece.there] = None
    return {key: tuple(boxes) for key, boxes in found.items()}


def _own_place(cuts: Sequence[Partition], source: int, made: int, index: int) -> DimPlace:
    read, given = cuts[source].owned(index), cuts[made].owned(index)
    return DimPlace(read, given, read, (cuts[source].size, cuts[made].size), cuts[source].parts == 1)
