"""A flat network computed by the ranks of one image together: each its block of every tensor.

The law: outputs, gradients (summed over the ranks) and buffers are those of the network on the whole image, for every
mesh, partition and fusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn
from torch.nn import functional

from tiledseg.comm.axes import Axes
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box
from tiledseg.geometry.decomposition import Partition, WindowExchange
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer_windows import LayerWindows, layer_windows, settle
from tiledseg.models.unet import FlatNetwork
from tiledseg.spatial.conv import SpatialConvolution
from tiledseg.spatial.convert import SkipConcatenation, SkipMark, convert_layers
from tiledseg.spatial.halo_exchange import HaloExchanger
from tiledseg.spatial.place import DimPlace, Place, SpatialLayer


class SpatialNetwork:
    """The converted twin of a flat network, whose weights, buffers and mode (train or eval) it shares.

    `fusion`: how many layers that need a halo share one exchange (see `geometry.layer_windows`). `overlap`:
    convolutions compute their interior while their halo travels (see `overlap`). Raises ConfigError where a layer
    cannot be converted exactly.
    """

    def __init__(
        self, network: FlatNetwork | nn.Sequential, axes: Axes, fusion: int = 1, overlap: bool = False
    ) -> None:
        self.axes = axes
        self.fusion = fusion
        self.overlap = overlap
        self._converted = convert_layers(network, axes)
        self._exchangers = [HaloExchanger(axes) for _ in self._converted.layers]
        self._programs: dict[tuple[Partition, Partition], tuple[_Action, ...]] = {}

    def settle(self, rows: Partition, cols: Partition) -> tuple[Partition, Partition]:
        """The partitions of the input with edges moved to where blocks fit all layers; see `layer_windows.settle`."""
        return settle(self._converted.rows, rows), settle(self._converted.cols, cols)

    def check(self, rows: Partition, cols: Partition) -> None:
        """Raise GeometryError where an input so cut cannot be computed. Communicates nothing; the same on all ranks."""
        self._windows(rows, cols)

    def output(self, rows: Partition, cols: Partition) -> Box:
        """This rank's block of the output of an input so cut, in positions of the whole output."""
        return self._program(rows, cols)[-1].given

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
        return self.run_layers(x_BCHW, rows, cols, {}, 0, len(program))

    def run_layers(
        self,
        x_BCHW: torch.Tensor,
        rows: Partition,
        cols: Partition,
        skips: dict[str, torch.Tensor],
        first: int,
        stop: int,
    ) -> torch.Tensor:
        """This rank's block behind layer `stop` - 1 from its block before layer `first`, for an input so cut.

        `skips` holds this rank's blocks of what earlier layers have stashed for these; it is given what these stash,
        and loses what nobody pops any more. Collective over the ranks of the image.
        """
        layers = zip(self._program(rows, cols), self._converted.layers, self._exchangers, strict=True)
        for action, layer, exchanger in islice(layers, first, stop):
            if isinstance(layer, SkipConcatenation):
                x_BCHW = action.join(x_BCHW, skips, layer, exchanger)
            elif self.overlap and isinstance(layer, SpatialConvolution) and action.overlaps(layer):
                x_BCHW = _cut(x_BCHW, action.crop)
                x_BCHW = layer.overlapped(x_BCHW, action.place, exchanger, action.rows, action.cols)
            else:
                x_BCHW = layer(action.bring(x_BCHW, exchanger, layer.fill), action.place)
            if isinstance(layer, SkipMark):
                skips[layer.skip] = x_BCHW
        return x_BCHW

    def blocks(self, rows: Partition, cols: Partition) -> tuple[Box, ...]:
        """This rank's block of each layer's output for an input so cut, in positions of the whole output."""
        return tuple(action.given for action in self._program(rows, cols))

    def _windows(self, rows: Partition, cols: Partition) -> tuple[tuple[LayerWindows, ...], tuple[LayerWindows, ...]]:
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
            self._programs[rows, cols] = _compile(self._converted.layers, *windows, self._position())
        return self._programs[rows, cols]

    def _position(self) -> tuple[int, int]:
        position = self.axes.position
        assert position is not None, "a rank outside the mesh has no block to compute"
        return position.row, position.col


