"""Convolutions that give a pixel the same bits in a tile of any size.

For a float32 convolution on a CPU torch uses its BLAS up to 20480 values and oneDNN above, which add in different
orders. oneDNN adds in one order for all pixels and sizes, so it is used for every size (decision 0002).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.geometry.layers.convolutions import FixedFilters
from tiledseg.models.layers.block import BlockModule, BlockPlace

Pair = tuple[int, ...]


def convolve(x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    """Convolve as `functional.conv2d` does, by oneDNN if it can. `how`: stride, padding, dilation and groups."""
    stride, padding, dilation, groups = how
    x_BCHW, stride = thinned(x_BCHW, weight, stride, padding)
    if isinstance(padding, str) or groups > 1 or not _has_steady_kernel(x_BCHW, weight):
        return functional.conv2d(x_BCHW, weight, bias, stride, padding, dilation, groups)
    if x_BCHW.shape[1] == 1:
        # With one channel both layouts have the same strides, and oneDNN takes channels first: double it, halve
        # weights.
        x_BCHW, weight = x_BCHW.expand(-1, 2, -1, -1), (weight / 2).repeat(1, 2, 1, 1)
        weight = weight.contiguous(memory_format=torch.channels_last)
    return torch.mkldnn_convolution(x_BCHW, weight, bias, padding, stride, dilation, groups)


def convolve_transposed(
    x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any
) -> torch.Tensor:
    """Convolve as `functional.conv_transpose2d` does, by oneDNN if it can. `how`: stride, padding, output padding,
    groups and dilation."""
    stride, padding, output_padding, groups, dilation = how
    if groups > 1 or any(output_padding) or not _has_steady_kernel(x_BCHW, weight):
        return functional.conv_transpose2d(x_BCHW, weight, bias, *how)
    return _Transposed.apply(x_BCHW, weight, bias, stride, padding, dilation)


class _Transposed(torch.autograd.Function):
    """oneDNN's transposed convolution of one group, differentiated as the adjoint of a convolution."""

    @staticmethod
    def forward(ctx: Any, x_BCHW: torch.Tensor, weight: torch.Tensor, bias: Any, *how: Pair) -> torch.Tensor:
        stride, padding, dilation = how
        ctx.options = padding, stride, dilation
        ctx.save_for_backward(x_BCHW, weight)
        convolution = torch.ops.mkldnn._convolution_transpose_pointwise
        return convolution(x_BCHW, weight, bias, padding, (0, 0), stride, dilation, 1, "none", [], "")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x_BCHW, weight), (padding, stride, dilation) = ctx.saved_tensors, ctx.options
        g_BCHW = g_BCHW.contiguous(memory_format=torch.channels_last)
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx_BCHW = dweight = None
        if wants_input:
            dx_BCHW = torch.mkldnn_convolution(g_BCHW, weight, None, padding, stride, dilation, 1)
        if wants_weight:
            options = list(stride), list(padding), list(dilation), False, [0, 0], 1
            gradients = torch.ops.aten.convolution_backward
            dweight = gradients(x_BCHW, g_BCHW, weight, None, *options, [False, True, False])[1]
        return dx_BCHW, dweight, g_BCHW.sum((0, 2, 3)) if wants_bias else None, None, None, None


def by_torch(x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    """Convolve by `functional.conv2d`, with torch's choice of kernel; `how` as for `convolve`."""
    x_BCHW, stride = thinned(x_BCHW, weight, *how[:2])
    return functional.conv2d(x_BCHW, weight, bias, stride, *how[1:])


_VECTOR = 16  # float32 values in the widest register


def thinned(x_BCHW: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair | str) -> tuple[torch.Tensor, Pair]:
    """Return the pixels that a 1 x 1 convolution with a stride reads on a CPU, and the stride 1; else input and stride.

    On channels last oneDNN has a fault (torch 2.13; uxlfoundation/oneDNN#6035): the gradient of such a convolution's
    weight writes beyond its memory if channels do not fill vectors. So oneDNN gets no stride then.
    """
    skips = max(weight.shape[2:]) == 1 < max(stride) and set(padding) == {0}
    if x_BCHW.device.type != "cpu" or not skips or x_BCHW.shape[1] % _VECTOR == 0:
        return x_BCHW, stride
    some_BCHW = x_BCHW[:, :, :: stride[0], :: stride[1]]
    return some_BCHW.contiguous(memory_format=torch.channels_last), (1, 1)


def _has_steady_kernel(x_BCHW: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True for tensors that oneDNN computes: float32 on the CPU. (It has no float64; lower precision torch gives
    it anyway.) False under torch.compile, which cannot trace oneDNN's convolution and chooses kernels itself."""
    if torch.compiler.is_compiling():
        return False
    on = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    single = x_BCHW.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return on and single and x_BCHW.device.type == "cpu"


class ChosenConvolution(nn.Conv2d):
    """nn.Conv2d by `compute`."""

    compute: Callable[..., torch.Tensor]

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.compute(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class SteadyConvolution(ChosenConvolution):
    """A convolution by a kernel that does not depend on the tensor's size, if there is one."""

    compute = staticmethod(convolve)


class TorchConvolution(ChosenConvolution):
    """A convolution with torch's choice of kernel, for users' modules."""

    compute = staticmethod(by_torch)


class OneDnnTransposed(nn.ConvTranspose2d):
    """nn.ConvTranspose2d by `convolve_transposed`."""

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        if output_size is not None or self.padding_mode != "zeros":
            return super().forward(input, output_size)
        how = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return convolve_transposed(input, self.weight, self.bias, *how)


class FilterBank(BlockModule):
    """Convolution of each channel with each constant filter of a bank, zero padded. Checkpoints leave the filters
    out."""

    filters: torch.Tensor

    def __init__(self, channels: int, bank: FixedFilters) -> None:
        super().__init__(bank)
        self.channels, self.padding = channels, (bank.kernel // 2,) * 2
        kernels = torch.tensor(bank.filters, dtype=torch.float64)[:, None].repeat(channels, 1, 1, 1)
        self.register_buffer("filters", kernels.to(torch.get_default_dtype()), persistent=False)

    def on_block(self, place: BlockPlace, ranks: Any, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        padding = place.own_padding(self.padding)
        return functional.conv2d(inputs_BCHW[0], self.filters, padding=padding, groups=self.channels)
