"""The windows of a network spread over the ranks of one axis: each rank's part of each tensor, and the exchanges.

Each rank owns a block of every tensor along the dim. If a node needs more of an input, an exchange before it brings the
rest. Later nodes with a halo can share that exchange, but compute their overlap twice: a *run* of `fusion` such nodes.
`fusion` 1 is a thin halo for each of them, with nothing computed twice (E = 1); a run as long as the network is one
exchange of its input. Results are the same.

    a rank's block        |=======|            conv reads a pixel more on either side than it gives:
    conv1 gives, fused    |=======|            its halo comes by its own exchange (fusion 1),
    conv0 gives         |-=========-|          or conv0 computes that pixel too, from a wider exchange (fusion 2)
    exchanged         |--===========--|

The exchange for a convolution is made before the activation in front of it, and before other layers that map zero to
zero. The activation then computes the whole window, with halo and zero padding: no copy is needed, and autograd keeps
one tensor for both layers instead of two (docs/decisions/0006).

A run ends at a node that reads a tensor of an earlier run, which would need a wider exchange too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.shapes import scales, total_stride
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition, decompose, partition_through
from tiledseg.geometry.sharing.segments import Segment
from tiledseg.geometry.tiling import Tile, Tiling

WHOLE = 1 << 30  # a fusion longer than any network: one exchange of the input

Edge = tuple[int, int]  # a node, and which of its inputs
Windows = tuple[Interval, ...]  # one entry a rank of the axis


@dataclass(frozen=True)
class InputWindows:
    """One input of a node over all ranks of the axis.

    `held`: the part used of the local tensor. `read`: the part from which the node computes, after an exchange if
    `exchanged`. It reaches beyond the tensor if the node pads, or computes the padding of a later convolution.
    """

    partition: Partition
    held: Windows
    read: Windows
    exchanged: bool


@dataclass(frozen=True)
class NodeWindows:
    """One node over all ranks of the axis. `given`: the part of the output that each computes; `output`: its
    partition."""

    node: Node
    inputs: tuple[InputWindows, ...]
    output: Partition
    given: Windows

    @property
    def exchanges(self) -> bool:
        """True if an exchange precedes the node."""
        return any(one.exchanged for one in self.inputs)


@lru_cache(maxsize=64)
def layer_windows(graph: Graph, partition: Partition, fusion: int = 1, early: bool = True) -> tuple[NodeWindows, ...]:
    """Return the windows of every node, for an input cut by `partition`. `early` False: exchanges come right before the
    node that needs them.

    Raises GeometryError if a rank would own nothing of a tensor, or joined tensors do not match.
    """
    partitions = partitions_of(graph, partition)
    exchanges = _exchanges(graph, _all_short(graph, partition), fusion)
    carried = _carriers(graph, exchanges) if early else {}
    wanted = {tensor: partitions[tensor].blocks for tensor in graph.results}
    return tuple(reversed(list(_walk_back(graph, partitions, exchanges, carried, range(len(graph)), wanted))))


def partitions_of(graph: Graph, partition: Partition) -> list[Partition]:
    """Return the partition of each tensor, for an input cut by `partition`. Raises GeometryError as `layer_windows`."""
    return graph.fold(partition, lambda k, inputs: partition_through(graph.nodes[k], inputs))


def segment_windows(
    graph: Graph, partitions: Sequence[Partition], segment: Segment
) -> tuple[tuple[NodeWindows, ...], dict[int, Windows]]:
    """Return the windows of a segment's nodes and of each tensor that enters it, with the halo of the whole segment. A
    dim that is not cut is read whole. Outputs of one size have the same blocks."""
    wanted = {tensor: leaving_partition(partitions, segment, tensor).blocks for tensor in segment.leaving}
    windows = tuple(reversed(list(_walk_back(graph, partitions, set(), {}, segment.nodes, wanted))))
    entering = {
        tensor: wanted[tensor] if partitions[tensor].parts > 1 else partitions[tensor].blocks
        for tensor in segment.entering
    }
    return windows, entering


def leaving_partition(partitions: Sequence[Partition], segment: Segment, tensor: int) -> Partition:
    """Return the partition of a tensor that leaves a segment: that of the first such tensor if they have one size."""
    first = partitions[segment.leaving[0]]
    return first if partitions[tensor].size == first.size else partitions[tensor]


@lru_cache(maxsize=256)
def block_partition(graph: Graph, ranks: Partition, parts: int) -> Partition:
    """Cut each block of `ranks` of an input into `parts` blocks, as even as the layers allow, or into fewer, so that
    each owns a part of every tensor. The edges of `ranks` stay."""
    for fewer in range(parts, 1, -1):
        try:
            blocks = settle(graph, _cut_each(graph, ranks, fewer))
            partitions_of(graph, blocks)
        except GeometryError:
            continue
        if set(ranks.edges) <= set(blocks.edges):
            return blocks
    return ranks


def _cut_each(graph: Graph, ranks: Partition, parts: int) -> Partition:
    """Cut each block of `ranks` into `parts` blocks. Blocks of a whole input have about equal outputs: the outer blocks
    also read the pixels that unpadded layers lose. Raises GeometryError for more blocks than outputs."""
    size = ranks.size
    if ranks.parts > 1:
        inner = [own.start + edge for own in ranks.blocks for edge in Partition.even(own.size, parts).edges[:-1]]
        return Partition((*inner, size))
    last = graph.results[0]
    outputs = graph.fold(size, lambda k, sizes: graph.layers[k].output_size(*sizes))[last]
    covered = min(size, int(outputs * scales(graph)[last]))
    ahead = (size - covered) // 2
    return Partition((0, *(ahead + edge for edge in Partition.even(covered, parts).edges[1:-1]), size))


@lru_cache(maxsize=64)
def settle(graph: Graph, partition: Partition) -> Partition:
    """Return the partition with each inner edge moved to the nearest place at which the blocks fit all layers.

    There, no pooling window lies across the edge, and joined tensors are cut alike, so only convolutions need halos.
    Padded networks fit at every multiple of their alignment, unpadded ones at other places. An edge without such a
    place within the alignment stays.
    """
    reach = total_stride(graph)
    inner: list[int] = []
    for edge, low, high in zip(partition.edges[1:-1], partition.edges, partition.edges[2:], strict=False):
        near = sorted(range(max(low + 1, edge - reach), min(high, edge + reach + 1)), key=lambda e: abs(e - edge))
        inner.append(next((e for e in near if _fits(graph, e) and e > (inner or [0])[-1]), edge))
    return Partition((0, *inner, partition.size))


def _fits(graph: Graph, edge: int) -> bool:
    edges = graph.fold(edge, lambda k, inputs: graph.layers[k].output_edge(*inputs))
    return all(
        layer.fits_edge(*(edges[source] for source in sources))
        for layer, sources in zip(graph.layers, graph.sources, strict=True)
    )


def _exchanges(graph: Graph, all_short: Sequence[Sequence[Edge]], fusion: int) -> set[Edge]:
    """Return the edges with an exchange: the first of each run, and those of joins that end runs."""
    edges: set[Edge] = set()
    runs: list[tuple[int, int] | None] = [None]  # of each tensor: the tensor exchanged for it, and its run's length
    for k, sources in enumerate(graph.sources):
        exchanged = [run for source in sources if (run := runs[source]) is not None]
        is_common = len(exchanged) == len(sources) and len({run[0] for run in exchanged}) == 1
        run = max(exchanged) if is_common else None  # the longest run from one exchange
        short = all_short[k]
        if len(sources) > 1:
            edges.update(short if run is None else ())
        elif short:
            if run is None or run[1] == fusion:
                edges.add((k, 0))
                run = sources[0], 0
            run = run[0], run[1] + 1
        runs.append(run)
    return edges


@lru_cache(maxsize=16)
def _all_short(graph: Graph, partition: Partition) -> tuple[tuple[Edge, ...], ...]:
    """Return each node's inputs of which some rank needs more than it owns for its own block."""
    partitions, short = partitions_of(graph, partition), list[tuple[Edge, ...]]()
    for k, (layer, sources) in enumerate(zip(graph.layers, graph.sources, strict=True)):
        edges = list[Edge]()
        for index, source in enumerate(partitions[tensor] for tensor in sources):
            reads = [layer.within(layer.required_input(out, index), source.size) for out in partitions[k + 1].blocks]
            pairs = zip(source.blocks, reads, strict=True)
            if source.parts > 1 and any(not own.contains(read) for own, read in pairs):
                edges.append((k, index))
        short.append(tuple(edges))
    return tuple(short)


