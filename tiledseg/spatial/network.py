"""A network computed by the ranks of one image together: each computes its block of every tensor.

The law: outputs, gradients (summed over the ranks) and buffers are those of the network on the whole image, for every
mesh, partition and fusion. The actions of a rank or a block at each node are compiled for one size of image before it
runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from tiledseg.comm.collectives import Communicator
from tiledseg.comm.mesh import Axes
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.graph import KEEP
from tiledseg.geometry.sharing.decomposition import BlockExchange, Partition, block_exchange
from tiledseg.geometry.sharing.layer_windows import NodeWindows, layer_windows, settle
from tiledseg.models.layers.block import BlockModule, BlockPlace, DimPlace, cropped
from tiledseg.models.network import GraphNetwork, Tensors, run_nodes
from tiledseg.models.normalise import Slices, normed
from tiledseg.spatial.halo_exchange import exchanged
from tiledseg.spatial.twins import SpatialConvolution, SpatialLayer, spatial_layers

DimWindows = tuple[NodeWindows, ...]


@dataclass(frozen=True)
class Bring:
    """The steps from an input of a node to the window that the node reads, on one rank for one size of image.

    `crop`: the part of the local tensor that is used (None: all); `exchange`: the exchange that follows (None: none);
    `pads`: the padding beyond the image's ends, for `functional.pad`.
    """

    crop: Box | None
    exchange: BlockExchange | None
    pads: tuple[int, int, int, int] | None

    def window(self, x_BCHW: torch.Tensor, fill: float, axes: Axes | None = None, owned: bool = False) -> torch.Tensor:
        """Return the window that the node reads. `owned`: see `exchanged`. Without `axes` there is no exchange."""
        x_BCHW = _cut(x_BCHW, self.crop)
        if axes is not None:
            x_BCHW = exchanged(x_BCHW, self.exchange, axes, fill, owned and self.pads is None)
        return x_BCHW if self.pads is None else functional.pad(x_BCHW, self.pads, value=fill)


@dataclass(frozen=True)
class Action:
    """The work of one rank at one node for one size of image. `given`: the computed output; `owned`: the rank's own
    block in it. With fusion the output may be larger than the block, for later nodes."""

    place: BlockPlace
    inputs: tuple[Bring, ...]
    given: Box
    owned: Box

    def run(
        self, layer: SpatialLayer | BlockModule, inputs: Sequence[torch.Tensor], axes: Axes, overlap: bool
    ) -> torch.Tensor:
        """Return the node's output from the local tensors. Collective over the ranks of the image."""
        only = self.inputs[0]
        exchange, overlaps = only.exchange, overlap and only.pads is None
        if overlaps and exchange and isinstance(layer, SpatialConvolution) and layer.can_overlap(self.place):
            return layer.overlapped(_cut(inputs[0], only.crop), self.place, axes, exchange)
        brought, owned = zip(self.inputs, inputs, strict=True), layer.rows.owns_gradient
        windows = (bring.window(x_BCHW, layer.fill, axes, owned) for bring, x_BCHW in brought)
        return layer.on_block(self.place, axes.image, *windows)


def compile_actions(
    rows: DimWindows,
    cols: DimWindows,
    sources: Sequence[tuple[int, ...]],
    at: tuple[int, int],
    held: Mapping[int, Box],
    nodes: Iterable[int],
) -> tuple[Action, ...]:
    """Return the actions at `nodes` of the rank at (row, col) of the mesh. `rows`, `cols`: the windows of these nodes.
    `held`: the rank's boxes of the tensors that come from earlier nodes."""
    extents = dict(held)
    actions = []
    for k, *dims in zip(nodes, rows, cols, strict=True):
        inputs = tuple(_bring(dims, index, at, extents[tensor]) for index, tensor in enumerate(sources[k]))
        places = []
        for node, rank in zip(dims, at, strict=True):
            source, sizes = node.inputs[0].partition, (node.inputs[0].partition.size, node.output.size)
            around = source.blocks[rank], sizes, source.parts == 1, source.blocks
            places.append(DimPlace(_read(node, 0, rank), node.given[rank], *around))
        place = BlockPlace(*places)
        owned = Box(*(node.output.blocks[rank] for node, rank in zip(dims, at, strict=True)))
        extents[k + 1] = Box(place.row.given, place.col.given)
        actions.append(Action(place, inputs, extents[k + 1], owned))
    return tuple(actions)


def _bring(windows: Sequence[NodeWindows], index: int, at: tuple[int, int], held: Box) -> Bring:
    exchanges, sources, missing = [], [], []
    for node, rank, extent in zip(windows, at, (held.row, held.col), strict=True):
        one, read = node.inputs[index], _read(node, index, rank)
        inside = read.clip(one.partition.whole)
        held_here = one.exchanged or extent.contains(inside)
        assert held_here, f"a rank holds {extent} but is to read {inside}: the plan is broken"
        exchanges.append((one.partition, one.read) if one.exchanged else None)
        sources.append(one.partition.blocks[rank] if one.exchanged else read.clip(extent))
        missing.append((0, 0) if one.exchanged else read.outside(extent))
    pads = (*missing[1], *missing[0])
    crop = _crop(held, Box(*sources))
    return Bring(crop, block_exchange(exchanges[0], exchanges[1], at), pads if any(pads) else None)


def _read(node: NodeWindows, index: int, rank: int) -> Interval:
    """Return the interval that a rank reads. Along an axis of one rank, a node of one input reads the whole dim and
    pads it itself."""
    one = node.inputs[index]
    return one.partition.whole if one.partition.parts == 1 and len(node.inputs) == 1 else one.read[rank]


def _cut(x_BCHW: torch.Tensor, crop: Box | None) -> torch.Tensor:
    return x_BCHW if crop is None else cropped(x_BCHW, *crop.slices)


