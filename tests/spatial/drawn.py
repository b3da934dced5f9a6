"""Layers and networks with skips that hypothesis draws, with an input and how it is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn

from tests.geometry.drawn import CHANNELS, partitions
from tests.geometry.drawn import networks as graphs
from tests.spatial.twins import FLOOR, Network
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import WHOLE
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.network import build_network
from tiledseg.models.norm import PixelNorm


@dataclass(frozen=True)
class Case:
    """One network and one image over one mesh."""

    network: Network
    x_BCHW: torch.Tensor
    rows: Partition
    cols: Partition
    fusion: int = 1
    overlap: bool = False
    floor: float = FLOOR


def cuts(parts: int, size: int) -> st.SearchStrategy[Partition]:
    """Even blocks, or any."""
    return st.one_of(st.just(Partition.even(size, parts)), partitions(size=size, parts=parts))


def pairs(values: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(values, values)


def image(shape: tuple[int, ...], seed: int, kind: str = "normal") -> torch.Tensor:
    """float64 values: `normal`; `ties`, few whole numbers; `negative`; `far`, with a mean of a thousand deviations."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "ties":
        return torch.randint(-1, 2, shape, generator=draw).double()
    x_BCHW = torch.randn(shape, generator=draw, dtype=torch.float64)
    return {"normal": x_BCHW, "negative": -x_BCHW.abs() - 1, "far": x_BCHW + 1000}[kind]


def with_weights(network: nn.Module, seed: int) -> nn.Module:
    """All weights and biases drawn, those of norms too, and buffers that are not what they start as."""
    draw = torch.Generator().manual_seed(seed)
    network.double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.5)
        for name, buffer in network.named_buffers():
            if buffer.is_floating_point():
                value = torch.rand(buffer.shape, generator=draw, dtype=torch.float64)
                buffer.copy_(value + 0.5 if "var" in name else value)
    return network


@st.composite
def spread(draw: st.DrawFn, shape: tuple[int, int], modules: st.SearchStrategy[tuple[nn.Module, int]]) -> Case:
    """One drawn layer, given with its number of input channels, over a mesh of `shape`."""
    module, channels = draw(modules)
    height, width = (draw(st.integers(max(2, ranks), 13)) for ranks in shape)
    x_BCHW = image((draw(st.integers(1, 2)), channels, height, width), 5, draw(st.sampled_from(["normal", "ties"])))
    network = nn.Sequential(with_weights(module, 3))
    rows, cols = draw(cuts(shape[0], height)), draw(cuts(shape[1], width))
    return Case(network, x_BCHW, rows, cols, overlap=draw(st.booleans()))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, int]:
    groups = draw(st.sampled_from([1, 1, 2]))
    channels, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, stride, dilation = (
        draw(pairs(st.integers(1, 5))),
        draw(pairs(st.integers(1, 3))),
        draw(pairs(st.integers(1, 3))),
    )
    padding: str | tuple[int, int] = draw(st.one_of(pairs(st.integers(0, 4)), st.sampled_from(["same", "valid"])))
    if padding == "same":
        stride = (1, 1)  # torch takes no other
    bias = draw(st.booleans())
    return nn.Conv2d(channels, out, kernel, stride, padding, dilation, groups, bias), channels


@st.composite
def transposed(draw: st.DrawFn) -> tuple[nn.Module, int]:
    groups = draw(st.sampled_from([1, 1, 2]))
    channels, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, stride = draw(pairs(st.integers(1, 5))), draw(pairs(st.integers(1, 3)))
    dilation = draw(st.integers(1, 2))
    extra = draw(pairs(st.integers(0, 2)))
    extra = (min(extra[0], max(stride[0], dilation) - 1), min(extra[1], max(stride[1], dilation) - 1))
    padding = draw(pairs(st.integers(0, 2)))
    bias = draw(st.booleans())
    return nn.ConvTranspose2d(channels, out, kernel, stride, padding, extra, groups, bias, dilation), channels


