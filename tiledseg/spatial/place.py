"""Where a layer computes: which part of its input a rank reads and which part of its output it gives, dim by dim."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiledseg.geometry.decomposition import WindowExchange
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer import Layer
from tiledseg.spatial.halo_exchange import HaloExchanger


@dataclass(frozen=True)
class DimPlace:
    """One dim of one layer on one rank, in positions of the whole tensors.

    `read`: the first input at hand; where the layer pads, it includes what lies beyond the tensor's ends, filled in.
    `given`: the output wanted. `owned`: the rank's own input. `sizes`: those of the whole input and output. `whole`:
    the dim is not cut, `read` is all of it without padding, and the layer's own padding applies.
    """

    read: Interval
    given: Interval
    owned: Interval
    sizes: tuple[int, int]
    whole: bool


@dataclass(frozen=True)
class Place:
    """Rows and columns, and who computes the rest: what a spatial layer knows besides its tensor."""

    row: DimPlace
    col: DimPlace

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the whole tensor: any layer is then its undivided self."""
        return self.row.whole and self.col.whole

    def crop_given(self, y_BCHW: torch.Tensor, start: tuple[int, int]) -> torch.Tensor:
        """The wanted output from a larger one whose first position is `start` (row, col)."""
        row, col = self.row.given.relative_to(start[0]), self.col.given.relative_to(start[1])
        if (row.size, col.size) == tuple(y_BCHW.shape[2:]):
            return y_BCHW
        return y_BCHW[:, :, row.slice, col.slice]


class SpatialLayer:
    """A layer that computes a rank's part of the undivided layer's output.

    `fill`: what stands beyond the tensor's ends in what it reads. `descriptions`: its geometry along rows and columns.
    """

    fill = 0.0
    descriptions: tuple[Layer, Layer]

    def __call__(self, place: Place, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        """The outputs `place.given` from what is read of each input: `place.read` of the first."""
        raise NotImplementedError

    def can_overlap(self, place: Place) -> bool:
        """Whether `overlapped` serves here."""
        return False

    def overlapped(
        self,
        x_BCHW: torch.Tensor,
        place: Place,
        exchanger: HaloExchanger,
        rows: WindowExchange | None,
        cols: WindowExchange | None,
    ) -> torch.Tensor:
        """The layer on this rank's own block, halo exchange included, which travels while the interior is computed. The
        same result but for the order of sums. Collective over the ranks of the image."""
        raise NotImplementedError
