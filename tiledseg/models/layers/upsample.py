"""Upsampling, with an adjoint of its own for the bilinear one where torch's is slow.

Where deterministic algorithms are asked for, torch leaves its CUDA kernels for bilinear upsampling and gathers from
index tensors instead, since the backward kernel adds in no fixed order: slow, and several times the memory. The forward
kernel has a fixed order, so it is kept, and doubling has a simple adjoint: with the gradient's ends repeated once, each
dim's is 1/4, 3/4, 3/4, 1/4 of four neighbours, a few sums of slices in one order. On a CPU torch's kernels serve both
ways (one core, 64 channels, 128 x 128 to 256 x 256 px: 1 ms; by slices 10).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.models.normalise import at_least_single

Factors = tuple[int, int]


class Upsample(nn.Upsample):
    """nn.Upsample by `upsample`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        factor = int(self.scale_factor)  # type: ignore[arg-type]
        return upsample(input, (factor, factor), self.mode)


def upsample(x_BCHW: torch.Tensor, factors: Factors, mode: str) -> torch.Tensor:
    """By whole factors (row, col): nearest, or bilinear with align_corners=False, of a tensor or of a block of one."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    if takes_own_adjoint(mode, factors, x_BCHW.device.type, deterministic):
        doubled: torch.Tensor = BilinearDoubling.apply(x_BCHW)
        return doubled
    align = False if mode in ("bilinear", "bicubic") else None
    scale = float(factors[0]), float(factors[1])
    return functional.interpolate(x_BCHW, scale_factor=scale, mode=mode, align_corners=align)


def takes_own_adjoint(mode: str, factors: Factors, device: str, deterministic: bool) -> bool:
    """Whether torch's own would be slow. Pure."""
    return mode == "bilinear" and factors == (2, 2) and device == "cuda" and deterministic


class BilinearDoubling(torch.autograd.Function):
    """Twice as many rows and columns by torch's forward kernel, and back by sums of slices."""

    @staticmethod
    def forward(ctx: Any, x_BCHW: torch.Tensor) -> torch.Tensor:
        size = [2 * side for side in x_BCHW.shape[2:]]
        return torch.ops.aten.upsample_bilinear2d(x_BCHW, size, False, 2.0, 2.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> torch.Tensor:
        return _halved(_halved(at_least_single(g_BCHW), 3), 2).to(g_BCHW.dtype)


def _halved(g: torch.Tensor, dim: int) -> torch.Tensor:
    """The adjoint of doubling along one dim: output 2i is 3/4 of input i and 1/4 of i - 1, 2i + 1 of i and i + 1."""
    even, odd = (_every_other(g, dim, start) for start in (0, 1))
    last = even.shape[dim] - 1
    dx = (even + odd).mul_(0.75)
    dx.narrow(dim, 1, last).add_(odd.narrow(dim, 0, last), alpha=0.25)
    dx.narrow(dim, 0, last).add_(even.narrow(dim, 1, last), alpha=0.25)
    dx.select(dim, 0).add_(g.select(dim, 0), alpha=0.25)
    dx.select(dim, last).add_(g.select(dim, -1), alpha=0.25)
    return dx


def _every_other(g: torch.Tensor, dim: int, start: int) -> torch.Tensor:
    return g[(slice(None),) * dim + (slice(start, None, 2),)]
