"""Dropout that does not know how the image is cut.

The channels dropped are drawn from a counter keyed by (seed, step, image, layer), never by rank or tile, so every
tile of an image, on whatever rank, drops the same channels as the whole image would.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class DropoutKey:
    """What a draw depends on, besides the layer."""

    seed: int
    step: int
    image: int


class ChannelDropout(nn.Module):
    """Zeroes whole channels with `probability` while training, and scales the others by 1 / (1 - probability)."""

    def __init__(self, name: str, probability: float) -> None:
        super().__init__()
        self.name = name
        self.probability = probability
        self.key = DropoutKey(0, 0, 0)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        if not self.training or self.probability == 0:
            return x_BCHW
        kept = self._kept(x_BCHW.shape[1]).to(x_BCHW.device, x_BCHW.dtype)
        return x_BCHW * (kept / (1 - self.probability)).view(1, -1, 1, 1)

    def _kept(self, channels: int) -> torch.Tensor:
        words = f"{self.key.seed}/{self.key.step}/{self.key.image}/{self.name}".encode()
        seed = int.from_bytes(hashlib.sha256(words).digest()[:8], "little", signed=True)
        draws = torch.rand(channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return draws >= self.probability


def set_dropout_key(network: nn.Module, key: DropoutKey) -> None:
    """Tell every dropout of `network` what its next draw depends on."""
    for module in network.modules():
        if isinstance(module, ChannelDropout):
            module.key = key
