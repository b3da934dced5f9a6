"""What hypothesis draws for the tests of planning: partitions, windows, layers and networks of them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution, FixedFilters, TransposedConvolution
from tiledseg.geometry.layers.joins import Add, Concatenate, ImageMean, Multiply
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import Activation, Dropout, Mark, Norm, Sigmoid
from tiledseg.geometry.layers.resampling import AveragePool, MaxIndices, MaxPool, MaxUnpool, Upsample
from tiledseg.geometry.sharing.decomposition import Partition

CHANNELS = 4  # of every tensor of a drawn network
law = settings(derandomize=True, max_examples=60, deadline=None, database=None)


def line(*layers: Layer) -> Graph:
    """Nodes one after the other, called by their kind and number."""
    return Graph(tuple(Node(f"{type(layer).__name__} {number}", layer) for number, layer in enumerate(layers)))


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
    return Convolution(1, kernel, stride, draw(st.integers(0, 4)), dilation, extra=draw(st.integers(0, 1)))


@st.composite
def pools(draw: st.DrawFn) -> MaxPool | AveragePool:
    kernel, stride = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    padding = draw(st.integers(0, kernel // 2))
    if draw(st.booleans()):
        return AveragePool(kernel, stride, padding)
    return MaxPool(kernel, stride, padding, draw(st.integers(1, 2)))


@st.composite
def transposed(draw: st.DrawFn) -> TransposedConvolution:
    kernel, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    output_padding = draw(st.integers(0, max(stride, dilation) - 1))
    padding = draw(st.integers(0, 3))
    return TransposedConvolution(1, kernel, True, stride, padding, output_padding, dilation)


upsamples = st.builds(Upsample, st.sampled_from(["nearest", "bilinear"]), st.integers(1, 4))
layers = st.one_of(st.just(Layer()), convolutions(), pools(), transposed(), upsamples)

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
    Upsample("nearest"),
    Upsample("bilinear"),
    TransposedConvolution(CHANNELS),
    TransposedConvolution(CHANNELS, 4, stride=2, padding=1),
    TransposedConvolution(CHANNELS, 3, stride=2, padding=1, output_padding=1),
)
_SHRINK = (MaxPool(), AveragePool(3, 2, 1), Convolution(CHANNELS, 1, 2), Convolution(CHANNELS, 3, 2, 1))
_BEFORE: tuple[tuple[Layer, ...], ...] = (
    (),
    (Activation(),),
    (Dropout(0.5), Mark(), Activation()),
    (Norm("batch"), Activation()),
)
_EDGES = (((-1.0, 0.0, 1.0),) * 3,)
_KEEP = (
    Sigmoid(),
    Convolution(CHANNELS, 3, padding=1),
    Convolution(CHANNELS, 2, extra=1),
    Convolution(CHANNELS, 3, padding=2, dilation=2),
    FixedFilters(_EDGES),
    MaxPool(3, 1, 1),
    Norm("batch"),
    Norm("instance"),
    Norm("group", groups=2),
    TransposedConvolution(CHANNELS, 3, stride=1, padding=1),
)


@st.composite
def networks(draw: st.DrawFn, depth: int = 2) -> Graph:
    """Nodes whose outputs are as many as their inputs, if those are a multiple of 4; with skips, nested or not, sums,
    gates, means of the image, and pooling that is undone by its indices."""
    nodes: list[Node] = []

    def add(layer: Layer, *inputs: str) -> str:
        nodes.append(Node(f"{len(nodes)} {type(layer).__name__}", layer, inputs))
        return nodes[-1].name

    def body(depth: int) -> str:
        kinds = ["keep", "scale", "unpool", "skip", "crop", "sum", "gate", "mean"] if depth else ["keep"]
        for _ in range(draw(st.integers(1, 3))):
            kind, start = draw(st.sampled_from(kinds)), nodes[-1].name
            if kind == "keep":
                for layer in (*draw(st.sampled_from(_BEFORE)), draw(st.sampled_from(_KEEP))):
                    add(layer)
            elif kind == "scale":
                add(draw(st.sampled_from(_SHRINK)))
                body(depth - 1)
                add(draw(st.sampled_from(_GROW)))
            elif kind == "unpool":
                indices = add(MaxIndices())
                add(MaxPool(), start)
                add(MaxUnpool(), body(depth - 1), indices)
            elif kind == "mean":
                add(Concatenate(), start, add(ImageMean()))
                add(Convolution(CHANNELS, 1))
            elif kind == "crop":  # an unpadded convolution, what it takes off cropped from the skip, and padding again
                add(Concatenate((1, 0)), start, add(Convolution(CHANNELS, 3)))
                add(Convolution(CHANNELS, 3, padding=2))
            elif kind == "skip":
                add(Concatenate(), start, body(depth - 1))
                add(Convolution(CHANNELS, 1))
            else:  # a shortcut with a convolution of its own, written after the branch that it joins
                branch, kernel = body(depth - 1), draw(st.sampled_from([1, 3]))
                shortcut = add(Convolution(CHANNELS, kernel, padding=kernel // 2), start)
                shortcut = add(Sigmoid()) if kind == "gate" else shortcut
                add(Add() if kind == "sum" else Multiply(), branch, shortcut)
        return nodes[-1].name

    add(Mark())
    body(depth)
    return Graph(tuple(nodes))
