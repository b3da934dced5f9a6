"""A network whose images are cut into blocks that a rank computes one after the other, segment by segment.

A block stands in the place of a rank of `spatial.network`, and its layers are the same. `block_pass` runs them.
"""

from __future__ import annotations

from torch import nn

from tiledseg.geometry.box import Box
from tiledseg.geometry.receptive_field import parts
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import block_partition
from tiledseg.geometry.sharing.segments import Segment
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.frozen import is_trained
from tiledseg.models.network import GraphNetwork
from tiledseg.spatial.blocks.program import BlockProgram, ImageRanks, compile_program
from tiledseg.spatial.blocks.sums import BlockRanks, Turn
from tiledseg.spatial.convert import convert_layers

Where = tuple[Box, Box]


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
        self.tracking = frozenset(k for k, module in enumerate(self.modules) if _tracks(module))
        self._programs: dict[tuple[Partition, Partition, Where | None, ImageRanks, bool], BlockProgram] = {}
        self._written: dict[Segment, tuple[int, ...]] = {}

    def _ranks_of_a_layer(self) -> BlockRanks:
        self.ranks.append(BlockRanks(self.turn, len(self.ranks)))
        return self.ranks[-1]

    def partitions(self, shared: tuple[Partition, Partition], blocks: tuple[int, int]) -> tuple[Partition, Partition]:
        """An input that ranks share along rows and columns, each one's part in so many rows and columns of blocks, or
        fewer where it is too small."""
        dims = zip((self.graph, self.along_columns), shared, blocks, strict=True)
        rows, cols = (block_partition(graph, ranks, parts) for graph, ranks, parts in dims)
        return rows, cols

    def program(
        self,
        rows: Partition,
        cols: Partition,
        where: Where | None = None,
        ranks: ImageRanks | None = None,
        together: bool = False,
    ) -> BlockProgram:
        """What one of `ranks` is to do for an input so cut. Raises GeometryError where it cannot be.

        `where` (the whole image, the input's place in it): of a tile, for layers that ask for their place. `together`:
        it goes with others, in the same segments.
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
        """A block of the first output, in positions of the whole output."""
        return program.box(self.graph.results[0], block)

    def written_over(self, segment: Segment) -> tuple[int, ...]:
        """The tensors that enter a segment and that one of its nodes writes over."""
        if segment not in self._written:
            origins = {tensor: tensor for tensor in segment.entering}
            found = set()
            for k in segment.nodes:
                source = origins.get(self.graph.sources[k][0])
                if source is not None and _writes_over(self.modules[k]):
                    found.add(source)
                if source is not None and (self.graph.layers[k].hands_on or _may_hand_on(self.modules[k])):
                    origins[k + 1] = source
            self._written[segment] = tuple(found)
        return self._written[segment]

    def wants_gradient(self, of_input: bool) -> list[bool]:
        """Of each tensor whether the loss is differentiated by it."""

        def step(k: int, given: list[bool]) -> bool:
            return self.graph.layers[k].gradient != "none" and (any(given) or is_trained(self.modules[k]))

        return self.graph.fold(of_input, step)


def _writes_over(module: nn.Module) -> bool:
    return any(getattr(each, "inplace", False) for each in module.modules())


def _may_hand_on(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity | ChannelDropout)


def _tracks(module: nn.Module) -> bool:
    return any(getattr(each, "track_running_stats", False) for each in module.modules())
