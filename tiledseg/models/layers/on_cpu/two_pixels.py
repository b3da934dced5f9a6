"""Eight channels to a vector of sixteen: a convolution that gives two pixels of a row at once, as channels of one.

oneDNN computes as many output channels at once as a vector holds values, 16 with AVX-512; of 8 half of each vector is
idle. So two pixels beside each other are seen as one of 16 channels:

    columns     a b c d e f
    pixel 0     w w w 0          4 columns for two pixels in place of 6,
    pixel 1     0 w w w          and the next pair begins two columns on

Channels last, the result lies as the plain one does. A zero adds nothing, and sums keep their order: bits are the same,
but of a pixel two columns beside one that is not finite, which a zero does not take away.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch.nn import functional

from tiledseg.models.layers.on_cpu.followed import is_followed

Pair = tuple[int, ...]
PIXELS = 2
_CHANNELS = 8
_MOST_INPUTS = 32  # channels: of many more oneDNN adds parts, in an order that depends on the outputs
_MOST_COLUMNS = 5
_WORTH_IT = 1 << 14  # values of the output: less takes less than another weight does


def takes_two(x_BCHW: torch.Tensor, weight: torch.Tensor, padding: Pair) -> bool:
    """Whether a convolution of stride and dilation 1 is quicker so, with the same bits: oneDNN has other kernels where
    a row is mostly padding."""
    if is_followed():
        return False
    out, inputs, rows, cols = weight.shape
    if out != _CHANNELS or inputs > _MOST_INPUTS or not 1 < cols <= _MOST_COLUMNS or not _has_wide_vectors():
        return False
    height, width = x_BCHW.shape[2] + 2 * padding[0] - rows + 1, x_BCHW.shape[3] + 2 * padding[1] - cols + 1
    even = width % PIXELS == 0 and width > 2 * PIXELS * cols and 0 <= padding[1] <= (cols - 1) // 2
    return even and x_BCHW.shape[0] * out * height * width >= _WORTH_IT


def of_two(weight: torch.Tensor) -> torch.Tensor:
    """The weight of twice the channels: each pixel's begins at its own column."""
    shifted = [functional.pad(weight, (k, PIXELS - 1 - k)) for k in range(PIXELS)]
    return torch.cat(shifted).contiguous(memory_format=torch.channels_last)


def apart(made_BCHW: torch.Tensor) -> torch.Tensor:
    """Pixels of their own again, where they lie; of a result without a graph. `data` is no view, so that an activation
    may overwrite what a function of autograd gives."""
    batch, channels, height, width = made_BCHW.shape
    rows_BHWC = made_BCHW.permute(0, 2, 3, 1).reshape(batch, height, width * PIXELS, channels // PIXELS)
    return rows_BHWC.permute(0, 3, 1, 2).data


@cache
def _has_wide_vectors() -> bool:
    """Whether oneDNN takes AVX-512, which `ONEDNN_MAX_CPU_ISA` may forbid it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "ONEDNN_MAX_CPU_ISA" not in os.environ
