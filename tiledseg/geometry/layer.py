"""What a layer is, without its weights: the description that geometry, cost, models and commands share.

Each layer states its own arithmetic along one dim (kernels are square):

- `required_input(out)`: the input positions that the output positions `out` depend on, in the layer's own indices;
- `output_size(n)`: how many outputs `n` inputs give;
- `output_edge(e)`: where an edge between two ranks' inputs falls among the outputs: each output to the rank that holds
  the middle of what it reads;
- `output_channels(c)`, `parameters(c)` and `multiply_adds(c)` (per output pixel) for `c` input channels.

Indices count from the first element of the tensor at hand; a padded layer may name positions below 0 or beyond
the size, which are the padding. A new layer type is added here once, with its receptive field and its cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.geometry.interval import Interval


@dataclass(frozen=True)
class Layer:
    """A layer that works pixel by pixel: geometry and channels unchanged, no weights."""

    name: str

    @property
    def keeps_zero(self) -> bool:
        """Whether the layer works pixel by pixel and makes zeros of zeros: it may then come behind zero padding."""
        return False

    def required_input(self, out: Interval) -> Interval:
        return out

    def output_size(self, size: int) -> int:
        return size

    def output_edge(self, edge: int) -> int:
        return edge

    def output_channels(self, channels: int) -> int:
        return channels

    def parameters(self, channels: int) -> int:
        return 0

    def multiply_adds(self, channels: int) -> int:
        return 0


@dataclass(frozen=True)
class Convolution(Layer):
    """A square convolution; `padding` pixels of zeros on each side, and `extra` more behind (even kernels, `same`)."""

    out_channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    bias: bool = True
    extra: int = 0

    @property
    def reach(self) -> int:
        """Input positions spanned by one output, less one."""
        return self.dilation * (self.kernel - 1)

    def required_input(self, out: Interval) -> Interval:
        start = out.start * self.stride - self.padding
        return Interval(start, start + (out.size - 1) * self.stride + self.reach + 1)

    def output_size(self, size: int) -> int:
        return (size + 2 * self.padding + self.extra - self.reach - 1) // self.stride + 1

    def output_edge(self, edge: int) -> int:
        return -(-(edge + self.padding - self.reach // 2) // self.stride)

    def output_channels(self, channels: int) -> int:
        return self.out_channels

    def parameters(self, channels: int) -> int:
        return self.out_channels * (channels * self.kernel**2 + self.bias)

    def multiply_adds(self, channels: int) -> int:
        return self.out_channels * channels * self.kernel**2


@dataclass(frozen=True)
class Pool(Layer):
    """Pooling over windows of `kernel`, which touch unless `stride` says otherwise; a broken last one is left out."""

    kernel: int = 2
    stride: int | None = None
    padding: int = 0
    dilation: int = 1

    @property
    def step(self) -> int:
        return self.stride or self.kernel

    @property
    def reach(self) -> int:
        """Input positions spanned by one output, less one."""
        return self.dilation * (self.kernel - 1)

    def required_input(self, out: Interval) -> Interval:
        start = out.start * self.step - self.padding
        return Interval(start, start + (out.size - 1) * self.step + self.reach + 1)

    def output_size(self, size: int) -> int:
        return (size + 2 * self.padding - self.reach - 1) // self.step + 1

    def output_edge(self, edge: int) -> int:
        return -(-(edge + self.padding - self.reach // 2) // self.step)


@dataclass(frozen=True)
class MaxPool(Pool):
    """Max pooling; padding counts as minus infinity."""


@dataclass(frozen=True)
class AveragePool(Pool):
    """Average pooling; padding counts as zeros, or not at all."""


@dataclass(frozen=True)
class TransposedConvolution(Layer):
    """A transposed convolution. With stride = kernel, the default, each input becomes its own kernel x kernel block."""

    out_channels: int
    kernel: int = 2
    bias: bool = True
    stride: int | None = None
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1

    @property
    def step(self) -> int:
        return self.stride or self.kernel

    @property
    def reach(self) -> int:
        """Output positions spanned by one input, less one."""
        return self.dilation * (self.kernel - 1)

    def required_input(self, out: Interval) -> Interval:
        """Never empty: where kernel < stride, an output between two blocks names the inputs beside it."""
        first, last = out.start + self.padding, out.stop - 1 + self.padding
        start = min(-((self.reach - first) // self.step), first // self.step)
        stop = max(last // self.step, -((self.reach - last) // self.step)) + 1
        return Interval(start, stop)

    def output_size(self, size: int) -> int:
        return (size - 1) * self.step - 2 * self.padding + self.reach + self.output_padding + 1

    def output_edge(self, edge: int) -> int:
        return edge * self.step - self.padding + self.reach // 2 - (self.step - 1) // 2

    def output_channels(self, channels: int) -> int:
        return self.out_channels

    def parameters(self, channels: int) -> int:
        return self.out_channels * (channels * self.kernel**2 + self.bias)

    def multiply_adds(self, channels: int) -> int:
        return self.out_channels * channels * self.kernel**2 // self.step**2


@dataclass(frozen=True)
class Upsample(Layer):
    """Upsampling by `factor`: `nearest`, or `bilinear` with pixel centres aligned (align_corners=False)."""

    mode: str = "nearest"
    factor: int = 2

    def required_input(self, out: Interval) -> Interval:
        if self.mode == "nearest":
            return Interval(out.start // self.factor, (out.stop - 1) // self.factor + 1)
        return Interval(self._lower(out.start), self._lower(out.stop - 1) + 2)

    def _lower(self, position: int) -> int:
        """The lower of the two inputs that output `position` blends: floor((position + 1/2) / factor - 1/2)."""
        return (2 * position + 1 - self.factor) // (2 * self.factor)

    def output_size(self, size: int) -> int:
        return size * self.factor

    def output_edge(self, edge: int) -> int:
        return edge * self.factor


@dataclass(frozen=True)
class Norm(Layer):
    """Normalisation over `kind`: none, pixel (channels of each pixel), instance, group or batch.

    All but `none` and `pixel` take statistics over many pixels, so a tile alone cannot compute them.
    """

    kind: str = "none"
    groups: int = 1

    @property
    def keeps_zero(self) -> bool:
        return self.kind == "none"

    def parameters(self, channels: int) -> int:
        return 0 if self.kind == "none" else 2 * channels


@dataclass(frozen=True)
class Dropout(Layer):
    """Drops whole channels of a sample with `probability`, the same channels over the whole image."""

    probability: float = 0.0

    @property
    def keeps_zero(self) -> bool:
        return True


@dataclass(frozen=True)
class Activation(Layer):
    """Leaky ReLU, or another activation that is zero at zero."""

    negative_slope: float = 0.01

    @property
    def keeps_zero(self) -> bool:
        return True


@dataclass(frozen=True)
class Stash(Layer):
    """Keeps its input for the layer that pops `skip`, and passes it on."""

    skip: str


@dataclass(frozen=True)
class PopConcatenate(Layer):
    """Concatenates the stashed `skip`, cropped by `crop` pixels on each side, before its own input."""

    skip: str
    skip_channels: int
    crop: int = 0

    def output_channels(self, channels: int) -> int:
        return channels + self.skip_channels
