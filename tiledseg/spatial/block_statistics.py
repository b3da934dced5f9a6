"""Statistics over all pixels of images that are computed in blocks: of norms, means and maxima over an image.

They are summed as blocks are stored, and used by the segment that reads the blocks. The gradients of the statistics
are summed over all blocks of that segment, and added to the measured tensor's gradient when its own segment is
differentiated. Instance and group norms, means and maxima cover one image, a training batch norm all images of a step.

Ranks that share an image sum their statistics, once forward and once backward for each layer; for a batch norm all
ranks of a step do. `block_pass` says why it cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from tiledseg.comm.collectives import Communicator
from tiledseg.memory.second_run import still_statistics
from tiledseg.models.layers.block import BlockPlace, DimPlace
from tiledseg.models.normalise import Statistics, joined_over, measure, moment_gradient, sharing_of, summed, track
from tiledseg.spatial.block_network import BlockNetwork, BlockProgram, Sums
from tiledseg.spatial.twins import SpatialBatchNorm, SpatialNorm

Cast = Callable[[], AbstractContextManager[object]]


class Together(NamedTuple):
    """The ranks whose images of a step go together. `device`: this rank's, for a rank without an image."""

    ranks: Communicator
    device: torch.device


class ImageStatistics:
    """The statistics of one image in its pass through a network. `joins`: batch norms cover all images together."""

    def __init__(self, network: BlockNetwork, program: BlockProgram, cast: Cast, joins: bool) -> None:
        self._network, self._program, self._cast, self._joins = network, program, cast, joins
        self.parts: dict[int, list[Statistics]] = {}  # a block's each, until all are measured
        self.measured: dict[int, Statistics] = {}
        self.forward: Sums = {}
        self.backward: Sums = {}
        self._tracked: set[int] = set()

    def nodes(self, tensor: int) -> Iterator[int]:
        """Yield the nodes that take statistics of a tensor in this pass."""
        return measuring_nodes(self._network, tensor, self._joins, self._program.blocks > 1)

    def add(self, tensor: int, block: int, x_BCHW: torch.Tensor) -> None:
        """Add a block to the statistics of its tensor."""
        for k in self.nodes(tensor):
            layer = self._network.layers[k]
            if isinstance(layer, SpatialNorm):
                self.parts.setdefault(k, []).append(measure(x_BCHW, sharing_of(layer.module, x_BCHW)))
                continue
            self.turn(block, self.forward, adds=True)
            with torch.no_grad(), self._cast(), self.still([k], True):
                layer.on_block(self._place(k, block), self._network.ranks[k], x_BCHW)

    def turn(self, block: int, sums: Sums, adds: bool = False) -> None:
        """Set the block whose layers add to the image's sums, or get them."""
        turn = self._network.turn
        turn.block, turn.sums, turn.adds = block, sums, adds

    def compute(self, k: int, place: BlockPlace, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run node `k` with the statistics of the image."""
        layer = self._network.layers[k]
        if k in self.measured:
            assert isinstance(layer, SpatialNorm), "others take their sums themselves"
            return layer.of(self.measured[k], inputs[0], self._network.ranks[k])
        return layer.on_block(place, self._network.ranks[k], *inputs)

    def with_gradient(
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
                    leaf_BCHW = x_BCHW.detach().requires_grad_()
                    self.turn(block, self.forward)
                    with torch.enable_grad(), self._cast(), self.still([k], True):
                        made_BCHW = layer.on_block(self._place(k, block), self._network.ranks[k], leaf_BCHW)
                    self.turn(block, self.backward)
                    (more,) = torch.autograd.grad(made_BCHW, leaf_BCHW, torch.zeros_like(made_BCHW))
                gradient = more if gradient is None else gradient.add_(more)
        return gradient

    def _place(self, k: int, block: int) -> BlockPlace:
        """Return the place of a block without halo."""
        source, dims = self._network.graph.sources[k][0], []
        at = divmod(block, self._program.cols[0].parts)
        for cuts, index in zip((self._program.rows, self._program.cols), at, strict=True):
            read, given = cuts[source].owned(index), cuts[k + 1].owned(index)
            sizes = cuts[source].size, cuts[k + 1].size
            dims.append(DimPlace(read, given, read, sizes, cuts[source].parts == 1))
        return BlockPlace(*dims)

    def still(self, nodes: Sequence[int], measuring: bool = False) -> AbstractContextManager[None]:
        """Do not update running statistics of nodes that have updated them already; the others update now."""
        tracking = [k for k in nodes if k in self._network.tracking]
        still = [k for k in tracking if measuring or k in self._tracked]
        if not measuring:
            self._tracked.update(tracking)
        return still_statistics(self._network.modules[k] for k in still)


class StatisticSums:
    """The sums of statistics over blocks and ranks: for one image over the ranks that share it (`ranks`), for training
    batch norms over all images and all ranks of `together`. Collective over these; a rank may have no image."""

    def __init__(
        self,
        network: BlockNetwork,
        images: Sequence[ImageStatistics],
        ranks: Communicator,
        together: Together | None,
        joins: bool,
    ) -> None:
        self._network, self._images, self._ranks, self._joins = network, images, ranks, joins
        self._together = together or Together(ranks, torch.device("cpu"))
        self._measured: dict[int, Statistics] = {}  # of batch norms

    def _batch_norms(self, tensor: int) -> Iterator[tuple[int, SpatialBatchNorm]]:
        for k in measuring_nodes(self._network, tensor, self._joins, False):
            layer = self._network.layers[k]
            assert isinstance(layer, SpatialBatchNorm), "a batch norm"
            yield k, layer

    def complete(self, tensor: int) -> None:
        """Complete a tensor's statistics once all its blocks have been added."""
        for image in self._images:
            for k in image.nodes(tensor):
                layer = self._network.layers[k]
                if not isinstance(layer, SpatialNorm):
                    summed(image.forward[k], self._ranks)
                elif not isinstance(layer, SpatialBatchNorm):
                    image.measured[k] = joined_over(image.parts.pop(k), self._ranks)
        for k, norm in self._batch_norms(tensor):
            parts = [part for image in self._images for part in image.parts.pop(k)]
            self._measured[k] = joined_over(
                parts, self._together.ranks, norm.module.num_features, self._together.device
            )
            track(norm.module, self._measured[k])
            for image in self._images:
                image.measured[k] = self._measured[k]

    def complete_gradients(self, tensor: int) -> None:
        """Complete the gradients of a tensor's statistics once all blocks of the reading segments are
        differentiated."""
        for image in self._images:
            for k in image.nodes(tensor):
                if not isinstance(self._network.layers[k], SpatialBatchNorm) and self._ranks.size > 1:
                    summed(image.backward[k], self._ranks)  # each rank of an image has a block, which adds to the sums
        for k, norm in self._batch_norms(tensor):
            total = self._measured[k].mean_G.new_zeros(2, norm.module.num_features)
            for image in self._images:
                if k in image.backward:  # else no block of it is in the loss
                    total += image.backward[k]
            summed(total, self._together.ranks)
            for image in self._images:
                image.backward[k] = total


def measuring_nodes(network: BlockNetwork, tensor: int, batch_norms: bool, others: bool) -> Iterator[int]:
    """Yield the nodes that take statistics of a tensor in this pass: training `batch_norms`, and `others`."""
    for k in network.graph.readers[tensor]:
        if k < len(network.graph) and network.graph.sources[k][0] == tensor:
            layer = network.layers[k]
            measures = layer.measures if isinstance(layer, SpatialNorm) else network.graph.layers[k].statistics
            if measures and (batch_norms if isinstance(layer, SpatialBatchNorm) else others):
                yield k
