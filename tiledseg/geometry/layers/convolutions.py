"""Convolutions: the positions that they read, and their cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers.layer import Layer, Shape


@dataclass(frozen=True)
class SlidingWindow(Layer):
    """A layer that reads windows of one kernel, at a stride."""

    @property
    def sliding(self) -> tuple[int, int, int]:
        """Stride, padding, and reach (a window's extent in positions, less one)."""
        raise NotImplementedError

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        stride, padding, reach = self.sliding
        start = out.start * stride - padding
        return Interval(start, start + (out.size - 1) * stride + reach + 1)

    def output_edge(self, edge: int, *others: int) -> int:
        stride, padding, reach = self.sliding
        return -(-(edge + padding - reach // 2) // stride)

    @property
    def is_padded(self) -> bool:
        return self.sliding[1] > 0


@dataclass(frozen=True)
class _Weighted(Layer):
    """The memory and value widths of convolutions."""

    kept_inputs = (0,)
    owns_gradient = True
    straightens_gradient = True
    is_cheap = False

    def unfolded(self, work: int, shape: Shape) -> int:
        """Count each window's values, one group at a time."""
        return work // shape[0]

    def input_width(self, at_hand: int, width: int) -> int:
        return width

    def output_width(self, at_hand: int, width: int) -> int:
        return width


@dataclass(frozen=True)
class OverTimes:
    """The numbers of times whose channels follow one another: of the input, of the output, and read by an output."""

    read: int = 1
    made: int = 1
    taps: int = 1


ONE_TIME = OverTimes()


@dataclass(frozen=True)
class Convolution(SlidingWindow, _Weighted):
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

    @property
    def sliding(self) -> tuple[int, int, int]:
        return self.stride, self.padding, self.dilation * (self.kernel - 1)

    def output_size(self, size: int, *others: int) -> int:
        return (size + 2 * self.padding + self.extra - self.sliding[2] - 1) // self.stride + 1

    def parameters(self, channels: int) -> int:
        return (self.multiply_adds(channels) + self.out_channels * self.bias) // self.times.made

    def multiply_adds(self, channels: int) -> int:
        inner = (channels // (self.groups * self.times.read) or 1) * self.times.taps
        return self.out_channels * inner * self.kernel * (self.across or self.kernel)


@dataclass(frozen=True)
class FixedFilters(SlidingWindow, _Weighted):
    """A convolution of each channel with each of the constant `filters` (square, of odd side), zero padded.

    Output channel c * len(filters) + f is channel c by filter f. A filter's rows are given from the top.
    """

    filters: tuple[tuple[tuple[float, ...], ...], ...]

    pads_with_zeros = True

    @property
    def kernel(self) -> int:
        return len(self.filters[0])

    @property
    def sliding(self) -> tuple[int, int, int]:
        return 1, self.kernel // 2, self.kernel - 1

    def output_channels(self, channels: int, *others: int) -> int:
        return channels * len(self.filters)

    def multiply_adds(self, channels: int) -> int:
        return self.output_channels(channels) * self.kernel**2


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

    @property
    def step(self) -> int:
        return self.stride or self.kernel

    @property
    def reach(self) -> int:
        """The extent of one input's outputs in positions, less one."""
        return self.dilation * (self.kernel - 1)

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        """Return at least one input; if kernel < stride, an output between two blocks reads the inputs beside it."""
        first, last = out.start + self.padding, out.stop - 1 + self.padding
        start = min(-((self.reach - first) // self.step), first // self.step)
        stop = max(last // self.step, -((self.reach - last) // self.step)) + 1
        return Interval(start, stop)

    def output_size(self, size: int, *others: int) -> int:
        return (size - 1) * self.step - 2 * self.padding + self.reach + self.output_padding + 1

    def output_edge(self, edge: int, *others: int) -> int:
        return edge * self.step - self.padding + self.reach // 2 - (self.step - 1) // 2

    def computed(self, read: int, given: int) -> int:
        return (read - 1) * self.step + self.reach + 1

    @property
    def is_padded(self) -> bool:
        return self.padding > 0

    def parameters(self, channels: int) -> int:
        return self._weights(channels) + self.out_channels * self.bias // self.times.made

    def multiply_adds(self, channels: int) -> int:
        return self._weights(channels) * self.times.read // self.step**2

    def unfolded(self, work: int, shape: Shape) -> int:
        """Count the values of the inputs' blocks before they are summed."""
        return math.prod(shape) * self.kernel * (self.across or self.kernel) // (self.step**2 * self.groups)

    def _weights(self, channels: int) -> int:
        inner = (channels // (self.groups * self.times.read) or 1) * self.times.taps
        return self.out_channels // self.times.made * inner * self.kernel * (self.across or self.kernel)
