"""Convolutions and norms of images of several times, whose channels follow one another, the first time first.

A tensor of the graph is (batch, times x channels, height, width): for halos, blocks, stages and memory, times are
channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.geometry.layers.convolutions import OverTimes
from tiledseg.models.layers.convolution import ChosenConvolution, convolve, convolve_transposed


class TimeSeries(nn.Module):
    """A wrapper that gives a module of (batch, channels, times, height, width) an input of (batch, times x channels,
    height, width): all bands of the first time, then of the second, and so on."""

    def __init__(self, module: nn.Module, times: int) -> None:
        super().__init__()
        self.whole, self.times = module, times
        self.train(module.training)

    def forward(self, x_BCHW: torch.Tensor) -> Any:
        return self.whole(x_BCHW.unflatten(1, (self.times, -1)).transpose(1, 2))


def _at_each(volume: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Compute the image of each time of (batch, times, channels, height, width) by itself."""
    return compute(volume.flatten(0, 1)).unflatten(0, volume.shape[:2]).flatten(1, 2)


class TimesConvolution(ChosenConvolution):
    """A convolution of images of several times, with weights (out, in, times, rows, columns), or (out, in, rows,
    columns) for each time by itself. Kernel, stride, padding and dilation are of rows and columns; `along`: of
    times."""

    times: OverTimes
    along: tuple[int, Any, int]  # stride, padding, dilation

    def compute(self, x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
        """Convolve; `how` as for `convolve`, of rows and columns."""
        stride, padding, dilation, groups = how
        volume = x_BCHW.unflatten(1, (self.times.read, -1))
        step, ahead, gap = self.along
        if weight.dim() == 4 or (weight.shape[2], step, ahead) in ((1, 1, 0), (1, 1, "same")):
            each = weight if weight.dim() == 4 else weight.squeeze(2)
            return _at_each(volume, lambda x: convolve(x, each, bias, *how))
        x = volume.transpose(1, 2)
        if isinstance(ahead, str) and not isinstance(padding, str):  # on a block, whose rows and columns are padded
            total = gap * (weight.shape[2] - 1) if ahead == "same" else 0
            x, ahead = functional.pad(x, (0, 0, 0, 0, total // 2, total - total // 2)), 0
        around: Any = padding if isinstance(padding, str) else (ahead, *padding)
        y = functional.conv3d(x, weight, bias, (step, *stride), around, (gap, *dilation), groups)
        return y.transpose(1, 2).flatten(1, 2)


class TimesTransposed(nn.ConvTranspose2d):
    """A transposed convolution of images of several times, as `TimesConvolution`. `along`: stride, padding, output
    padding, dilation."""

    times: OverTimes
    along: tuple[int, int, int, int]

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        how = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return self.compute(input, self.weight, self.bias, *how)

    def compute(self, x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
        """Convolve; `how` as for `convolve_transposed`, of rows and columns."""
        stride, padding, output_padding, groups, dilation = how
        volume = x_BCHW.unflatten(1, (self.times.read, -1))
        if weight.dim() == 4:
            return _at_each(volume, lambda x: convolve_transposed(x, weight, bias, *how))
        pairs = zip(self.along, (stride, padding, output_padding, dilation), strict=True)
        one: Any = [(first, *each) for first, each in pairs]
        y = functional.conv_transpose3d(volume.transpose(1, 2), weight, bias, one[0], one[1], one[2], groups, one[3])
        return y.transpose(1, 2).flatten(1, 2)


class TimesBatchNorm(nn.BatchNorm2d):
    """A batch norm whose channels each cover all times."""

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
