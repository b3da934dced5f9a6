"""Losses that look at the labels around a pixel: of edges, and of boundaries.

A network that gives edges beside classes learns by the loss of G-SCNN (Takikawa et al., 2019, section 3.3). Four terms,
each a sum over pixels, so that tiles and ranks add up:

- the cross-entropy of the classes;
- `factor` times the cross-entropy of the edges, in which an edge pixel counts `balance`, another the rest;
- `attention` times the cross-entropy of the classes again, where the network is sure of an edge (above 0.8);
- `dual` times |z - z'| / sqrt(2), summed over classes: z is the length of the gradient of the smoothed
  probabilities, z' that of the labels.

All are divided by the number of valid pixels of the step; where classes have weights, the first and the third
(`PixelTerm`) by the sum of these pixels' weights. The published code divides each by the number of pixels in which it
is not zero, or weighs edges by their share in the image. It draws noise for the probabilities, and divides gradients by
their largest. Such numbers are known when all tiles are done, and are then too late for the gradients.

Terms that look at neighbours are exact over tiles. Gradients of probabilities are an output of the network's graph,
with a halo like any other. Edges and gradients of labels come from the labels around a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from tiledseg.architecture.gated_scnn import GRADIENTS, REACH
from tiledseg.models.sending import sent
from tiledseg.training.losses.objective import MeanTerm, Outputs, counted, inner

_LEAST = 1e-6  # under the root: where nothing changes, its slope would be infinite


@dataclass(frozen=True)
class EdgesTerm(MeanTerm):
    """The terms of G-SCNN that look at edges. `radius`: an edge pixel has another class within so many pixels."""

    ignore_index: int
    factor: float = 20.0
    balance: float = 0.9
    radius: int = 2
    dual: float = 1.0
    weights: tuple[float, ...] = ()

    @property
    def margin(self) -> int:
        return max(self.radius, REACH)

    @property
    def in_words(self) -> str:
        return " + ".join(counted(f, name) for f, name in ((self.factor, "edges"), (self.dual, "dual")) if f)

    def sums(self, outputs_BKHW: Outputs, target_BHW: torch.Tensor) -> torch.Tensor:
        _, edges_BCHW, gradients_BCHW = outputs_BKHW
        valid_P = (inner(target_BHW, self.margin) != self.ignore_index).reshape(-1)
        scores_P = edges_BCHW.reshape(-1)
        edge_P = edges_of(target_BHW, self.radius, self.ignore_index, self.margin).reshape(-1)
        weights_P = torch.where(edge_P, self.balance, 1 - self.balance) * valid_P
        bce_P = functional.binary_cross_entropy_with_logits(scores_P, edge_P.to(scores_P.dtype), reduction="none")
        dual_P = _dual(gradients_BCHW, target_BHW, self.ignore_index, self.margin).reshape(-1)
        losses_P = self.factor * weights_P.to(scores_P.dtype) * bce_P + self.dual * dual_P
        return torch.stack([losses_P.sum(dtype=torch.float64), valid_P.sum(dtype=torch.float64)])


def edges_of(target_BHW: torch.Tensor, radius: int, ignore_index: int, margin: int) -> torch.Tensor:
    """Return True for valid pixels with another class within `radius`; without `margin` pixels around."""
    valid_BHW = (target_BHW >= 0) & (target_BHW != ignore_index)
    height, width = (size - 2 * margin for size in target_BHW.shape[1:])
    own_BHW, found_BHW = inner(target_BHW, margin), inner(torch.zeros_like(valid_BHW), margin)
    for row in range(-radius, radius + 1):
        for col in range(-radius, radius + 1):
            if row**2 + col**2 <= radius**2:
                top, left = margin + row, margin + col
                part = slice(None), slice(top, top + height), slice(left, left + width)
                found_BHW = found_BHW | (valid_BHW[part] & (target_BHW[part] != own_BHW))
    return found_BHW & inner(valid_BHW, margin)


def _dual(gradients_BCHW: torch.Tensor, target_BHW: torch.Tensor, ignore_index: int, margin: int) -> torch.Tensor:
    """Return |z - z'| / sqrt(2), summed over classes; 0 where the filters see a pixel without a class."""
    near_BHW = inner(target_BHW, margin - REACH)
    classes, dtype = gradients_BCHW.shape[1] // len(GRADIENTS), gradients_BCHW.dtype
    filters = sent(torch.tensor(GRADIENTS, dtype=dtype), gradients_BCHW.device)[:, None].repeat(classes, 1, 1, 1)
    # Beyond the raster there is no class: zeros, as around the probabilities.
    labels_BKHW = torch.stack([near_BHW == k for k in range(classes)], 1).to(dtype)
    known_BCHW = functional.max_pool2d((near_BHW == ignore_index).to(dtype)[:, None], 2 * REACH + 1, 1) == 0
    labels_BCHW = functional.conv2d(labels_BKHW, filters, groups=classes)
    differences_BKHW = (_lengths(gradients_BCHW) - _lengths(labels_BCHW)).abs()
    return differences_BKHW.sum(1) / 2**0.5 * known_BCHW[:, 0]


def _lengths(gradients_BCHW: torch.Tensor) -> torch.Tensor:
    """Return the root of the sum of squares of a class's two channels, by column and by row."""
    return (gradients_BCHW.unflatten(1, (-1, 2)).square().sum(2) + _LEAST).sqrt()


@dataclass(frozen=True)
class BoundaryTerm(MeanTerm):
    """The boundary loss (Kervadec et al., 2019, equation 5): probabilities times signed distances to the classes.

    It sums p_k phi_k over classes, of each valid pixel. phi_k is the distance in pixels to the nearest pixel of class
    k. For the pixel's own class it is 1 minus the distance to the nearest pixel of another class, as in the published
    code. So the loss may fall below 0. Distances end at `radius`: labels of so many pixels around a tile give them to
    the last bit. A pixel without a label, or beyond the raster, is of no class. The step's loss is the mean over its
    valid pixels; weights of classes do not enter.
    """

    ignore_index: int
    factor: float = 1.0
    radius: int = 8
    weights: tuple[float, ...] = ()

    @property
    def margin(self) -> int:
        return self.radius

    @property
    def in_words(self) -> str:
        return counted(self.factor, "boundary")

    def sums(self, outputs_BKHW: Outputs, target_BHW: torch.Tensor) -> torch.Tensor:
        shares_BKHW = outputs_BKHW[0].softmax(1)
        phi_BKHW = signed_distances(target_BHW, shares_BKHW.shape[1], self.radius, self.ignore_index)
        valid_BHW = inner(target_BHW, self.radius) != self.ignore_index
        losses_BHW = (shares_BKHW * phi_BKHW.to(shares_BKHW.dtype)).sum(1) * valid_BHW
        return torch.stack([self.factor * losses_BHW.sum(dtype=torch.float64), valid_BHW.sum(dtype=torch.float64)])


def signed_distances(target_BHW: torch.Tensor, classes: int, radius: int, ignore_index: int) -> torch.Tensor:
    """Return phi_k of each pixel but a margin of `radius`, at most `radius`; float32, of shape (B, K, H, W).
    `target_BHW`: its negative classes are beyond the raster. Values are void where a pixel has no label."""
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
    """Return the least of a square and the squared way to it along a dim, of places with `radius` others on both
    sides."""
    size = squares_BKHW.shape[dim] - 2 * radius
    least = squares_BKHW.narrow(dim, radius, size).clone()
    for way in range(1, radius + 1):
        for start in (radius - way, radius + way):
            torch.minimum(least, squares_BKHW.narrow(dim, start, size) + way**2, out=least)
    return least
