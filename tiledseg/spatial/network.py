"""A network computed by the ranks of one image together: each its block of every tensor.

The law: outputs, gradients (summed over the ranks) and buffers are those of the network on the whole image, for every
mesh, partition and fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from tiledseg.comm.axes import Axes
from tiledseg.comm.collectives import Communicator
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box
from tiledseg.geometry.graph import KEEP
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import layer_windows, settle
from tiledseg.models.network import Compute, GraphNetwork, Tensors, run_nodes
from tiledseg.spatial.actions import Action, DimWindows, compile_actions
from tiledseg.spatial.convert import convert_layers
from tiledseg.spatial.halo_exchange import HaloExchanger
from tiledseg.spatial.norm import SpatialBatchNorm


class SpatialNetwork:
    """The converted twin of a network, whose weights, buffers and mode (train or eval) it shares.

    `fusion`: how many nodes that need a halo share one exchange (see `geometry.sharing.layer_windows`). `overlap`:
    convolutions compute their interior while their halo travels (see `overlap`). Raises ConfigError where a layer
    cannot be converted exactly.
    """

    def __init__(
        self, network: GraphNetwork | nn.Sequential, axes: Axes, fusion: int = 1, overlap: bool = False
    ) -> None:
        self.axes = axes
        self._network = network
        self.fusion = fusion
        self.overlap = overlap
        self._converted = convert_layers(network, lambda: axes.image)
        self._exchangers = [[HaloExchanger(axes) for _ in sources] for sources in self._converted.rows.sources]
        self._programs: dict[tuple[Partition, Partition], tuple[Action, ...]] = {}

    def settle(self, rows: Partition, cols: Partition) -> tuple[Partition, Partition]:
        """Return the partitions of the input with edges moved to where blocks fit all layers.

        See `layer_windows.settle`.
        """
        return settle(self._converted.rows, rows), settle(self._converted.cols, cols)

    def check(self, rows: Partition, cols: Partition) -> None:
        """Raise GeometryError where an input so cut cannot be computed. Communicates nothing; the same on all ranks."""
        self._windows(rows, cols)

    def output(self, rows: Partition, cols: Partition) -> Box:
        """Return this rank's block of the output of an input so cut, in positions of the whole output."""
        return self._program(rows, cols)[self._converted.rows.results[0] - 1].given

    def __call__(self, x_BCHW: torch.Tensor, rows: Partition, cols: Partition) -> torch.Tensor:
        """Return this rank's block of the output from its block of the input, which `rows` x `cols` cut.

        Collective over the ranks of the image. Raises GeometryError, on all of them and before any message, where the
        input cannot be so cut.
        """
        program = self._program(rows, cols)
        row, col = self._position()
        expected = rows.owned(row).size, cols.owned(col).size
        if tuple(x_BCHW.shape[2:]) != expected:
            raise GeometryError(
                f"the rank at ({row}, {col}) of the mesh gives {tuple(x_BCHW.shape[2:])} pixels, but its block of the "
                f"input is {expected}; cut the input by the same partitions"
            )
        tensors = {0: x_BCHW}
        self.run_nodes(tensors, rows, cols, 0, len(program))
        return tensors[self._converted.rows.results[0]]

    def run_nodes(self, tensors: Tensors, rows: Partition, cols: Partition, first: int, stop: int) -> None:
        """Run nodes `first` to `stop` (half-open) on this rank's blocks `tensors`, as `models.network.run_nodes`, for
        an input so cut. Collective over the ranks of the image."""
        program = self._program(rows, cols)

        def compute(k: int, inputs: list[torch.Tensor]) -> torch.Tensor:
            return program[k].run(self._converted.layers[k], inputs, self._exchangers[k], self.overlap)

        run_nodes(self._converted.rows, self._by_policy(compute), tensors, first, stop)
        for result in self._converted.rows.results if stop == len(program) else ():
            tensors[result] = program[result - 1].own(tensors[result])

    def _by_policy(self, compute: Compute) -> Compute:
        """Compute as the network's memory policy says.

        But a window that a convolution computes from while its halo travels is had only by computing all of it, so it
        is kept.
        """
        network = self._network
        if not isinstance(network, GraphNetwork):
            return compute
        policy = network.memory
        kept = replace(policy, inside=(KEEP,) * len(policy.inside)) if self.overlap else policy
        return network.by_policy(self._converted.rows, compute, kept)

    def norm_together(
        self,
        k: int,
        images: Sequence[tuple[Tensors, Partition, Partition]],
        ranks: Communicator,
        device: torch.device,
    ) -> None:
        """Run node `k`, a batch norm, on this rank's blocks of several images, as `run_nodes` for each of them; its
        statistics are those of all images of all `ranks`. Collective over these; a rank may have none."""
        graph, layer = self._converted.rows, self._converted.layers[k]
        blocks = []
        for tensors, rows, cols in images:
            action = self._program(rows, cols)[k]
            window = action.inputs[0].window(tensors[graph.sources[k][0]], self._exchangers[k][0], layer.fill)
            blocks.append((action.place, window))
        assert isinstance(layer, SpatialBatchNorm), "a batch norm"
        normed = layer.together(blocks, ranks, device)
        for (tensors, _, _), y_BCHW in zip(images, normed, strict=True):
            run_nodes(graph, lambda _, __, y_BCHW=y_BCHW: y_BCHW, tensors, k, k + 1)  # type: ignore[misc]

    def no_gradients(self, k: int, ranks: Communicator, device: torch.device) -> None:
        """Run the backward pass of `norm_together` on a rank that had no image."""
        layer = self._converted.layers[k]
        assert isinstance(layer, SpatialBatchNorm), "a batch norm"
        layer.no_gradients(ranks, device)

    def blocks(self, rows: Partition, cols: Partition) -> tuple[Box, ...]:
        """Return this rank's block of each tensor for an input so cut, in positions of the whole tensor."""
        row, col = self._position()
        own = Box(rows.owned(row), cols.owned(col))
        return own, *(action.given for action in self._program(rows, cols))

    def _windows(self, rows: Partition, cols: Partition) -> tuple[DimWindows, DimWindows]:
        shape = self.axes.shape
        if (rows.parts, cols.parts) != (shape.rows, shape.cols):
            raise GeometryError(
                f"the input is cut into {rows.parts} x {cols.parts} blocks, but the mesh is {shape}; give each rank one"
            )
        early = not self.overlap  # an exchange that a convolution's interior is to hide comes right before it
        return (
            layer_windows(self._converted.rows, rows, self.fusion, early),
            layer_windows(self._converted.cols, cols, self.fusion, early),
        )

    def _program(self, rows: Partition, cols: Partition) -> tuple[Action, ...]:
        if (rows, cols) not in self._programs:
            at = self._position()
            own = Box(rows.owned(at[0]), cols.owned(at[1]))
            windows, sources = self._windows(rows, cols), self._converted.rows.sources
            self._programs[rows, cols] = compile_actions(*windows, sources, at, {0: own}, range(len(sources)))
        return self._programs[rows, cols]

    def _position(self) -> tuple[int, int]:
        position = self.axes.position
        assert position is not None, "a rank outside the mesh has no block to compute"
        return position.row, position.col
