"""Upsampling and borders whose results do not depend on how an image is cut.

Two kinds of torch's upsampling kernels are replaced. With aligned corners, torch's weights depend on the local tensor's
size. Here they are quotients of integers: each output's place in the whole image times (N - 1) over (M - 1). With
deterministic algorithms, torch has no gradient of bilinear upsampling in a fixed order on CUDA, and refuses bicubic
upsampling. Here torch's forward kernels are kept, and the gradient sums outputs' gradients in a fixed order (`Taps`).
On a CPU torch's kernels are used both ways.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers import resampling as geometry
from tiledseg.memory.device import is_gpu, sent
from tiledseg.models.layers.block import BlockModule, BlockPlace
from tiledseg.models.normalise import at_least_single

Pair = tuple[int, int]


KERNELS = {"bilinear": torch.ops.aten.upsample_bilinear2d, "bicubic": torch.ops.aten.upsample_bicubic2d}
ROWS = 2  # the dim of x_BCHW; columns are the next
AT_ONCE = 1 << 16, 1 << 25  # values computed at once: on a CPU (fits a cache), on a GPU


class UpsampleModule(nn.Upsample):
    """nn.Upsample by `upsample`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        row, col = self.scale_factor if isinstance(self.scale_factor, tuple) else (self.scale_factor,) * 2
        return upsample(input, (int(row), int(col)), self.mode)  # type: ignore[arg-type]


def upsample(x_BCHW: torch.Tensor, factors: Pair, mode: str) -> torch.Tensor:
    """Upsample a tensor or a block by whole factors (row, col): nearest, bilinear or bicubic, without align_corners."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    if takes_own_adjoint(mode, x_BCHW.device.type, deterministic):
        return Interpolated.apply(x_BCHW, factors, mode)
    align = False if mode in KERNELS else None
    scale = float(factors[0]), float(factors[1])
    return functional.interpolate(x_BCHW, scale_factor=scale, mode=mode, align_corners=align)


def takes_own_adjoint(mode: str, device: str, deterministic: bool) -> bool:
    """Return True if torch's adjoint is slow or missing. Pure."""
    return mode in KERNELS and device != "cpu" and deterministic


