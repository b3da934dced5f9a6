"""A network computed by the ranks of one image together: each its block of every tensor.

The law: outputs, gradients (summed over the ranks) and buffers are those of the network on the whole image, for every
mesh, partition and fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from tiledseg.comm.axes import Axes
from tiledseg.comm.collectives import Communicator
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box
from tiledseg.geometry.decomposition import Partition, WindowExchange
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer_windows import NodeWindows, layer_windows, settle
from tiledseg.models.block import DimPlace, Place
from tiledseg.models.network import GraphNetwork, Tensors, run_nodes
from tiledseg.spatial.convert import convert_layers
from tiledseg.spatial.halo_exchange import HaloExchanger
from tiledseg.spatial.place import SpatialLayer

DimWindows = tuple[NodeWindows, ...]


class SpatialNetwork:
    """The converted twin of a network, whose weights, buffers and mode (train or eval) it shares.

    `fusion`: how many nodes that need a halo share one exchange (see `geometry.layer_windows`). `overlap`:
    convolutions compute their interior while their halo travels (see `overlap`). Raises ConfigError where a layer
    cannot be converted exactly.
    """

    def __init__(
        self, network: GraphNetwork | nn.Sequential, axes: Axes, fusion: int = 1, overlap: bool = False
    ) -> None:
        self.axes = axes
        self.fusion = fusion
        self.overlap = overlap
        self._converted = convert_layers(network, axes)
        self._exchangers = [[HaloExchanger(axes) for _ in sources] for sources in self._converted.rows.sources]
        self._programs: dict[tuple[Partition, Partition], tuple[_Action, ...]] = {}

    def settle(self, rows: Partition, cols: Partition) -> tuple[Partition, Partition]:
        """The partitions of the input with edges moved to where blocks fit all layers; see `layer_windows.settle`."""
        return settle(self._converted.rows, rows), settle(self._converted.cols, cols)

    def check(self, rows: Partition, cols: Partition) -> None:
        """Raise GeometryError where an input so cut cannot be computed. Communicates nothing; the same on all ranks."""
        self._windows(rows, cols)

    def output(self, rows: Partition, cols: Partition) -> Box:
        """This rank's block of the output of an input so cut, in positions of the whole output."""
        return self._program(rows, cols)[self._converted.rows.results[0] - 1].given

    def __call__(self, x_BCHW: torch.Tensor, rows: Partition, cols: Partition) -> torch.Tensor:
        """This rank's block of the output from its block of the input, which `rows` x `cols` cut.

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
        """Nodes `first` to `stop` (half-open) on this rank's blocks `tensors`, as `models.network.run_nodes`, for an
        input so cut. Collective over the ranks of the image."""
        program = self._program(rows, cols)

        def compute(k: int, inputs: list[torch.Tensor]) -> torch.Tensor:
            return program[k].run(self._converted.layers[k], inputs, self._exchangers[k], self.overlap)

        run_nodes(self._converted.rows, compute, tensors, first, stop)
        for result in self._converted.rows.results if stop == len(program) else ():
            tensors[result] = program[result - 1].own(tensors[result])

    def norm_together(
        self,
        k: int,
        images: Sequence[tuple[Tensors, Partition, Partition]],
        ranks: Communicator,
        device: torch.device,
    ) -> None:
        """Node `k`, a batch norm, on this rank's blocks of several images, as `run_nodes` for each of them; its
        statistics are those of all images of all `ranks`. Collective over these; a rank may have none."""
        graph, layer = self._converted.rows, self._converted.layers[k]
        blocks = []
        for tensors, rows, cols in images:
            action = self._program(rows, cols)[k]
            window = action.inputs[0].window(tensors[graph.sources[k][0]], self._exchangers[k][0], layer.fill)
            blocks.append((action.place, window))
        normed = layer.together(blocks, ranks, device)
        for (tensors, _, _), y_BCHW in zip(images, normed, strict=True):
            run_nodes(graph, lambda _, __, y_BCHW=y_BCHW: y_BCHW, tensors, k, k + 1)  # type: ignore[misc]

    def no_gradients(self, k: int, ranks: Communicator, device: torch.device) -> None:
        """The backward pass of `norm_together` on a rank that had no image."""
        self._converted.layers[k].no_gradients(ranks, device)

    def blocks(self, rows: Partition, cols: Partition) -> tuple[Box, ...]:
        """This rank's block of each tensor for an input so cut, in positions of the whole tensor."""
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

    def _program(self, rows: Partition, cols: Partition) -> tuple[_Action, ...]:
        if (rows, cols) not in self._programs:
            windows = self._windows(rows, cols)
            self._programs[rows, cols] = _compile(*windows, self._converted.rows.sources, self._position())
        return self._programs[rows, cols]

    def _position(self) -> tuple[int, int]:
        position = self.axes.position
        assert position is not None, "a rank outside the mesh has no block to compute"
        return position.row, position.col


