"""Pixels of one value put around a tensor, or cut from it."""

from __future__ import annotations

import torch
from torch.nn import functional

from tiledseg.geometry import border as geometry
from tiledseg.geometry.layer import Layer
from tiledseg.models.block import BlockModule, Place
from tiledseg.models.normalise import Ranks


class Border(BlockModule):
    """See `geometry.border.Border`, along rows and along columns."""

    def __init__(self, rows: geometry.Border, cols: geometry.Border) -> None:
        super().__init__()
        self.rows, self.cols = rows, cols
        self.fill = rows.value

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        pads = (self.cols.before, self.cols.after, self.rows.before, self.rows.after)
        return functional.pad(x_BCHW, pads, value=self.fill)

    @property
    def description(self) -> Layer:
        return self.rows

    @property
    def column_description(self) -> Layer:
        return self.cols

    def on_block(self, place: Place, ranks: Ranks, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        """Along dims that are cut, the positions that it reads are those that it gives."""
        cols = (self.cols.before, self.cols.after) if place.col.whole else (0, 0)
        rows = (self.rows.before, self.rows.after) if place.row.whole else (0, 0)
        return functional.pad(x_BCHW, (*cols, *rows), value=self.fill)
