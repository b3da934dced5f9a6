"""Networks as their authors write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Two convolutions and what they are added to."""

    def __init__(self, channels: int, out: int, norm: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(out) if norm else nn.Identity()
        self.second = nn.Conv2d(out, out, 3, padding=1)
        self.short = nn.Conv2d(channels, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm(self.first(x)))
        return functional.relu(self.second(y) + self.short(x))


class Somebody(nn.Module):
    """A residual network of two poolings and one skip, with weights of its own, used and unused."""

    def __init__(self, bands: int = 2, classes: int = 3, width: int = 4, norm: bool = False) -> None:
        super().__init__()
        self.stem = Block(bands, width, norm)
        self.down = Block(width, 2 * width, norm)
        self.bottom = Block(2 * width, 2 * width, norm)
        self.head = nn.Conv2d(3 * width, classes, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, classes).view(classes, 1, 1))
        self.register_buffer("shift", torch.linspace(-1, 1, classes).view(classes, 1, 1))
        self.spare = nn.Linear(2, 2)  # which nobody calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.stem(x)
        coarse = self.down(functional.max_pool2d(fine, 2))
        deep = self.bottom(functional.max_pool2d(coarse, 2))
        deep = functional.interpolate(deep, scale_factor=2, mode="nearest") + coarse
        fine = torch.cat([fine, functional.interpolate(deep, scale_factor=2, mode="nearest")], dim=1)
        return self.head(fine) * self.scale + self.shift


class Telling(Somebody):
    """Scores by a name, and scores again with a number, as some authors return theirs."""

    def forward(self, x: torch.Tensor) -> Any:
        scores = super().forward(x)
        return {"out": scores, "aux": [torch.sigmoid(scores), 3]}


def build(bands: int, classes: int, width: int = 4, norm: bool = False) -> nn.Module:
    """What `model.build` names."""
    return Somebody(bands, classes, width, norm)


def build_measured(bands: int, classes: int, width: int = 4) -> nn.Module:
    """With norms that come with statistics, as weights trained elsewhere do."""
    module = Somebody(bands, classes, width, norm=True)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
    return module


def build_aligned(bands: int, classes: int) -> nn.Module:
    """A layer of it has to know its place in the image: corners are aligned."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(bands, 4, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        nn.Conv2d(4, classes, 3, padding=1),
    )
