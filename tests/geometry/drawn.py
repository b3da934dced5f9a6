"""What hypothesis draws for the tests of planning: partitions, windows, layers and networks of them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.decomposition import Partition
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer import (
    Activation,
    AveragePool,
    Convolution,
    Dropout,
    Layer,
    MaxPool,
    Norm,
    PopConcatenate,
    Stash,
    TransposedConvolution,
    Upsample,
)

law = settings(derandomize=True, max_examples=60, deadline=None, database=None)


@st.composite
def partitions(draw: st.DrawFn, size: int | None = None, parts: int | None = None, largest: int = 60) -> Partition:
    """Any edges; of `size` positions and `parts` blocks where given."""
    parts = parts or draw(st.integers(1, min(6, size or 6)))
    size = size or draw(st.integers(parts, largest))
    inner = draw(st.sets(st.integers(1, size - 1), min_size=parts - 1, max_size=parts - 1)) if parts > 1 else set()
    return Partition((0, *sorted(inner), size))


@st.composite
def windows(draw: st.DrawFn, partition: Partition) -> tuple[Interval, ...]:
    """One window a rank, none empty: within its block, across those of others, or beyond the tensor altogether."""
    size = partition.size
    starts = draw(st.lists(st.integers(-6, size + 5), min_size=partition.parts, max_size=partition.parts))
    return tuple(Interval(start, draw(st.integers(start + 1, size + 7))) for start in starts)


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    kernel, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return Convolution("conv", 1, kernel, stride, draw(st.integers(0, 4)), dilation, extra=draw(st.integers(0, 1)))


@st.composite
def pools(draw: st.DrawFn) -> MaxPool | AveragePool:
    kernel, stride = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    padding = draw(st.integers(0, kernel // 2))
    if draw(st.booleans()):
        return AveragePool("pool", kernel, stride, padding)
    return MaxPool("pool", kernel, stride, padding, draw(st.integers(1, 2)))


@st.composite
def transposed(draw: st.DrawFn) -> TransposedConvolution:
    kernel, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    output_padding = draw(st.integers(0, max(stride, dilation) - 1))
    padding = draw(st.integers(0, 3))
    return TransposedConvolution("up", 1, kernel, True, stride, padding, output_padding, dilation)


upsamples = st.builds(Upsample, st.just("up"), st.sampled_from(["nearest", "bilinear"]), st.integers(1, 4))
layers = st.one_of(st.just(Layer("pointwise")), convolutions(), pools(), transposed(), upsamples)

unets = st.builds(
    UNet,
    levels=st.integers(1, 4),
    convs_per_level=st.integers(1, 2),
    kernel=st.sampled_from([1, 3, 5]),
    base_channels=st.just(1),
    padding=st.sampled_from(["same", "valid"]),
    norm=st.sampled_from(["none", "batch"]),
    upsampling=st.sampled_from(["transposed", "nearest", "bilinear"]),
)

_GROW = (
    Upsample("grow", "nearest"),
    Upsample("grow", "bilinear"),
    TransposedConvolution("grow", 1),
    TransposedConvolution("grow", 1, 4, stride=2, padding=1),
    TransposedConvolution("grow", 1, 3, stride=2, padding=1, output_padding=1),
)
_SHRINK = (
    MaxPool("shrink"),
    AveragePool("shrink", 3, 2, 1),
    Convolution("shrink", 1, 1, 2),
    Convolution("shrink", 1, 3, 2, 1),
)
_BEFORE: tuple[tuple[Layer, ...], ...] = (
    (),
    (Activation("act"),),
    (Dropout("drop", 0.5), Norm("norm"), Activation("act")),
    (Norm("norm", "batch"), Activation("act")),
)
_KEEP = (
    Layer("keep"),
    Convolution("keep", 1, 3, padding=1),
    Convolution("keep", 1, 2, extra=1),
    Convolution("keep", 1, 3, padding=2, dilation=2),
    MaxPool("keep", 3, 1, 1),
    Norm("keep", "batch"),
    TransposedConvolution("keep", 1, 3, stride=1, padding=1),
)


@st.composite
def networks(draw: st.DrawFn, depth: int = 2) -> tuple[Layer, ...]:
    """Layers whose outputs are as many as their inputs, if those are a multiple of 4; with skips, nested or not."""
    sequence: list[Layer] = []
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["keep", "scale", "skip", "crop"] if depth else ["keep"]))
        skip = f"skip {depth} {number} {len(sequence)}"
        if kind == "keep":
            sequence += [*draw(st.sampled_from(_BEFORE)), draw(st.sampled_from(_KEEP))]
        elif kind == "scale":
            sequence += [draw(st.sampled_from(_SHRINK)), *draw(networks(depth - 1)), draw(st.sampled_from(_GROW))]
        elif kind == "skip":
            inner = draw(networks(depth)) if depth == 0 else draw(networks(depth - 1))
            sequence += [Stash("stash", skip), *_renamed(inner, skip), PopConcatenate("pop", skip, 1)]
        else:  # an unpadded convolution, what it takes off cropped from the skip, and padding that brings it back
            sequence += [Stash("stash", skip), Convolution("valid", 1, 3), PopConcatenate("pop", skip, 1, 1)]
            sequence.append(Convolution("pad", 1, 3, padding=2))
    return tuple(sequence)


def _renamed(layers: tuple[Layer, ...], prefix: str) -> tuple[Layer, ...]:
    """The same with other skips, so that no two have one name."""
    renamed: list[Layer] = []
    for layer in layers:
        if isinstance(layer, Stash):
            renamed.append(Stash(layer.name, f"{prefix}/{layer.skip}"))
        elif isinstance(layer, PopConcatenate):
            skip = f"{prefix}/{layer.skip}"
            renamed.append(PopConcatenate(layer.name, skip, layer.skip_channels, layer.crop))
        else:
            renamed.append(layer)
    return tuple(renamed)