def _carriers(graph: Graph, exchanges: set[Edge]) -> dict[int, tuple[int, ...]]:
    """Return nodes whose exchange can come before an activation, each with the nodes from there to itself."""
    earlier = {}
    for k, _ in exchanges:
        passed = [k]
        while not graph.layers[passed[0]].overwrites and (source := graph.sources[passed[0]][0]) > 0:
            if not graph.layers[source - 1].keeps_zero or graph.readers[source] != (passed[0],):
                break
            passed.insert(0, source - 1)
        if graph.layers[k].pads_with_zeros and graph.layers[passed[0]].overwrites:
            earlier[k] = tuple(passed)
    return earlier


def _walk_back(
    graph: Graph,
    partitions: Sequence[Partition],
    exchanges: set[Edge],
    carried: Mapping[int, tuple[int, ...]],
    nodes: Sequence[int],
    wanted: dict[int, Windows],
) -> Iterator[NodeWindows]:
    """Yield the windows of `nodes`, from the last back to the first. `wanted`: the windows of the resulting tensors;
    those of earlier tensors are added to it."""
    points = {(carried[k][0] if k in carried else k, i) for k, i in exchanges}
    padded = {k for passed in carried.values() for k in passed}  # nodes whose window includes a later node's padding
    for k in reversed(nodes):
        layer, target = graph.layers[k], partitions[k + 1]
        given = wanted[k + 1] if target.parts > 1 else target.blocks  # a dim that is not cut is computed whole
        if layer.statistics:
            given = _hull(given, target.blocks)  # statistics are of the owned pixels
        inputs = []
        for index, tensor in enumerate(graph.sources[k]):
            source = partitions[tensor]
            read = tuple(layer.required_input(out, index) for out in given)
            inside = read if k in padded else tuple(layer.within(r, source.size) for r in read)
            exchanged = (k, index) in points
            held = source.blocks if exchanged else inside
            inputs.append(InputWindows(source, held, inside if layer.clamps else read, exchanged))
            wanted[tensor] = _hull(held, wanted.get(tensor, held))
        yield NodeWindows(graph.nodes[k], tuple(inputs), target, given)


