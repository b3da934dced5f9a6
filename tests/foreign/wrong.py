"""Functions that build no network that can be trained here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.foreign.modules import Somebody


def text(bands: int, classes: int) -> str:
    return "a network"


def kind(bands: int, classes: int) -> type[nn.Module]:
    return Somebody


def raising(bands: int, classes: int) -> nn.Module:
    raise ValueError("no such luck\nat all")


def four(bands: int, classes: int) -> nn.Module:
    return Somebody(bands, 4)


def flat(bands: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(bands, classes, 1), nn.Flatten())


class Pair(nn.Module):
    """Scores, and scores again."""

    def __init__(self, bands: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(bands, classes, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x), torch.relu(self.head(x))


def pair(bands: int, classes: int) -> nn.Module:
    return Pair(bands, classes)


def by_rank(bands: int, classes: int) -> nn.Module:
    module = Somebody(bands, classes)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        nn.init.zeros_(module.head.bias)
    return module
