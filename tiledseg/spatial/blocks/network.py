"""A network whose images are cut into blocks that a rank computes one after the other, segment by segment.

Its layers are those of `spatial.network`; `block_pass` runs them. A layer that takes statistics of the image sums them
over ranks by one call forward and one backward (see `models.normalise.Ranks`). Here the blocks of a rank stand in the
place of ranks. They come one at a time, so a sum is made in two turns: first each block adds its part, then each gets
the whole. Backward the first turn is that of the layer itself, which gets zeros for the sum of the others. The sum's
part of the gradient of its input follows when the segment before it is differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from tiledseg.comm.point_to_point import Work
from tiledseg.geometry.box import Box
from tiledseg.geometry.shapes import parts
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import block_partition
from tiledseg.geometry.sharing.segments import Segment
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.frozen import is_trained
from tiledseg.models.network import GraphNetwork
from tiledseg.spatial.blocks.program import BlockProgram, ImageRanks, compile_program
from tiledseg.spatial.convert import convert_layers

TilePlace = tuple[Box, Box]  # the whole image, and the tile in it


class Doing(Enum):
    """The turn of a block: it adds to the forward sums, or gets them; it adds to the backward sums, or gets them."""

    MEASURE = "measure"
    COMPUTE = "compute"
    DIFFERENTIATE = "differentiate"
    RETURN = "return"


@dataclass
class Sums:
    """The sums over the blocks of an image, by the layer's node."""

    forward: dict[int, torch.Tensor] = field(default_factory=dict)
    backward: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Turn:
    """The block at work, of how many, its turn, and its image's sums."""

    block: int = 0
    blocks: int = 1
    doing: Doing = Doing.COMPUTE
    sums: Sums = field(default_factory=Sums)


@dataclass
class BlockRanks:
    """The blocks of an image, in the place of the ranks that the layer of node `k` sums over."""

    turn: Turn
    k: int

    @property
    def rank(self) -> int:
        return self.turn.block

    @property
    def size(self) -> int:
        return self.turn.blocks

    def all_reduce_sum(self, tensor: torch.Tensor) -> Work:
        """Add `tensor` to the sums, or put the sums into it: as the turn is."""
        doing = self.turn.doing
        forward = doing in (Doing.MEASURE, Doing.COMPUTE)
        sums = self.turn.sums.forward if forward else self.turn.sums.backward
        if doing in (Doing.COMPUTE, Doing.RETURN):
            tensor.copy_(sums[self.k])  # all blocks have added to it
            return Work()
        sums[self.k] = sums[self.k].add_(tensor) if self.k in sums else tensor.clone()
        if doing is Doing.DIFFERENTIATE:
            tensor.zero_()
        return Work()


class BlockNetwork:
    """The twin of a network that computes blocks; it shares weights, buffers and mode (train or eval) with it.

    Raises ConfigError where a layer cannot be computed so.
    """

    def __init__(self, network: GraphNetwork | nn.Sequential) -> None:
        self.turn = Turn()
        self.ranks: list[BlockRanks] = []
        self.modules = list(network.layers.values() if isinstance(network, GraphNetwork) else network)
        converted = convert_layers(network, self._ranks_of_a_layer)
        self.layers, self.graph, self.along_columns = converted.layers, converted.rows, converted.cols
        self.tracking = frozenset(k for k, module in enumerate(self.modules) if _any(module, "track_running_stats"))
        self._programs: dict[tuple[Partition, Partition, TilePlace | None, ImageRanks, bool], BlockProgram] = {}
        self._written: dict[Segment, set[int]] = {}

    def _ranks_of_a_layer(self) -> BlockRanks:
        self.ranks.append(BlockRanks(self.turn, len(self.ranks)))
        return self.ranks[-1]

    def partitions(self, shared: tuple[Partition, Partition], blocks: tuple[int, int]) -> tuple[Partition, Partition]:
        """Cut the part of each rank of an input, which ranks share along rows and columns, into `blocks` (rows, cols),
        or fewer where it is too small."""
        dims = zip((self.graph, self.along_columns), shared, blocks, strict=True)
        rows, cols = (block_partition(graph, ranks, parts) for graph, ranks, parts in dims)
        return rows, cols

    def program(
        self,
        rows: Partition,
        cols: Partition,
        where: TilePlace | None = None,
        ranks: ImageRanks | None = None,
        together: bool = False,
    ) -> BlockProgram:
        """Return the program of one of `ranks` for an input so cut. Raises GeometryError where it cannot be.

        `where`: the tile's place, for layers that ask for it. `together`: it goes with others, in the same segments.
        """
        ranks = ranks or ImageRanks()
        where = where if any(layer.asks_place for layer in self.graph.layers) else None
        key = rows, cols, where, ranks, together
        if key not in self._programs:
            parts_of = None
            if where is not None and where[0] != where[1]:
                whole, tile = where
                parts_of = parts(self.graph, whole.row, tile.row), parts(self.along_columns, whole.col, tile.col)
            graphs = self.graph, self.along_columns
            self._programs[key] = compile_program(*graphs, rows, cols, parts_of, ranks, together)
        return self._programs[key]

    def output_box(self, program: BlockProgram, block: int) -> Box:
        """Return a block of the first output, in positions of the whole output."""
        return program.box(self.graph.results[0], block)

    def written_over(self, segment: Segment) -> set[int]:
        """Return the tensors that enter a segment and that one of its nodes writes over."""
        if segment not in self._written:
            origins = {tensor: tensor for tensor in segment.entering}
            self._written[segment] = set()
            for k in segment.nodes:
                source, module = origins.get(self.graph.sources[k][0]), self.modules[k]
                if source is not None and _any(module, "inplace"):
                    self._written[segment].add(source)
                if source is not None and (
                    self.graph.layers[k].hands_on or isinstance(module, nn.Identity | ChannelDropout)
                ):
                    origins[k + 1] = source
        return self._written[segment]

    def wants_gradient(self, of_input: bool) -> list[bool]:
        """Return for each tensor whether the loss is differentiated by it."""

        def step(k: int, given: list[bool]) -> bool:
            return self.graph.layers[k].gradient != "none" and (any(given) or is_trained(self.modules[k]))

        return self.graph.fold(of_input, step)


def _any(module: nn.Module, flag: str) -> bool:
    return any(getattr(each, flag, False) for each in module.modules())
