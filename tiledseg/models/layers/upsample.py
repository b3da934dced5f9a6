"""Upsampling, with an adjoint of its own where torch's is slow, or missing.

With deterministic algorithms torch does not use its CUDA kernels for bilinear upsampling, since the backward kernel
adds in no fixed order. It gathers from index tensors, slowly and with several times the memory; it refuses bicubic
upsampling. The forward kernels have a fixed order, so they are kept, and whole factors have a simple adjoint: sums of
slices in one order. On a CPU torch's kernels serve both ways (one core, 64 channels, 128 x 128 to 256 x 256 px: 1 ms;
by slices 10).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.models.normalise import at_least_single

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
