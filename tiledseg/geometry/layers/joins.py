"""Layers that join several tensors, and layers whose every output depends on the whole image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers.layer import Layer, LayerCounts, LayerMemory, Shape
from tiledseg.units import SINGLE_BYTES


@dataclass(frozen=True)
class Join(Layer):
    """A layer of several inputs that cover the same pixels after `crops` pixels are cut from each side of each."""

    crops: tuple[int, ...] = (0, 0)

    @property
    def arity(self) -> int:
        return len(self.crops)

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        return out.shift(self.crops[index])

    def output_size(self, size: int, *others: int) -> int:
        sizes = [each - 2 * crop for each, crop in zip((size, *others), self.crops, strict=True)]
        if len(set(sizes)) > 1:
            raise GeometryError(
                f"it joins tensors of {' and '.join(map(str, (size, *others)))} positions, cropped by "
                f"{' and '.join(map(str, self.crops))} a side, which are not the same pixels; choose another input size"
            )
        return sizes[0]

    def output_edge(self, edge: int, *others: int) -> int:
        """Return the last input's edge: a skip's last input is cropped the least."""
        return (edge, *others)[-1] - self.crops[-1]

    def fits_edge(self, *edges: int) -> bool:
        return len({edge - crop for edge, crop in zip(edges, self.crops, strict=True)}) == 1


@dataclass(frozen=True)
class Concatenate(Join):
    """A concatenation along channels, in the order of the inputs."""

    gradient = "parts"
    gives_in = "run"

    def output_channels(self, channels: int, *others: int) -> int:
        return channels + sum(others)


@dataclass(frozen=True)
class Add(Join):
    """The sum of two tensors, as of a residual block."""

    gradient = "same"

    def output_channels(self, channels: int, *others: int) -> int:
        return equal_channels(channels, *others)


@dataclass(frozen=True)
class Multiply(Join):
    """The product of two tensors; one of them may have one channel, which then gates all of the other's."""

    kept_inputs = (0, 1)

    def output_channels(self, channels: int, *others: int) -> int:
        every = (channels, *others)
        return equal_channels(*(every if max(every) == 1 else [count for count in every if count > 1]))

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        """Count a gate's gradient before it is summed over channels."""
        return LayerMemory(transient=max(inputs) if min(inputs) < max(inputs) else 0)


def equal_channels(*channels: int) -> int:
    """Return the common number of channels. Raises GeometryError if they differ."""
    if len(set(channels)) > 1:
        raise GeometryError(f"it takes tensors of one number of channels, not of {' and '.join(map(str, channels))}")
    return channels[0]


@dataclass(frozen=True)
class ImageLayer(Layer):
    """A layer whose every output depends on the whole image; `takes` says in words on what."""

    statistics = "image"
    can_rebuild = False  # a sum over all ranks, or their keys and values


@dataclass(frozen=True)
class ImageMean(ImageLayer):
    """The mean of each channel over the whole image, or with `total` the sum, in every pixel."""

    total: bool = False

    takes = "the mean of an image"
    protects_output = True
    is_flat = True

    def shared_values(self, channels: int, ranks: int) -> tuple[int, int]:
        """Count the sums; backward the gradients' sums."""
        return channels, channels

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        gradient = inputs[0] // (shape[1] * shape[2])  # all pixels share one value in memory
        return LayerMemory(gradient=gradient, held=gradient)


@dataclass(frozen=True)
class ImageProducts(ImageLayer, Join):
    """The sum over the image of the outer products of two tensors' channels, in `heads` parts, in every pixel: for
    linear attention, and attention between channels."""

    heads: int = 1
    out_channels: int = 1

    takes = "a sum of products over an image"
    protects_output = True
    is_flat = True
    kept_inputs = (0, 1)
    is_cheap = False

    def counts(self, channels: int) -> LayerCounts:
        return LayerCounts(work=self.out_channels)

    def shared_values(self, channels: int, ranks: int) -> tuple[int, int]:
        return self.out_channels, self.out_channels

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        copied = max(inputs) if self.out_channels > self.heads else 0  # a copy that gathers the heads' channels
        return LayerMemory(transient=copied)


@dataclass(frozen=True)
class ImageMax(ImageLayer):
    """The maximum of each channel over the image. Its gradient goes to the first of equal pixels, or (`even`) to
    all."""

    even: bool = False

    takes = "the maximum of an image"
    protects_output = True
    is_flat = True

    def shared_values(self, channels: int, ranks: int) -> tuple[int, int]:
        """Count maxima, with their places or counts, in a slot for each rank; backward sums."""
        return 2 * channels * ranks, channels

    @property
    def kept_inputs(self) -> tuple[int, ...]:
        return (0,) if self.even else ()


WEIGHTS_AT_ONCE = 1 << 22  # the most weights of queries and keys in memory of all ranks: 16 MiB in float32


@dataclass(frozen=True)
class ImageAttention(ImageLayer):
    """softmax(`factor` x queries x keys) x values, in `heads` parts of the channels, from queries, keys and values.

    Keys and values are `ratio` times smaller along the dim, as SegFormer reduces them. Over ranks, each rank's keys and
    values are broadcast in turn to all (`models.layers.attention`); `passing`: their number in a plan.
    """

    heads: int = 1
    ratio: int = 1
    factor: float = 1.0
    passing: int = 0

    arity = 3
    takes = "attention over an image"
    sees_all = True
    protects_output = True
    keeps_output = True
    kept_inputs = (0, 1, 2)
    is_cheap = False

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        """Return the queries of `out`, or the keys and values at their place; those of other places are broadcast."""
        return Interval(out.start // self.ratio, -(-out.stop // self.ratio)) if index else out

    def output_size(self, size: int, *others: int) -> int:
        if any(other * self.ratio != size for other in others):
            raise GeometryError(
                f"it takes queries of {size} positions and keys of {' and '.join(map(str, others))}, not 1 to "
                f"{self.ratio}; choose another input size"
            )
        return size

    def scale(self, *scales: Fraction) -> Fraction:
        return scales[0]

    def fits_edge(self, *edges: int) -> bool:
        return all(edge * self.ratio == edges[0] for edge in edges[1:])

    def output_channels(self, channels: int, *others: int) -> int:
        return others[-1]

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        """Count the logarithm of each query's sum of weights. Over ranks, but not in torch's kernel, also wide copies
        of queries, of a block of keys and values, and of their gradients, and two sets of weights."""
        queries, transient = shape[1] * shape[2], 0
        if self.passing:
            weights = min(WEIGHTS_AT_ONCE // self.passing, self.heads * queries * max(1, queries // self.ratio**2))
            transient = 4 * sum(inputs) + 2 * SINGLE_BYTES * weights
        return LayerMemory(kept=max(width, SINGLE_BYTES) * self.heads * queries, transient=transient)
