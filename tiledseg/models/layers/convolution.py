"""A convolution that gives a pixel the same bits whatever the size of the tile around it.

torch takes one of two kernels for a float32 convolution on a CPU: for tensors of up to 20480 values a matrix product of
its BLAS, for larger ones oneDNN's. They add in different orders, and some BLAS do so even from one pixel to the next:
MKL's, on processors that are not Intel's, by where in memory a pixel's values begin. oneDNN's adds in one order for all
pixels, so it is taken for every size (decision 0002).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from tiledseg.geometry.layers.convolutions import FixedFilters
from tiledseg.geometry.layers.layer import Layer
from tiledseg.models.layers.block import BlockModule, Place
from tiledseg.models.layers.on_cpu.followed import is_followed
from tiledseg.models.layers.on_cpu.how import How, Pair
from tiledseg.models.layers.on_cpu.one_dnn import activated, convolved
from tiledseg.models.normalise import Ranks

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
    """As `functional.conv2d`, by the kernel that does not look at the tensor's size where there is one."""
    if isinstance(padding, str) or groups > 1 or not _has_steady_kernel(x_BCHW, weight):
        return by_torch(x_BCHW, weight, bias, stride, padding, dilation, groups)
    x_BCHW, weight, stride = _as_seen(x_BCHW, weight, stride, padding)
    return convolved(x_BCHW, weight, bias, How(stride, padding, dilation))


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
    """As `functional.conv_transpose2d`, to the last bit; its gradients to rounding."""
    if groups > 1 or any(output_padding) or not _has_steady_kernel(x_BCHW, weight):
        return functional.conv_transpose2d(x_BCHW, weight, bias, stride, padding, output_padding, groups, dilation)
    return convolved(x_BCHW, weight, bias, How(stride, padding, dilation, transposed=True))


def _as_seen(
    x_BCHW: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair | str
) -> tuple[torch.Tensor, torch.Tensor, Pair]:
    """Input, weight and stride, as oneDNN is given them."""
    x_BCHW, stride = thinned(x_BCHW, weight, stride, padding)
    if x_BCHW.shape[1] == 1:
        # One channel lies alike in both layouts and is taken for the other one: it is seen twice, at half its weight.
        x_BCHW, weight = x_BCHW.expand(-1, 2, -1, -1), _seen_twice(weight)
    return x_BCHW, weight, stride


def by_torch(
    x_BCHW: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Pair,
    padding: Pair | str,
    dilation: Pair,
    groups: int,
) -> torch.Tensor:
    """As `functional.conv2d`, by the kernel that torch takes."""
    x_BCHW, stride = thinned(x_BCHW, weight, stride, padding)
    return functional.conv2d(x_BCHW, weight, bias, stride, padding, dilation, groups)


_VECTOR = 16  # float32 values of the widest registers


def thinned(x_BCHW: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair | str) -> tuple[torch.Tensor, Pair]:
    """What a convolution of single pixels reads of its input on a CPU, and its stride over that: 1.

    oneDNN's gradient of the weight of such a one with a stride, on channels last, writes beyond its memory where there
    are fewer channels than a vector has values (torch 2.13; uxlfoundation/oneDNN#6035): it sees no stride, unless
    channels fill vectors.
    """
    skips = max(weight.shape[2:]) == 1 < max(stride) and set(padding) == {0}
    if x_BCHW.device.type != "cpu" or not skips or x_BCHW.shape[1] % _VECTOR == 0:
        return x_BCHW, stride
    some_BCHW = x_BCHW[:, :, :: stride[0], :: stride[1]]
    return some_BCHW.contiguous(memory_format=torch.channels_last), (1, 1)


def _has_steady_kernel(x_BCHW: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN computes these as they are: it has no float64, and lower precision it gets from torch anyway.

    Never within torch.compile, which can neither ask for oneDNN nor trace its convolution: it chooses kernels itself.
    """
    if torch.compiler.is_compiling():
        return False
    on = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    single = x_BCHW.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return on and single and x_BCHW.device.type == "cpu"


def _seen_twice(weight: torch.Tensor) -> torch.Tensor:
    return (weight / 2).repeat(1, 2, 1, 1).contiguous(memory_format=torch.channels_last)


class ChosenConvolution(nn.Conv2d):
    """nn.Conv2d by `compute`."""

    compute: Convolve

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.compute(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class SteadyConvolution(ChosenConvolution):
    """By the kernel that does not look at the tensor's size where there is one."""

    compute = staticmethod(convolve)

    def activates(self, x_BCHW: torch.Tensor) -> bool:
        """Whether `activated` can be asked for, of this input."""
        if torch.is_grad_enabled() and is_followed():
            return False
        return not isinstance(self.padding, str) and self.groups == 1 and _has_steady_kernel(x_BCHW, self.weight)

    def activated(self, x_BCHW: torch.Tensor, negative_slope: float) -> torch.Tensor:
        """See `one_dnn.activated`."""
        assert not isinstance(self.padding, str), "it is asked first whether it can"
        x_BCHW, weight, stride = _as_seen(x_BCHW, self.weight, self.stride, self.padding)
        return activated(x_BCHW, weight, self.bias, How(stride, self.padding, self.dilation), negative_slope)


class TorchConvolution(ChosenConvolution):
    """By the kernel that torch takes: what somebody else's is taken for."""

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
        super().__init__()
        self.channels, self.bank = channels, bank
        kernels = torch.tensor(bank.filters, dtype=torch.float64)[:, None].repeat(channels, 1, 1, 1)
        self.register_buffer("filters", kernels.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self._filtered(x_BCHW, (self.bank.kernel // 2,) * 2)

    @property
    def description(self) -> Layer:
        return self.bank

    def on_block(self, place: Place, ranks: Ranks, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        return self._filtered(x_BCHW, place.own_padding((self.bank.kernel // 2,) * 2))

    def _filtered(self, x_BCHW: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
        return functional.conv2d(x_BCHW, self.filters, padding=padding, groups=self.channels)
