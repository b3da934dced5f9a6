"""Bilinear upsampling with aligned corners, of an image or of a part of it, by weights from places in the image.

torch's own kernel knows the tensor at hand alone, and would take its ends for the image's. Here weights are quotients
of integers: each output's place in the whole image times (N - 1) over (M - 1). So a part gives what the whole gives.

An output is a weighted sum of two inputs. An input's gradient is one of a few outputs', in an order of its own. Both
are gathered, nothing is added where others add too, and sums are the same run after run on any device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layers.resampling import AlignedUpsample as Geometry
from tiledseg.models.layers.block import BlockModule, BlockPlace, DimPlace
from tiledseg.models.normalise import Ranks, at_least_single
from tiledseg.models.sending import sent

ROWS = 2  # the dim of x_BCHW; columns are the next
CACHED = 1 << 16  # values that are made at once


class AlignedUpsampleModule(BlockModule):
    """Bilinear upsampling by whole factors (row, col), with align_corners=True."""

    def __init__(self, factors: tuple[int, int]) -> None:
        super().__init__(*map(Geometry, factors))
        self.factors = factors

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        dims = zip(x_BCHW.shape[2:], self.factors, strict=True)
        return self.on_tile(BlockPlace(*(_whole(size, factor) for size, factor in dims)), x_BCHW)

    def on_tile(self, place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        taps = (dim_taps(dim.read, dim.given, dim.sizes) for dim in (place.row, place.col))
        result: torch.Tensor = Resampled.apply(x_BCHW, *taps)
        return result

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.on_tile(place, x_BCHW)


def _whole(size: int, factor: int) -> DimPlace:
    read = Interval(0, size)
    return DimPlace(read, Interval(0, size * factor), read, (size, size * factor), True)


class Taps(NamedTuple):
    """The inputs of each output along one dim, and their weights (float64) in its sum: shape (outputs, terms)."""

    places: torch.Tensor
    weights: torch.Tensor


class DimTaps(NamedTuple):
    """The taps of outputs, from inputs; and of inputs' gradients, from outputs'."""

    forward: Taps
    backward: Taps


@lru_cache(maxsize=1024)
def dim_taps(read: Interval, given: Interval, sizes: tuple[int, int], aligned: bool = True) -> DimTaps:
    """Return taps of the outputs `given` from the inputs `read`, of `sizes` in all, with the corners' centres
    `aligned`, or the corners themselves. Outputs in a tile's halo that need inputs beyond `read` take its last one,
    unread."""
    inputs, outputs = sizes
    at = torch.arange(given.start, given.stop, dtype=torch.int64)
    if aligned:
        at, steps = at * (inputs - 1), max(outputs - 1, 1)
    else:
        at, steps = ((2 * at + 1) * inputs - outputs).clamp(min=0), 2 * outputs
    lower, rest = at // steps, at % steps
    share = rest.double() / steps
    places = torch.stack([lower, lower + 1], dim=1).sub(read.start).clamp(0, read.size - 1)
    forward = Taps(places, torch.stack([1 - share, share], dim=1))
    return DimTaps(forward, _adjoint(forward, read.size))


def _adjoint(taps: Taps, inputs: int) -> Taps:
    """Return for each input the outputs that it is a term of, in their order; filled up by weights of zero."""
    terms = taps.places.shape[1]
    flat = taps.places.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=inputs)
    most = int(counts.max())
    within = torch.arange(len(flat)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    places, weights = torch.zeros(inputs, most, dtype=torch.int64), torch.zeros(inputs, most, dtype=torch.float64)
    places[flat[order], within] = order // terms
    weights[flat[order], within] = taps.weights.flatten()[order]
    return Taps(places, weights)


class Resampled(torch.autograd.Function):
    """Sums along rows and columns by taps."""

    @staticmethod
    def forward(ctx: Any, x_BCHW: torch.Tensor, rows: DimTaps, cols: DimTaps) -> torch.Tensor:
        ctx.rows, ctx.cols = rows, cols
        return _resampled(x_BCHW, rows.forward, cols.forward)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _resampled(g_BCHW, ctx.rows.backward, ctx.cols.backward), None, None


def _resampled(x_BCHW: torch.Tensor, rows: Taps, cols: Taps) -> torch.Tensor:
    """Resample in the memory format of x, a few rows at a time, which fit a cache."""
    if x_BCHW.is_contiguous(memory_format=torch.channels_last):
        return _by_rows(x_BCHW.permute(0, 2, 3, 1), 1, rows, cols).permute(0, 3, 1, 2)
    return _by_rows(x_BCHW, ROWS, rows, cols)


def _by_rows(x: torch.Tensor, dim: int, rows: Taps, cols: Taps) -> torch.Tensor:
    """Resample with rows along `dim`, columns along the next one."""
    shape = list(x.shape)
    shape[dim], shape[dim + 1] = len(rows.places), len(cols.places)
    made = x.new_empty(shape)
    dtype = at_least_single(x[:0]).dtype
    rows, cols = (Taps(sent(taps.places, x.device), sent(taps.weights, x.device).to(dtype)) for taps in (rows, cols))
    step = max(1, CACHED // max(1, made.numel() // shape[dim]))
    for first in range(0, shape[dim], step):
        some = Taps(rows.places[first : first + step], rows.weights[first : first + step])
        made.narrow(dim, first, len(some.places)).copy_(_sums(_sums(x, dim, some), dim + 1, cols))
    return made


def _sums(x: torch.Tensor, dim: int, taps: Taps) -> torch.Tensor:
    total: torch.Tensor | None = None
    shape = [1] * x.dim()
    shape[dim] = -1
    for places, weights in zip(taps.places.T, taps.weights.T, strict=True):
        part = at_least_single(x.index_select(dim, places))
        total = part.mul_(weights.view(shape)) if total is None else total.addcmul_(part, weights.view(shape))
    assert total is not None, "each sum has a term"
    return total
