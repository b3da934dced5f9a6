"""A U-Net at half size, in plain torch: before it 2 x 2 pixels become channels, after it channels 2 x 2 pixels.

Nothing is lost at either end, and a convolution costs a quarter, so the same minutes pay for wider layers that see
twice as far. `model.build: benchmarks.naip_trees.network:build` names it in a configuration.
"""

from __future__ import annotations

import torch
from torch import nn


class HalfSizeUNet(nn.Module):
    """`width` channels at half size; each of the `levels` below has twice as many. `dropout`: the share of channels
    that the two lowest levels drop in training."""

    def __init__(self, bands: int, classes: int, width: int, levels: int, dropout: float = 0.0) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        inputs = [4 * bands, *widths]
        dropped = [dropout if level >= levels - 2 else 0.0 for level in range(levels)]
        self.down = nn.ModuleList(map(_twice, inputs, widths, dropped))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * one, one, 2, 2) for one in widths[:-1])
        self.join = nn.ModuleList(_twice(2 * one, one, share) for one, share in zip(widths[:-1], dropped, strict=False))
        self.head = nn.Conv2d(width, 4 * classes, 1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Scores of the classes, at the size of the image."""
        x_BCHW = nn.functional.pixel_unshuffle(x_BCHW, 2)
        kept: list[torch.Tensor] = []
        for down in self.down:
            x_BCHW = down(nn.functional.max_pool2d(x_BCHW, 2) if kept else x_BCHW)
            kept.append(x_BCHW)
        for level in reversed(range(len(self.up))):
            x_BCHW = self.join[level](torch.cat([kept[level], self.up[level](x_BCHW)], 1))
        return nn.functional.pixel_shuffle(self.head(x_BCHW), 2)


def build(bands: int, classes: int, width: int = 24, levels: int = 4, dropout: float = 0.0) -> nn.Module:
    """What `model.build` calls, with `model.arguments`."""
    return HalfSizeUNet(bands, classes, width, levels, dropout)


def _twice(before: int, after: int, dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.Dropout2d(dropout)] if dropout else []))
