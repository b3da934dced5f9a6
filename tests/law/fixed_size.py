"""Modules of one input size, well-behaved and not, for the tests of maps by crops."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

SIDE, BANDS, CLASSES = 12, 3, 4
SHAPE = (45, 67)


class FixedSize(nn.Module):
    """A transformer of patches with a learned place for each: of one input size, written for contiguous tensors."""

    def __init__(self, bands: int = BANDS, classes: int = CLASSES, side: int = SIDE, width: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(bands, width, 4, 4)
        self.places = nn.Parameter(torch.randn(1, (side // 4) ** 2, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.2)
        self.head = nn.ConvTranspose2d(width, classes, 4, 4)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        batch, side = len(x_BCHW), x_BCHW.shape[2] // 4
        x = self.patches(x_BCHW).view(batch, -1, side * side).transpose(1, 2) + self.places
        x = self.norm(x + self.drop(self.attention(x, x, x)[0]))
        return self.head(x.transpose(1, 2).reshape(batch, -1, side, side))


def fixed_size(dtype: torch.dtype = torch.float32, kind: type[FixedSize] = FixedSize, **options: Any) -> FixedSize:
    torch.manual_seed(4)
    return kind(**options).to(dtype).eval()


class Handing(FixedSize):
    """A module that hands a tensor on by an attribute."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        self.mean = x_BCHW.mean((2, 3), keepdim=True)
        y_BCHW = super().forward(x_BCHW) + self.mean.sum(1, keepdim=True)
        del self.mean
        return y_BCHW


class Fickle(FixedSize):
    """A module with a sort of memory, of chance, or of company."""

    every: ClassVar[int] = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.last, self.seen = how, 0, None, list[int]()
        self.own = torch.Generator()
        if how.startswith("moves"):
            self.register_buffer("moved", torch.zeros(()))

    def forward(self, x_BCHW: torch.Tensor) -> Any:
        if self.how == "brightest":
            x_BCHW = x_BCHW / x_BCHW.abs().max()
        y_BCHW = super().forward(x_BCHW)
        match self.how:
            case "counts":
                self.calls += 1
                return y_BCHW * (2 if self.calls > 60 else 1)
            case "counts bright":
                self.calls += int(100 < x_BCHW.max() < 256)
            case "moves bright":
                self.moved += float(100 < x_BCHW.max() < 256)
            case "lists":
                self.seen.append(len(x_BCHW))
            case "counts for all":
                Fickle.every += 1
            case "moves":
                self.moved += 1
            case "remembers":
                before, self.last = self.last, y_BCHW
                return y_BCHW if before is None or torch.equal(before, y_BCHW) else (before + y_BCHW) / 2
            case "seeds":
                torch.manual_seed(0)
                return y_BCHW + torch.rand_like(y_BCHW)
            case "draws":
                return y_BCHW + torch.rand_like(y_BCHW)
            case "seldom":
                return y_BCHW + torch.rand_like(y_BCHW) if x_BCHW.max() > 100 else y_BCHW
            case "seldom, of its own":
                return y_BCHW + torch.rand(1, generator=self.own) if x_BCHW.max() > 100 else y_BCHW
            case "numbers":
                return y_BCHW + torch.arange(len(y_BCHW)).to(y_BCHW)[:, None, None, None]
            case "dict":
                return {"out": y_BCHW, "aux": y_BCHW.sum()}
            case "list":
                return [y_BCHW, y_BCHW[:, :, ::4, ::4]]
            case "coarse":
                return y_BCHW[:, :, ::4, ::4]
        return y_BCHW


class Normed(FixedSize):
    """With a batch norm."""

    def __init__(self, bands: int, classes: int) -> None:
        super().__init__(bands, classes)
        self.bn = nn.BatchNorm2d(bands)


class Spectral(nn.Conv2d):
    """A module that no tracing takes, of any size."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW = super().forward(x_BCHW)
        return y_BCHW * torch.fft.fft2(y_BCHW).abs().mean()
