"""Convolutions and norms of images of several times, whose channels stand one after the other, the first time first.

A tensor of the graph is (batch, times x channels, height, width). So times are channels to all that cuts images: halos,
blocks, stages and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.geometry.layers.convolutions import OverTimes
from tiledseg.models.layers.convolution import ChosenConvolution, Pair, convolve, convolve_transposed


class TimeSeries(nn.Module):
    """A module of (batch, channels, times, height, width) as one of (batch, times x channels, height, width), whose
    bands are all of the first time, then all of the second, and so on."""

    def __init__(self, module: nn.Module, times: int) -> None:
        super().__init__()
        self.whole, self.times = module, times
        self.train(module.training)

    def forward(self, x_BCHW: torch.Tensor) -> Any:
        return self.whole(x_BCHW.unflatten(1, (self.times, -1)).transpose(1, 2))


def _at_each(volume: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Compute the image of each time by itself, of (batch, times, channels, height, width)."""
    return compute(volume.flatten(0, 1)).unflatten(0, volume.shape[:2]).flatten(1, 2)


class TimesConvolution(ChosenConvolution):
    """A convolution of images of several times, by weights of (out, in, times, rows, columns), or those of an image at
    each time. Kernel, stride, padding and dilation are those of rows and columns; `along`: those of times."""

    times: OverTimes
    along: tuple[int, Any, int]  # stride, padding, dilation

    def compute(
        self,
        x_BCHW: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Pair,
        padding: Pair | str,
        dilation: Pair,
        groups: int,
    ) -> torch.Tensor:
        volume = x_BCHW.unflatten(1, (self.times.read, -1))
        step, ahead, gap = self.along
        if weight.dim() == 4 or (weight.shape[2], step, ahead) in ((1, 1, 0), (1, 1, "same")):
            each = weight if weight.dim() == 4 else weight.squeeze(2)
            return _at_each(volume, lambda x: convolve(x, each, bias, stride, padding, dilation, groups))
        x = volume.transpose(1, 2)
        if isinstance(ahead, str) and not isinstance(padding, str):  # of a block, whose rows and columns have theirs
            total = gap * (weight.shape[2] - 1) if ahead == "same" else 0
            x, ahead = functional.pad(x, (0, 0, 0, 0, total // 2, total - total // 2)), 0
        around: Any = padding if isinstance(padding, str) else (ahead, *padding)
        y = functional.conv3d(x, weight, bias, (step, *stride), around, (gap, *dilation), groups)
        return y.transpose(1, 2).flatten(1, 2)


class TimesTransposed(nn.ConvTranspose2d):
    """A transposed convolution of images of several times, as `TimesConvolution`; `along` has the output padding too,
    before the dilation."""

    times: OverTimes
    along: tuple[int, int, int, int]

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        how: Any = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return self.compute(input, self.weight, self.bias, *how)

    def compute(
        self,
        x_BCHW: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Pair,
        padding: Pair,
        output_padding: Pair,
        groups: int,
        dilation: Pair,
    ) -> torch.Tensor:
        """Convolve, with numbers of rows and columns as `functional.conv_transpose2d` takes them."""
        volume = x_BCHW.unflatten(1, (self.times.read, -1))
        if weight.dim() == 4:
            how = weight, bias, stride, padding, output_padding, groups, dilation
            return _at_each(volume, lambda x: convolve_transposed(x, *how))
        own: Any = stride, padding, output_padding
        one: Any = [(first, *each) for first, each in zip(self.along, (*own, dilation), strict=True)]
        y = functional.conv_transpose3d(volume.transpose(1, 2), weight, bias, one[0], one[1], one[2], groups, one[3])
        return y.transpose(1, 2).flatten(1, 2)


class TimesBatchNorm(nn.BatchNorm2d):
    """A batch norm of channels of several times, which are one channel of its own."""

    times: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _at_each(input.unflatten(1, (self.times, -1)), super().forward)


class TimesGroupNorm(nn.GroupNorm):
    """A norm of groups of channels: of all times together, or of `each` time by itself."""

    times: int
    each: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        volume = input.unflatten(1, (self.times, -1))
        if self.each:
            return _at_each(volume, super().forward)
        return super().forward(volume.transpose(1, 2)).transpose(1, 2).flatten(1, 2)
