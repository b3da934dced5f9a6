"""Statistics over all pixels of images that are computed in blocks: those of norms, means and maxima over an image.

They are summed as blocks are stored, and given to the segments that take them. The gradients of the statistics are
summed over all blocks of those segments too. They go to the gradient of what was measured when its own segment's turn
comes. Instance and group norms, means and maxima see one image (`ImageStatistics`), a batch norm that learns sees all
that go together (`StepNorms`).

Ranks that share an image add up their sums, once forward and once backward for each layer that takes some; so do all
ranks of a step for a batch norm. `block_pass` says why it cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from tiledseg.comm.collectives import Communicator
from tiledseg.models.layers.block import BlockPlace
from tiledseg.models.norm import track
from tiledseg.models.normalise import Statistics, joined, joined_over, over_ranks
from tiledseg.models.notes import still_statistics
from tiledseg.spatial.blocks.network import BlockNetwork, Doing, Sums
from tiledseg.spatial.blocks.program import BlockProgram
from tiledseg.spatial.norm import SpatialBatchNorm, SpatialNorm

Cast = Callable[[], AbstractContextManager[object]]


class Together(NamedTuple):
    """All images of a step go together: of all these ranks. `device`: that of a rank without an image."""

    ranks: Communicator
    device: torch.device


class ImageStatistics:
    """The statistics of one image on its way through a network; `ranks`: those that share the image. `joins`: batch
    norms see all images together (`StepNorms`)."""

    def __init__(
        self, network: BlockNetwork, program: BlockProgram, ranks: Communicator, cast: Cast, joins: bool
    ) -> None:
        self._network, self._program, self._ranks, self._cast = network, program, ranks, cast
        self.parts: dict[int, list[Statistics]] = {}  # of each block, until all are measured
        self.measured: dict[int, Statistics] = {}
        self.sums = Sums()
        self._tracked: set[int] = set()
        self._nodes = measuring_nodes(network, joins, program.blocks > 1)

    def measures(self, tensor: int) -> bool:
        """Return True if a node takes statistics of a tensor."""
        return tensor in self._nodes

    def add(self, tensor: int, block: int, x_BCHW: torch.Tensor) -> None:
        """Add a block to what nodes take of its tensor."""
        for k in self._nodes.get(tensor, ()):
            layer = self._network.layers[k]
            if isinstance(layer, SpatialNorm):
                self.parts.setdefault(k, []).append(layer.measured(x_BCHW))
                continue
            self._network.turn.block, self._network.turn.doing = block, Doing.MEASURE
            with torch.no_grad(), self._cast(), self.still([k], True):
                layer(self._place(k, block), x_BCHW)

    def complete(self, tensor: int) -> None:
        """Sum over ranks once all blocks have been added. Collective over the ranks of the image."""
        for k in self._nodes.get(tensor, ()):
            layer = self._network.layers[k]
            if not isinstance(layer, SpatialNorm):
                self._sum(self.sums.forward[k])
            elif not isinstance(layer, SpatialBatchNorm):
                self.measured[k] = over_ranks(joined(self.parts.pop(k)), self._ranks)

    def complete_gradients(self, tensor: int) -> None:
        """Sum over ranks once all blocks have been through the segments that take them. Collective as `complete`."""
        for k in self._nodes.get(tensor, ()):
            if not isinstance(self._network.layers[k], SpatialBatchNorm) and self._ranks.size > 1:
                self._sum(self.sums.backward[k])  # each rank of an image has a block, and each block adds to the sums

    def _sum(self, sums: torch.Tensor) -> None:
        if self._ranks.size > 1:
            self._ranks.all_reduce_sum(sums).wait()

    def compute(self, k: int, place: BlockPlace, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run node `k` by the statistics of the image."""
        layer = self._network.layers[k]
        if k in self.measured:
            assert isinstance(layer, SpatialNorm), "others take their sums themselves"
            return layer.of(self.measured[k], inputs[0], self._network.ranks[k])
        return layer(place, *inputs)

    def with_gradient(
        self, tensor: int, block: int, x_BCHW: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return a block's gradient, with what goes to it through the statistics that nodes take of its tensor."""
        for k in self._nodes.get(tensor, ()):
            if k in self.sums.backward:
                more = self._through(k, block, x_BCHW)
                gradient = more if gradient is None else gradient.add_(more)
        return gradient

    def _through(self, k: int, block: int, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return what goes to a block's gradient through the statistics of node k, by the sums of all blocks."""
        layer = self._network.layers[k]
        if isinstance(layer, SpatialNorm):
            return layer.moment_gradient(self.measured[k], self.sums.backward[k], x_BCHW)
        self._network.turn.block, self._network.turn.doing = block, Doing.COMPUTE
        x_BCHW = x_BCHW.detach().requires_grad_()
        with torch.enable_grad(), self._cast(), self.still([k], True):
            made_BCHW = layer(self._place(k, block), x_BCHW)
        self._network.turn.doing = Doing.RETURN
        (gradient,) = torch.autograd.grad(made_BCHW, x_BCHW, torch.zeros_like(made_BCHW))
        return gradient

    def _place(self, k: int, block: int) -> BlockPlace:
        return self._program.measuring_place(self._network.graph.sources[k][0], k + 1, block)

    def still(self, nodes: Sequence[int], measuring: bool = False) -> AbstractContextManager[None]:
        """Hold the running statistics of nodes that have moved theirs; the others move now."""
        tracking = [k for k in nodes if k in self._network.tracking]
        still = [k for k in tracking if measuring or k in self._tracked]
        if not measuring:
            self._tracked.update(tracking)
        return still_statistics(self._network.modules[k] for k in still)


class StepNorms:
    """Batch norms that learn: their statistics are of all pixels of `images`, and of those of the other ranks."""

    def __init__(
        self, network: BlockNetwork, images: Sequence[ImageStatistics], together: Together, joins: bool
    ) -> None:
        self._network, self._images, self._together = network, images, together
        self._measured: dict[int, Statistics] = {}
        self._nodes = measuring_nodes(network, joins, False)

    def complete(self, tensor: int) -> None:
        """Join the statistics of all ranks once all blocks have been added. Collective; a rank may have no image."""
        for k in self._nodes.get(tensor, ()):
            layer = self._network.layers[k]
            assert isinstance(layer, SpatialBatchNorm), "a batch norm"
            parts = [part for image in self._images for part in image.parts.pop(k)]
            self._measured[k] = joined_over(parts, layer.module.num_features, *self._together)
            track(layer.module, self._measured[k])
            for image in self._images:
                image.measured[k] = self._measured[k]

    def complete_gradients(self, tensor: int) -> None:
        """Sum over ranks once all blocks have been through the segments that take them. Collective as `complete`."""
        for k in self._nodes.get(tensor, ()):
            mean = self._measured[k].mean_G
            total = mean.new_zeros(2, len(mean))
            for image in self._images:
                if k in image.sums.backward:  # else no block of it is in the loss
                    total += image.sums.backward[k]
            if self._together.ranks.size > 1:
                self._together.ranks.all_reduce_sum(total).wait()
            for image in self._images:
                image.sums.backward[k] = total


def measuring_nodes(network: BlockNetwork, batch_norms: bool, others: bool) -> dict[int, list[int]]:
    """Return, by the tensor, the nodes that take statistics of it now: `batch_norms` that learn, and `others`."""
    nodes: dict[int, list[int]] = {}
    for k, layer in enumerate(network.layers):
        measures = layer.measures if isinstance(layer, SpatialNorm) else network.graph.layers[k].statistics
        if measures and (batch_norms if isinstance(layer, SpatialBatchNorm) else others):
            nodes.setdefault(network.graph.sources[k][0], []).append(k)
    return nodes
