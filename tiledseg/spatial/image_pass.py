"""The pass of one image that is computed in blocks: its blocks, and its statistics over all pixels.

Norms, means and maxima over the image take statistics of a tensor. They are summed as blocks are stored, and used by
the segment that reads the blocks. The gradients of the statistics are summed over all blocks of that segment, and added
to the measured tensor's gradient when its own segment is differentiated. `block_pass` calls the methods in order, and
sums over ranks and images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from tiledseg.geometry.box import Box
from tiledseg.geometry.sharing.layer_windows import leaving_partition
from tiledseg.geometry.sharing.segments import Segment
from tiledseg.memory.file_store import MemoryShelf
from tiledseg.memory.second_run import still_statistics
from tiledseg.models.layers.block import BlockPlace, DimPlace
from tiledseg.models.network import Tensors
from tiledseg.models.normalise import Statistics, measure, moment_gradient, sharing_of
from tiledseg.spatial.block_network import BlockNetwork, BlockProgram, BlockRanks, BlockRun, Sums, Turn
from tiledseg.spatial.block_store import INPUT, BlockGradients, BlockValues, BringInput, part_in
from tiledseg.spatial.twins import SpatialBatchNorm, SpatialNorm

Cast = Callable[[], AbstractContextManager[object]]
Outputs = tuple[torch.Tensor, ...]
LossOf = Callable[[int, Outputs], torch.Tensor | None]


class Image(NamedTuple):
    """An image: `x_BCHW`, this rank's part of the network's input, cut by `program`. `begin` is called before each
    block of it."""

    x_BCHW: torch.Tensor
    program: BlockProgram
    begin: Callable[[], None] = lambda: None


class ImagePass:
    """This rank's blocks of one image. Methods take a segment's index, and do not communicate.

    `begin` prepares the network for a block of this image. `wants`: True for each tensor whose gradient is wanted.
    `joins`: batch norms take their statistics over several images.

    `parts`: the statistics of each block, by node, until all are `measured`. `forward`, `backward`: sums of other nodes
    and of gradients.
    """

    def __init__(
        self,
        image: Image,
        network: BlockNetwork,
        wants: Sequence[bool],
        shelf: MemoryShelf,
        cast: Cast,
        bring: BringInput | None,
        joins: bool,
    ) -> None:
        self.program, self.begin = image.program, image.begin
        self._network, self._wants, self._cast, self._joins = network, wants, cast, joins
        self.values = BlockValues(self.program, shelf, image.x_BCHW, bring)
        self.gradients = BlockGradients(self.program, shelf, self.values)
        self.parts: dict[int, list[Statistics]] = {}
        self.measured: dict[int, Statistics] = {}
        self.forward: Sums = {}
        self.backward: Sums = {}
        self._tracked: set[int] = set()

    def compute(self, index: int, block: int) -> None:
        """Run a segment that is not the last, and store the resulting block."""
        (tensor,) = self.program.segments[index].leaving
        y_BCHW = self._run(index, self._turn(block), self._windows(index, block))[tensor]
        self.measure(tensor, block, y_BCHW)
        self.values.put(tensor, block, y_BCHW)

    def outputs(self, block: int) -> Outputs:
        """Return the network's outputs on a block, without gradients; others cover a part of the first's block."""
        self.begin()
        with torch.no_grad():
            last = len(self.program.segments) - 1
            tensors = self._run(last, self._turn(block), self._windows(last, block))
        return tuple(tensors[tensor] for tensor in self._network.graph.results)

    def input_gradient(self, block: int) -> torch.Tensor | None:
        """Return the gradient of a block of the input after the backward pass, and free it."""
        self.begin()
        x_BCHW = self.values.own_input(block)
        return self._with_gradient(INPUT, block, x_BCHW, self.gradients.take(INPUT, block))

    def close(self) -> None:
        self.values.clear()
        self.gradients.clear()

    def ahead(self, index: int, block: int, backward: bool) -> None:
        """Prefetch the windows of a block."""
        segment = self.program.segments[index]
        for tensor, window in self.program.runs[index][block].windows.items():
            if window.own is not None:
                self.values.ahead(tensor, block)
        for tensor in (*segment.leaving, *segment.entering) if backward else ():
            self.gradients.ahead(tensor, block)

    def _windows(self, index: int, block: int) -> Tensors:
        windows = self.program.runs[index][block].windows
        return {tensor: self.values.read(tensor, block, window) for tensor, window in windows.items()}

    def _run(self, index: int, turn: Turn, tensors: Tensors) -> Tensors:
        """Return the tensors that leave a segment from those that enter it. Running statistics move in the first
        run."""
        segment, graph = self.program.segments[index], self._network.graph
        run = self.program.runs[index][turn.block]
        for tensor in self._network.written_over(segment):
            tensors[tensor] = tensors[tensor].clone()
        with self._cast(), self._still(segment.nodes):
            for number, (k, action) in enumerate(zip(segment.nodes, run.actions, strict=True)):
                fill = self._network.layers[k].fill
                brought = zip(action.inputs, graph.sources[k], strict=True)
                windows = [bring.window(tensors[source], fill) for bring, source in brought]
                tensors[k + 1] = self._node(k, action.place, turn, windows)
                del windows
                later = {source for node in segment.nodes[number + 1 :] for source in graph.sources[node]}
                for tensor in {k + 1, *graph.sources[k]} - later - {*segment.leaving}:
                    del tensors[tensor]
        return {tensor: self._own(segment, run, tensor, turn.block, tensors[tensor]) for tensor in segment.leaving}

    def _own(self, segment: Segment, run: BlockRun, tensor: int, block: int, made_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the own block of a tensor that leaves: nodes may have computed more, for later nodes."""
        inside = tensor - 1 in segment.nodes
        given = run.actions[segment.nodes.index(tensor - 1)].given if inside else run.windows[tensor].box
        row, col = divmod(block, self.program.cols[0].parts)
        rows, cols = (leaving_partition(cuts, segment, tensor) for cuts in (self.program.rows, self.program.cols))
        return part_in(made_BCHW, Box(rows.blocks[row], cols.blocks[col]), given)

    def differentiate(self, index: int, block: int, loss: LossOf | None = None) -> None:
        """Run a segment again, then differentiate it; the last one by its `loss`."""
        segment, run = self.program.segments[index], self.program.runs[index][block]
        gradient = None if loss is not None else self.gradients.take(segment.leaving[0], block)
        leaves, turn = self._windows(index, block), self._turn(block)
        with torch.enable_grad():
            for tensor, x_BCHW in leaves.items():
                leaves[tensor] = x_BCHW.detach().requires_grad_(self._wants[tensor])
            made = self._run(index, turn, dict(leaves))
            turn.sums, turn.adds = self.backward, True
            shares = self.program.ranks.size > 1  # then a block without a loss adds zeros to the sums of ranks
            if loss is not None:
                outputs = tuple(made[tensor] for tensor in self._network.graph.results)
                scalar = loss(block, outputs)
                if scalar is not None and scalar.requires_grad:
                    scalar.backward()
                elif shares:
                    wanting = [output_BKHW for output_BKHW in outputs if output_BKHW.requires_grad]
                    torch.autograd.backward(wanting, [torch.zeros_like(output_BKHW) for output_BKHW in wanting])
            elif (y_BCHW := made.pop(segment.leaving[0])).requires_grad:  # statistics may have been taken of it
                gradient = self._with_gradient(segment.leaving[0], block, y_BCHW.detach(), gradient)
                if gradient is None and shares:
                    gradient = torch.zeros_like(y_BCHW)
                if gradient is not None:
                    y_BCHW.backward(gradient)
        for tensor, leaf in leaves.items():
            if leaf.grad is not None:
                self.gradients.add(tensor, block, run.windows[tensor], leaf.grad)
                leaf.grad = None

    def nodes(self, tensor: int) -> Iterator[int]:
        """Yield the nodes that take statistics of a tensor in this pass."""
        return measuring_nodes(self._network, tensor, self._joins, self.program.blocks > 1)

    def measure(self, tensor: int, block: int, x_BCHW: torch.Tensor) -> None:
        """Add a block to the statistics of its tensor."""
        for k in self.nodes(tensor):
            layer = self._network.layers[k]
            if isinstance(layer, SpatialNorm):
                self.parts.setdefault(k, []).append(measure(x_BCHW, sharing_of(layer.module, x_BCHW)))
                continue
            with torch.no_grad(), self._cast(), self._still([k], True):
                layer.on_block(self._place(k, block), BlockRanks(self._turn(block, adds=True), k), x_BCHW)

    def _turn(self, block: int, adds: bool = False) -> Turn:
        blocks = max(self.program.blocks, 2 if self._joins else 1)  # 2: a block that is its image still adds
        return Turn(block, blocks, self.forward, adds)

    def _node(self, k: int, place: BlockPlace, turn: Turn, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run node `k` with the statistics of the image."""
        layer, ranks = self._network.layers[k], BlockRanks(turn, k)
        if k in self.measured:
            assert isinstance(layer, SpatialNorm), "others take their sums themselves"
            return layer.of(self.measured[k], inputs[0], ranks)
        return layer.on_block(place, ranks, *inputs)

    def _with_gradient(
        self, tensor: int, block: int, x_BCHW: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return a block's gradient plus the gradient through its tensor's statistics, from the sums of all blocks."""
        for k in self.nodes(tensor):
            if k in self.backward:
                layer = self._network.layers[k]
                if isinstance(layer, SpatialNorm):
                    norm, sharing = layer.module, sharing_of(layer.module, x_BCHW)
                    more = moment_gradient(x_BCHW, self.backward[k], self.measured[k], norm.eps, sharing)
                else:  # the sums of a node that is no norm
                    leaf_BCHW, turn = x_BCHW.detach().requires_grad_(), self._turn(block)
                    with torch.enable_grad(), self._cast(), self._still([k], True):
                        made_BCHW = layer.on_block(self._place(k, block), BlockRanks(turn, k), leaf_BCHW)
                    turn.sums = self.backward
                    (more,) = torch.autograd.grad(made_BCHW, leaf_BCHW, torch.zeros_like(made_BCHW))
                gradient = more if gradient is None else gradient.add_(more)
        return gradient

    def _place(self, k: int, block: int) -> BlockPlace:
        """Return the place of a block without halo."""
        source, dims = self._network.graph.sources[k][0], []
        at = divmod(block, self.program.cols[0].parts)
        for cuts, index in zip((self.program.rows, self.program.cols), at, strict=True):
            read, given = cuts[source].blocks[index], cuts[k + 1].blocks[index]
            sizes = cuts[source].size, cuts[k + 1].size
            dims.append(DimPlace(read, given, read, sizes, cuts[source].parts == 1))
        return BlockPlace(*dims)

    def _still(self, nodes: Sequence[int], measuring: bool = False) -> AbstractContextManager[None]:
        """Do not update running statistics of nodes that have updated them already; the others update now."""
        tracking = [k for k in nodes if k in self._network.tracking]
        still = [k for k in tracking if measuring or k in self._tracked]
        if not measuring:
            self._tracked.update(tracking)
        return still_statistics(self._network.modules[k] for k in still)


def measuring_nodes(network: BlockNetwork, tensor: int, batch_norms: bool, others: bool) -> Iterator[int]:
    """Yield the nodes that take statistics of a tensor in this pass: training `batch_norms`, and `others`."""
    for k in network.graph.readers[tensor]:
        if k < len(network.graph) and network.graph.sources[k][0] == tensor:
            layer = network.layers[k]
            measures = layer.measures if isinstance(layer, SpatialNorm) else network.graph.layers[k].statistics
            if measures and (batch_norms if isinstance(layer, SpatialBatchNorm) else others):
                yield k
