"""oneDNN's convolutions on a CPU, whose gradients are each computed by themselves, by the quickest kernel there is.

torch asks oneDNN for the gradients of a weight and of a bias at once, for which oneDNN takes a slower kernel; it leaves
a convolution of single pixels to its BLAS where there is one thread; and oneDNN sums a weight's gradient over a few
large images slower than over many small ones, of which a kernel that does not reach over its stride sees no difference.
Outputs are those of torch, to the last bit; gradients to rounding, the same on any number of ranks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tiledseg.models.rerun.homes import hooks_around
from tiledseg.models.rerun.looking import Looking

Pair = tuple[int, ...]
_IMAGES = 16  # that the rows of one are seen as


class How(NamedTuple):
    """What a convolution is told besides its tensors."""

    stride: Pair
    padding: Pair
    dilation: Pair
    transposed: bool = False


def convolved(x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: How) -> torch.Tensor:
    """As `functional.conv2d` or `conv_transpose2d`, of float32 on a CPU, in one group."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return _forward(x_BCHW, weight, bias, how)
    made: torch.Tensor = _Convolved.apply(x_BCHW, weight, bias, how)
    return made


def _forward(x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: How) -> torch.Tensor:
    if how.transposed:
        return functional.conv_transpose2d(x_BCHW, weight, bias, how.stride, how.padding, dilation=how.dilation)
    return torch.mkldnn_convolution(x_BCHW, weight, bias, how.padding, how.stride, how.dilation, 1)


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: How
    ) -> torch.Tensor:
        ctx.how, hooks = how, hooks_around()
        if hooks is not None and isinstance(hooks.pack, Looking):
            hooks.pack(x_BCHW)  # which may have seen enough, before anything is computed, as of torch's own convolution
            hooks.pack(weight)
        else:
            ctx.save_for_backward(x_BCHW, weight)
        return _forward(x_BCHW, weight, bias, how)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_BCHW, weight = ctx.saved_tensors
        g_BCHW = g_BCHW.contiguous(memory_format=torch.channels_last)
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dx_BCHW = _of_input(g_BCHW, x_BCHW, weight, ctx.how) if wants_input else None
        dweight = _of_weight(g_BCHW, x_BCHW, weight, ctx.how) if wants_weight else None
        return dx_BCHW, dweight, g_BCHW.sum((0, 2, 3)) if wants_bias else None, None


def _of_input(g_BCHW: torch.Tensor, x_BCHW: torch.Tensor, weight: torch.Tensor, how: How) -> torch.Tensor:
    if how.transposed:
        return _forward(g_BCHW, weight, None, how._replace(transposed=False))
    if how == How((1, 1), (0, 0), (1, 1)) and weight[0, 0].numel() == 1:
        return _forward(g_BCHW, weight.transpose(0, 1).contiguous(memory_format=torch.channels_last), None, how)
    return _gradients(g_BCHW, x_BCHW, weight, how, [True, False, False])[0]


def _of_weight(g_BCHW: torch.Tensor, x_BCHW: torch.Tensor, weight: torch.Tensor, how: How) -> torch.Tensor:
    if how.transposed:  # the convolution from its output to its input has the same weight
        g_BCHW, x_BCHW = x_BCHW, g_BCHW
    (rows, step), reaches = (g_BCHW.shape[2], how.stride[0]), how.padding[0] or weight.shape[2] > how.stride[0]
    if not reaches and x_BCHW.shape[2] == rows * step:
        pieces = math.gcd(rows, _IMAGES)
        g_BCHW, x_BCHW = _rows_as_images(g_BCHW, pieces), _rows_as_images(x_BCHW, pieces)
    return _gradients(g_BCHW, x_BCHW, weight, how, [False, True, False])[1]


def _gradients(
    g_BCHW: torch.Tensor, x_BCHW: torch.Tensor, weight: torch.Tensor, how: How, wanted: list[bool]
) -> tuple[torch.Tensor, ...]:
    """torch's, of input, weight and bias, of a convolution that is not transposed."""
    options = list(how.stride), list(how.padding), list(how.dilation), False, [0, 0], 1
    return torch.ops.aten.convolution_backward(g_BCHW, x_BCHW, weight, None, *options, wanted)


def _rows_as_images(x_BCHW: torch.Tensor, pieces: int) -> torch.Tensor:
    """Each image as so many of fewer rows, where it lies."""
    batch, channels, height, width = x_BCHW.shape
    rows_BHWC = x_BCHW.permute(0, 2, 3, 1).reshape(batch * pieces, height // pieces, width, channels)
    return rows_BHWC.permute(0, 3, 1, 2)
