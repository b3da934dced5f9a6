"""Attention in windows as people write it, in the words of these tests, and its footprints."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import tiledseg

WINDOW = 4


class DropPath(nn.Module):
    """Stochastic depth: in training an image as it is, scaled, or zeros."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        keep = 1 - self.drop_prob
        return x * x.new_empty(len(x), *(1,) * (x.dim() - 1)).bernoulli_(keep).div_(keep)


DropPath.__module__ = "timm.layers.drop"  # it is written as there


class Block(nn.Module):
    """A block of Swin: attention in windows, moved by `shift` by rolling and a mask, and a hidden layer."""

    def __init__(
        self, channels: int, shift: int, window: int = WINDOW, masks: bool = True, drop: float = 0.0, depth: float = 0.0
    ) -> None:
        super().__init__()
        self.depth = DropPath(depth)
        self.window, self.shift, self.masks = window, shift, masks
        self.norm, self.drop = nn.LayerNorm(channels), nn.Dropout(drop)
        self.qkv, self.bias = nn.Linear(channels, 3 * channels), nn.Parameter(torch.randn(window**2, window**2))
        self.hidden = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))

    def forward(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        y_BHWC = self.norm(x_BHWC).roll((-self.shift, -self.shift), (1, 2))
        q, k, v = self.qkv(self._windows(y_BHWC)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + self.bias
        if self.shift and self.masks:
            scores = scores + self._mask(x_BHWC).repeat(len(x_BHWC), 1, 1)
        batch, height, width, channels = x_BHWC.shape
        y = scores.softmax(-1) @ v
        y = y.view(batch, height // self.window, width // self.window, self.window, self.window, channels)
        y_BHWC = y.transpose(2, 3).reshape(x_BHWC.shape).roll((self.shift, self.shift), (1, 2))
        x_BHWC = x_BHWC + self.drop(self.depth(y_BHWC))
        return x_BHWC + self.depth(self.hidden(x_BHWC))

    def _windows(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        batch, height, width, channels = x_BHWC.shape
        x = x_BHWC.view(batch, height // self.window, self.window, width // self.window, self.window, channels)
        return x.transpose(2, 3).reshape(-1, self.window**2, channels)

    def _mask(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        rows, cols = (torch.arange(n) >= n - self.shift for n in x_BHWC.shape[1:3])
        side = (2 * rows[:, None] + cols[None, :]).to(x_BHWC)
        regions = self._windows(side[None, :, :, None])[..., 0]
        return (regions[:, :, None] != regions[:, None, :]) * -100.0


class Tokens(nn.Module):
    """Two blocks on a line of tokens, which are told the image's size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block, self.window, self.shift = Block(channels, 1), WINDOW, 1

    def forward(self, tokens: torch.Tensor, size: tuple[int, int]) -> tuple[torch.Tensor]:
        batch, _, channels = tokens.shape
        return (self.block(tokens.view(batch, *size, channels)).flatten(1, 2),)


class Merging(nn.Module):
    """Four pixels to one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(4 * channels, 2 * channels)

    def forward(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        parts = [x_BHWC[:, row::2, col::2] for col in (0, 1) for row in (0, 1)]
        return self.reduce(torch.cat(parts, -1))


class Neighbours(nn.Module):
    """Attention of each pixel over the 3 x 3 around it, by `unfold`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        q, *kv = self.qkv(x_BCHW).chunk(3, 1)
        k, v = (
            functional.unfold(each, 3, padding=1).unflatten(1, (-1, 9)).unflatten(3, x_BCHW.shape[2:]) for each in kv
        )
        weights = (q[:, :, None] * k).sum(1, keepdim=True).softmax(2)
        return x_BCHW + (weights * v).sum(2)


class Scan(nn.Module):
    """A scan of the image's tokens, both ways: each sees all, by what tracing takes for no layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.into = nn.Linear(channels, channels)

    def forward(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        y = self.into(x_BHWC).flatten(1, 2)
        y = y.cumsum(1).tanh() + y.flip(1).cumsum(1).flip(1).sigmoid()
        return x_BHWC + y.view(x_BHWC.shape)


class Scanning(nn.Module):
    """A scan of an image half as large."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scan, self.after = Scan(channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y = self.scan(functional.avg_pool2d(x_BCHW, 2).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x_BCHW + functional.interpolate(self.after(y), scale_factor=2)


class SmallSwin(nn.Module):
    """Two levels of two blocks each, 12 channels, windows of 4 x 4, and a decoder with a skip."""

    def __init__(self, bands: int = 3, classes: int = 2, drop: float = 0.0, depth: float = 0.3) -> None:
        super().__init__()
        self.patches, self.merge = nn.Conv2d(bands, 12, 2, stride=2), Merging(12)
        self.high = nn.Sequential(Block(12, 0), Block(12, 2, drop=drop, depth=depth))
        self.low, self.tokens = nn.Sequential(Block(24, 0), Block(24, 1)), Tokens(24)
        self.depth = DropPath(depth)
        self.up, self.near = nn.ConvTranspose2d(24, 12, 2, stride=2), Neighbours(12)
        self.head = nn.ConvTranspose2d(24, classes, 2, stride=2)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        high = self.high(self.patches(x_BCHW).permute(0, 2, 3, 1))
        low = self.low(self.merge(high))
        batch, height, width, channels = low.shape
        (tokens,) = self.tokens(low.flatten(1, 2), (height, width))
        low = tokens.view(batch, height, width, channels).permute(0, 3, 1, 2)
        skip = self.depth(self.near(high.permute(0, 3, 1, 2)))
        return self.head(torch.cat([self.up(low), skip], 1))


tiledseg.declare(Block, lambda block: tiledseg.Windows(block.window, block.shift))
tiledseg.declare(Tokens, tiledseg.Windows(WINDOW, 1), lambda module, height, width: ((height, width),))
tiledseg.declare(Merging, tiledseg.Local(stride=2))
tiledseg.declare(Scan, tiledseg.WholeImage(2))
tiledseg.declare(Neighbours, tiledseg.Local(1))
