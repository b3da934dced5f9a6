"""What layers take of all pixels of an image that is computed in blocks: norms, means, maxima over it.

Statistics are summed as blocks are stored, and given to the segments that take them. How they change the loss is summed
over all blocks of those segments too, and goes to the gradient of what was measured when its own segment's turn comes.

Ranks that share the image add up what each has of its blocks, once forward and once backward for each layer that takes
some. It cannot deadlock: all of them do so in the order of the segments, and of the layers of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from tiledseg.comm.transports.collectives import Communicator
from tiledseg.models.layers.block import Place
from tiledseg.models.normalise import Statistics, joined, over_ranks
from tiledseg.models.rerun.still import still_statistics
from tiledseg.spatial.blocks.network import BlockNetwork
from tiledseg.spatial.blocks.program import BlockProgram
from tiledseg.spatial.blocks.sums import Doing
from tiledseg.spatial.norm import SpatialNorm

Cast = Callable[[], AbstractContextManager[object]]


class ImageStatistics:
    """Those of one image on its way through a network; `ranks`: those that share the image."""

    def __init__(self, network: BlockNetwork, program: BlockProgram, ranks: Communicator, cast: Cast) -> None:
        self._network, self._program, self._ranks, self._cast = network, program, ranks, cast
        self._parts: dict[int, list[Statistics]] = {}  # of each block, as long as not all are known
        self._found: dict[int, Statistics] = {}
        self._tracked: set[int] = set()
        self._nodes = self._measuring_nodes()
        network.turn.blocks = program.blocks
        for each in network.ranks:
            each.clear()

    def _measuring_nodes(self) -> dict[int, list[int]]:
        """By the tensor, the nodes that take statistics of it, over several blocks."""
        found: dict[int, list[int]] = {}
        if self._program.blocks == 1:
            return found
        for k, layer in enumerate(self._network.layers):
            statistics = self._network.graph.layers[k].statistics
            if layer.measures if isinstance(layer, SpatialNorm) else statistics:
                found.setdefault(self._network.graph.sources[k][0], []).append(k)
        return found

    def wanted(self, tensor: int) -> bool:
        """Whether some node takes statistics of it."""
        return tensor in self._nodes

    def add(self, tensor: int, block: int, x_BCHW: torch.Tensor) -> None:
        """Adds a block to what nodes take of its tensor."""
        for k in self._nodes.get(tensor, ()):
            layer = self._network.layers[k]
            if isinstance(layer, SpatialNorm):
                self._parts.setdefault(k, []).append(layer.measured(x_BCHW))
                continue
            self._network.turn.block, self._network.turn.doing = block, Doing.MEASURE
            with torch.no_grad(), self._cast(), self.still([k], True):
                layer(self._place(k, block), x_BCHW)

    def complete(self, tensor: int) -> None:
        """All blocks of this rank have been added. Collective over the ranks of the image."""
        for k in self._nodes.get(tensor, ()):
            layer = self._network.layers[k]
            if isinstance(layer, SpatialNorm):
                self._found[k] = over_ranks(joined(self._parts.pop(k)), self._ranks)
                layer.track(self._found[k])
            else:
                self._sum(self._network.ranks[k].forward)

    def complete_gradients(self, tensor: int) -> None:
        """All blocks of this rank have been through the segments that take them. Collective as `complete`."""
        for k in self._nodes.get(tensor, ()):
            self._sum(self._network.ranks[k].backward)

    def _sum(self, sums: torch.Tensor | None) -> None:
        if self._ranks.size > 1:
            assert sums is not None, "each rank of an image has a block, and each block adds to the sums"
            self._ranks.all_reduce_sum(sums).wait()

    def compute(self, k: int, place: Place, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Node `k`, by what has been found."""
        layer = self._network.layers[k]
        if k in self._found:
            assert isinstance(layer, SpatialNorm), "others take their sums themselves"
            return layer.of(self._found[k], inputs[0], self._network.ranks[k])
        return layer(place, *inputs)

    def with_gradient(
        self, tensor: int, block: int, x_BCHW: torch.Tensor, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """A block's gradient, and what goes to it through the statistics that nodes take of its tensor."""
        for k in self._nodes.get(tensor, ()):
            more = self._through(k, block, x_BCHW)
            if more is not None:
                gradient = more if gradient is None else gradient.add_(more)
        return gradient

    def _through(self, k: int, block: int, x_BCHW: torch.Tensor) -> torch.Tensor | None:
        """What goes to a block's gradient through the statistics that node k takes, by the sums of all blocks."""
        layer, sums = self._network.layers[k], self._network.ranks[k].backward
        if sums is None:
            return None
        if isinstance(layer, SpatialNorm):
            return layer.moment_gradient(self._found[k], sums, x_BCHW)
        self._network.turn.block, self._network.turn.doing = block, Doing.COMPUTE
        x_BCHW = x_BCHW.detach().requires_grad_()
        with torch.enable_grad(), self._cast(), self.still([k], True):
            made_BCHW = layer(self._place(k, block), x_BCHW)
        self._network.turn.doing = Doing.RETURN
        (found,) = torch.autograd.grad(made_BCHW, x_BCHW, torch.zeros_like(made_BCHW))
        return found

    def _place(self, k: int, block: int) -> Place:
        return self._program.measuring_place(self._network.graph.sources[k][0], k + 1, block)

    def still(self, nodes: Sequence[int], measuring: bool = False) -> AbstractContextManager[None]:
        """Running statistics of nodes that have moved theirs stay; the others' are about to move."""
        tracking = [k for k in nodes if k in self._network.tracking]
        still = [k for k in tracking if measuring or k in self._tracked]
        if not measuring:
            self._tracked.update(tracking)
        return still_statistics(self._network.modules[k] for k in still)