def _crop(extent: Box, part: Box) -> Box | None:
    """Return the place of `part` in a tensor that covers `extent`; None if it is all of it."""
    if part == extent:
        return None
    assert extent.contains(part), f"a rank holds {extent} but is to give {part}: the plan is broken"
    return part.relative_to(extent)


class SpatialNetwork:
    """The twin of a network on the ranks of an image. It shares the network's weights, buffers and mode (train or
    eval).

    `fusion`: the number of nodes with a halo that share one exchange (see `geometry.sharing.layer_windows`). `overlap`:
    convolutions compute their interior while their halo travels (see `halo_exchange`). Raises ConfigError if a layer
    has no exact twin.
    """

    def __init__(self, network: GraphNetwork, axes: Axes, fusion: int = 1, overlap: bool = False) -> None:
        self.axes = axes
        self._network = network
        self.fusion = fusion
        self.overlap = overlap
        self._layers = spatial_layers(network)
        self._rows, self._cols = network.graph, network.graph.along_columns
        self._programs: dict[tuple[Partition, Partition], tuple[Action, ...]] = {}

    def settle(self, rows: Partition, cols: Partition) -> tuple[Partition, Partition]:
        """Return the partitions of the input with edges moved so that blocks fit all layers."""
        return settle(self._rows, rows), settle(self._cols, cols)

    def output(self, rows: Partition, cols: Partition) -> Box:
        """Return this rank's block of the output, for an input cut by `rows` x `cols`, in positions of the whole
        output. Raises GeometryError, on all ranks, if the cut does not fit. Does not communicate."""
        return self._program(rows, cols)[self._rows.results[0] - 1].given

    def __call__(self, x_BCHW: torch.Tensor, rows: Partition, cols: Partition) -> torch.Tensor:
        """Return this rank's block of the output from its block of an input cut by `rows` x `cols`. Collective over the
        ranks of the image."""
        tensors = {0: x_BCHW}
        self.run_nodes(tensors, rows, cols, 0, len(self._rows))
        return tensors[self._rows.results[0]]

    def run_nodes(self, tensors: Tensors, rows: Partition, cols: Partition, first: int, stop: int) -> None:
        """Run nodes `first` to `stop` (half-open) on this rank's blocks `tensors`, as `models.network.run_nodes` does.
        Collective over the ranks of the image."""
        program = self._program(rows, cols)

        def compute(k: int, inputs: list[torch.Tensor]) -> torch.Tensor:
            return program[k].run(self._layers[k], inputs, self.axes, self.overlap)

        policy = self._network.memory
        if self.overlap:  # an overlapped window cannot be rebuilt without its convolution: it is kept
            policy = replace(policy, inside=(KEEP,) * len(policy.inside))
        kept = self._network.by_policy(self._rows, compute, policy)
        run_nodes(self._rows, kept, tensors, first, stop)
        for result in self._rows.results if stop == len(program) else ():
            action = program[result - 1]
            tensors[result] = _cut(tensors[result], _crop(action.given, action.owned))

    def norm_together(
        self, k: int, images: Sequence[tuple[Tensors, Partition, Partition]], ranks: Communicator, device: torch.device
    ) -> None:
        """Run node `k`, a batch norm, on this rank's blocks of several images, with (running) statistics over all
        images of all `ranks`. Collective over these, also backward, where a rank without an image calls
        `no_gradients`."""
        graph, norm = self._rows, self._norm(k)
        tensors_BCHW, owned = list[torch.Tensor](), list[Slices | None]()
        for tensors, rows, cols in images:
            action = self._program(rows, cols)[k]
            tensors_BCHW.append(action.inputs[0].window(tensors[graph.sources[k][0]], 0.0, self.axes))
            owned.append(action.place.owned(tensors_BCHW[-1]))
        made = normed(norm, tensors_BCHW, owned, ranks, device=device)
        for (tensors, _, _), y_BCHW in zip(images, made, strict=True):
            run_nodes(graph, lambda _, __, y_BCHW=y_BCHW: y_BCHW, tensors, k, k + 1)  # type: ignore[misc]

    def no_gradients(self, k: int, ranks: Communicator, device: torch.device) -> None:
        """Take part in the backward pass of `norm_together` without an image. Collective over `ranks`."""
        features = self._norm(k).num_features
        ranks.all_reduce_sum(torch.zeros(2, features, dtype=torch.float64, device=device)).wait()

    def _norm(self, k: int) -> Any:
        return list(self._network.layers.values())[k]

    def blocks(self, rows: Partition, cols: Partition) -> tuple[Box, ...]:
        """Return this rank's block of each tensor, in positions of the whole tensor."""
        row, col = self._position()
        own = Box(rows.blocks[row], cols.blocks[col])
        return own, *(action.given for action in self._program(rows, cols))

    def _program(self, rows: Partition, cols: Partition) -> tuple[Action, ...]:
        if (rows, cols) not in self._programs:
            shape, sources = self.axes.shape, self._rows.sources
            assert (rows.parts, cols.parts) == (shape.rows, shape.cols), "each rank has a block"
            early = not self.overlap  # for overlap, an exchange stands right before its convolution
            windows = (
                layer_windows(self._rows, rows, self.fusion, early),
                layer_windows(self._cols, cols, self.fusion, early),
            )
            at = self._position()  # last: ranks outside the mesh refuse a wrong cut too
            own = Box(rows.blocks[at[0]], cols.blocks[at[1]])
            self._programs[rows, cols] = compile_actions(*windows, sources, at, {0: own}, range(len(sources)))
        return self._programs[rows, cols]

    def _position(self) -> tuple[int, int]:
        position = self.axes.position
        assert position is not None, "a rank outside the mesh has no block to compute"
        return position.row, position.col
