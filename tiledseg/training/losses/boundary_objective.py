"""The boundary loss (Kervadec et al., 2019, equation 5): probabilities times signed distances to the labels' classes.

Of each valid pixel, the sum over classes of p_k phi_k: phi_k is the distance in pixels to the nearest pixel of class k,
or, of a pixel's own class, minus the distance to the nearest pixel of another class, plus 1, as the published code has
it. So probability costs where it is far from its class, and pays inside of it: the loss may fall below 0.

A distance has no end. Here it ends at `radius`, beyond which all is as far: labels of so many pixels around a tile then
give it to the last bit, and a class's far probability is left to other losses. A pixel without a label, or beyond the
raster, is of no class. The step's loss is the mean over its valid pixels: one sum over another, exact over tiles and
ranks; weights of classes do not enter.
"""

from __future__ import annotations

import torch

from tiledseg.records import dataclass
from tiledseg.training.losses.objective import Sums, counted


@dataclass(frozen=True)
class BoundaryObjective:
    """See above; `factor`: what the loss counts beside others."""

    ignore_index: int
    factor: float = 1.0
    radius: int = 8

    @property
    def margin(self) -> int:
        return self.radius

    @property
    def in_words(self) -> str:
        return counted(self.factor, "boundary")

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        shares_BKHW = outputs_BKHW[0].softmax(1)
        phi_BKHW = signed_distances(target_BHW, shares_BKHW.shape[1], self.radius, self.ignore_index)
        own_BHW = target_BHW[:, self.radius : -self.radius, self.radius : -self.radius]
        valid_BHW = own_BHW != self.ignore_index
        losses_BHW = (shares_BKHW * phi_BKHW.to(shares_BKHW.dtype)).sum(1) * valid_BHW
        return self.factor * losses_BHW.sum(dtype=torch.float64), valid_BHW.sum(dtype=torch.float64)


def signed_distances(target_BHW: torch.Tensor, classes: int, radius: int, ignore_index: int) -> torch.Tensor:
    """phi_k of each pixel but a margin of `radius`, at most `radius`; float32, of shape (B, K, H, W). `target_BHW`: its
    negative classes are beyond the raster. Of no meaning where a pixel has no label."""
    numbers_K = torch.arange(classes, device=target_BHW.device).view(-1, 1, 1)
    here_BKHW = (target_BHW[:, None] == numbers_K) & (target_BHW != ignore_index)[:, None]
    squares_BKHW = torch.where(here_BKHW, 0, radius**2).to(torch.int16)
    for dim in (3, 2):  # the nearest in the row, then of these the nearest in the column: exact for the Euclidean one
        squares_BKHW = _least_along(squares_BKHW, dim, radius)
    distances_BKHW = squares_BKHW.to(torch.float32).sqrt()
    own_BKHW = here_BKHW[:, :, radius:-radius, radius:-radius]
    to_others_BHW = torch.where(own_BKHW, float(radius), distances_BKHW).amin(1)
    return torch.where(own_BKHW, 1 - to_others_BHW[:, None], distances_BKHW)


def _least_along(squares_BKHW: torch.Tensor, dim: int, radius: int) -> torch.Tensor:
    """The least of a square and the squared way to it along a dim, of places with `radius` others on both sides."""
    size = squares_BKHW.shape[dim] - 2 * radius
    least = squares_BKHW.narrow(dim, radius, size).clone()
    for way in range(1, radius + 1):
        for start in (radius - way, radius + way):
            torch.minimum(least, squares_BKHW.narrow(dim, start, size) + way**2, out=least)
    return least