@dataclass(frozen=True)
class _Bring:
    """What one rank does with one input of a node for an image of one size: all that can be known before it runs.

    `crop`: what of the tensor at hand goes on (None: all); `rows`, `cols`: the exchanges after it; `pads`: what is
    still missing beyond the image's ends, as `functional.pad` takes it.
    """

    crop: Box | None
    rows: WindowExchange | None
    cols: WindowExchange | None
    pads: tuple[int, int, int, int] | None

    @property
    def waits(self) -> bool:
        """Whether there is a halo to wait for, and nothing else to be done before the node."""
        exchanges = (e for e in (self.rows, self.cols) if e is not None)
        return self.pads is None and any(not exchange.is_identity for exchange in exchanges)

    def cut(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """What of the tensor at hand goes on."""
        return x_BCHW if self.crop is None else x_BCHW[(slice(None), slice(None), *self.crop.slices)]

    def window(self, x_BCHW: torch.Tensor, exchanger: HaloExchanger, fill: float) -> torch.Tensor:
        """What the node reads."""
        x_BCHW = exchanger.exchange(self.cut(x_BCHW), self.rows, self.cols, fill)
        return x_BCHW if self.pads is None else functional.pad(x_BCHW, self.pads, value=fill)


@dataclass(frozen=True)
class _Action:
    """What one rank does at one node for an image of one size; `given`: the output, of which `owned` is the rank's
    own block: with fusion a tensor may be larger, for nodes after it."""

    place: Place
    inputs: tuple[_Bring, ...]
    given: Box
    owned: Box

    def own(self, y_BCHW: torch.Tensor) -> torch.Tensor:
        """The rank's own block of the output."""
        crop = _crop(self.given, self.owned)
        return y_BCHW if crop is None else y_BCHW[(slice(None), slice(None), *crop.slices)]

    def run(
        self, layer: SpatialLayer, inputs: list[torch.Tensor], exchangers: list[HaloExchanger], overlap: bool
    ) -> torch.Tensor:
        """The node's output from the tensors at hand. Collective over the ranks of the image."""
        if overlap and self.inputs[0].waits and layer.can_overlap(self.place):
            only = self.inputs[0]
            return layer.overlapped(only.cut(inputs[0]), self.place, exchangers[0], only.rows, only.cols)
        brought = zip(self.inputs, inputs, exchangers, strict=True)
        return layer(self.place, *(bring.window(x, exchanger, layer.fill) for bring, x, exchanger in brought))


def _compile(
    rows: DimWindows, cols: DimWindows, sources: Sequence[tuple[int, ...]], at: tuple[int, int]
) -> tuple[_Action, ...]:
    """The actions of the rank at (row, col) of the mesh."""
    first = rows[0].inputs[0].partition, cols[0].inputs[0].partition
    extents = [Box(first[0].owned(at[0]), first[1].owned(at[1]))]
    actions = []
    for row, col, tensors in zip(rows, cols, sources, strict=True):
        action = _action(row, col, at, [extents[tensor] for tensor in tensors])
        extents.append(action.given)
        actions.append(action)
    return tuple(actions)


def _action(row: NodeWindows, col: NodeWindows, at: tuple[int, int], extents: Sequence[Box]) -> _Action:
    inputs = tuple(_bring((row, col), index, at, (extent.row, extent.col)) for index, extent in enumerate(extents))
    place = Place(_dim_place(row, at[0]), _dim_place(col, at[1]))
    owned = Box(*(node.output.owned(rank) for node, rank in zip((row, col), at, strict=True)))
    return _Action(place, inputs, Box(place.row.given, place.col.given), owned)


def _bring(
    windows: tuple[NodeWindows, NodeWindows], index: int, at: tuple[int, int], held: tuple[Interval, Interval]
) -> _Bring:
    exchanges, sources, missing = [], [], []
    for node, rank, extent in zip(windows, at, held, strict=True):
        one = node.inputs[index]
        exchange, read = one.exchange(rank), _read(node, index, rank)
        inside = read.clip(one.partition.whole)
        assert exchange or extent.contains(inside), f"a rank holds {extent} but is to read {inside}: the plan is broken"
        exchanges.append(exchange)
        sources.append(read.clip(extent) if exchange is None else exchange.owned)
        missing.append(read.outside(extent) if exchange is None else (0, 0))
    pads = (*missing[1], *missing[0])
    return _Bring(_crop(Box(*held), Box(*sources)), exchanges[0], exchanges[1], pads if any(pads) else None)


def _read(node: NodeWindows, index: int, rank: int) -> Interval:
    """An axis of one rank cuts nothing: a node of one input sees the whole dim and pads it itself."""
    one = node.inputs[index]
    return one.partition.whole if one.partition.parts == 1 and len(node.inputs) == 1 else one.read[rank]


def _dim_place(node: NodeWindows, rank: int) -> DimPlace:
    source = node.inputs[0].partition
    sizes = source.size, node.output.size
    return DimPlace(_read(node, 0, rank), node.given[rank], source.owned(rank), sizes, source.parts == 1)


def _crop(extent: Box, part: Box) -> Box | None:
    """Where `part` lies in a tensor that covers `extent`; None where it is all of it."""
    if part == extent:
        return None
    assert extent.contains(part), f"a rank holds {extent} but is to give {part}: the plan is broken"
    return part.relative_to(extent)