@dataclass(frozen=True)
class _Action:
    """What one rank does at one layer for an input of one size: all that can be known before it runs.

    `crop`: what of the tensor at hand goes on (None: all); `rows`, `cols`: the exchanges behind it; `pads`: what is
    still missing beyond the image's ends, as `functional.pad` takes it. For a layer that pops a skip, `skip_crop` is
    cut from the skip and the exchanges are the skip's. `given`: the output.
    """

    place: Place
    crop: Box | None
    rows: WindowExchange | None
    cols: WindowExchange | None
    pads: tuple[int, int, int, int] | None
    given: Box
    skip_crop: Box | None = None
    last_pop: bool = False

    def overlaps(self, layer: SpatialConvolution) -> bool:
        """Whether there is a halo to wait for, and nothing else to be done before the layer."""
        waits = any(exchange is not None and not exchange.is_identity for exchange in (self.rows, self.cols))
        return waits and self.pads is None and layer.can_overlap(self.place)

    def bring(self, x_BCHW: torch.Tensor, exchanger: HaloExchanger, fill: float) -> torch.Tensor:
        """The window that the layer reads."""
        x_BCHW = exchanger.exchange(_cut(x_BCHW, self.crop), self.rows, self.cols, fill)
        return x_BCHW if self.pads is None else functional.pad(x_BCHW, self.pads, value=fill)

    def join(
        self, x_BCHW: torch.Tensor, skips: dict[str, torch.Tensor], layer: SkipConcatenation, exchanger: HaloExchanger
    ) -> torch.Tensor:
        """The skip's window before the tensor's; the skip is let go behind its last pop."""
        skip_BCHW = skips.pop(layer.skip) if self.last_pop else skips[layer.skip]
        skip_BCHW = exchanger.exchange(_cut(skip_BCHW, self.skip_crop), self.rows, self.cols)
        return layer.join(_cut(x_BCHW, self.crop), skip_BCHW)


def _cut(x_BCHW: torch.Tensor, part: Box | None) -> torch.Tensor:
    return x_BCHW if part is None else x_BCHW[(slice(None), slice(None), *part.slices)]


def _compile(
    layers: tuple[SpatialLayer, ...],
    rows: tuple[LayerWindows, ...],
    cols: tuple[LayerWindows, ...],
    at: tuple[int, int],
) -> tuple[_Action, ...]:
    """The actions of the rank at (row, col) of the mesh."""
    extent = Box(rows[0].input.owned(at[0]), cols[0].input.owned(at[1]))
    stashed: dict[str, Box] = {}
    last = {layer.skip: layer for layer in layers if isinstance(layer, SkipConcatenation)}
    actions = []
    for layer, row, col in zip(layers, rows, cols, strict=True):
        if isinstance(layer, SkipConcatenation):
            action = _join_action(row, col, at, extent, stashed[layer.skip], last[layer.skip] is layer)
        else:
            action = _layer_action(row, col, at, extent)
        extent = action.given
        if isinstance(layer, SkipMark):
            stashed[layer.skip] = extent
        actions.append(action)
    return tuple(actions)


def _layer_action(row: LayerWindows, col: LayerWindows, at: tuple[int, int], extent: Box) -> _Action:
    place = Place(_dim_place(row, at[0]), _dim_place(col, at[1]))
    exchanges = row.exchange(at[0]), col.exchange(at[1])
    dims = list(zip(exchanges, (place.row, place.col), (extent.row, extent.col), strict=True))
    source = Box(*(_source(exchange, p, held) for exchange, p, held in dims))
    missing = [(0, 0) if exchange is not None else _missing(p, held) for exchange, p, held in dims]
    pads = (*missing[1], *missing[0])
    given = Box(place.row.given, place.col.given)
    return _Action(place, _crop(extent, source), *exchanges, pads if any(pads) else None, given)


def _join_action(
    row: LayerWindows, col: LayerWindows, at: tuple[int, int], extent: Box, skip: Box, last_pop: bool
) -> _Action:
    place = Place(_dim_place(row, at[0]), _dim_place(col, at[1]))
    given = Box(place.row.given, place.col.given)
    exchanges = row.exchange(at[0]), col.exchange(at[1])
    wanted = [
        exchange.owned if exchange is not None else windows.skip[index]
        for exchange, windows, index in zip(exchanges, (row, col), at, strict=True)
    ]
    return _Action(place, _crop(extent, given), *exchanges, None, given, _crop(skip, Box(*wanted)), last_pop)


def _dim_place(windows: LayerWindows, index: int) -> DimPlace:
    """An axis of one rank cuts nothing: the layer sees the whole dim and pads it itself."""
    source, whole = windows.input, windows.input.parts == 1
    read = source.whole if whole else windows.read[index]
    given = windows.output.whole if whole else windows.given[index]
    return DimPlace(read, given, source.owned(index), (source.size, windows.output.size), whole)


def _source(exchange: WindowExchange | None, place: DimPlace, held: Interval) -> Interval:
    """What goes into the exchange, or, without one, what is there of the window."""
    return exchange.owned if exchange is not None else place.read.clip(held)


def _missing(place: DimPlace, held: Interval) -> tuple[int, int]:
    """What is still to be padded of the window, before and behind what is there: beyond the tensor's ends only."""
    inside = place.read.clip(Interval(0, place.sizes[0]))
    assert held.contains(inside), f"a rank holds {held} but is to read {inside}: the plan is broken"
    return place.read.outside(held)


def _crop(extent: Box, part: Box) -> Box | None:
    """Where `part` lies in a tensor that covers `extent`; None where it is all of it."""
    if part == extent:
        return None
    assert extent.contains(part), f"a rank holds {extent} but is to give {part}: the plan is broken"
    return part.relative_to(extent)