def _hull(one: Sequence[Interval], other: Sequence[Interval]) -> Windows:
    return tuple(a.hull(b) for a, b in zip(one, other, strict=True))


@dataclass(frozen=True)
class LayerBlocks(Decomposition):
    """An image spread over a mesh in mode `layer`: `rows` and `cols` cut the network's input, `output_rows` and
    `output_cols` the whole `output` (in raster positions)."""

    output: Box
    output_rows: Partition
    output_cols: Partition

    def block(self, row: int, col: int) -> Tile:
        """Return the block at (row, col) as a tile: its context is its part of the input, its core its outputs."""
        output = Box(self.output_rows.blocks[row], self.output_cols.blocks[col])
        output = output.shift(self.output.row.start, self.output.col.start)
        core = output.clip(Box.of_shape(self.tiling.raster))
        return Tile(row * self.cols.parts + col, (row, col), core, self.owned(row, col), output)


def layer_blocks(tiling: Tiling, graph: Graph, shape: tuple[int, int], fusion: int = 1) -> LayerBlocks:
    """Spread a tiling over `shape` (rows, cols) ranks that compute the network together.

    Raises GeometryError if the mesh has more rows or columns than the grid, or a rank would own nothing of a layer's
    output or of the raster.
    """
    decomposition = decompose(tiling, shape)
    rows, cols = settle(graph, decomposition.rows), settle(graph.along_columns, decomposition.cols)
    last = graph.results[0] - 1
    dims = (graph, rows), (graph.along_columns, cols)
    outputs = [layer_windows(each, partition, fusion)[last].output for each, partition in dims]
    first = tiling.rows[0].output.start, tiling.cols[0].output.start
    output = Box(outputs[0].whole, outputs[1].whole).shift(*first)
    blocks = LayerBlocks(tiling, decomposition.whole, rows, cols, output, *outputs)
    for row, col in ((0, 0), (shape[0] - 1, shape[1] - 1)):
        if blocks.block(row, col).core.area == 0:
            raise GeometryError(
                f"the rank at ({row}, {col}) of {shape[0]} x {shape[1]} would own no pixel of a raster of "
                f"{tiling.raster[0]} x {tiling.raster[1]}; use fewer ranks an image"
            )
    return blocks
