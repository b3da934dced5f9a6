"""Images on their way through a network in blocks, which are computed one after the other, segment by segment.

The law: outputs, gradients and buffers are those of the network on the whole images, norms over them included. Nothing
travels within a segment, whose halo is read with the window, and only what leaves a segment is kept, in blocks, outside
of autograd. The backward pass runs each segment once more, block by block, last segment first, and adds up the
gradients of what it read.

    store    input    conv0's output     conv1's output           forward: ->   backward: <-
    block 0    | conv0 |   | norm0 act0 conv1 |   | norm1 ...     what stands between bars is a segment: for each block
    block 1    | conv0 |   | norm0 act0 conv1 |   | norm1 ...     it reads a window, and gives a block

An image goes alone, or, for the sake of a batch norm that learns, all images of a step go together: the blocks of the
first, then those of the next, through one segment after the other.

Between segments ranks that share an image bring each other what their blocks read (`messages`), and add up statistics
(`statistics`); between blocks they do not wait for each other. It cannot deadlock. All ranks end the same segments in
one order, backward in the opposite one, since that follows from the graph alone, not from an image's size or blocks. At
each end a rank first does what belongs to its images, one after the other: those who share one share all of theirs, in
one order. Then come the sums over all ranks of a step, once for each batch norm that has measured what the segment
gave: a rank has them with many images, with few, or with none, for which it adds zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import zip_longest

import torch

from tiledseg.comm.axes import Axes, serial_axes
from tiledseg.geometry.sharing.segments import segments
from tiledseg.memory.disk.shelf import MemoryShelf
from tiledseg.spatial.blocks.image_pass import Image, ImagePass, LossOf, PassOptions
from tiledseg.spatial.blocks.network import BlockNetwork
from tiledseg.spatial.blocks.statistics import Cast, StepNorms, Together
from tiledseg.spatial.blocks.store import INPUT, Bring, Shelf


class BlockPass:
    """This rank's blocks of an image, or of all that it has of a step: `forward`, then `backward`, or the `outputs` of
    its `images` as often as one likes.

    `together`: batch norms take their statistics over all images, of all ranks, of which one may have none; else there
    is one image. `input_gradient`: that of the input is wanted too, block by block in the end. For the others see
    `PassOptions`. The making, `forward` and `backward` are collective over `axes`, the ranks that share an image, and
    over `together`. `close` lets go of all that is kept.
    """

    def __init__(
        self,
        network: BlockNetwork,
        images: Sequence[Image],
        shelf: Shelf | None = None,
        input_gradient: bool = False,
        cast: Cast = nullcontext,
        bring: Bring | None = None,
        axes: Axes | None = None,
        together: Together | None = None,
    ) -> None:
        axes = axes or serial_axes()
        self._shelf = shelf or MemoryShelf()
        self._wants = network.wants_gradient(input_gradient)
        how = PassOptions(self._shelf, self._wants, cast, bring, axes)
        joins = together is not None or images[0].program.blocks > 1
        self.images = [ImagePass(network, image, how, joins) for image in images]
        self._segments = images[0].program.segments if images else segments(network.graph)
        ranks, device = together or Together(axes.image, torch.device("cpu"))
        self._norms = StepNorms(network, [image.statistics for image in self.images], ranks, device, joins)
        for each in self.images:
            each.measure_input()
        self._complete(INPUT)

    def forward(self, keep: bool = True) -> None:
        """All segments but the last, without gradients. `keep`: for a backward pass."""
        *inner, _ = self._segments
        with torch.no_grad():
            for index, segment in enumerate(inner):
                for image, block in self._blocks(index):
                    image.compute(index, block)
                self._complete(segment.leaving[0])
                for done in [] if keep else self._last_taken(index):
                    self._drop(done)

    def backward(self, *losses: LossOf) -> None:
        """Differentiates the sum over all images and blocks of `losses`, one for each image, which is given a block
        and the outputs on it; None: it does not look at them. Gradients of weights are added block by block."""
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
        """Lets go of all blocks."""
        for image in self.images:
            image.close()

    def _blocks(self, index: int, backward: bool = False) -> Iterator[tuple[ImagePass, int]]:
        """This rank's blocks, image by image; at each, what the next one reads begins to come."""
        every = [(image, block) for image in self.images for block in image.program.own]
        for (image, block), following in zip_longest(every, every[1:]):
            if following is not None:
                following[0].ahead(index, following[1], backward)
            image.begin()
            yield image, block

    def _complete(self, tensor: int) -> None:
        """This rank has all its blocks of a tensor."""
        for image in self.images:
            image.complete(tensor)
        self._norms.complete(tensor)
        self._shelf.rest()

    def _complete_gradients(self, tensor: int) -> None:
        """All that this rank adds to a tensor's gradient has been added."""
        if self._wants[tensor]:
            for image in self.images:
                image.complete_gradients(tensor)
            self._norms.complete_gradients(tensor)
            self._shelf.rest()

    def _drop(self, tensor: int) -> None:
        for image in self.images:
            image.drop(tensor)

    def _last_taken(self, index: int) -> list[int]:
        """The tensors that no segment after this one takes."""
        later = {tensor for segment in self._segments[index + 1 :] for tensor in segment.entering}
        return [tensor for tensor in self._segments[index].entering if tensor not in later]
