"""A network on one rank, whose image is cut into blocks that are computed one after the other, segment by segment.

The law: outputs, gradients and buffers are those of the network on the whole image, norms over the image included. A
block stands in the place of a rank of `spatial.network`, and its layers are the same; but nothing travels within a
segment, whose halo is read with the window, and only what leaves a segment is kept, in blocks, outside of autograd.
The backward pass runs each segment once more, block by block, last segment first, and adds up the gradients of what it
read.

    store    input    conv0's output     conv1's output           forward: ->   backward: <-
    block 0    | conv0 |   | norm0 act0 conv1 |   | norm1 ...     what stands between bars is a segment: for each block
    block 1    | conv0 |   | norm0 act0 conv1 |   | norm1 ...     it reads a window, and gives a block

Statistics are summed as blocks are stored, and given to the segments that take them. How they change the loss is summed
over all blocks of those segments too, and goes to the gradient of what was measured when its own segment's turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from tiledseg.geometry.box import Box
from tiledseg.geometry.decomposition import Partition
from tiledseg.geometry.layer_windows import block_partition
from tiledseg.geometry.places import parts
from tiledseg.geometry.segments import Segment
from tiledseg.memory.shelf import MemoryShelf
from tiledseg.models.block import Place
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.frozen import is_trained
from tiledseg.models.network import GraphNetwork, Tensors
from tiledseg.models.normalise import Statistics, joined
from tiledseg.models.still import still_statistics
from tiledseg.spatial.blocks.program import BlockProgram, BlockRun, compile_program
from tiledseg.spatial.blocks.store import BlockGradients, BlockValues, Bring, Shelf
from tiledseg.spatial.blocks.sums import BlockRanks, Doing, Turn
from tiledseg.spatial.convert import convert_layers
from tiledseg.spatial.norm import SpatialNorm

Outputs = tuple[torch.Tensor, ...]
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
        self._programs: dict[tuple[Partition, Partition, Where | None], BlockProgram] = {}
        self._written: dict[Segment, tuple[int, ...]] = {}

    def _ranks_of_a_layer(self) -> BlockRanks:
        self.ranks.append(BlockRanks(self.turn))
        return self.ranks[-1]

    def partitions(self, shape: tuple[int, int], blocks: tuple[int, int]) -> tuple[Partition, Partition]:
        """An input of `shape` (height, width) in so many rows and columns of blocks, or fewer where it is too small."""
        dims = zip((self.graph, self.along_columns), shape, blocks, strict=True)
        rows, cols = (block_partition(graph, size, parts) for graph, size, parts in dims)
        return rows, cols

    def program(self, rows: Partition, cols: Partition, where: Where | None = None) -> BlockProgram:
        """What is to be done for an input that `rows` x `cols` cut. Raises GeometryError where it cannot be so cut.

        `where` (the whole image, the input's place in it): of a tile, for layers that ask for their place.
        """
        where = where if any(layer.asks_place for layer in self.graph.layers) else None
        key = rows, cols, where
        if key not in self._programs:
            parts_of = None
            if where is not None and where[0] != where[1]:
                whole, tile = where
                parts_of = parts(self.graph, whole.row, tile.row), parts(self.along_columns, whole.col, tile.col)
            self._programs[key] = compile_program(self.graph, self.along_columns, rows, cols, parts_of)
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


class BlockPass:
    """One image on its way through a network: `forward`, then `backward`, or `outputs` as often as one likes.

    `shelf`: where blocks lie in between. `input_gradient`: that of the input is wanted too, block by block in the end.
    `cast`: in which precision layers compute, their backward passes as these do. `bring`: what makes a part of the
    input one on the network's device, in its layout; none where it is already.
    `close` lets go of all that is kept.
    """

    def __init__(
        self,
        network: BlockNetwork,
        x_BCHW: torch.Tensor,
        program: BlockProgram,
        shelf: Shelf | None = None,
        input_gradient: bool = False,
        cast: Callable[[], AbstractContextManager[object]] = nullcontext,
        bring: Bring | None = None,
    ) -> None:
        self._network, self.program = network, program
        shelf = shelf or MemoryShelf()
        self._values, self._gradients = BlockValues(self.program, shelf), BlockGradients(self.program, shelf)
        self._wants = network.wants_gradient(input_gradient)
        self._cast = cast
        self._parts: dict[int, list[Statistics]] = {}  # of each block, as long as not all are known
        self._found: dict[int, Statistics] = {}
        self._tracked: set[int] = set()
        self._measuring = self._measuring_nodes()
        network.turn.blocks = self.program.blocks
        for ranks in network.ranks:
            ranks.clear()
        self._values.put_whole(0, x_BCHW, bring)
        if 0 in self._measuring:
            for block in range(self.program.blocks):
                self._measure(0, block, self._values.own_part(0, block))

    def _measuring_nodes(self) -> dict[int, list[int]]:
        """By the tensor, the nodes that take statistics of it, over several blocks."""
        found: dict[int, list[int]] = {}
        if self.program.blocks == 1:
            return found
        for k, layer in enumerate(self._network.layers):
            statistics = self._network.graph.layers[k].statistics
            if layer.measures if isinstance(layer, SpatialNorm) else statistics:
                found.setdefault(self._network.graph.sources[k][0], []).append(k)
        return found

    def forward(self, keep: bool = True) -> None:
        """All segments but the last, without gradients. `keep`: for a backward pass."""
        *inner, _ = self.program.segments
        with torch.no_grad():
            for index, segment in enumerate(inner):
                (tensor,) = segment.leaving
                for block in range(self.program.blocks):
                    y_BCHW = self._run(index, block, self._windows(index, block))[tensor]
                    self._measure(tensor, block, y_BCHW)
                    self._values.put(tensor, block, y_BCHW)
                for done in [] if keep else self._last_taken(index):
                    self._values.drop(done)

    def outputs(self, block: int) -> Outputs:
        """The network's outputs on a block, each its part of `output_box`. Without gradients."""
        with torch.no_grad():
            last = len(self.program.segments) - 1
            tensors = self._run(last, block, self._windows(last, block))
        return tuple(tensors[tensor] for tensor in self._network.graph.results)

    def output_box(self, block: int) -> Box:
        """A block of the first output, in positions of the whole output."""
        return self._network.output_box(self.program, block)

    def backward(self, loss: Callable[[int, Outputs], torch.Tensor | None]) -> None:
        """Differentiates the sum over all blocks of `loss`, which is given a block and the outputs on it; None: it does
        not look at them. Gradients of weights are added block by block."""
        last = len(self.program.segments) - 1
        for block in range(self.program.blocks):
            self._differentiate(last, block, loss)
        for index in reversed(range(last)):
            (tensor,) = self.program.segments[index].leaving
            self._values.drop(tensor)
            for block in range(self.program.blocks):
                self._differentiate(index, block)

    def input_gradient(self, block: int) -> torch.Tensor | None:
        """That of a block of the input, after `backward`; once."""
        x_BCHW = self._values.own_part(0, block)
        return self._with_statistics(0, block, x_BCHW, self._gradients.take(0, block))

    def close(self) -> None:
        """Lets go of all blocks."""
        self._values.clear()
        self._gradients.clear()

    def _last_taken(self, index: int) -> list[int]:
        """The tensors that no segment after this one takes."""
        later = {tensor for segment in self.program.segments[index + 1 :] for tensor in segment.entering}
        return [tensor for tensor in self.program.segments[index].entering if tensor not in later]

    def _windows(self, index: int, block: int) -> Tensors:
        windows = self.program.runs[index][block].windows
        return {tensor: self._values.read(tensor, block, window) for tensor, window in windows.items()}

    def _run(self, index: int, block: int, tensors: Tensors) -> Tensors:
        """What leaves a segment, of what enters it. Running statistics move the first time."""
        segment, run = self.program.segments[index], self.program.runs[index][block]
        self._network.turn.block, self._network.turn.doing = block, Doing.COMPUTE
        for tensor in self._network.written_over(segment):
            tensors[tensor] = tensors[tensor].clone()
        with self._cast(), self._still(segment.nodes):
            for k, action in zip(segment.nodes, run.actions, strict=True):
                layer = self._network.layers[k]
                given = zip(action.inputs, self._network.graph.sources[k], strict=True)
                windows = [bring.padded(bring.cut(tensors[source]), layer.fill) for bring, source in given]
                tensors[k + 1] = self._compute(k, action.place, windows)
                del windows
                for tensor in self._released(segment.nodes, segment.leaving, k):
                    del tensors[tensor]
        return {tensor: self._own(segment, run, tensor, tensors[tensor]) for tensor in segment.leaving}

    def _compute(self, k: int, place: Place, inputs: list[torch.Tensor]) -> torch.Tensor:
        layer = self._network.layers[k]
        if k in self._found:
            assert isinstance(layer, SpatialNorm), "others take their sums themselves"
            return layer.of(self._found[k], inputs[0], self._network.ranks[k])
        return layer(place, *inputs)

    def _own(self, segment: Segment, run: BlockRun, tensor: int, made_BCHW: torch.Tensor) -> torch.Tensor:
        """A block of what leaves: nodes may have made more, for each other."""
        inside = tensor - 1 in segment.nodes
        given = run.actions[segment.nodes.index(tensor - 1)].given if inside else run.windows[tensor].box
        own = self.program.leaving_box(segment, tensor, self._network.turn.block)
        return made_BCHW if own == given else made_BCHW[(slice(None), slice(None), *own.relative_to(given).slices)]

    def _released(self, nodes: Sequence[int], leaving: Sequence[int], k: int) -> Iterator[int]:
        """The tensors that no later node of a segment takes."""
        later = {source for node in nodes if node > k for source in self._network.graph.sources[node]}
        yield from (t for t in {k + 1, *self._network.graph.sources[k]} if t not in later and t not in leaving)

    def _still(self, nodes: Sequence[int], measuring: bool = False) -> AbstractContextManager[None]:
        """Running statistics of nodes that have moved theirs stay; the others' are about to move."""
        tracking = [k for k in nodes if k in self._network.tracking]
        still = [k for k in tracking if measuring or k in self._tracked]
        if not measuring:
            self._tracked.update(tracking)
        return still_statistics(self._network.modules[k] for k in still)

    def _measure(self, tensor: int, block: int, x_BCHW: torch.Tensor) -> None:
        """Adds a block to the statistics that nodes take of its tensor; the last block completes them."""
        for k in self._measuring.get(tensor, ()):
            layer = self._network.layers[k]
            if not isinstance(layer, SpatialNorm):
                self._add_to_sums(k, block, x_BCHW)
                continue
            parts = self._parts.setdefault(k, [])
            parts.append(layer.measured(x_BCHW))
            if len(parts) == self.program.blocks:
                self._found[k] = joined(self._parts.pop(k))
                layer.track(self._found[k])

    def _add_to_sums(self, k: int, block: int, x_BCHW: torch.Tensor) -> None:
        """Node k adds a block to what it sums over the image."""
        self._network.turn.block, self._network.turn.doing = block, Doing.MEASURE
        place = self.program.measuring_place(self._network.graph.sources[k][0], k + 1, block)
        with torch.no_grad(), self._cast(), self._still([k], True):
            self._network.layers[k](place, x_BCHW)

    def _differentiate(
        self, index: int, block: int, loss: Callable[[int, Outputs], torch.Tensor | None] | None = None
    ) -> None:
        segment, run = self.program.segments[index], self.program.runs[index][block]
        gradient = None if loss is not None else self._gradients.take(segment.leaving[0], block)
        windows = self._windows(index, block)
        with torch.enable_grad():
            for tensor, x_BCHW in windows.items():
                windows[tensor] = x_BCHW.detach().requires_grad_(self._wants[tensor])
            made = self._run(index, block, dict(windows))
            self._network.turn.doing = Doing.DIFFERENTIATE
            if loss is not None:
                scalar = loss(block, tuple(made[tensor] for tensor in self._network.graph.results))
                if scalar is not None and scalar.requires_grad:
                    scalar.backward()
            else:
                self._pull(segment.leaving[0], block, made.pop(segment.leaving[0]), gradient)
        for tensor, leaf in windows.items():
            if leaf.grad is not None:
                self._gradients.add(tensor, block, run.windows[tensor], leaf.grad)
                leaf.grad = None

    def _pull(self, tensor: int, block: int, y_BCHW: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """The backward pass of a block of a stored tensor, which statistics may have been taken of."""
        if not y_BCHW.requires_grad:
            return
        gradient = self._with_statistics(tensor, block, y_BCHW.detach(), gradient)
        if gradient is not None:
            self._network.turn.doing = Doing.DIFFERENTIATE
            y_BCHW.backward(gradient)

    def _with_statistics(
        self, tensor: int, block: int, x_BCHW: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """A block's gradient, and what goes to it through the statistics that nodes take of its tensor."""
        for k in self._measuring.get(tensor, ()):
            more = self._through_statistics(k, block, x_BCHW)
            if more is not None:
                gradient = more if gradient is None else gradient.add_(more)
        return gradient

    def _through_statistics(self, k: int, block: int, x_BCHW: torch.Tensor) -> torch.Tensor | None:
        """What goes to a block's gradient through the statistics that node k takes, by the sums of all blocks."""
        layer, sums = self._network.layers[k], self._network.ranks[k].backward
        if sums is None:
            return None
        if isinstance(layer, SpatialNorm):
            return layer.moment_gradient(self._found[k], sums, x_BCHW)
        self._network.turn.block, self._network.turn.doing = block, Doing.COMPUTE
        x_BCHW = x_BCHW.detach().requires_grad_()
        place = self.program.measuring_place(self._network.graph.sources[k][0], k + 1, block)
        with torch.enable_grad(), self._cast(), self._still([k], True):
            made_BCHW = layer(place, x_BCHW)
        self._network.turn.doing = Doing.RETURN
        (found,) = torch.autograd.grad(made_BCHW, x_BCHW, torch.zeros_like(made_BCHW))
        return found


def _writes_over(module: nn.Module) -> bool:
    return any(getattr(each, "inplace", False) for each in module.modules())


def _may_hand_on(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity | ChannelDropout)


def _tracks(module: nn.Module) -> bool:
    return any(getattr(each, "track_running_stats", False) for each in module.modules())
