"""Images on their way through a network in blocks, which are computed one after the other, segment by segment.

The law: outputs, gradients and buffers are those of the network on the whole images, norms over them included. Nothing
travels within a segment, whose halo is read with the window. Only what leaves a segment is kept, in blocks, outside of
autograd. The backward pass runs each segment once more, block by block, last segment first, and adds up the gradients
of what it read.

    store    input    conv0's output     conv1's output           forward: ->   backward: <-
    block 0    | conv0 |   | norm0 act0 conv1 |   | norm1 ...     what stands between bars is a segment: for each block
    block 1    | conv0 |   | norm0 act0 conv1 |   | norm1 ...     it reads a window, and gives a block

An image goes alone. For a batch norm that learns all images of a step go together: the blocks of the first, then those
of the next, through one segment after the other.

Between segments ranks that share an image bring each other what their blocks read (`block_store`), and add up
statistics (`block_statistics`); between blocks they do not wait for each other. It cannot deadlock. All ranks end the
same segments in one order, backward in the opposite one, since that follows from the graph alone, not from an image. At
each end a rank first serves its images, one after the other: ranks that share one share all of theirs, in one order.
Then come the sums over all ranks of a step, once for each batch norm that has measured what the segment gave. A rank
takes part with many images, with few, or with none, for which it adds zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import NamedTuple

import torch

from tiledseg.comm.mesh import Axes, serial_axes
from tiledseg.geometry.box import Box
from tiledseg.geometry.sharing.layer_windows import leaving_partition
from tiledseg.geometry.sharing.segments import Segment, segments
from tiledseg.memory.file_store import MemoryShelf
from tiledseg.models.network import Tensors
from tiledseg.spatial.block_network import BlockNetwork, BlockProgram, BlockRun
from tiledseg.spatial.block_statistics import Cast, ImageStatistics, StatisticSums, Together
from tiledseg.spatial.block_store import INPUT, BlockGradients, BlockValues, BringInput

Outputs = tuple[torch.Tensor, ...]
LossOf = Callable[[int, Outputs], torch.Tensor | None]


class Image(NamedTuple):
    """An image: `x_BCHW`, this rank's part of the network's input, cut as `program` says. `begin` is called before any
    of its blocks is computed, after one of another image."""

    x_BCHW: torch.Tensor
    program: BlockProgram
    begin: Callable[[], None] = lambda: None


class BlockPass:
    """This rank's blocks of an image, or of all that it has of a step: `forward`, then `backward`, or the `outputs` of
    its `images` as often as one likes.

    `shelf`: the place of blocks between segments. `input_gradient`: that of the input is wanted too, block by block in
    the end. `cast`: the precision of the layers. `bring`: see `block_store.BlockValues`. `together`: batch norms take
    their statistics over all images, of all ranks, of which one may have none; else there is one image. The making,
    `forward` and `backward` are collective over `axes`, the ranks that share an image, and over `together`. `close`
    frees all.
    """

    def __init__(
        self,
        network: BlockNetwork,
        images: Sequence[Image],
        shelf: MemoryShelf | None = None,
        input_gradient: bool = False,
        cast: Cast = nullcontext,
        bring: BringInput | None = None,
        axes: Axes | None = None,
        together: Together | None = None,
    ) -> None:
        self.network, self.shelf, self.cast, self.bring = network, shelf or MemoryShelf(), cast, bring
        self.wants, self._axes = network.wants_gradient(input_gradient), axes or serial_axes()
        self.joins = together is not None or images[0].program.blocks > 1
        self.images = [ImagePass(self, each) for each in images]
        self._segments = images[0].program.segments if images else segments(network.graph)
        statistics = [image.statistics for image in self.images]
        self._sums = StatisticSums(network, statistics, self._axes.image, together, self.joins)
        for image in self.images:
            image.begin()
            for block in image.program.own if list(image.statistics.nodes(INPUT)) else ():
                image.statistics.add(INPUT, block, image.values.own_input(block))
        self._complete(INPUT)

    def forward(self, keep: bool = True) -> None:
        """Run all segments but the last, without gradients. `keep`: for a backward pass."""
        with torch.no_grad():
            for index, segment in enumerate(self._segments[:-1]):
                for image, block in self._blocks(index):
                    image.compute(index, block)
                self._complete(segment.leaving[0])
                later = {tensor for after in self._segments[index + 1 :] for tensor in after.entering}
                for tensor in () if keep else segment.entering:
                    if tensor not in later:
                        self._drop(tensor)

    def backward(self, *losses: LossOf) -> None:
        """Differentiate the sum over all images and blocks of `losses`, one for each image. A loss takes a block and
        the outputs on it, and may be None there. Gradients of weights are added block by block."""
        last, of = len(self._segments) - 1, dict(zip(self.images, losses, strict=True))
        for image, block in self._blocks(last, True):
            image.differentiate(last, block, of[image])
        for index in reversed(range(last)):
            (tensor,) = self._segments[index].leaving
            self._drop(tensor)
            self._complete_gradients(tensor)
            for image, block in self._blocks(index, True):
                image.differentiate(index, block)
        self._complete_gradients(INPUT)

    def close(self) -> None:
        """Free all blocks."""
        for image in self.images:
            image.close()

    def _blocks(self, index: int, backward: bool = False) -> Iterator[tuple[ImagePass, int]]:
        """Yield this rank's blocks, image by image; at each, what the next one reads begins to come."""
        every = [(image, block) for image in self.images for block in image.program.own]
        for (image, block), following in zip_longest(every, every[1:]):
            if following is not None:
                following[0].ahead(index, following[1], backward)
            image.begin()
            yield image, block

    def _complete(self, tensor: int) -> None:
        """Swap and sum once this rank has all its blocks of a tensor. Collective."""
        for image in self.images:
            image.values.swap(tensor, self._axes)
        self._sums.complete(tensor)
        self.shelf.rest()

    def _complete_gradients(self, tensor: int) -> None:
        """Swap and sum once all that this rank adds to a tensor's gradient has been added. Collective."""
        if self.wants[tensor]:
            for image in self.images:
                image.gradients.swap(tensor, self._axes)
            self._sums.complete_gradients(tensor)
            self.shelf.rest()

    def _drop(self, tensor: int) -> None:
        for image in self.images:
            image.values.drop(tensor)


