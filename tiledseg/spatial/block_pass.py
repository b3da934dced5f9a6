"""The forward and backward pass of images in blocks, which are computed one after the other, segment by segment.

The law: outputs, gradients and buffers are those of the network on the whole images, including norms over them. A
block reads a window with the halo of the whole segment. Only the tensors that leave a segment are kept, in blocks,
outside autograd. The backward pass runs each segment again, block by block, last segment first, and adds up the
gradients of the windows.

    store    input    conv0's output     conv1's output           forward: ->   backward: <-
    block 0    | conv0 |   | norm0 act0 conv1 |   | norm1 ...     what stands between bars is a segment: for each block
    block 1    | conv0 |   | norm0 act0 conv1 |   | norm1 ...     it reads a window, and gives a block

Without a training batch norm each image goes alone. With one, all images of a step go together: through each segment
first the blocks of the first image, then those of the next.

Between segments, ranks that share an image exchange strips (`block_store`) and sum statistics (`block_statistics`);
between blocks they do not wait for each other. It cannot deadlock. All ranks finish the same segments in one order,
backward in the reverse, which follows from the graph alone. After each segment a rank first serves its images, in
order: ranks that share one image share all of theirs. Then come the sums over all ranks of a step, one for each batch
norm of the segment's result. A rank without an image adds zeros.
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
from tiledseg.spatial.block_store import INPUT, BlockGradients, BlockValues, BringInput, part_in

Outputs = tuple[torch.Tensor, ...]
LossOf = Callable[[int, Outputs], torch.Tensor | None]


class Image(NamedTuple):
    """An image: `x_BCHW`, this rank's part of the network's input, cut by `program`. `begin` is called before a block
    of it that follows one of another image."""

    x_BCHW: torch.Tensor
    program: BlockProgram
    begin: Callable[[], None] = lambda: None


class BlockPass:
    """This rank's blocks of one image, or of all its images of a step. Call `forward`, then `backward`, or `outputs` of
    each of the `images` any number of times; `close` frees all.

    `shelf`: the store of blocks between segments. `input_gradient`: compute the input's gradient too, block by block at
    the end. `cast`: the autocast context of the layers. `bring`: see `block_store.BlockValues`. `together`: batch norms
    take their statistics over all images of all ranks, and a rank may have none; else there is one image. The
    constructor, `forward` and `backward` are collective over `axes`, the ranks that share an image, and `together`.
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
        """Run all segments but the last, without gradients. `keep`: keep the tensors for a backward pass."""
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
        """Differentiate the sum of `losses`, one for each image, over all blocks. A loss takes a block's number and its
        outputs, and may return None. Gradients of weights are added block by block."""
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
        for image in self.images:
            image.close()

    def _blocks(self, index: int, backward: bool = False) -> Iterator[tuple[ImagePass, int]]:
        """Yield this rank's blocks, image by image, and prefetch the windows of the next one."""
        every = [(image, block) for image in self.images for block in image.program.own]
        for (image, block), following in zip_longest(every, every[1:]):
            if following is not None:
                following[0].ahead(index, following[1], backward)
            image.begin()
            yield image, block

    def _complete(self, tensor: int) -> None:
        """Exchange strips and sum statistics once this rank has all its blocks of a tensor. Collective."""
        for image in self.images:
            image.values.swap(tensor, self._axes)
        self._sums.complete(tensor)
        self.shelf.rest()

    def _complete_gradients(self, tensor: int) -> None:
        """Exchange strips and sums once this rank has added all its gradients of a tensor. Collective."""
        if self.wants[tensor]:
            for image in self.images:
                image.gradients.swap(tensor, self._axes)
            self._sums.complete_gradients(tensor)
            self.shelf.rest()

    def _drop(self, tensor: int) -> None:
        for image in self.images:
            image.values.drop(tensor)


class ImagePass:
    """This rank's blocks of one image. Methods take a segment's index, and do not communicate."""

    def __init__(self, owner: BlockPass, image: Image) -> None:
        self.program, self._begin = image.program, image.begin
        self._network, self._wants, self._cast = owner.network, owner.wants, owner.cast
        self.values = BlockValues(self.program, owner.shelf, image.x_BCHW, owner.bring)
        self.gradients = BlockGradients(self.program, owner.shelf, self.values)
        self.statistics = ImageStatistics(owner.network, self.program, owner.cast, owner.joins)
        self._blocks = max(self.program.blocks, 2 if owner.joins else 1)  # 2: a block that is its image still adds

    def begin(self) -> None:
        """Prepare the network for a block of this image, if the last block was another image's."""
        turn = self._network.turn
        if turn.image is not self:
            turn.image, turn.blocks = self, self._blocks
            self._begin()

    def compute(self, index: int, block: int) -> None:
        """Run a segment that is not the last, and store the resulting block."""
        (tensor,) = self.program.segments[index].leaving
        y_BCHW = self._run(index, block, self._windows(index, block))[tensor]
        self.statistics.add(tensor, block, y_BCHW)
        self.values.put(tensor, block, y_BCHW)

    def outputs(self, block: int) -> Outputs:
        """Return the network's outputs on a block, without gradients; others cover a part of the first's block."""
        self.begin()
        with torch.no_grad():
            last = len(self.program.segments) - 1
            tensors = self._run(last, block, self._windows(last, block))
        return tuple(tensors[tensor] for tensor in self._network.graph.results)

    def input_gradient(self, block: int) -> torch.Tensor | None:
        """Return the gradient of a block of the input after the backward pass, and free it."""
        self.begin()
        x_BCHW = self.values.own_input(block)
        return self.statistics.with_gradient(INPUT, block, x_BCHW, self.gradients.take(INPUT, block))

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

    def _run(self, index: int, block: int, tensors: Tensors) -> Tensors:
        """Return the tensors that leave a segment from those that enter it. Running statistics move in the first
        run."""
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
        """Return the own block of a tensor that leaves: nodes may have computed more, for later nodes."""
        inside = tensor - 1 in segment.nodes
        given = run.actions[segment.nodes.index(tensor - 1)].given if inside else run.windows[tensor].box
        row, col = divmod(block, self.program.cols[0].parts)
        rows, cols = (leaving_partition(cuts, segment, tensor) for cuts in (self.program.rows, self.program.cols))
        return part_in(made_BCHW, Box(rows.owned(row), cols.owned(col)), given)

    def differentiate(self, index: int, block: int, loss: LossOf | None = None) -> None:
        """Run a segment again, then differentiate it; the last one by its `loss`."""
        segment, run = self.program.segments[index], self.program.runs[index][block]
        gradient = None if loss is not None else self.gradients.take(segment.leaving[0], block)
        leaves = self._windows(index, block)
        with torch.enable_grad():
            for tensor, x_BCHW in leaves.items():
                leaves[tensor] = x_BCHW.detach().requires_grad_(self._wants[tensor])
            made = self._run(index, block, dict(leaves))
            self.statistics.turn(block, self.statistics.backward, adds=True)
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
