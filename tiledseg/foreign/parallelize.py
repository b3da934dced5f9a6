"""`parallelize`: a module that computes one image on several ranks."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import nn

from tiledseg.comm.failure import mark_agreed
from tiledseg.config.checks import MOST, Range, checked
from tiledseg.errors import GeometryError
from tiledseg.foreign.spread import SpreadModule, check_images, trace
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
    """Return a `ParallelModule` with the weights of `module`: R x C ranks compute an image. Collective.

    `mesh`: R rows and C columns of ranks; a job may have any multiple of R x C. `bands`: of the input (None: those of
    the first convolution). `fusion`: number of layers that share an exchange of halos. `seed`: of dropout. `verify`:
    the first call in either mode compares the traced network with the module, on each rank's block as an image of its
    own (docs/explanation/exactness.md).

    Raises ConfigError that lists every operation of the module that cannot be exact, before any communication.
    """
    Range(1, MOST).check("fusion", fusion)
    return ParallelModule(trace(module, bands), mesh, fusion, seed, verify)


class ParallelModule(SpreadModule):
    """A module whose ranks compute an image together: each rank computes its block of every layer.

    The law: outputs, gradients (summed over the ranks) and buffers equal those of the module on the whole image, or on
    the stacked images of all replicas. Dropout depends on `seed`, the call and the image, not on the ranks.
    """

    def __init__(
        self, network: GraphNetwork, mesh: tuple[int, int], fusion: int = 1, seed: int = 0, verify: bool = True
    ) -> None:
        super().__init__(network, *mesh, stages=1, seed=seed)
        self._verifies = verify and network.recorded is not None
        self._unverified = {True, False} if self._verifies else set()  # modes of training
        self._spatial = SpatialNetwork(self.network, self.axes, fusion)
        self._last_cut: tuple[int, int] | None = None  # (height, width) of the last call of `block`

    def block(self, height: int, width: int) -> Box:
        """Return this rank's block of an image of `height` x `width` pixels: blocks are about equal, and cut where all
        layers can be cut. `box.slices` cuts the block out of an array.

        Raises GeometryError if the image has fewer pixels than ranks.
        """
        self._last_cut = height, width
        return self._spatial.blocks(*self._even(height, width))[0]

    def output_block(self, height: int, width: int) -> Box:
        """Return the box of the whole output that this rank computes from its `block` of an image."""
        return self._spatial.output(*self._even(height, width))

    def forward(self, x_BCHW: torch.Tensor) -> Any:
        """Return this rank's block of the module's output, from its block of the image. Collective over the ranks of an
        image, and so is the backward pass, which leaves each rank its share of the gradients (`reduce_gradients`).

        Blocks may be cut anywhere if those of a row of ranks are equally high, and those of a column equally wide.
        Raises GeometryError, on all ranks, if they do not fit the mesh or the layers, or if each is as large as the
        image of the last call of `block`.

        A batch norm in training measures the images of all replicas together, so every rank must call forward and
        backward. No deadlock: norms communicate in the order of the graph, backward in the opposite order.
        """
        self.network.check_origin()
        rows, cols = self._partitions(x_BCHW)
        whole = len(x_BCHW), (rows.size, cols.size)
        if self.training in self._unverified:
            self.verify(self.network, x_BCHW, whole, self.axes.image)
            self._unverified.remove(self.training)
        elif self._verifies:
            self.network.recorded.check(self.network, [whole])  # same result on all ranks
        set_dropout_key(self.network, *self.dropout_keys(len(x_BCHW)))
        graph, tensors, first = self.network.graph, {0: x_BCHW}, 0
        pairs = enumerate(zip(graph.layers, self.network.layers.values(), strict=True))
        norms = [k for k, (layer, module) in pairs if layer.statistics == "batch" and module.training]
        for stop in (*(norms if self.replicas > 1 else ()), len(graph)):
            self._spatial.run_nodes(tensors, rows, cols, first, stop)
            if stop < len(graph):
                parts = [(tensors, rows, cols)]
                self._spatial.norm_together(stop, parts, self.axes.weights, self.mesh.device)
            first = stop + 1
        return self.network.returned(tuple(tensors[tensor] for tensor in graph.results))

    def _even(self, height: int, width: int) -> tuple[Partition, Partition]:
        shape = self.axes.shape
        return self._spatial.settle(Partition.even(height, shape.rows), Partition.even(width, shape.cols))

    def _partitions(self, x_BCHW: torch.Tensor) -> tuple[Partition, Partition]:
        """Return the cuts of the image along rows and columns, from the sizes of all ranks' blocks. One gather."""
        shape = self.axes.shape
        cuts, shapes = zip(*self.axes.image.gather_objects((self._last_cut, tuple(x_BCHW.shape))), strict=True)
        for of_rank in shapes:
            check_images(of_rank, self.network.bands)
        if len(shapes) > 1 and all(of_rank[2:] == whole for of_rank, whole in zip(shapes, cuts, strict=True)):
            what = f"each rank has the whole {cuts[0][0]} x {cuts[0][1]} pixels that .block{cuts[0]} cuts"
            raise mark_agreed(GeometryError(f"{what}; give it x[:, :, rows, cols], of rows, cols = its .slices"))
        images, bands = shapes[0][:2]
        heights = [shapes[row * shape.cols][2] for row in range(shape.rows)]
        widths = [of_rank[3] for of_rank in shapes[: shape.cols]]
        if list(shapes) != [(images, bands, height, width) for height in heights for width in widths]:
            what = f"the blocks of {shape.rows} x {shape.cols} ranks have the shapes {shapes}, which make no image"
            raise mark_agreed(GeometryError(f"{what}; give each rank its .block(height, width) of as many images"))
        return Partition((0, *accumulate(heights))), Partition((0, *accumulate(widths)))