class Interpolated(torch.autograd.Function):
    """Bilinear or bicubic upsampling by torch's forward kernel, with a gradient summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_BCHW: torch.Tensor, factors: Pair, mode: str) -> torch.Tensor:
        size = [factor * side for factor, side in zip(factors, x_BCHW.shape[2:], strict=True)]
        ctx.taps = [
            dim_taps(Interval(0, side), Interval(0, out), (side, out), mode)
            for side, out in zip(x_BCHW.shape[2:], size, strict=True)
        ]
        return KERNELS[mode](x_BCHW, size, False, float(factors[0]), float(factors[1]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _resampled(g_BCHW, *(taps.backward for taps in ctx.taps)), None, None


class AlignedUpsampleModule(BlockModule):
    """Bilinear upsampling by whole factors (row, col), with align_corners=True."""

    def __init__(self, factors: Pair) -> None:
        super().__init__(*map(geometry.AlignedUpsample, factors))

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        taps = (dim_taps(dim.read, dim.given, dim.sizes) for dim in (place.row, place.col))
        return Resampled.apply(*inputs_BCHW, *taps)


class Taps(NamedTuple):
    """The inputs of each output along one dim, and their weights (float64) in its sum: shape (outputs, terms)."""

    places: torch.Tensor
    weights: torch.Tensor


class DimTaps(NamedTuple):
    """The taps of outputs in inputs (`forward`), and of inputs' gradients in outputs' (`backward`)."""

    forward: Taps
    backward: Taps


@lru_cache(maxsize=1024)
def dim_taps(read: Interval, given: Interval, sizes: tuple[int, int], mode: str = "aligned") -> DimTaps:
    """Return the taps of outputs `given` in inputs `read`; `sizes`: of all inputs and outputs. `mode`: `aligned`
    (bilinear with aligned corner centres), `bilinear` or `bicubic` (Keys with a = -3/4, as torch). Outputs in a tile's
    halo that need inputs beyond `read` use its last one; they are cropped later."""
    inputs, outputs = sizes
    at = torch.arange(given.start, given.stop, dtype=torch.int64)
    if mode == "aligned":
        at, steps = at * (inputs - 1), max(outputs - 1, 1)
    else:
        at, steps = (2 * at + 1) * inputs - outputs, 2 * outputs
    lower, t = at // steps, (at % steps).double() / steps
    if mode == "bicubic":
        near = [((1.25 * d - 2.25) * d) * d + 1 for d in (t, 1 - t)]
        far = [((-0.75 * d + 3.75) * d - 6) * d + 3 for d in (1 + t, 2 - t)]
        first, weights = -1, [far[0], *near, far[1]]
    else:
        first, weights = 0, [1 - t, t]
    places = torch.stack([lower + first + term for term in range(len(weights))], dim=1).clamp(0, inputs - 1)
    forward = Taps(places.sub(read.start).clamp(0, read.size - 1), torch.stack(weights, dim=1))
    # For each input the outputs that have it as a term, in order, padded with weights of zero.
    flat, terms = forward.places.flatten(), len(weights)
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=read.size)
    within = torch.arange(len(flat)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    shape = read.size, int(counts.max())
    backward = Taps(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.float64))
    backward.places[flat[order], within] = order // terms
    backward.weights[flat[order], within] = forward.weights.flatten()[order]
    return DimTaps(forward, backward)


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
    """Resample in the memory format of x, a few rows at a time."""
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
    step = max(1, AT_ONCE[is_gpu(x.device)] // max(1, made.numel() // shape[dim]))
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


class BorderModule(BlockModule):
    """The module of two `geometry.layers.resampling.Border`s of one mode, along rows and along columns."""

    def __init__(self, rows: geometry.Border, cols: geometry.Border) -> None:
        super().__init__(rows, cols)
        self.fill = rows.value

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        (x_BCHW,) = inputs_BCHW
        if self.rows.clamps:  # pixels are mirrored at the image's ends, where their originals are local
            dims = (place.row, self.rows), (place.col, self.cols)
            wanted = [layer.required_input(dim.given) for dim, layer in dims]
            pads = [
                (max(0, -read.start), max(0, read.stop - dim.sizes[0]))
                for read, (dim, _) in zip(wanted, dims, strict=True)
            ]
            y_BCHW = self._padded(x_BCHW, (*pads[1], *pads[0]))
            starts = [dim.read.start - before for (dim, _), (before, _) in zip(dims, pads, strict=True)]
            row, col = (read.relative_to(start).slice for read, start in zip(wanted, starts, strict=True))
            return y_BCHW[:, :, row, col]
        # Along dims that are cut, it reads and gives the same positions.
        cols = (self.cols.before, self.cols.after) if place.col.whole else (0, 0)
        rows = (self.rows.before, self.rows.after) if place.row.whole else (0, 0)
        return self._padded(x_BCHW, (*cols, *rows))

    def _padded(self, x_BCHW: torch.Tensor, pads: tuple[int, int, int, int]) -> torch.Tensor:
        if self.rows.mode == "constant":
            return functional.pad(x_BCHW, pads, value=self.fill)
        if self.rows.mode == "reflect":
            return Reflected.apply(x_BCHW, pads)
        return functional.pad(x_BCHW, pads, mode=self.rows.mode)


class Reflected(torch.autograd.Function):
    """Reflection padding with a gradient summed over slices in a fixed order, which torch does not have on a GPU."""

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
    """Return the parts of `size` padded positions (the inner ones, both ends), each with the inner slice it adds to."""
    last = size - before - after - 1
    ends = (slice(0, before), slice(1, before + 1)), (slice(size - after, size), slice(last - after, last))
    return [(slice(before, size - after), slice(None)), *ends]
