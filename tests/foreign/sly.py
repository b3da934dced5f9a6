"""Modules that do something that no trace has seen: at other sizes, on other pixels, in training, once they change."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn import functional

DOES: dict[int, str] = {}  # what modules do besides, by their keys
KEYS = count()


class Sly(nn.Module):
    """A small network; `sly` names what it does besides. Set after tracing, no trace can have seen it."""

    def __init__(self, bands: int = 2, classes: int = 3, sly: str = "", norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(bands, 4, 3, padding=1)
        self.norm = nn.InstanceNorm2d(4, affine=True) if norm else nn.Identity()
        self.drop = nn.Dropout(0.25)
        self.head = nn.Conv2d(4, classes, 1)
        self.register_buffer("count", torch.zeros(()))
        self.key = next(KEYS)
        self.sly = sly

    @property
    def sly(self) -> str:
        """What it does besides: kept where no trace looks."""
        return DOES[self.key]

    @sly.setter
    def sly(self, sly: str) -> None:
        DOES[self.key] = sly

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sly == "pixels":
            x = x.clamp(max=3.5)
        if self.sly == "view":
            x = x.clone()
            x[:, :1].clamp_(-3.5, 3.5)
        if self.sly == "bright":
            x = x.clamp(max=50)
        if self.sly == "size" and x.shape[2] == 320:
            x = x * 1.001
        y = functional.relu(self.stem(x))
        if self.sly == "hidden":
            with torch._C.DisableTorchFunction():
                y.clamp_(max=1.5)
        if self.sly == "training" and self.training:
            y = y * 1.0001
        if self.sly == "term":
            y = y + 1e-3 * x.mean(1, keepdim=True)
        if self.sly == "counts":
            self.count += 1
        y = self.drop(self.norm(y))
        return self.head(_Scaled.apply(y) if self.sly == "backward" else y)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.01


class LargeOnly(Sly):
    """Other numbers at a size that no trace tries."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2 if x.shape[2] == 352 else x)


class SmallOnly(Sly):
    """Other numbers in training, on images smaller than any that a trace tries."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 1.001 if self.training and x.shape[2] < 60 else x)


def in_training(bands: int, classes: int) -> nn.Module:
    return SmallOnly(bands, classes, norm=False)
