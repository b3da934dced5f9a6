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

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.shapes import scales, total_stride
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition, decompose
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
    exchanged, padded = set[Edge](), set[int]()
    for k, index in _exchanges(graph, partitions, fusion):
        passed = [k]  # nodes from the one before which the exchange can come
        while early and not graph.layers[passed[0]].overwrites and (source := graph.sources[passed[0]][0]) > 0:
            if not graph.layers[source - 1].keeps_zero or graph.readers[source] != (passed[0],):
                break
            passed.insert(0, source - 1)
        is_earlier = early and graph.layers[k].pads_with_zeros and graph.layers[passed[0]].overwrites
        exchanged.add((passed[0] if is_earlier else k, index))
        padded.update(passed if is_earlier else ())
    wanted = {tensor: partitions[tensor].blocks for tensor in graph.results}
    return _walk_back(graph, partitions, range(len(graph)), wanted, exchanged, padded)


@lru_cache(maxsize=64)
def partitions_of(graph: Graph, partition: Partition) -> tuple[Partition, ...]:
    """Return the partition of each tensor, for an input cut by `partition`. Raises GeometryError as `layer_windows`."""
    partitions = [partition]
    for node, sources in zip(graph.nodes, graph.sources, strict=True):
        layer, inputs = node.layer, [partitions[source] for source in sources]
        try:
            size = layer.output_size(*(each.size for each in inputs))
        except GeometryError as error:
            raise GeometryError(f"layer '{node.name}': {error}") from None
        edges = [0]
        for cut in zip(*(each.edges[1:-1] for each in inputs), strict=True):
            if layer.statistics and not layer.fits_edge(*cut):
                raise GeometryError(
                    f"layer '{node.name}' takes tensors that ranks cut at {' and '.join(map(str, cut))}, which is not "
                    "one place of the image; use fewer ranks an image, or larger images"
                )
            edges.append(min(max(layer.output_edge(*cut), 0), size))
        edges.append(size)
        empty = next((i for i, (start, stop) in enumerate(pairwise(edges)) if stop <= start), None)
        if empty is not None:
            raise GeometryError(
                f"layer '{node.name}' gives {max(size, 0)} positions along a dim that {partition.parts} ranks share, "
                f"and none of them to rank {empty} along it; use fewer ranks an image, larger images, or fewer levels"
            )
        partitions.append(Partition(tuple(edges)))
    return tuple(partitions)


def segment_windows(
    graph: Graph, partitions: Sequence[Partition], segment: Segment
) -> tuple[tuple[NodeWindows, ...], dict[int, Windows]]:
    """Return the windows of a segment's nodes and of each tensor that enters it, with the halo of the whole segment. A
    dim that is not cut is read whole. Outputs of one size have the same blocks."""
    wanted = {tensor: leaving_partition(partitions, segment, tensor).blocks for tensor in segment.leaving}
    windows = _walk_back(graph, partitions, segment.nodes, wanted)
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
    inner = [0]
    for edge, low, high in zip(partition.edges[1:-1], partition.edges, partition.edges[2:], strict=False):
        near = range(max(low + 1, edge - reach, inner[-1] + 1), min(high, edge + reach + 1))
        for place in sorted(near, key=lambda place: abs(place - edge)):
            edges = graph.fold(place, lambda k, inputs: graph.layers[k].output_edge(*inputs))
            cuts = ([edges[source] for source in sources] for sources in graph.sources)
            if all(layer.fits_edge(*cut) for layer, cut in zip(graph.layers, cuts, strict=True)):
                inner.append(place)
                break
        else:
            inner.append(edge)
    return Partition((*inner, partition.size))


def _exchanges(graph: Graph, partitions: Sequence[Partition], fusion: int) -> set[Edge]:
    """Return the edges with an exchange: the first of each run, and those of joins that end runs. Along them some rank
    needs more of a tensor than it owns, for its own block of the outputs."""
    edges: set[Edge] = set()
    runs: list[tuple[int, int] | None] = [None]  # of each tensor: the tensor exchanged for it, and its run's length
    for k, (layer, sources) in enumerate(zip(graph.layers, graph.sources, strict=True)):
        exchanged = [run for source in sources if (run := runs[source]) is not None]
        is_common = len(exchanged) == len(sources) and len({run[0] for run in exchanged}) == 1
        run = max(exchanged) if is_common else None  # the longest run from one exchange
        short = []
        for index, source in enumerate(partitions[tensor] for tensor in sources):
            reads = (layer.within(layer.required_input(out, index), source.size) for out in partitions[k + 1].blocks)
            if source.parts > 1 and tuple(map(Interval.hull, source.blocks, reads)) != source.blocks:
                short.append((k, index))
        if len(sources) > 1:
            edges.update(short if run is None else ())
        elif short:
            if run is None or run[1] == fusion:
                edges.add((k, 0))
                run = sources[0], 0
            run = run[0], run[1] + 1
        runs.append(run)
    return edges


def _walk_back(
    graph: Graph,
    partitions: Sequence[Partition],
    nodes: Sequence[int],
    wanted: dict[int, Windows],
    exchanged: Set[Edge] = frozenset(),
    padded: Set[int] = frozenset(),
) -> tuple[NodeWindows, ...]:
    """Return the windows of `nodes`. `wanted`: the windows of the resulting tensors; those of earlier tensors are added
    to it. `padded`: nodes whose window includes the padding of a later one."""
    windows = []
    for k in reversed(nodes):
        layer, target = graph.layers[k], partitions[k + 1]
        given = wanted[k + 1] if target.parts > 1 else target.blocks  # a dim that is not cut is computed whole
        if layer.statistics:  # of the owned pixels
            given = tuple(map(Interval.hull, given, target.blocks))
        inputs = []
        for index, tensor in enumerate(graph.sources[k]):
            source, is_exchanged = partitions[tensor], (k, index) in exchanged
            read = tuple(layer.required_input(out, index) for out in given)
            inside = read if k in padded else tuple(layer.within(each, source.size) for each in read)
            held = source.blocks if is_exchanged else inside
            inputs.append(InputWindows(source, held, inside if layer.clamps else read, is_exchanged))
            wanted[tensor] = tuple(map(Interval.hull, held, wanted.get(tensor, held)))
        windows.append(NodeWindows(graph.nodes[k], tuple(inputs), target, given))
    return tuple(reversed(windows))


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
    dims, last = ((graph, rows), (graph.along_columns, cols)), graph.results[0] - 1
    outputs = [layer_windows(each, partition, fusion)[last].output for each, partition in dims]
    first = tiling.rows[0].output.start, tiling.cols[0].output.start
    for row, col in ((0, 0), (shape[0] - 1, shape[1] - 1)):
        blocks = outputs[0].blocks[row].shift(first[0]), outputs[1].blocks[col].shift(first[1])
        if any(block.clip(Interval(0, side)).size == 0 for block, side in zip(blocks, tiling.raster, strict=True)):
            raise GeometryError(
                f"the rank at ({row}, {col}) of {shape[0]} x {shape[1]} would own no pixel of a raster of "
                f"{tiling.raster[0]} x {tiling.raster[1]}; use fewer ranks an image"
            )
    output = Box(outputs[0].whole.shift(first[0]), outputs[1].whole.shift(first[1]))
    return LayerBlocks(tiling, decomposition.whole, rows, cols, output, *outputs)
