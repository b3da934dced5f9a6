"""Pixels beside each other in a row, seen as the channels of one, so that oneDNN's vectors are full.

oneDNN computes as many output channels at once as a vector holds values, 16 with AVX-512; of 8 half of each vector is
idle. Channels last, two pixels of 8 channels lie as one of 16 does, so nothing is copied.

A convolution gives two pixels at once:

    columns     a b c d e f
    pixel 0     w w w 0          4 columns for two pixels in place of 6,
    pixel 1     0 w w w          and the next pair begins two columns on

A zero adds nothing, and sums keep their order: bits are the same, but of a pixel two columns beside one that is not
finite, which a zero does not take away.

The gradient of its weight is summed over pairs of the output's pixels too, as that of a weight of 4 columns, and of
pairs of the input's where these have half a vector of channels as well. What the pairs' weight has and the plain one
lacks is left out, and what it has twice is added up: the same products in another order.

A transposed convolution whose kernel is as wide as its stride makes all columns of a pixel at once, as its channels.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch.nn import functional

from tiledseg.models.layers.on_cpu.followed import is_followed
from tiledseg.models.layers.on_cpu.how import How, Pair, gradients

PIXELS = 2
_CHANNELS = 8
_VECTOR = 16
_MOST_INPUTS = 32  # channels: of many more oneDNN adds parts, in an order that depends on the outputs
_MOST_COLUMNS = 5
_WORTH_IT = 1 << 14  # values of the output: less takes less than another weight does


def takes_two(x_BCHW: torch.Tensor, weight: torch.Tensor, padding: Pair) -> bool:
    """Whether a convolution of stride and dilation 1 is quicker so, with the same bits: oneDNN has other kernels where
    a row is mostly padding."""
    (rows, cols), (height, width) = weight.shape[2:], x_BCHW.shape[2:]
    height, width = height + 2 * padding[0] - rows + 1, width + 2 * padding[1] - cols + 1
    if not _fills_a_vector(weight, width, padding) or cols > _MOST_COLUMNS:
        return False
    return width > 2 * PIXELS * cols and x_BCHW.shape[0] * _CHANNELS * height * width >= _WORTH_IT


def takes_pairs(g_BCHW: torch.Tensor, weight: torch.Tensor, padding: Pair) -> bool:
    """Whether `of_pairs` is quicker, of a convolution of stride and dilation 1."""
    return _fills_a_vector(weight, g_BCHW.shape[3], padding) and g_BCHW.numel() >= _WORTH_IT


def _fills_a_vector(weight: torch.Tensor, width: int, padding: Pair) -> bool:
    """Of a convolution that makes rows of `width` pixels."""
    if is_followed():
        return False
    out, inputs, _, cols = weight.shape
    if out != _CHANNELS or inputs > _MOST_INPUTS or cols == 1 or not _has_wide_vectors():
        return False
    return width % PIXELS == 0 and 0 <= padding[1] <= (cols - 1) // 2


def of_two(weight: torch.Tensor) -> torch.Tensor:
    """The weight of twice the channels: each pixel's begins at its own column."""
    shifted = [functional.pad(weight, (k, PIXELS - 1 - k)) for k in range(PIXELS)]
    return torch.cat(shifted).contiguous(memory_format=torch.channels_last)


def of_pairs(g_BCHW: torch.Tensor, x_BCHW: torch.Tensor, weight: torch.Tensor, how: How) -> torch.Tensor:
    """The weight's gradient, summed over pairs of pixels."""
    (out, inputs, rows, cols), padding = weight.shape, how.padding[1]
    seen = PIXELS if _CHANNELS <= inputs < _VECTOR and cols % 2 and cols <= _MOST_COLUMNS else 1
    # A pair's column c begins at the input's pixel 2c, and the kernel's column k stands `seen` pixels on from its last.
    before = -(-padding // seen)
    last = PIXELS - 1 + cols - 1 - padding  # the last of the input's pixels that a pair reads, from 2c on
    width = before + last // seen + 1
    like = weight.new_empty(PIXELS * out, seen * inputs, rows, width).contiguous(memory_format=torch.channels_last)
    asked = How((1, PIXELS // seen), (how.padding[0], before), (1, 1))
    pairs = _as_pixels_of(PIXELS * out, g_BCHW), _as_pixels_of(seen * inputs, x_BCHW)
    found = gradients(*pairs, like, asked, [False, True, False])[1]
    parts = found.view(PIXELS, out, seen, inputs, rows, width)
    total = torch.zeros_like(weight)
    for pixel in range(PIXELS):
        for col in range(cols):
            k, at = divmod(col + pixel - padding + seen * before, seen)
            total[..., col] += parts[pixel, :, at, :, :, k]
    return total


def of_columns(weight: torch.Tensor, how: How) -> tuple[torch.Tensor, How, int]:
    """Weight and orders of a transposed convolution that makes all columns of a pixel as its channels, and how many:
    1 where it makes them as they are."""
    inputs, out, rows, cols = weight.shape
    if cols == 1 or how.stride[1] != cols or how.padding[1] or how.dilation[1] != 1:
        return weight, how, 1
    weight = weight.permute(0, 3, 1, 2).reshape(inputs, cols * out, rows, 1)
    return weight.contiguous(memory_format=torch.channels_last), how._replace(stride=(how.stride[0], 1)), cols


def apart(made_BCHW: torch.Tensor, pixels: int) -> torch.Tensor:
    """Pixels of their own again, of a result without a graph. `data` is no view, so that an activation may overwrite
    what a function of autograd gives."""
    return _as_pixels_of(made_BCHW.shape[1] // pixels, made_BCHW).data


def _as_pixels_of(channels: int, x_BCHW: torch.Tensor) -> torch.Tensor:
    """The same rows in pixels of so many channels, where they lie."""
    batch, _, height, _ = x_BCHW.shape
    return x_BCHW.permute(0, 2, 3, 1).reshape(batch, height, -1, channels).permute(0, 3, 1, 2)


@cache
def _has_wide_vectors() -> bool:
    """Whether oneDNN takes AVX-512, which `ONEDNN_MAX_CPU_ISA` may forbid it."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "ONEDNN_MAX_CPU_ISA" not in os.environ
