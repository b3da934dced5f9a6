"""A module that computes one image on several ranks: `parallelize`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import nn

from tiledseg.comm.failure import mark_agreed
from tiledseg.config.checks import MOST, Range, checked
from tiledseg.errors import GeometryError
from tiledseg.foreign.spread import SpreadModule, check_images, traced
from tiledseg.geometry.box import Box
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.models.dropout import set_dropout_key
from tiledseg.models.network import GraphNetwork
from tiledseg.spatial.network import SpatialNetwork


@checked
def parallelize(
    module: nn.Module,
    mesh: tuple[int, int],
    *,
    bands: int | None = None,
    fusion: int = 1,
    seed: int = 0,
    verify: bool = True,
) -> ParallelModule:
    """Return a module with the weights of `module`, computed by R x C ranks an image: a `ParallelModule`. Collective.

    `mesh`: R rows and C columns of ranks, of which a job may have any multiple. `bands`: of the input; None for those
    that the first convolution takes. `fusion`: layers that share an exchange of halos. `seed`: of dropout. `verify`:
    the first call in either mode compares what was traced with the module, on each rank's block as an image of its own
    (docs/explanation/exactness.md).

    Raises ConfigError that lists every place of the module that could not be exact, before any communication.
    """
    Range(1, MOST).check("fusion", fusion)
    return ParallelModule(traced(module, bands), mesh, fusion, seed, verify)


class ParallelModule(SpreadModule):
    """A module of which each rank of an image computes a block, every layer together with the others.

    The law: outputs, gradients (summed over the ranks) and buffers are those of the module on the whole image, or on
    those of all replicas, stacked. Dropout draws by `seed`, the call and the image, so that it does not depend on the
    ranks.
    """

    def __init__(
        self, network: GraphNetwork, mesh: tuple[int, int], fusion: int = 1, seed: int = 0, verify: bool = True
    ) -> None:
        super().__init__(network, *mesh, stages=1, seed=seed)
        self._verifies = verify and network.recorded is not None
        self._unverified = {True, False} if self._verifies else set()  # modes of training
        self._spatial = SpatialNetwork(self.network, self.axes, fusion)
        self._asked: tuple[int, int] | None = None  # height and width of the image that was last cut

    def block(self, height: int, width: int) -> Box:
        """Return the rows and columns of this rank of an image of so many pixels: about as many on every rank, cut
        where all layers can be. `box.slices` cuts them out of an array.

        Raises GeometryError where the image has fewer pixels than ranks.
        """
        self._asked = height, width
        return self._spatial.blocks(*self._even(height, width))[0]

    def output_block(self, height: int, width: int) -> Box:
        """Return the part of the whole output that this rank gives for its `block` of an image of so many pixels."""
        return self._spatial.output(*self._even(height, width))

    def forward(self, x_BCHW: torch.Tensor) -> Any:
        """Return what the module does, of this rank's block of each tensor, from its block of the image. Collective
        over the ranks of the image; so is the backward pass, after which each rank has its share of the gradients
        (`reduce_gradients`).

        Blocks may be cut anywhere, as long as those of a row of ranks are equally high, and those of a column equally
        wide. Raises GeometryError, on all ranks, where they do not fit the mesh or the layers, or where each is as
        large as the image of the last call of `block`.

        A batch norm in training measures the images of all replicas together: every rank then calls this, and the
        backward pass. Norms come in the order of the graph, backward in the opposite one: nothing can wait forever.
        """
        self.network.check_origin()
        rows, cols = self._partitions(x_BCHW)
        whole = len(x_BCHW), (rows.size, cols.size)
        if self.training in self._unverified:
            self.verify(self.network, x_BCHW, whole, self.axes.image)
            self._unverified.remove(self.training)
        elif self._verifies:
            self.network.recorded.check(self.network, [whole])  # alike on all ranks
        set_dropout_key(self.network, *self.dropout_keys(len(x_BCHW)))
        graph, tensors, first = self.network.graph, {0: x_BCHW}, 0
        pairs = enumerate(zip(graph.layers, self.network.layers.values(), strict=True))
        norms = [k for k, (layer, module) in pairs if layer.statistics == "batch" and module.training]
        for stop in (*(norms if self.replicas > 1 else ()), len(graph)):
            self._spatial.run_nodes(tensors, rows, cols, first, stop)
            if stop < len(graph):
                at_hand = [(tensors, rows, cols)]
                self._spatial.norm_together(stop, at_hand, self.axes.weights, self.mesh.device)
            first = stop + 1
        return self.network.returned(tuple(tensors[tensor] for tensor in graph.results))

    def _even(self, height: int, width: int) -> tuple[Partition, Partition]:
        shape = self.axes.shape
        return self._spatial.settle(Partition.even(height, shape.rows), Partition.even(width, shape.cols))

    def _partitions(self, x_BCHW: torch.Tensor) -> tuple[Partition, Partition]:
        """Return the places of all ranks' blocks, whose sizes one message carries."""
        shape = self.axes.shape
        asked, shapes = zip(*self.axes.image.gather_objects((self._asked, tuple(x_BCHW.shape))), strict=True)
        for given in shapes:
            check_images(given, self.network.bands)
        if len(shapes) > 1 and all(given[2:] == whole for given, whole in zip(shapes, asked, strict=True)):
            what = f"each rank has the whole {asked[0][0]} x {asked[0][1]} pixels that .block{asked[0]} cuts"
            raise mark_agreed(GeometryError(f"{what}; give it x[:, :, rows, cols], of rows, cols = its .slices"))
        images = [given[0] for given in shapes]
        if len(set(images)) > 1:
            raise mark_agreed(GeometryError(f"the blocks have {images} images; give all ranks as many"))
        sizes = [given[2:] for given in shapes]
        heights = [sizes[row * shape.cols][0] for row in range(shape.rows)]
        widths = [size[1] for size in sizes[: shape.cols]]
        if sizes != [(height, width) for height in heights for width in widths]:
            what = f"the blocks of {shape.rows} x {shape.cols} ranks are {sizes} pixels, which make no image"
            raise mark_agreed(GeometryError(f"{what}; give each rank its .block(height, width) of one"))
        return Partition((0, *accumulate(heights))), Partition((0, *accumulate(widths)))
