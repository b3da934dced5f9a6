"""Pooling, upsampling, and borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers.layer import Layer, LayerMemory, LayerWindow, Shape

INDEX_BYTES = 8  # torch's index of a maximum


@dataclass(frozen=True)
class Pool(Layer):
    """Pooling over windows of `kernel`, at `stride` (None: the kernel); an incomplete last window is dropped."""

    kernel: int = 2
    stride: int | None = None
    padding: int = 0
    dilation: int = 1

    @cached_property
    def window(self) -> LayerWindow:
        return LayerWindow(self.stride or self.kernel, self.padding, self.dilation * (self.kernel - 1))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Kernel, stride, padding, dilation."""
        return self.kernel, self.stride or self.kernel, self.padding, self.dilation

    def fits_edge(self, *edges: int) -> bool:
        """Return True if no window lies across the edge."""
        after = self.output_edge(edges[0])
        return self.required_input(Interval(after, after + 1)).start == edges[0]


@dataclass(frozen=True)
class MaxPool(Pool):
    """Max pooling; padding counts as minus infinity."""

    kept_inputs = (0,)

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        """Count the recomputed indices beside the gradient."""
        return LayerMemory(gradient=inputs[0] + INDEX_BYTES * shape[0] * shape[1] * shape[2])


@dataclass(frozen=True)
class AveragePool(Pool):
    """Average pooling; padding counts as zeros or is left out."""

    pads_with_zeros = True
    kept_inputs = (0,)


@dataclass(frozen=True)
class MaxIndices(Pool):
    """The place of each maximum in its window, row by row, as an integer of one byte, which does not depend on how the
    image is cut. Raises GeometryError for windows of more positions than a byte counts."""

    gradient = "none"
    gives_in = "byte"

    def __post_init__(self) -> None:
        if self.kernel > 16:
            raise GeometryError(
                f"indices in windows of {self.kernel} x {self.kernel} do not fit a byte; give at most 16"
            )


class Enlarging(Layer):
    """A layer that computes `factor` x `factor` pixels from each."""

    factor: int  # a field of each kind

    @cached_property
    def window(self) -> LayerWindow:
        return LayerWindow(self.factor, reach=self.factor - 1, transposed=True)


@dataclass(frozen=True)
class MaxUnpool(Enlarging):
    """Unpooling: each value at the place given by the second input (`MaxIndices`) in a window of `factor` x `factor`
    outputs, and zeros elsewhere."""

    factor: int = 2

    arity = 2
    kept_inputs = (1,)

    def output_size(self, size: int, *others: int) -> int:
        if others != (size,):
            raise GeometryError(f"it unpools {size} positions by indices of {others[0]}; give it as many of both")
        return super().output_size(size)

    def fits_edge(self, *edges: int) -> bool:
        return edges[0] == edges[1]

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        """Count a mask of one place of the windows: a byte for each value."""
        return LayerMemory(transient=shape[0] * shape[1] * shape[2] // self.factor**2)


@dataclass(frozen=True)
class Upsample(Enlarging):
    """Upsampling by `factor`: `nearest`, `bilinear` (from two pixels a dim) or `bicubic` (four), without
    align_corners."""

    mode: str = "nearest"
    factor: int = 2

    clamps = True

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        if self.mode == "nearest":
            return super().required_input(out)
        more = 1 if self.mode == "bicubic" else 0
        return Interval(self._lower(out.start) - more, self._lower(out.stop - 1) + 2 + more)

    def _lower(self, position: int) -> int:
        """Return the lower of the two inputs that output `position` blends: floor((position + 1/2) / factor - 1/2)."""
        return (2 * position + 1 - self.factor) // (2 * self.factor)


@dataclass(frozen=True)
class AlignedUpsample(Enlarging):
    """Bilinear upsampling by `factor` with aligned corner centres (align_corners=True): output o of M reads the input
    at o (N - 1) / (M - 1) of N. Its weights depend on the place in the image and the image's size.

    `required_input` covers all sizes: from less than a pixel before o / factor up to it.
    """

    factor: int = 2

    clamps = True
    asks_place = True

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        return Interval((out.start - self.factor + 1) // self.factor, (out.stop - 1) // self.factor + 2)

    def computed(self, read: int, given: int) -> int:
        return given


@dataclass(frozen=True)
class PixelShuffle(Enlarging):
    """Depth to space: `factor`^2 channels of a pixel become `factor` x `factor` pixels, row by row (Shi et al.,
    2016)."""

    factor: int = 2

    def output_channels(self, channels: int, *others: int) -> int:
        if channels % self.factor**2:
            raise GeometryError(f"{channels} channels are not divisible by {self.factor**2}; use a multiple")
        return channels // self.factor**2


@dataclass(frozen=True)
class PixelUnshuffle(Layer):
    """Space to depth: `factor` x `factor` pixels of a channel become channels of one pixel, row by row."""

    factor: int = 2

    @cached_property
    def window(self) -> LayerWindow:
        return LayerWindow(self.factor, reach=self.factor - 1)

    def output_size(self, size: int, *others: int) -> int:
        if size % self.factor:
            raise GeometryError(f"{size} pixels are not divisible by {self.factor}; use a multiple")
        return super().output_size(size)

    def output_edge(self, edge: int, *others: int) -> int:
        return -(-edge // self.factor)

    def fits_edge(self, *edges: int) -> bool:
        return edges[0] % self.factor == 0

    def output_channels(self, channels: int, *others: int) -> int:
        return channels * self.factor**2


MIRRORED = ("reflect", "replicate")


@dataclass(frozen=True)
class Border(Layer):
    """A border of `before` positions before the tensor and `after` after it; negative numbers crop.

    `mode`: `constant` (`value`), `reflect` (positions beside the last one, in reverse) or `replicate` (the last one).
    """

    before: int
    after: int
    value: float = 0.0
    mode: str = "constant"

    @cached_property
    def window(self) -> LayerWindow:
        return LayerWindow(padding=self.before, extra=self.after - self.before)

    def within(self, read: Interval, size: int) -> Interval:
        """Return the positions within the input, including those that are mirrored."""
        inside = super().within(read, size)
        if self.mode not in MIRRORED:
            return inside
        ahead, past = (beyond if self.mode == "reflect" else 0 for beyond in (-read.start, read.stop - size))
        if read.start < 0:
            inside = inside.hull(Interval(0, min(size, ahead + 1)))
        if read.stop > size:
            inside = inside.hull(Interval(max(0, size - 1 - past), size))
        return inside

    def output_size(self, size: int, *others: int) -> int:
        if self.mode == "reflect" and max(self.before, self.after) >= size:
            raise GeometryError(
                f"it mirrors {max(self.before, self.after)} positions beside the end one of {size}; give larger images"
            )
        return super().output_size(size)

    @property
    def padding_after(self) -> int:
        return max(0, self.after)

    @property
    def pads_with_zeros(self) -> bool:
        return self.mode == "constant" and self.value == 0

    @property
    def clamps(self) -> bool:
        return self.mode in MIRRORED

    @property
    def kept_inputs(self) -> tuple[int, ...]:
        return (0,) if self.mode == "replicate" else ()
