"""Cuts, images, weights and norms for tests of what ranks and blocks compute."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn

from tests.geometry.drawn import CHANNELS, partitions
from tests.spatial.twins import Network
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.models.layers.pooling import MaxIndicesModule
from tiledseg.models.norm import PixelNorm


def cuts(parts: int, size: int) -> st.SearchStrategy[Partition]:
    """Even blocks, or any."""
    return st.one_of(st.just(Partition.even(size, parts)), partitions(size=size, parts=parts))


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


def may_tie(network: Network) -> bool:
    """Whether the place of a maximum is asked among pixels that upsampling has made equal: a rounding then decides."""
    modules = list(network.modules())
    copies = any(isinstance(m, nn.Upsample) and m.mode == "nearest" for m in modules)
    return copies and any(isinstance(m, MaxIndicesModule) for m in modules)
