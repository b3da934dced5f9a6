"""Modules of our own that also compute a rank's block of a tensor. (A torch module has a twin for that in
`spatial/`.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

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

    `read`: the local first input, including filled positions beyond the tensor's ends if the layer pads. `given`: the
    output to compute. `owned`: the rank's own part of the input. `sizes`: of the whole input and output. `whole`: the
    dim is not cut, `read` is all of it, and the layer pads itself. `blocks`: the parts of the first input that the
    ranks along the dim own.
    """

    read: Interval
    given: Interval
    owned: Interval
    sizes: tuple[int, int]
    whole: bool
    blocks: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class BlockPlace:
    """The part of a layer that one rank computes, along rows and columns."""

    row: DimPlace
    col: DimPlace

    @property
    def is_whole(self) -> bool:
        """True if this rank has the whole tensor."""
        return self.row.whole and self.col.whole

    def own_padding(self, padding: tuple[int, int]) -> tuple[int, int]:
        """Return the layer's padding (row, col): 0 along dims that are cut, where `read` includes it."""
        return padding[0] if self.row.whole else 0, padding[1] if self.col.whole else 0

    def owned(self, x_BCHW: torch.Tensor) -> Slices | None:
        """Return the slices of the rank's own pixels in its local input; None if they are all of it."""
        row, col = (at.owned.relative_to(at.read.start) for at in (self.row, self.col))
        if (row.size, col.size) == tuple(x_BCHW.shape[2:]):
            return None
        return slice(None), slice(None), row.slice, col.slice

    def own_part(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the rank's own pixels of its local input."""
        owned = self.owned(x_BCHW)
        return x_BCHW if owned is None else x_BCHW[owned]

    def crop_given(self, y_BCHW: torch.Tensor, rows: Layer, cols: Layer) -> torch.Tensor:
        """Crop `given` from all outputs of `read`, each of which gives a window of outputs (`LayerWindow`)."""
        dims = (self.row, rows.window), (self.col, cols.window)
        row, col = (0 if at.whole else at.read.start * window.stride - window.padding for at, window in dims)
        return self.crop(y_BCHW, (row, col))

    def crop(self, y_BCHW: torch.Tensor, start: tuple[int, int]) -> torch.Tensor:
        """Crop `given` from a larger output whose first position is `start` (row, col)."""
        row, col = self.row.given.relative_to(start[0]), self.col.given.relative_to(start[1])
        if (row.size, col.size) == tuple(y_BCHW.shape[2:]):
            return y_BCHW
        return cropped(y_BCHW, row.slice, col.slice)


Places = Mapping[int, BlockPlace]  # by node number


def tile_places(graph: Graph, whole: Box, context: Box) -> Places:
    """Return the place, on the tile `context` of the image `whole`, of each node that depends on its place.

    Raises GeometryError as `geometry.shapes.parts` does.
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
    """A module that computes a tensor, or a rank's block of it. `rows` and `cols` describe the layer along rows and
    columns. `fill`: the value beyond the tensor's ends.

    A kind of module defines `on_block`, or `forward` if all its blocks are computed as whole tensors are, or both.
    """

    fill = 0.0
    rows: Any
    cols: Any

    def __init__(self, rows: Layer, cols: Layer | None = None) -> None:
        super().__init__()
        self.rows, self.cols = rows, cols or rows

    def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        sizes = zip((self.rows, self.cols), map(int, inputs_BCHW[0].shape[2:]), strict=True)
        whole = [(Interval(0, size), layer.output_size(size, size), size) for layer, size in sizes]
        dims = (DimPlace(read, Interval(0, made), read, (size, made), True) for read, made, size in whole)
        return self.on_block(BlockPlace(*dims), None, *inputs_BCHW)

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the outputs `place.given` from the windows of the inputs (`place.read` of the first). Collective over
        `ranks`, those of the image, if the layer takes statistics of the image: backward too, and in the order of the
        nodes, so it cannot deadlock."""
        return self.forward(*inputs_BCHW)

    def on_tile(self, place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return all outputs of a tile at `place`, without communication, of a layer that depends on its place."""
        return self.on_block(place, None, x_BCHW)


def computes_blocks(module: nn.Module) -> TypeGuard[BlockModule]:
    """Return True for this library's modules that compute blocks; a user's subclass may compute anything."""
    return isinstance(module, BlockModule) and type(module).__module__.startswith("tiledseg.")


def cropped(x_BCHW: torch.Tensor, rows: slice, cols: slice) -> torch.Tensor:
    """Return a view of these rows and columns, or the tensor itself if they are all.

    The gradient keeps the tensor's layout. torch gives the gradient of a slice channels first, and earlier layers keep
    that layout. The gradient of a view by strides is one copy into zeros of the tensor's layout.
    """
    part_BCHW = x_BCHW[:, :, rows, cols]
    if part_BCHW.shape == x_BCHW.shape:
        return x_BCHW
    if not (torch.is_grad_enabled() and x_BCHW.requires_grad) or torch.compiler.is_compiling():
        return part_BCHW  # also for export: its format has no strides
    return x_BCHW.as_strided(part_BCHW.shape, part_BCHW.stride(), part_BCHW.storage_offset())
