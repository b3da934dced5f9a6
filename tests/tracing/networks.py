"""Networks as people write them, in the words of these tests: what tracing has to read."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Double(nn.Module):
    """Two convolutions, each normed and activated in place."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        parts = []
        for given in (channels, out):
            parts += [nn.Conv2d(given, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class PaddingUNet(nn.Module):
    """A U-Net that pads what comes up to the size of what it joins, dropout in the middle."""

    def __init__(self, bands: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.third = Double(bands, 6), Double(6, 8), Double(14, 6)
        self.pool, self.dropout = nn.MaxPool2d(2), nn.Dropout2d(0.2)
        self.head = nn.Conv2d(6, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.first(x)
        low = self.dropout(self.second(self.pool(high)))
        up = functional.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        rows, cols = high.size(2) - up.size(2), high.size(3) - up.size(3)
        up = functional.pad(up, [cols // 2, cols - cols // 2, rows // 2, rows - rows // 2])
        return self.head(self.third(torch.cat([high, up], dim=1)))


class Pointed(nn.Module):
    """A block that works channels last, with a scale a channel, as tokens, and on halves of its channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.around = nn.Conv2d(channels, channels, (1, 7), padding=(0, 3), groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.wide, self.narrow = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.around(x).permute(0, 2, 3, 1)
        y = self.scale * self.narrow(functional.gelu(self.wide(self.norm(y))))
        x = x + y.permute(0, 3, 1, 2)
        batch, channels, height, width = x.shape
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        x = tokens.transpose(1, 2).reshape(batch, channels, height, width)
        one, other = x.chunk(2, dim=1)
        return torch.cat([one.softmax(dim=1) * other, x[:, : channels // 2]], dim=1)


class Squeezed(nn.Module):
    """Squeeze and excitation: channels gated by the image's mean of each."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, 3),
            nn.ReLU(inplace=True),
            nn.Linear(3, channels),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(x).view(x.shape[0], -1, 1, 1)


class Mixed(nn.Module):
    """Channels of two groups shuffled, every other pixel, a crop that is padded again, and one weight used twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.twice = nn.Conv2d(channels, channels, 3, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        x = functional.pad(self.twice(functional.elu(self.twice(x)))[:, :, 1:-1, 2:], (2, 0, 1, 1))
        thin = functional.interpolate(x, scale_factor=0.5)
        x += functional.interpolate(thin, size=x.shape[2:])
        return 1 - x / 2


class Outer(nn.Module):
    """One of these blocks between a first and a last convolution."""

    def __init__(self, block: nn.Module, bands: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Conv2d(bands, 8, 3, padding=1), block, nn.LazyConv2d(classes, 1)
        self(torch.zeros(2, bands, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)))


class Up(nn.Module):
    """Brought up by aligned corners, and padded by what it lacks of the size of what it joins."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.join = Double(channels, out)

    def forward(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        low = self.up(low)
        rows, cols = high.size()[2] - low.size()[2], high.size()[3] - low.size()[3]
        low = functional.pad(low, [cols // 2, cols - cols // 2, rows // 2, rows - rows // 2])
        return self.join(torch.cat([high, low], dim=1))


class AlignedUNet(nn.Module):
    """The U-Net that most people know: pooling by maxima, corners aligned on the way up."""

    def __init__(self, bands: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.first = Double(bands, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), Double(4, 6))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), Double(6, 6))
        self.up1, self.up2 = Up(12, 4), Up(8, 4)
        self.head = nn.Conv2d(4, classes, kernel_size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.first(x)
        two = self.down1(one)
        three = self.down2(two)
        return self.head(self.up2(self.up1(three, two), one))
