"""A network whose images are cut into blocks that a rank computes one after the other, segment by segment.

Its layers are those of `spatial.network`; `block_pass` runs them. A layer with statistics of the image sums them over
ranks by one call forward and one backward (see `models.normalise.Ranks`). Here the blocks of a rank take the place of
ranks. They come one at a time, so a sum takes two turns: first each block adds its part, then each gets the sum.
Backward, the layer gets zeros for the other blocks' sum in the first turn. The sum's contribution to the gradient of
the layer's input follows when the segment before it is differentiated.

A `BlockProgram` holds the integers of an image: the windows that each block reads, and their strips that other blocks
own. The windows are those of `layer_windows`, the actions those of `network`, without exchanges: a segment reads its
whole halo with its window. Ranks that share an image each have a rectangle of its blocks. All of them compile the same
integers, so both ends of a message know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from tiledseg.comm.collectives import Work
from tiledseg.geometry.box import Box
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import block_partition, partitions_of, segment_windows
from tiledseg.geometry.sharing.segments import Segment, segments
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.frozen import is_trained
from tiledseg.models.layers.block import BlockPlace, DimPlace, tile_places
from tiledseg.models.network import GraphNetwork
from tiledseg.spatial.network import Action, compile_actions
from tiledseg.spatial.twins import spatial_layers

TilePlace = tuple[Box, Box]  # the whole image, and the tile in it
Sums = dict[int, torch.Tensor]  # over the blocks of an image, by the layer's node


class Strip(NamedTuple):
    """A part of a block that another block reads; `box` in positions of the whole tensor."""

    block: int
    box: Box


class Window(NamedTuple):
    """The box of a tensor that a block reads: `own`, the block's own part, and the strips of `others`."""

    box: Box
    own: Box | None
    others: tuple[Strip, ...]


class BlockRun(NamedTuple):
    """A segment on one block: the actions of its nodes, and the windows of the tensors that enter it."""

    actions: tuple[Action, ...]
    windows: Mapping[int, Window]


class ImageRanks(NamedTuple):
    """The `rows` x `cols` ranks of an image, and this rank's place `at` (row, col)."""

    rows: int = 1
    cols: int = 1
    at: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        return self.rows * self.cols

    @property
    def number(self) -> int:
        """This rank's number, row by row."""
        return self.at[0] * self.cols + self.at[1]


@dataclass(frozen=True)
class BlockTraffic:
    """The strips of one tensor that this rank sends to and receives from each other rank (by `ImageRanks.number`), in
    the same order on both. Gradients go the other way."""

    sends: dict[int, list[Strip]] = field(default_factory=dict)
    receives: dict[int, list[Strip]] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockProgram:
    """The work of one rank on an image cut by `rows` x `cols` (a partition for each tensor).

    `own`: this rank's blocks, numbered row by row over the image. `runs`: for each segment, the run of each own block.
    `strips`: the boxes of (tensor, own block) that others read. `traffic`: the strips between ranks, by tensor.
    """

    rows: tuple[Partition, ...]
    cols: tuple[Partition, ...]
    ranks: ImageRanks
    own: tuple[int, ...]
    segments: tuple[Segment, ...]
    runs: tuple[Mapping[int, BlockRun], ...]
    strips: Mapping[tuple[int, int], Mapping[Box, None]]
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
        row, col = divmod(block, self.cols[0].parts)
        return Box(self.rows[tensor].blocks[row], self.cols[tensor].blocks[col])


@dataclass
class Turn:
    """A run of a segment on one of an image's `blocks`. It `adds` to the image's `sums`, or gets them."""

    block: int
    blocks: int
    sums: Sums
    adds: bool = False


@dataclass
class BlockRanks:
    """The blocks of an image, in place of the ranks over which the layer of node `k` sums."""

    turn: Turn
    k: int

    @property
    def rank(self) -> int:
        return self.turn.block

    @property
    def size(self) -> int:
        return self.turn.blocks

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        """Add `tensor` to the sums and zero it, or copy the sums into it, by the turn."""
        sums = self.turn.sums
        if not self.turn.adds:
            tensor.copy_(sums[self.k])  # all blocks have added to it
            return Work()
        sums[self.k] = sums[self.k].add_(tensor) if self.k in sums else tensor.clone()
        tensor.zero_()
        return Work()


