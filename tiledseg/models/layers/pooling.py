"""Pooling whose results do not depend on how an image is cut, and whose gradients are right on a GPU.

Max pooling keeps no indices: torch's take 8 bytes each, and count pixels of the local tensor. `MaxPoolModule`
recomputes them in its backward pass, by the same kernel, from its input, which is kept anyway. `MaxIndicesModule` gives
positions in the window, row by row, in one byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.geometry.layers import resampling as geometry
from tiledseg.models.layers.block import BlockModule, BlockPlace

Pair = tuple[int, int]
Sizes = tuple[Pair, Pair, Pair, Pair]  # kernel, stride, padding, dilation


class MaxPoolModule(nn.MaxPool2d):
    """nn.MaxPool2d by `max_pool`, without `ceil_mode` and `return_indices`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return max_pool(input, (pair(self.kernel_size), pair(self.stride), pair(self.padding), pair(self.dilation)))


def max_pool(x_BCHW: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Return the maxima of windows; padding counts as minus infinity."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x_BCHW.requires_grad):
        return functional.max_pool2d(x_BCHW, *sizes)
    return _MaxPooled.apply(x_BCHW, sizes)


def pair(value: int | Sequence[int]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class _MaxPooled(torch.autograd.Function):
    """A max pooling that keeps only its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_BCHW: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(x_BCHW)
        return functional.max_pool2d(x_BCHW, *sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x_BCHW,) = ctx.saved_tensors
        indices_BCHW = torch.ops.aten.max_pool2d_with_indices(x_BCHW, *ctx.sizes)[1]
        aten = torch.ops.aten.max_pool2d_with_indices_backward
        return aten(g_BCHW, x_BCHW, *ctx.sizes, False, indices_BCHW), None


class AveragePoolModule(nn.AvgPool2d):
    """nn.AvgPool2d by `average_pool`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        options = self.ceil_mode, self.count_include_pad, self.divisor_override
        return average_pool(input, self.kernel_size, self.stride, self.padding, *options)


def average_pool(
    input: torch.Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """Average as `functional.avg_pool2d`, with its arguments. On a GPU pad the tensor first: torch's gradient of a
    padded pooling in channels_last is wrong there (pytorch#188344, fixed after torch 2.13)."""
    kernel, step, (top, left) = pair(kernel_size), pair(stride or kernel_size), pair(padding)
    if input.device.type == "cpu" or not (top or left) or ceil_mode:
        options = ceil_mode, count_include_pad, divisor_override
        return functional.avg_pool2d(input, kernel, step, (top, left), *options)
    border = left, left, top, top
    if count_include_pad or divisor_override is not None:
        return functional.avg_pool2d(functional.pad(input, border), kernel, step, divisor_override=divisor_override)
    sums, counts = (
        functional.avg_pool2d(functional.pad(x, border), kernel, step, divisor_override=1)
        for x in (input, torch.ones_like(input[:1, :1]))
    )
    return sums / counts


class MaxIndicesModule(BlockModule):
    """The position of each maximum in its window, uint8; of equal values the first, as in torch's pooling. Positions
    beyond the image's border count too."""

    fill = float("-inf")

    def __init__(self, kernel: int, stride: int, padding: int, dilation: int) -> None:
        super().__init__(geometry.MaxIndices(kernel, stride, padding, dilation))
        self.sizes = kernel, stride, padding, dilation

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        (x_BCHW,), (kernel, stride, own, dilation) = inputs_BCHW, self.sizes
        padding = place.own_padding((own, own))
        with torch.no_grad():
            found_BCHW = functional.max_pool2d(x_BCHW, kernel, stride, padding, dilation, return_indices=True)[1]
            rows_H, cols_W = (
                torch.arange(size, device=x_BCHW.device) * stride - before
                for size, before in zip(found_BCHW.shape[2:], padding, strict=True)
            )
            row = (found_BCHW // x_BCHW.shape[3] - rows_H[:, None]) // dilation
            col = (found_BCHW % x_BCHW.shape[3] - cols_W) // dilation
            return (row * kernel + col).to(torch.uint8).contiguous(memory_format=torch.channels_last)


class MaxUnpoolModule(BlockModule):
    """Unpooling: each value at its index in its window of kernel x kernel outputs, zeros elsewhere."""

    def __init__(self, kernel: int) -> None:
        super().__init__(geometry.MaxUnpool(kernel))
        self.kernel = kernel

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        return place.crop_given(_Unpooled.apply(*inputs_BCHW, self.kernel), self.rows, self.cols)


class _Unpooled(torch.autograd.Function):
    """An unpooling that keeps only the indices. Backward takes each value's gradient from its place."""

    @staticmethod
    def forward(ctx: Any, x_BCHW: torch.Tensor, indices_BCHW: torch.Tensor, kernel: int) -> torch.Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(indices_BCHW)
        batch, channels, height, width = x_BCHW.shape
        y_BCHW = torch.empty(
            (batch, channels, height * kernel, width * kernel),
            dtype=x_BCHW.dtype,
            device=x_BCHW.device,
            memory_format=torch.channels_last,
        )
        for place, part in _places(y_BCHW, kernel):
            part.copy_(torch.where(indices_BCHW == place, x_BCHW, x_BCHW.new_zeros(())))
        return y_BCHW

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (indices_BCHW,) = ctx.saved_tensors
        dx_BCHW = torch.zeros_like(indices_BCHW, dtype=g_BCHW.dtype)
        for place, part in _places(g_BCHW, ctx.kernel):
            torch.where(indices_BCHW == place, part, dx_BCHW, out=dx_BCHW)
        return dx_BCHW, None, None


def _places(y_BCHW: torch.Tensor, kernel: int) -> list[tuple[int, torch.Tensor]]:
    """Return, for each position in a window, the view of that pixel of all windows."""
    return [(place, y_BCHW[:, :, place // kernel :: kernel, place % kernel :: kernel]) for place in range(kernel**2)]
