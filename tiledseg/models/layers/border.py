"""Pixels put around a tensor, or cut from it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional

from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers import resampling as geometry
from tiledseg.models.layers.block import BlockModule, BlockPlace, DimPlace
from tiledseg.models.normalise import Ranks


class BorderModule(BlockModule):
    """The module of `geometry.layers.border.Border`, along rows and along columns, which have one mode."""

    rows: geometry.Border
    cols: geometry.Border

    def __init__(self, rows: geometry.Border, cols: geometry.Border) -> None:
        super().__init__(rows, cols)
        self.fill = rows.value

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self._padded(x_BCHW, (self.cols.before, self.cols.after, self.rows.before, self.rows.after))

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        if self.rows.clamps:
            return self._mirrored(place, x_BCHW)
        # Along dims that are cut, the positions that it reads are those that it gives.
        cols = (self.cols.before, self.cols.after) if place.col.whole else (0, 0)
        rows = (self.rows.before, self.rows.after) if place.row.whole else (0, 0)
        return self._padded(x_BCHW, (*cols, *rows))

    def _mirrored(self, place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Mirror pixels at the image's ends, where their originals are at hand, and cut off those that are too many."""
        dims = (place.row, self.rows), (place.col, self.cols)
        wanted = [layer.required_input(dim.given) for dim, layer in dims]
        rows, cols = (_beyond(read, dim) for read, (dim, _) in zip(wanted, dims, strict=True))
        y_BCHW = self._padded(x_BCHW, (*cols, *rows))
        starts = place.row.read.start - rows[0], place.col.read.start - cols[0]
        row, col = (read.relative_to(start).slice for read, start in zip(wanted, starts, strict=True))
        return y_BCHW[:, :, row, col]

    def _padded(self, x_BCHW: torch.Tensor, pads: tuple[int, int, int, int]) -> torch.Tensor:
        if self.rows.mode == "constant":
            return functional.pad(x_BCHW, pads, value=self.fill)
        if self.rows.mode == "reflect":
            reflected: torch.Tensor = Reflected.apply(x_BCHW, pads)
            return reflected
        return functional.pad(x_BCHW, pads, mode=self.rows.mode)


class Reflected(torch.autograd.Function):
    """Padding by reflection whose gradients are sums of slices in one order: torch has none in one order on a GPU."""

    @staticmethod
    def forward(ctx: Any, x_BCHW: torch.Tensor, pads: tuple[int, int, int, int]) -> torch.Tensor:
        ctx.pads = pads
        return functional.pad(x_BCHW, pads, mode="reflect")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor, None]:
        left, right, top, bottom = ctx.pads
        parts = itertools.product(_mirrors(g_BCHW.shape[2], top, bottom), _mirrors(g_BCHW.shape[3], left, right))
        (row, _), (col, _) = next(parts)
        dx_BCHW = g_BCHW[:, :, row, col].clone()
        for (row, into_row), (col, into_col) in parts:
            dims = [dim for dim, into in ((2, into_row), (3, into_col)) if into != slice(None)]
            dx_BCHW[:, :, into_row, into_col] += g_BCHW[:, :, row, col].flip(dims)
        return dx_BCHW, None


def _mirrors(size: int, before: int, after: int) -> list[tuple[slice, slice]]:
    """Return the parts of `size` padded positions, and which of those within each one is to be added to: the positions
    within, and each end, in reverse."""
    last = size - before - after - 1
    ends = (slice(0, before), slice(1, before + 1)), (slice(size - after, size), slice(last - after, last))
    return [(slice(before, size - after), slice(None)), *ends]


def _beyond(read: Interval, dim: DimPlace) -> tuple[int, int]:
    """Count the positions that lie before the tensor, and after it."""
    return max(0, -read.start), max(0, read.stop - dim.sizes[0])
