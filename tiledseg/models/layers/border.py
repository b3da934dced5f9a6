"""Pixels put around a tensor, or cut from it."""

from __future__ import annotations

import torch
from torch.nn import functional

from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layers import border as geometry
from tiledseg.geometry.layers.layer import Layer
from tiledseg.models.layers.block import BlockModule, DimPlace, Place
from tiledseg.models.normalise import Ranks


class Border(BlockModule):
    """See `geometry.layers.border.Border`, along rows and along columns, which have one mode."""

    def __init__(self, rows: geometry.Border, cols: geometry.Border) -> None:
        super().__init__()
        self.rows, self.cols = rows, cols
        self.fill = rows.value

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self._padded(x_BCHW, (self.cols.before, self.cols.after, self.rows.before, self.rows.after))

    @property
    def description(self) -> Layer:
        return self.rows

    @property
    def column_description(self) -> Layer:
        return self.cols

    def on_block(self, place: Place, ranks: Ranks, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        if self.rows.clamps:
            return self._mirrored(place, x_BCHW)
        # Along dims that are cut, the positions that it reads are those that it gives.
        cols = (self.cols.before, self.cols.after) if place.col.whole else (0, 0)
        rows = (self.rows.before, self.rows.after) if place.row.whole else (0, 0)
        return self._padded(x_BCHW, (*cols, *rows))

    def _mirrored(self, place: Place, x_BCHW: torch.Tensor) -> torch.Tensor:
        """At the image's ends what is mirrored is at hand: it is put there, and what is too much is cut."""
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
        return functional.pad(x_BCHW, pads, mode=self.rows.mode)


def _beyond(read: Interval, dim: DimPlace) -> tuple[int, int]:
    """How many of these positions lie before the tensor, and how many after it."""
    return max(0, -read.start), max(0, read.stop - dim.sizes[0])
