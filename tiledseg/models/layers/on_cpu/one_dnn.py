"""oneDNN's convolutions on a CPU, whose gradients are each computed by themselves, by the quickest kernel there is.

torch asks oneDNN for the gradients of a weight and of a bias at once, for which oneDNN takes a slower kernel; it leaves
a convolution of single pixels to its BLAS where there is one thread; and oneDNN sums a weight's gradient over a few
large images slower than over many small ones, of which a kernel that does not reach over its stride sees no difference;
over one image of few channels it sums on one core alone. The gradient of an input is a convolution too, by the weight
turned about. Where vectors would be half empty, pixels are seen as channels (`pixels_as_channels`).
Outputs are those that torch gets of oneDNN, to the last bit, also where torch would ask its BLAS; gradients to
rounding, the same on any number of ranks.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from tiledseg.models.layers.on_cpu.beside import can_share, side_by_side
from tiledseg.models.layers.on_cpu.followed import is_followed
from tiledseg.models.layers.on_cpu.how import How, gradients
from tiledseg.models.layers.on_cpu.pixels_as_channels import (
    PIXELS,
    apart,
    of_columns,
    of_pairs,
    of_two,
    takes_pairs,
    takes_two,
)
from tiledseg.models.rerun.homes import hooks_around
from tiledseg.models.rerun.looking import Looking

_IMAGES = 16  # that the rows of one are seen as
_BANDS = 8  # of rows, whose sums are added up in one order whoever has computed them
_CHANNELS = 16  # of a block
_WORTH_BANDS = 1 << 20  # values: less is summed before other threads have woken


def convolved(x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: How) -> torch.Tensor:
    """As `functional.conv2d` or `conv_transpose2d`, of float32 on a CPU, in one group."""
    if not _wants_gradients(x_BCHW, weight, bias):
        return _forward(x_BCHW, weight, bias, how)
    made: torch.Tensor = _Convolved.apply(x_BCHW, weight, bias, how, None)
    return made


def _wants_gradients(*tensors: torch.Tensor | None) -> bool:
    """Of a frozen weight too, where its input or bias has some."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _forward(
    x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: How, negative_slope: float | None = None
) -> torch.Tensor:
    if how.transposed:
        return _computed_transposed(x_BCHW, weight, bias, how)
    return _computed(x_BCHW, weight, bias, how, negative_slope)


def activated(
    x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: How, negative_slope: float
) -> torch.Tensor:
    """What leaky ReLU makes of the output, to the last bit, in one pass over memory: oneDNN multiplies what is below 0
    before it writes it. Not transposed. Where gradients are taken, `sloped` has to follow, which has the activation's
    part of them."""
    if not _wants_gradients(x_BCHW, weight, bias):
        return _computed(x_BCHW, weight, bias, how, negative_slope)
    made: torch.Tensor = _Convolved.apply(x_BCHW, weight, bias, how, negative_slope)
    return made


def sloped(y_BCHW: torch.Tensor, negative_slope: float) -> torch.Tensor:
    """What `activated` has given, as it is. It keeps it, as an activation that writes over its input does."""
    made: torch.Tensor = _Sloped.apply(y_BCHW, negative_slope) if y_BCHW.requires_grad else y_BCHW
    return made


def _computed(
    x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: How, negative_slope: float | None
) -> torch.Tensor:
    stride, two = how.stride, how.dense and takes_two(x_BCHW, weight, how.padding)
    if two:
        weight, bias, stride = of_two(weight), None if bias is None else bias.repeat(PIXELS), (1, PIXELS)
    asked = how.padding, stride, how.dilation, 1
    if negative_slope is None:
        made = torch.mkldnn_convolution(x_BCHW, weight, bias, *asked)
    else:
        after = "leaky_relu", [negative_slope], ""
        made = torch.ops.mkldnn._convolution_pointwise(x_BCHW, weight, bias, *asked, *after)
    return apart(made, PIXELS) if two else made


def _computed_transposed(
    x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: How
) -> torch.Tensor:
    if is_followed():
        return functional.conv_transpose2d(x_BCHW, weight, bias, how.stride, how.padding, dilation=how.dilation)
    weight, how, columns = of_columns(weight, how)
    bias = None if bias is None else bias.repeat(columns)
    asked = how.padding, (0, 0), how.stride, how.dilation, 1
    made = torch.ops.mkldnn._convolution_transpose_pointwise(x_BCHW, weight, bias, *asked, "none", [], "")
    return apart(made, columns)


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BCHW: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: How,
        negative_slope: float | None,
    ) -> torch.Tensor:
        ctx.how, hooks = how, hooks_around()
        if hooks is not None and isinstance(hooks.pack, Looking):
            hooks.pack(x_BCHW)  # which may have seen enough, before anything is computed, as of torch's own convolution
            hooks.pack(weight)
        else:
            ctx.save_for_backward(x_BCHW, weight)
        return _forward(x_BCHW, weight, bias, how, negative_slope)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_BCHW, weight = ctx.saved_tensors
        g_BCHW = g_BCHW.contiguous(memory_format=torch.channels_last)
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx_BCHW = _of_input(g_BCHW, x_BCHW, weight, ctx.how) if wants_input else None
        dweight = _of_weight(g_BCHW, x_BCHW, weight, ctx.how) if wants_weight else None
        return dx_BCHW, dweight, g_BCHW.sum((0, 2, 3)) if wants_bias else None, None, None


