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

Between segments, ranks that share an image exchange strips (`block_store`) and sum statistics;
between blocks they do not wait for each other. It cannot deadlock. All ranks finish the same segments in one order,
backward in the reverse, which follows from the graph alone. After each segment a rank first serves its images, in
order: ranks that share one image share all of theirs. Then come the sums over all ranks of a step, one for each batch
norm of the segment's result. A rank without an image adds zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import NamedTuple

import torch

from tiledseg.comm.collectives import Communicator
from tiledseg.comm.mesh import Axes, serial_axes
from tiledseg.geometry.sharing.segments import segments
from tiledseg.memory.file_store import MemoryShelf
from tiledseg.models.normalise import Statistics, joined_over, summed, track
from tiledseg.spatial.block_network import BlockNetwork
from tiledseg.spatial.block_store import INPUT, BringInput
from tiledseg.spatial.image_pass import Cast, Image, ImagePass, LossOf, measuring_nodes
from tiledseg.spatial.twins import SpatialBatchNorm, SpatialNorm


class Together(NamedTuple):
    """The ranks whose images of a step go together. `device`: this rank's, for a rank without an image."""

    ranks: Communicator
    device: torch.device


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
        self._network, self._shelf, self._axes = network, shelf or MemoryShelf(), axes or serial_axes()
        self._wants = network.wants_gradient(input_gradient)
        self._joins = together is not None or images[0].program.blocks > 1
        how = network, self._wants, self._shelf, cast, bring, self._joins
        self.images = [ImagePass(each, *how) for each in images]
        self._segments = images[0].program.segments if images else segments(network.graph)
        self._together = together or Together(self._axes.image, torch.device("cpu"))
        self._measured: dict[int, Statistics] = {}  # of batch norms
        for image in self.images:
            image.begin()
            for block in image.program.own if list(image.nodes(INPUT)) else ():
                image.measure(INPUT, block, image.values.own_input(block))
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
        """Exchange strips and complete the statistics once this rank has all its blocks of a tensor. Collective."""
        for image in self.images:
            image.values.swap(tensor, self._axes)
        for image in self.images:
            for k in image.nodes(tensor):
                layer = self._network.layers[k]
                if not isinstance(layer, SpatialNorm):
                    summed(image.forward[k], self._axes.image)
                elif not isinstance(layer, SpatialBatchNorm):
                    image.measured[k] = joined_over(image.parts.pop(k), self._axes.image)
        for k, norm in self._batch_norms(tensor):
            parts = [part for image in self.images for part in image.parts.pop(k)]
            self._measured[k] = joined_over(
                parts, self._together.ranks, norm.module.num_features, self._together.device
            )
            track(norm.module, self._measured[k])
            for image in self.images:
                image.measured[k] = self._measured[k]
        self._shelf.rest()

    def _complete_gradients(self, tensor: int) -> None:
        """Exchange strips and complete the statistics' gradients once this rank has added all its gradients of a
        tensor. Collective."""
        if not self._wants[tensor]:
            return
        for image in self.images:
            image.gradients.swap(tensor, self._axes)
        for image in self.images:
            for k in image.nodes(tensor):
                if not isinstance(self._network.layers[k], SpatialBatchNorm) and self._axes.image.size > 1:
                    summed(image.backward[k], self._axes.image)  # each rank of an image has a block, which adds
        for k, norm in self._batch_norms(tensor):
            total = self._measured[k].mean_G.new_zeros(2, norm.module.num_features)
            for image in self.images:
                if k in image.backward:  # else no block of it is in the loss
                    total += image.backward[k]
            summed(total, self._together.ranks)
            for image in self.images:
                image.backward[k] = total
        self._shelf.rest()

    def _batch_norms(self, tensor: int) -> Iterator[tuple[int, SpatialBatchNorm]]:
        for k in measuring_nodes(self._network, tensor, self._joins, False):
            layer = self._network.layers[k]
            assert isinstance(layer, SpatialBatchNorm), "a batch norm"
            yield k, layer

    def _drop(self, tensor: int) -> None:
        for image in self.images:
            image.values.drop(tensor)
