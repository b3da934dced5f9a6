"""Modules of ours that compute a rank's block of a tensor themselves: both stand in one place.

A torch module has a twin for that in `spatial/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.shapes import ContextPart, parts
from tiledseg.models.normalise import Slices


@dataclass(frozen=True)
class DimPlace:
    """One dim of one layer on one rank, in positions of the whole tensors.

    `read`: the first input at hand; where the layer pads, it includes what lies beyond the tensor's ends, filled in.
    `given`: the output wanted. `owned`: the rank's own input. `sizes`: those of the whole input and output. `whole`:
    the dim is not cut, `read` is all of it without padding, and the layer's own padding applies. `blocks`: what each
    rank along the dim owns of the first input.
    """

    read: Interval
    given: Interval
    owned: Interval
    sizes: tuple[int, int]
    whole: bool
    blocks: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class BlockPlace:
    """Rows and columns: what is computed of a layer on one rank."""

    row: DimPlace
    col: DimPlace

    @property
    def is_whole(self) -> bool:
        """True if this rank has the whole tensor: any layer is then its undivided self."""
        return self.row.whole and self.col.whole

    def own_padding(self, padding: tuple[int, int]) -> tuple[int, int]:
        """Return the layer's padding along dims that are not cut; along the others the layer reads it."""
        return padding[0] if self.row.whole else 0, padding[1] if self.col.whole else 0

    def owned(self, x_BCHW: torch.Tensor) -> Slices | None:
        """Return the place of the rank's own pixels in what it reads; None where that is all."""
        row, col = (at.owned.relative_to(at.read.start) for at in (self.row, self.col))
        if (row.size, col.size) == tuple(x_BCHW.shape[2:]):
            return None
        return slice(None), slice(None), row.slice, col.slice

    def crop_given(self, y_BCHW: torch.Tensor, factor: int | tuple[int, int] = 1) -> torch.Tensor:
        """Crop `given` from all that is made of what is read, `factor` times as large (rows, cols)."""
        factors = (factor, factor) if isinstance(factor, int) else factor
        return self.crop(y_BCHW, (self.row.read.start * factors[0], self.col.read.start * factors[1]))

    def crop(self, y_BCHW: torch.Tensor, start: tuple[int, int]) -> torch.Tensor:
        """Crop `given` from a larger output whose first position is `start` (row, col)."""
        row, col = self.row.given.relative_to(start[0]), self.col.given.relative_to(start[1])
        if (row.size, col.size) == tuple(y_BCHW.shape[2:]):
            return y_BCHW
        return cropped(y_BCHW, row.slice, col.slice)


def whole_place(x_BCHW: torch.Tensor, factors: tuple[int, int] = (1, 1)) -> BlockPlace:
    """Return the place of a layer that has the whole tensor, and makes `factors` times as many rows and columns."""
    sizes = zip(map(int, x_BCHW.shape[2:]), factors, strict=True)
    whole = [(Interval(0, size), size, size * factor) for size, factor in sizes]
    return BlockPlace(*(DimPlace(read, Interval(0, out), read, (size, out), True) for read, size, out in whole))


def part_of(x_BCHW: torch.Tensor, owned: Slices | None) -> torch.Tensor:
    """Return the owned part of a tensor; None: all of it."""
    return x_BCHW if owned is None else x_BCHW[owned]


def gradient_of_part(own_BCHW: torch.Tensor, owned: Slices | None, shape: torch.Size) -> torch.Tensor:
    """Return the gradient of a tensor of which only the owned part has one."""
    if owned is None:
        return own_BCHW
    whole_BCHW = own_BCHW.new_zeros(shape)
    whole_BCHW[owned] = own_BCHW
    return whole_BCHW


Places = Mapping[int, BlockPlace]  # by the node's number


def tile_places(graph: Graph, whole: Box, context: Box) -> Places:
    """Return for each node that asks for its place what it reads and gives on a tile of `context` of the image `whole`.

    Raises GeometryError as `geometry.shapes.parts`.
    """
    asking = [k for k, layer in enumerate(graph.layers) if layer.asks_place]
    if not asking:
        return {}
    rows = parts(graph, whole.row, context.row)
    cols = parts(graph.along_columns, whole.col, context.col)
    sources = [graph.sources[k][0] for k in asking]
    return {
        k: BlockPlace(_place(rows[source], rows[k + 1]), _place(cols[source], cols[k + 1]))
        for k, source in zip(asking, sources, strict=True)
    }


def _place(source: ContextPart, made: ContextPart) -> DimPlace:
    return DimPlace(source.at, made.at, source.at, (source.size, made.size), False)


class BlockModule(nn.Module):
    """A module that also computes a rank's part of its undivided self's output. `rows` and `cols` describe the layer
    along rows and along columns.

    `on_block(place, ranks, *inputs)` returns the outputs `place.given` from what is read of each input, `place.read` of
    the first; collective over `ranks`, those of the image, where its statistics are the image's. `on_tile(place,
    *inputs)` returns all outputs of a tile that lies at `place`, for a layer that asks for it, without communication.
    `fill` stands beyond the tensor's ends in what it reads.
    """

    fill = 0.0
    on_block: Callable[..., torch.Tensor]
    on_tile: Callable[..., torch.Tensor]

    def __init__(self, rows: Layer, cols: Layer | None = None) -> None:
        super().__init__()
        self.rows, self.cols = rows, cols or rows

    @classmethod
    def speaks_for_blocks(cls) -> bool:
        """Return True if `on_block` belongs to this class's own `forward`: subclasses may compute anything."""
        provider = next(base for base in cls.__mro__ if "forward" in vars(base) or "on_block" in vars(base))
        return {"forward", "on_block"} <= vars(provider).keys()


def cropped(x_BCHW: torch.Tensor, rows: slice, cols: slice) -> torch.Tensor:
    """Return a view of these rows and columns, or the tensor itself where that is all.

    Its gradient keeps the layout. torch gives the gradient of a slice in rows of channels, whatever lies in memory, and
    the layers before it go on so. A view by strides has one copy instead, into zeros that lie as the tensor does.
    """
    part_BCHW = x_BCHW[:, :, rows, cols]
    if part_BCHW.shape == x_BCHW.shape:
        return x_BCHW
    if not (torch.is_grad_enabled() and x_BCHW.requires_grad) or torch.compiler.is_compiling():
        return part_BCHW  # of an exported network too, whose format has no strides
    return x_BCHW.as_strided(part_BCHW.shape, part_BCHW.stride(), part_BCHW.storage_offset())
