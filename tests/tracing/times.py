"""Networks of time series: three-dimensional convolutions, norms, poolings and resizing, and images at each time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from tiledseg.models.layers.times import TimeSeries

TIMES = 3


class Step(nn.Module):
    """Two convolutions over times, the second one dilated, with even kernels and uneven padding."""

    def __init__(self, channels: int, out: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(channels, out, 3, padding=1), norm(out)
        self.slopes = nn.PReLU(out)
        self.second = nn.Conv3d(out, out, (2, 3, 2), padding="same", dilation=(1, 1, 2), groups=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.leaky_relu(self.second(self.slopes(self.norm(self.first(x)))), 0.1)


class TemporalUNet(nn.Module):
    """A U-Net over times: pooling and norms over them, a part that sees each time by itself, a gate of means over times
    and pixels, and reductions over times before the head. `exact`: without statistics and means of images."""

    def __init__(self, bands: int = 2, classes: int = 2, exact: bool = False) -> None:
        super().__init__()
        self.high = Step(bands, 4, nn.Identity if exact else nn.BatchNorm3d)
        self.low = Step(4, 4, nn.Identity if exact else lambda channels: nn.GroupNorm(2, channels))
        self.down = nn.AvgPool3d(2, stride=(1, 2, 2))
        self.bottom = Step(4, 4, nn.Identity if exact else lambda channels: nn.InstanceNorm3d(channels, affine=True))
        self.up = nn.ConvTranspose3d(4, 4, 2, stride=(1, 2, 2))
        self.gate = None if exact else nn.Conv3d(8, 8, 1)
        norms = [nn.Identity(), nn.Identity()] if exact else [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)]
        self.each = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), norms[0], nn.ReLU(), nn.MaxPool2d(3, 1, 1), norms[1])
        self.last, self.head = nn.LayerNorm(8), nn.Conv2d(16, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.high(x)
        low = self.low(functional.max_pool3d(high, (3, 2, 2), stride=(1, 2, 2), padding=(1, 0, 0)))
        joined = torch.cat([low, self.up(self.bottom(self.down(low)))], 1)
        if self.gate is not None:
            joined = joined * self.gate(joined.mean((2, 3, 4), keepdim=True)).sigmoid()
        batch, channels, times, height, width = joined.shape
        images = joined.transpose(1, 2).reshape(batch * times, channels, height, width)
        series = self.each(images).view(batch, times, 4, height, width).permute(0, 2, 1, 3, 4)
        series = functional.interpolate(series, scale_factor=(1, 2, 2), mode="trilinear")
        series = torch.cat([high, torch.stack([series[:, :, time] for time in range(times)], 2)], 1)
        series = self.last(series.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)
        return self.head(torch.cat([series.mean(2), series.amax(2)], 1))


def temporal(exact: bool = False) -> TimeSeries:
    return TimeSeries(TemporalUNet(exact=exact), TIMES)