class _Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_BCHW: torch.Tensor, negative_slope: float) -> torch.Tensor:
        ctx.negative_slope = negative_slope
        ctx.mark_dirty(y_BCHW)
        ctx.save_for_backward(y_BCHW)
        return y_BCHW

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y_BCHW,) = ctx.saved_tensors
        return torch.ops.aten.leaky_relu_backward(g_BCHW, y_BCHW, ctx.negative_slope, True), None


def _of_input(g_BCHW: torch.Tensor, x_BCHW: torch.Tensor, weight: torch.Tensor, how: How) -> torch.Tensor:
    if how.transposed:
        return _forward(g_BCHW, weight, None, how._replace(transposed=False))
    if how.dense:
        padding = tuple(size - 1 - each for size, each in zip(weight.shape[2:], how.padding, strict=True))
        back = weight.transpose(0, 1)
        if min(padding) >= 0 and (math.prod(back.shape[2:]) == 1 or takes_two(g_BCHW, back, padding)):
            back = back.flip(2, 3).contiguous(memory_format=torch.channels_last)
            return _forward(g_BCHW, back, None, how._replace(padding=padding))
    return gradients(g_BCHW, x_BCHW, weight, how, [True, False, False])[0]


def _of_weight(g_BCHW: torch.Tensor, x_BCHW: torch.Tensor, weight: torch.Tensor, how: How) -> torch.Tensor:
    if how.transposed:  # the convolution from its output to its input has the same weight
        g_BCHW, x_BCHW = x_BCHW, g_BCHW
    (rows, step), reaches = (g_BCHW.shape[2], how.stride[0]), how.padding[0] or weight.shape[2] > how.stride[0]
    if not reaches and x_BCHW.shape[2] == rows * step:
        pieces = math.gcd(rows, _IMAGES)
        g_BCHW, x_BCHW = _rows_as_images(g_BCHW, pieces), _rows_as_images(x_BCHW, pieces)
    if _on_one_core(g_BCHW, x_BCHW) and can_share():
        bands = itertools.pairwise(_cuts(rows, how))
        sums = side_by_side([partial(_of_rows, g_BCHW, x_BCHW, weight, how, *band) for band in bands])
        return torch.stack(sums).sum(0)
    return _summed(g_BCHW, x_BCHW, weight, how)


def _on_one_core(g_BCHW: torch.Tensor, x_BCHW: torch.Tensor) -> bool:
    """Whether oneDNN would use one core: what it deals out are images and blocks of channels, not pixels."""
    blocks = math.prod(math.ceil(each.shape[1] / _CHANNELS) for each in (g_BCHW, x_BCHW))
    return x_BCHW.shape[0] * blocks == 1 and x_BCHW.numel() >= _WORTH_BANDS


def _cuts(rows: int, how: How) -> list[int]:
    """Where bands of output rows begin and end: equal ones, and apart from them the first and last rows, for which
    padding is read."""
    edge = min(-(-how.padding[0] // how.stride[0]), rows // 2)
    inner = rows - 2 * edge
    return sorted({0, rows, *(edge + inner * k // _BANDS for k in range(_BANDS + 1))})


def _of_rows(
    g_BCHW: torch.Tensor, x_BCHW: torch.Tensor, weight: torch.Tensor, how: How, begin: int, stop: int
) -> torch.Tensor:
    """The weight's gradient by rows [begin, stop) of the output. Rows of one image lie in one piece, so that nothing is
    copied but rows beside padding."""
    low = begin * how.stride[0] - how.padding[0]
    high = (stop - 1) * how.stride[0] - how.padding[0] + (weight.shape[2] - 1) * how.dilation[0] + 1
    height = x_BCHW.shape[2]
    read_BCHW = x_BCHW[:, :, max(low, 0) : min(high, height)]
    if low < 0 or high > height:
        read_BCHW = functional.pad(read_BCHW, (0, 0, max(-low, 0), max(high - height, 0)))
    how = how._replace(padding=(0, how.padding[1]))
    return _summed(g_BCHW[:, :, begin:stop], read_BCHW, weight, how)


def _summed(g_BCHW: torch.Tensor, x_BCHW: torch.Tensor, weight: torch.Tensor, how: How) -> torch.Tensor:
    """The weight's gradient by one sum."""
    if how.dense and takes_pairs(g_BCHW, weight, how.padding):
        return of_pairs(g_BCHW, x_BCHW, weight, how)
    return gradients(g_BCHW, x_BCHW, weight, how, [False, True, False])[1]


def _rows_as_images(x_BCHW: torch.Tensor, pieces: int) -> torch.Tensor:
    """Each image as so many of fewer rows, where it lies."""
    batch, channels, height, width = x_BCHW.shape
    rows_BHWC = x_BCHW.permute(0, 2, 3, 1).reshape(batch * pieces, height // pieces, width, channels)
    return rows_BHWC.permute(0, 3, 1, 2)
