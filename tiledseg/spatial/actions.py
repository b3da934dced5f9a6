"""The actions of one rank, or one block, at each node for an image of one size, compiled before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.sharing.decomposition import BlockExchange, block_exchange
from tiledseg.geometry.sharing.layer_windows import NodeWindows
from tiledseg.models.layers.block import BlockPlace, DimPlace, cropped
from tiledseg.spatial.halo_exchange import HaloExchanger
from tiledseg.spatial.twins import SpatialConvolution, SpatialLayer

DimWindows = tuple[NodeWindows, ...]


@dataclass(frozen=True)
class Bring:
    """The way of one input of a node to the window that the node reads, on one rank for an image of one size.

    `crop`: what of the tensor at hand goes on (None: all); `exchange`: the one after it (None: there is nothing to do);
    `pads`: what is still missing beyond the image's ends, as `functional.pad` takes it.
    """

    crop: Box | None
    exchange: BlockExchange | None
    pads: tuple[int, int, int, int] | None

    def cut(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return what of the tensor at hand goes on."""
        return x_BCHW if self.crop is None else cropped(x_BCHW, *self.crop.slices)

    def window(self, x_BCHW: torch.Tensor, exchanger: HaloExchanger, fill: float, owned: bool = False) -> torch.Tensor:
        """Return what the node reads; `owned`: it makes the gradient of that itself."""
        owned = owned and self.pads is None
        return self.padded(exchanger.exchange(self.cut(x_BCHW), self.exchange, fill, owned), fill)

    def padded(self, x_BCHW: torch.Tensor, fill: float) -> torch.Tensor:
        """Add what is missing beyond the image's ends."""
        return x_BCHW if self.pads is None else functional.pad(x_BCHW, self.pads, value=fill)


@dataclass(frozen=True)
class Action:
    """The work of one rank at one node for an image of one size. `given`: the output, of which `owned` is the rank's
    own block. With fusion a tensor may be larger, for nodes after it."""

    place: BlockPlace
    inputs: tuple[Bring, ...]
    given: Box
    owned: Box

    def own(self, y_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the rank's own block of the output."""
        crop = _crop(self.given, self.owned)
        return y_BCHW if crop is None else cropped(y_BCHW, *crop.slices)

    def run(
        self, layer: SpatialLayer, inputs: list[torch.Tensor], exchangers: list[HaloExchanger], overlap: bool
    ) -> torch.Tensor:
        """Return the node's output from the tensors at hand. Collective over the ranks of the image."""
        only = self.inputs[0]
        exchange, overlaps = only.exchange, overlap and only.pads is None
        if overlaps and exchange and isinstance(layer, SpatialConvolution) and layer.can_overlap(self.place):
            return layer.overlapped(only.cut(inputs[0]), self.place, exchangers[0], exchange)
        brought, owned = zip(self.inputs, inputs, exchangers, strict=True), layer.descriptions[0].owns_gradient
        return layer(self.place, *(bring.window(x, exchanger, layer.fill, owned) for bring, x, exchanger in brought))


def compile_actions(
    rows: DimWindows,
    cols: DimWindows,
    sources: Sequence[tuple[int, ...]],
    at: tuple[int, int],
    held: Mapping[int, Box],
    nodes: Iterable[int],
) -> tuple[Action, ...]:
    """Return the actions at `nodes` of the rank at (row, col) of the mesh, which holds the boxes `held` of the tensors
    that they take from before them. `rows`, `cols`: the windows of these nodes."""
    extents = dict(held)
    actions = []
    for k, row, col in zip(nodes, rows, cols, strict=True):
        action = _action(row, col, at, [extents[tensor] for tensor in sources[k]])
        extents[k + 1] = action.given
        actions.append(action)
    return tuple(actions)


def _action(row: NodeWindows, col: NodeWindows, at: tuple[int, int], extents: Sequence[Box]) -> Action:
    inputs = tuple(_bring((row, col), index, at, (extent.row, extent.col)) for index, extent in enumerate(extents))
    place = BlockPlace(_dim_place(row, at[0]), _dim_place(col, at[1]))
    owned = Box(*(node.output.owned(rank) for node, rank in zip((row, col), at, strict=True)))
    return Action(place, inputs, Box(place.row.given, place.col.given), owned)


def _bring(
    windows: tuple[NodeWindows, NodeWindows], index: int, at: tuple[int, int], held: tuple[Interval, Interval]
) -> Bring:
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
    crop = _crop(Box(*held), Box(*sources))
    return Bring(crop, block_exchange(exchanges[0], exchanges[1], at), pads if any(pads) else None)


def _read(node: NodeWindows, index: int, rank: int) -> Interval:
    """Return the interval that a rank reads.

    An axis of one rank cuts nothing: a node of one input sees the whole dim and pads it itself.
    """
    one = node.inputs[index]
    return one.partition.whole if one.partition.parts == 1 and len(node.inputs) == 1 else one.read[rank]


def _dim_place(node: NodeWindows, rank: int) -> DimPlace:
    source = node.inputs[0].partition
    sizes = source.size, node.output.size
    return DimPlace(_read(node, 0, rank), node.given[rank], source.owned(rank), sizes, source.parts == 1)


def _crop(extent: Box, part: Box) -> Box | None:
    """Return where `part` lies in a tensor that covers `extent`; None where it is all of it."""
    if part == extent:
        return None
    assert extent.contains(part), f"a rank holds {extent} but is to give {part}: the plan is broken"
    return part.relative_to(extent)
