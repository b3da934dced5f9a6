"""Does this processor's convolution give a pixel the same bits wherever it stands? Asked of the kernels themselves.

In float64 a convolution is a matrix product of torch's BLAS. MKL's product for processors that are not Intel's adds in
an order that depends on where in memory a pixel's values begin, and on how many pixels are left at the end (decision
0002): no tiling can be exact to the last bit there. Where the kernels are steady, every tiling must be.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

SIDES = (19, 17)
STARTS = (0, 1, 2, 3)
SIZES = (7, 8, 9, 10, 11)


def has_steady_kernels(network: nn.Module) -> bool:
    """Whether every convolution of `network` gives a pixel of a window the bits that it gives it in the whole."""
    return all(is_steady(m) for m in network.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d))


@torch.no_grad()
def is_steady(module: nn.Conv2d | nn.ConvTranspose2d) -> bool:
    """One layer without padding on windows of many starts and sizes, against itself on the whole."""
    draw = torch.Generator().manual_seed(1)
    x_BCHW = torch.randn(1, module.in_channels, *SIDES, generator=draw, dtype=torch.float64).to(module.weight.dtype)
    whole_BCHW = _without_padding(module, _as_tile(x_BCHW))
    for row, col, height, width in itertools.product(STARTS, STARTS, SIZES, SIZES):
        part_BCHW = _without_padding(module, _as_tile(x_BCHW[:, :, row : row + height, col : col + width]))
        rows, cols = part_BCHW.shape[2:]
        row, col = (start * scale for start, scale in zip((row, col), _scales(module), strict=True))
        if not torch.equal(part_BCHW, whole_BCHW[:, :, row : row + rows, col : col + cols]):
            return False
    return True


def _as_tile(x_BCHW: torch.Tensor) -> torch.Tensor:
    """In memory of its own, channels last, as a tile is read."""
    return x_BCHW.clone(memory_format=torch.channels_last)


def _scales(module: nn.Conv2d | nn.ConvTranspose2d) -> tuple[int, ...]:
    """Output pixels an input pixel; the convolutions of the project's networks have stride 1."""
    return module.stride if isinstance(module, nn.ConvTranspose2d) else (1, 1)


def _without_padding(module: nn.Conv2d | nn.ConvTranspose2d, x_BCHW: torch.Tensor) -> torch.Tensor:
    padding, module.padding = module.padding, (0, 0)
    try:
        result: torch.Tensor = module(x_BCHW)
        return result
    finally:
        module.padding = padding
