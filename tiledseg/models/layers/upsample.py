"""Upsampling, with an adjoint of its own where torch's is slow, or missing.

With deterministic algorithms torch does not use its CUDA kernels for bilinear upsampling, since the backward kernel
adds in no fixed order. It gathers from index tensors, slowly and with several times the memory; it refuses bicubic
upsampling. The forward kernels have a fixed order, so they are kept, and whole factors have a simple adjoint: sums of
slices in one order. On a CPU torch's kernels serve both ways (one core, 64 channels, 128 x 128 to 256 x 256 px: 1 ms;
by slices 10).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers.resampling import AlignedUpsample as Geometry
from tiledseg.models.layers.block import BlockModule, BlockPlace, DimPlace
from tiledseg.models.normalise import Ranks, at_least_single
from tiledseg.models.sending import sent

Factors = tuple[int, int]
KERNELS = {"bilinear": torch.ops.aten.upsample_bilinear2d, "bicubic": torch.ops.aten.upsample_bicubic2d}
BEYOND = 2  # inputs before the first and after the last one that a kernel reaches for


class UpsampleModule(nn.Upsample):
    """nn.Upsample by `upsample`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        row, col = self.scale_factor if isinstance(self.scale_factor, tuple) else (self.scale_factor,) * 2
        return upsample(input, (int(row), int(col)), self.mode)  # type: ignore[arg-type]


def upsample(x_BCHW: torch.Tensor, factors: Factors, mode: str) -> torch.Tensor:
    """Upsample by whole factors (row, col): nearest, or bilinear or bicubic with align_corners=False, of a tensor or
    of a block of one."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    if takes_own_adjoint(mode, x_BCHW.device.type, deterministic):
        made: torch.Tensor = Interpolated.apply(x_BCHW, factors, mode)
        return made
    align = False if mode in KERNELS else None
    scale = float(factors[0]), float(factors[1])
    return functional.interpolate(x_BCHW, scale_factor=scale, mode=mode, align_corners=align)


def takes_own_adjoint(mode: str, device: str, deterministic: bool) -> bool:
    """Return True if torch's own adjoint would be slow, or is missing. Pure."""
    return mode in KERNELS and device == "cuda" and deterministic


class Interpolated(torch.autograd.Function):
    """Bilinear or bicubic upsampling by torch's forward kernel, and back by sums of slices."""

    @staticmethod
    def forward(ctx: Any, x_BCHW: torch.Tensor, factors: Factors, mode: str) -> torch.Tensor:
        ctx.factors, ctx.mode = factors, mode
        size = [factor * side for factor, side in zip(factors, x_BCHW.shape[2:], strict=True)]
        made: torch.Tensor = KERNELS[mode](x_BCHW, size, False, float(factors[0]), float(factors[1]))
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        dx_BCHW = at_least_single(g_BCHW)
        for dim, factor in ((3, ctx.factors[1]), (2, ctx.factors[0])):
            dx_BCHW = _gathered(dx_BCHW, dim, factor, ctx.mode)
        return dx_BCHW.to(g_BCHW.dtype), None, None


def _gathered(g: torch.Tensor, dim: int, factor: int, mode: str) -> torch.Tensor:
    """Return the adjoint along one dim. Parts beyond the ends go to the end itself, which the kernels repeat."""
    size = g.shape[dim] // factor
    wide = g.new_zeros([*g.shape[:dim], size + 2 * BEYOND, *g.shape[dim + 1 :]])
    for phase in range(factor):
        outputs = g[(slice(None),) * dim + (slice(phase, None, factor),)]
        first, weights = taps(phase, factor, mode)
        for place, weight in enumerate(weights, BEYOND + first):
            wide.narrow(dim, place, size).add_(outputs, alpha=weight)
    dx = wide.narrow(dim, BEYOND, size)
    dx.select(dim, 0).add_(wide.narrow(dim, 0, BEYOND).sum(dim))
    dx.select(dim, size - 1).add_(wide.narrow(dim, BEYOND + size, BEYOND).sum(dim))
    return dx


def taps(phase: int, factor: int, mode: str) -> tuple[int, list[float]]:
    """Return the first of the inputs that output `factor * i + phase` blends, counted from input i, and their weights;
    bicubic ones are those of Keys with a = -3/4, as torch has them."""
    lower, rest = divmod(2 * phase + 1 - factor, 2 * factor)
    t = rest / (2 * factor)
    if mode == "bilinear":
        return lower, [1 - t, t]
    near = [((1.25 * d - 2.25) * d) * d + 1 for d in (t, 1 - t)]
    far = [((-0.75 * d + 3.75) * d - 6) * d + 3 for d in (1 + t, 2 - t)]
    return lower - 1, [far[0], *near, far[1]]


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