class ImagePass:
    """This rank's blocks of one image. Segments are given by their index; nothing here communicates."""

    def __init__(self, owner: BlockPass, image: Image) -> None:
        self.program, self._begin = image.program, image.begin
        self._network, self._wants, self._cast = owner.network, owner.wants, owner.cast
        self.values = BlockValues(self.program, owner.shelf, image.x_BCHW, owner.bring)
        self.gradients = BlockGradients(self.program, owner.shelf, self.values)
        self.statistics = ImageStatistics(owner.network, self.program, owner.cast, owner.joins)
        # One that is all of its image still adds to sums.
        self._blocks = max(self.program.blocks, 2 if owner.joins else 1)

    def begin(self) -> None:
        """Prepare the network for a block of this image, maybe after one of another."""
        turn = self._network.turn
        if turn.image is not self:
            turn.image, turn.blocks = self, self._blocks
            self._begin()

    def compute(self, index: int, block: int) -> None:
        """Run a segment that is not the last, and store the block that it gives."""
        (tensor,) = self.program.segments[index].leaving
        y_BCHW = self._run(index, block, self._windows(index, block))[tensor]
        self.statistics.add(tensor, block, y_BCHW)
        self.values.put(tensor, block, y_BCHW)

    def outputs(self, block: int) -> Outputs:
        """Return the network's outputs on a block, each its part of a block of the first, without gradients."""
        self.begin()
        with torch.no_grad():
            last = len(self.program.segments) - 1
            tensors = self._run(last, block, self._windows(last, block))
        return tuple(tensors[tensor] for tensor in self._network.graph.results)

    def input_gradient(self, block: int) -> torch.Tensor | None:
        """Return the gradient of a block of the input, after the backward pass; once."""
        self.begin()
        x_BCHW = self.values.own_input(block)
        return self.statistics.with_gradient(INPUT, block, x_BCHW, self.gradients.take(INPUT, block))

    def close(self) -> None:
        """Free all blocks."""
        self.values.clear()
        self.gradients.clear()

    def ahead(self, index: int, block: int, backward: bool) -> None:
        """Begin to fetch what the block reads."""
        segment = self.program.segments[index]
        for tensor, window in self.program.runs[index][block].windows.items():
            if window.own is not None:
                self.values.ahead(tensor, block)
        for tensor in (*segment.leaving, *segment.entering) if backward else ():
            self.gradients.ahead(tensor, block)

    def _windows(self, index: int, block: int) -> Tensors:
        windows = self.program.runs[index][block].windows
        return {tensor: self.values.read(tensor, block, window) for tensor, window in windows.items()}

    def _run(self, index: int, block: int, tensors: Tensors) -> Tensors:
        """Return what leaves a segment, of what enters it. Running statistics move the first time."""
        segment, run, graph = self.program.segments[index], self.program.runs[index][block], self._network.graph
        self.statistics.turn(block, self.statistics.forward)
        for tensor in self._network.written_over(segment):
            tensors[tensor] = tensors[tensor].clone()
        with self._cast(), self.statistics.still(segment.nodes):
            for number, (k, action) in enumerate(zip(segment.nodes, run.actions, strict=True)):
                fill = self._network.layers[k].fill
                brought = zip(action.inputs, graph.sources[k], strict=True)
                windows = [bring.window(tensors[source], fill) for bring, source in brought]
                tensors[k + 1] = self.statistics.compute(k, action.place, windows)
                del windows
                later = {source for node in segment.nodes[number + 1 :] for source in graph.sources[node]}
                for tensor in {k + 1, *graph.sources[k]} - later - {*segment.leaving}:
                    del tensors[tensor]
        return {tensor: self._own(segment, run, tensor, block, tensors[tensor]) for tensor in segment.leaving}

    def _own(self, segment: Segment, run: BlockRun, tensor: int, block: int, made_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the block of what leaves: nodes may have made more, for each other."""
        inside = tensor - 1 in segment.nodes
        given = run.actions[segment.nodes.index(tensor - 1)].given if inside else run.windows[tensor].box
        row, col = divmod(block, self.program.cols[0].parts)  # outputs of one size cover the same
        rows, cols = (leaving_partition(cuts, segment, tensor) for cuts in (self.program.rows, self.program.cols))
        own = Box(rows.owned(row), cols.owned(col))
        return made_BCHW if own == given else made_BCHW[(slice(None), slice(None), *own.relative_to(given).slices)]

    def differentiate(self, index: int, block: int, loss: LossOf | None = None) -> None:
        """Run a segment once more, and back; the last one by its `loss`."""
        segment, run = self.program.segments[index], self.program.runs[index][block]
        gradient = None if loss is not None else self.gradients.take(segment.leaving[0], block)
        leaves = self._windows(index, block)
        with torch.enable_grad():
            for tensor, x_BCHW in leaves.items():
                leaves[tensor] = x_BCHW.detach().requires_grad_(self._wants[tensor])
            made = self._run(index, block, dict(leaves))
            self.statistics.turn(block, self.statistics.backward, adds=True)
            shares = self.program.ranks.size > 1  # blocks without a loss then add zeros to what ranks sum
            if loss is not None:
                outputs = tuple(made[tensor] for tensor in self._network.graph.results)
                scalar = loss(block, outputs)
                if scalar is not None and scalar.requires_grad:
                    scalar.backward()
                elif shares:
                    wanting = [output_BKHW for output_BKHW in outputs if output_BKHW.requires_grad]
                    torch.autograd.backward(wanting, [torch.zeros_like(output_BKHW) for output_BKHW in wanting])
            elif (y_BCHW := made.pop(segment.leaving[0])).requires_grad:  # statistics may have been taken of it
                gradient = self.statistics.with_gradient(segment.leaving[0], block, y_BCHW.detach(), gradient)
                if gradient is None and shares:
                    gradient = torch.zeros_like(y_BCHW)
                if gradient is not None:
                    self.statistics.turn(block, self.statistics.backward, adds=True)
                    y_BCHW.backward(gradient)
        for tensor, leaf in leaves.items():
            if leaf.grad is not None:
                self.gradients.add(tensor, block, run.windows[tensor], leaf.grad)
                leaf.grad = None
