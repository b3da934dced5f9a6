"""Convolutions: the positions that they read, and their cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tiledseg.geometry.layers.layer import Layer, LayerCounts, LayerMemory, LayerWindow, Shape
from tiledseg.units import DOUBLE_BYTES


@dataclass(frozen=True)
class _Weighted(Layer):
    """The memory and value widths of convolutions."""

    kept_inputs = (0,)
    owns_gradient = True
    straightens_gradient = True
    is_cheap = False
    computes_in = gives_in = "run"

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        """Count the matrix of the values of each window, one group at a time.

        oneDNN has no float64 kernels, so PyTorch copies every window of the input into a matrix: nine times the input
        for a kernel of 3 x 3. This holds on a CPU; on a GPU it has not been measured.
        """
        return LayerMemory(unfolded=work // shape[0] * width * (width == DOUBLE_BYTES))


@dataclass(frozen=True)
class OverTimes:
    """The numbers of times whose channels follow one another: of the input, of the output, and read by an output."""

    read: int = 1
    made: int = 1
    taps: int = 1


ONE_TIME = OverTimes()


@dataclass(frozen=True)
class Convolution(_Weighted):
    """A convolution with `padding` zeros on each side, and `extra` more after (`same` with even kernels).

    `across`: the kernel along the other dim; None: the same. `times`: for channels of several times.
    """

    out_channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    bias: bool = True
    extra: int = 0
    groups: int = 1
    across: int | None = None
    times: OverTimes = ONE_TIME

    pads_with_zeros = True

    @cached_property
    def window(self) -> LayerWindow:
        return LayerWindow(self.stride, self.padding, self.dilation * (self.kernel - 1), self.extra)

    def counts(self, channels: int) -> LayerCounts:
        inner = (channels // (self.groups * self.times.read) or 1) * self.times.taps
        work = self.out_channels * inner * self.kernel * (self.across or self.kernel)
        return LayerCounts((work + self.out_channels * self.bias) // self.times.made, work)


@dataclass(frozen=True)
class FixedFilters(_Weighted):
    """A convolution of each channel with each of the constant `filters` (square, of odd side), zero padded.

    Output channel c * len(filters) + f is channel c by filter f. A filter's rows are given from the top.
    """

    filters: tuple[tuple[tuple[float, ...], ...], ...]

    pads_with_zeros = True

    @property
    def kernel(self) -> int:
        return len(self.filters[0])

    @cached_property
    def window(self) -> LayerWindow:
        return LayerWindow(1, self.kernel // 2, self.kernel - 1)

    def output_channels(self, channels: int, *others: int) -> int:
        return channels * len(self.filters)

    def counts(self, channels: int) -> LayerCounts:
        return LayerCounts(work=self.output_channels(channels) * self.kernel**2)


@dataclass(frozen=True)
class TransposedConvolution(_Weighted):
    """A transposed convolution. With stride = kernel, the default, each input becomes its own kernel x kernel block."""

    out_channels: int
    kernel: int = 2
    bias: bool = True
    stride: int | None = None
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1
    groups: int = 1
    across: int | None = None
    times: OverTimes = ONE_TIME

    @cached_property
    def window(self) -> LayerWindow:
        return LayerWindow(
            self.stride or self.kernel, self.padding, self.dilation * (self.kernel - 1), self.output_padding, True
        )

    def counts(self, channels: int) -> LayerCounts:
        inner = (channels // (self.groups * self.times.read) or 1) * self.times.taps
        weights = self.out_channels // self.times.made * inner * self.kernel * (self.across or self.kernel)
        work = weights * self.times.read // self.window.stride**2
        return LayerCounts(weights + self.out_channels * self.bias // self.times.made, work)

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        """Count the inputs' blocks before they are summed."""
        blocks = math.prod(shape) * self.kernel * (self.across or self.kernel)
        unfolded = blocks // (self.window.stride**2 * self.groups) * width
        return LayerMemory(unfolded=unfolded * (width == DOUBLE_BYTES))