class BlockNetwork:
    """The twin of a network that computes blocks. It shares the network's weights, buffers and mode (train or eval).

    Raises ConfigError if a layer cannot be computed in blocks.
    """

    def __init__(self, network: GraphNetwork) -> None:
        self.modules = list(network.layers.values())
        self.layers = spatial_layers(network)
        self.graph, self.along_columns = network.graph, network.graph.along_columns
        self.tracking = frozenset(k for k, module in enumerate(self.modules) if _any(module, "track_running_stats"))
        self._programs: dict[tuple[Partition, Partition, TilePlace | None, ImageRanks, bool], BlockProgram] = {}

    def partitions(self, shared: tuple[Partition, Partition], blocks: tuple[int, int]) -> tuple[Partition, Partition]:
        """Cut each rank's part of an input, `shared` along rows and columns, into at most `blocks` (rows, cols)."""
        dims = zip((self.graph, self.along_columns), shared, blocks, strict=True)
        rows, cols = (block_partition(graph, ranks, parts) for graph, ranks, parts in dims)
        return rows, cols

    def program(
        self,
        rows: Partition,
        cols: Partition,
        where: TilePlace | None = None,
        ranks: ImageRanks = ImageRanks(),  # noqa: B008
        together: bool = False,
    ) -> BlockProgram:
        """Return the program of one of `ranks` for an input cut by `rows` x `cols`, of which each rank has as many
        blocks.

        `where`: the tile's place, for layers that depend on it. `together`: the input is one of several, so segments
        must not depend on the cut. Raises GeometryError if a block of a tensor would be empty, or joined tensors do not
        match.
        """
        key = rows, cols, where if any(layer.asks_place for layer in self.graph.layers) else None, ranks, together
        if key not in self._programs:
            self._programs[key] = self._compile(*key)
        return self._programs[key]

    def _compile(
        self, rows: Partition, cols: Partition, where: TilePlace | None, ranks: ImageRanks, together: bool
    ) -> BlockProgram:
        graphs, shape = (self.graph, self.along_columns), (rows.parts, cols.parts)
        cuts = tuple(partitions_of(graphs[0], rows)), tuple(partitions_of(graphs[1], cols))
        places = [divmod(block, cols.parts) for block in range(shape[0] * shape[1])]
        owner = [row * ranks.rows // shape[0] * ranks.cols + col * ranks.cols // shape[1] for row, col in places]
        own = tuple(block for block, rank in enumerate(owner) if rank == ranks.number)
        parts_of_graph = segments(self.graph, shape == (1, 1) and not together)
        runs: list[dict[int, BlockRun]] = []
        strips: dict[tuple[int, int], dict[Box, None]] = {}
        traffic: dict[int, BlockTraffic] = {}
        for segment in parts_of_graph:
            (row_nodes, row_reads), (col_nodes, col_reads) = (
                segment_windows(graph, cut, segment) for graph, cut in zip(graphs, cuts, strict=True)
            )
            runs.append({})
            for block, at in enumerate(places):
                held = {tensor: Box(row_reads[tensor][at[0]], col_reads[tensor][at[1]]) for tensor in segment.entering}
                windows = {tensor: _window(box, cuts[0][tensor], cuts[1][tensor], at) for tensor, box in held.items()}
                if block in own:
                    actions = compile_actions(row_nodes, col_nodes, self.graph.sources, at, held, segment.nodes)
                    runs[-1][block] = BlockRun(self._placed(actions, segment, where), windows)
                for tensor, strip in ((tensor, strip) for tensor, window in windows.items() for strip in window.others):
                    if strip.block in own:
                        strips.setdefault((tensor, strip.block), {})[strip.box] = None
                    giver, taker = owner[strip.block], owner[block]
                    if giver == taker:
                        continue
                    # A travelling tensor has an entry on all ranks, also on those that send none of it.
                    travelling = traffic.setdefault(tensor, BlockTraffic())
                    for lists, here, peer in ((travelling.sends, giver, taker), (travelling.receives, taker, giver)):
                        if here == ranks.number and strip not in lists.setdefault(peer, []):
                            lists[peer].append(strip)
        return BlockProgram(*cuts, ranks, own, parts_of_graph, tuple(runs), strips, traffic)

    def _placed(self, actions: tuple[Action, ...], segment: Segment, where: TilePlace | None) -> tuple[Action, ...]:
        """Return the actions, with places in the whole image for layers that depend on them."""
        if where is None or where[0] == where[1]:
            return actions
        places = tile_places(self.graph, *where)

        def moved(dim: DimPlace, tile: DimPlace) -> DimPlace:
            ahead = tile.read.start
            given = dim.given.shift(tile.given.start)
            return DimPlace(dim.read.shift(ahead), given, dim.owned.shift(ahead), tile.sizes, False)

        def placed(action: Action, tile: BlockPlace) -> Action:
            return replace(
                action, place=BlockPlace(moved(action.place.row, tile.row), moved(action.place.col, tile.col))
            )

        nodes = zip(segment.nodes, actions, strict=True)
        return tuple(placed(action, places[k]) if k in places else action for k, action in nodes)

    def written_over(self, segment: Segment) -> set[int]:
        """Return the tensors that enter a segment and that one of its nodes overwrites."""
        origins, written = {tensor: tensor for tensor in segment.entering}, set[int]()
        for k in segment.nodes:
            source, module = origins.get(self.graph.sources[k][0]), self.modules[k]
            if source is not None and _any(module, "inplace"):
                written.add(source)
            if source is not None and (self.graph.layers[k].hands_on or isinstance(module, ChannelDropout)):
                origins[k + 1] = source
        return written

    def wants_gradient(self, of_input: bool) -> list[bool]:
        """Return for each tensor True if the loss is differentiated by it. `of_input`: by the network's input too."""

        def step(k: int, given: list[bool]) -> bool:
            return self.graph.layers[k].gradient != "none" and (any(given) or is_trained(self.modules[k]))

        return self.graph.fold(of_input, step)


def _any(module: nn.Module, flag: str) -> bool:
    return any(getattr(each, flag, False) for each in module.modules())


def _window(box: Box, rows: Partition, cols: Partition, at: tuple[int, int]) -> Window:
    parts = {
        (row, col): Box(of_rows, of_cols)
        for row, of_rows in rows.owners(box.row).items()
        for col, of_cols in cols.owners(box.col).items()
    }
    own = parts.pop(at, None)
    return Window(box, own, tuple(Strip(row * cols.parts + col, part) for (row, col), part in parts.items()))
