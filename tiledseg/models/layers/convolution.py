"""A convolution that gives a pixel the same bits whatever the size of the tile around it.

For a float32 convolution on a CPU torch takes its BLAS up to 20480 values, and oneDNN above. The two add in different
orders. oneDNN adds in one order for all pixels and all sizes, so it is taken for every size (decision 0002).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.geometry.layers.convolutions import FixedFilters
from tiledseg.models.layers.block import BlockModule, BlockPlace
from tiledseg.models.normalise import Ranks

Pair = tuple[int, ...]
Convolve = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Pair, Pair | str, Pair, int], torch.Tensor]


def convolve(
    x_BCHW: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Pair,
    padding: Pair | str,
    dilation: Pair,
    groups: int,
) -> torch.Tensor:
    """Convolve as `functional.conv2d` does, by oneDNN for any size where it can."""
    x_BCHW, stride = thinned(x_BCHW, weight, stride, padding)
    if isinstance(padding, str) or groups > 1 or not _has_steady_kernel(x_BCHW, weight):
        return functional.conv2d(x_BCHW, weight, bias, stride, padding, dilation, groups)
    if x_BCHW.shape[1] == 1:
        # One channel is the same memory in both layouts, and oneDNN takes the other one: two copies at half the weight.
        x_BCHW, weight = x_BCHW.expand(-1, 2, -1, -1), (weight / 2).repeat(1, 2, 1, 1)
        weight = weight.contiguous(memory_format=torch.channels_last)
    return torch.mkldnn_convolution(x_BCHW, weight, bias, padding, stride, dilation, groups)


def convolve_transposed(
    x_BCHW: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    groups: int,
    dilation: Pair,
) -> torch.Tensor:
    """Convolve as `functional.conv_transpose2d` does, by oneDNN for any size where it can."""
    if groups > 1 or any(output_padding) or not _has_steady_kernel(x_BCHW, weight):
        return functional.conv_transpose2d(x_BCHW, weight, bias, stride, padding, output_padding, groups, dilation)
    made: torch.Tensor = _Transposed.apply(x_BCHW, weight, bias, stride, padding, dilation)
    return made


class _Transposed(torch.autograd.Function):
    """oneDNN's transposed convolution of one group, with the gradients of the convolution it is the adjoint of."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BCHW: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
    ) -> torch.Tensor:
        ctx.options = padding, stride, dilation
        ctx.save_for_backward(x_BCHW, weight)
        convolution = torch.ops.mkldnn._convolution_transpose_pointwise
        made: torch.Tensor = convolution(x_BCHW, weight, bias, padding, (0, 0), stride, dilation, 1, "none", [], "")
        return made

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


def by_torch(
    x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Pair, padding: Pair | str, *more: Any
) -> torch.Tensor:
    """Convolve as `functional.conv2d` does, by the kernel that torch takes; `more`: dilation and groups."""
    x_BCHW, stride = thinned(x_BCHW, weight, stride, padding)
    return functional.conv2d(x_BCHW, weight, bias, stride, padding, *more)


_VECTOR = 16  # float32 values of the widest registers


def thinned(x_BCHW: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair | str) -> tuple[torch.Tensor, Pair]:
    """Return the pixels that a convolution of single pixels reads on a CPU, and its stride over them, 1.

    Such a convolution with a stride, on channels last, has a fault in oneDNN (torch 2.13; uxlfoundation/oneDNN#6035).
    The gradient of its weight writes beyond its memory where there are fewer channels than a vector has values. So
    oneDNN sees no stride, unless channels fill vectors.
    """
    skips = max(weight.shape[2:]) == 1 < max(stride) and set(padding) == {0}
    if x_BCHW.device.type != "cpu" or not skips or x_BCHW.shape[1] % _VECTOR == 0:
        return x_BCHW, stride
    some_BCHW = x_BCHW[:, :, :: stride[0], :: stride[1]]
    return some_BCHW.contiguous(memory_format=torch.channels_last), (1, 1)


def _has_steady_kernel(x_BCHW: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if oneDNN computes these as they are: it has no float64, and torch hands it lower precision anyway.

    Never within torch.compile, which can neither ask for oneDNN nor trace its convolution: it chooses kernels itself.
    """
    if torch.compiler.is_compiling():
        return False
    on = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    single = x_BCHW.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return on and single and x_BCHW.device.type == "cpu"


class ChosenConvolution(nn.Conv2d):
    """nn.Conv2d by `compute`."""

    compute: Convolve

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.compute(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class SteadyConvolution(ChosenConvolution):
    """A convolution by the kernel that does not depend on the tensor's size, where there is one."""

    compute = staticmethod(convolve)


class TorchConvolution(ChosenConvolution):
    """A convolution by the kernel that torch takes, for modules of others."""

    compute = staticmethod(by_torch)


class OneDnnTransposed(nn.ConvTranspose2d):
    """nn.ConvTranspose2d by `convolve_transposed`."""

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        if output_size is not None or self.padding_mode != "zeros":
            return super().forward(input, output_size)
        how = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return convolve_transposed(input, self.weight, self.bias, *how)  # type: ignore[arg-type]  # a str is refused


class FilterBank(BlockModule):
    """Each channel convolved with each filter of a bank, zeros around; nobody trains them, no checkpoint holds them."""

    filters: torch.Tensor

    def __init__(self, channels: int, bank: FixedFilters) -> None:
        super().__init__(bank)
        self.channels, self.padding = channels, (bank.kernel // 2,) * 2
        kernels = torch.tensor(bank.filters, dtype=torch.float64)[:, None].repeat(channels, 1, 1, 1)
        self.register_buffer("filters", kernels.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x_BCHW, self.filters, padding=self.padding, groups=self.channels)

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        padding = place.own_padding(self.padding)
        return functional.conv2d(x_BCHW, self.filters, padding=padding, groups=self.channels)