@st.composite
def pools(draw: st.DrawFn) -> tuple[nn.Module, int]:
    kernel, stride = draw(pairs(st.integers(1, 4))), draw(pairs(st.integers(1, 3)))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    kind = draw(st.sampled_from(["max", "inside only", "with padding", "divisor"]))
    if kind == "max":
        return nn.MaxPool2d(kernel, stride, padding, draw(pairs(st.integers(1, 2)))), 2
    divisor = 3 if kind == "divisor" else None
    return nn.AvgPool2d(kernel, stride, padding, count_include_pad=kind != "inside only", divisor_override=divisor), 2


@st.composite
def upsamples(draw: st.DrawFn) -> tuple[nn.Module, int]:
    factors = draw(pairs(st.integers(1, 3)))
    return nn.Upsample(scale_factor=factors, mode=draw(st.sampled_from(["nearest", "nearest-exact", "bilinear"]))), 2


def norms() -> list[nn.Module]:
    """Of CHANNELS channels; made anew at each call."""
    return [
        nn.BatchNorm2d(CHANNELS),
        nn.BatchNorm2d(CHANNELS, momentum=None),
        nn.BatchNorm2d(CHANNELS, affine=False, momentum=0.3),
        nn.BatchNorm2d(CHANNELS, track_running_stats=False),
        nn.BatchNorm2d(CHANNELS).eval(),
        nn.BatchNorm2d(CHANNELS, track_running_stats=False).eval(),
        nn.GroupNorm(1, CHANNELS),
        nn.GroupNorm(2, CHANNELS, affine=False),
        nn.GroupNorm(CHANNELS, CHANNELS),
        nn.InstanceNorm2d(CHANNELS),
        nn.InstanceNorm2d(CHANNELS, affine=True),
        PixelNorm(CHANNELS),
    ]


def keeping() -> list[nn.Module]:
    """Layers that keep the size, if nothing else."""
    return [
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.Conv2d(CHANNELS, CHANNELS, 5, padding="same", groups=2),
        nn.Conv2d(CHANNELS, CHANNELS, 2, padding="same", bias=False),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=2, dilation=2),
        nn.Conv2d(CHANNELS, CHANNELS, 1),
        nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.MaxPool2d(3, 1, 1),
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        nn.LeakyReLU(0.1),
        nn.GELU(),
        nn.PReLU(CHANNELS),
        ChannelDropout("dropout", 0.4),
        *norms(),
    ]


def shrinking() -> list[nn.Module]:
    return [
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.AvgPool2d(3, 2, 1),
        nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1),
        nn.Conv2d(CHANNELS, CHANNELS, 4, stride=2, padding=1),
        nn.Conv2d(CHANNELS, CHANNELS, 1, stride=2),
    ]


def growing() -> list[nn.Module]:
    return [
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, stride=2),
        nn.ConvTranspose2d(CHANNELS, CHANNELS, 4, stride=2, padding=1),
        nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, stride=2, padding=1, output_padding=1),
        nn.ConvTranspose2d(CHANNELS, CHANNELS, 1, stride=2, output_padding=1),
    ]


@st.composite
def networks(draw: st.DrawFn, shape: tuple[int, int]) -> Case:
    """Skips, nested or not, of all kinds; pooling and upsampling of any kind; norms over few pixels."""
    network = with_weights(build_network(draw(graphs()), CHANNELS), draw(st.integers(0, 3)))
    height, width = (4 * draw(st.integers(max(2, n), max(4, n + 1))) for n in shape)
    x_BCHW = image((draw(st.integers(1, 2)), CHANNELS, height, width), 5)
    rows, cols = draw(cuts(shape[0], height)), draw(cuts(shape[1], width))
    return Case(network, x_BCHW, rows, cols, draw(st.sampled_from([1, 2, 3, WHOLE])), draw(st.booleans()), floor=1.0)
