"""Dropout that does not know how the image is cut.

The channels dropped are drawn from a counter keyed by (seed, step, image, layer), never by rank or tile, so every
tile of an image, on whatever rank, drops the same channels as the whole image would. A network that somebody calls
by himself, who gives no keys, draws as torch's Dropout2d: from torch's generator, other channels at each call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from tiledseg.models.notes import noted


@dataclass(frozen=True)
class DropoutKey:
    """What a draw depends on, besides the layer."""

    seed: int
    step: int
    image: int


class ChannelDropout(nn.Module):
    """Zeroes whole channels with `probability` while training, and scales the others by 1 / (1 - probability).

    `keys`: what the next draw depends on, one for a whole batch or one an image; none for torch's generator.
    """

    def __init__(self, name: str, probability: float) -> None:
        super().__init__()
        self.name = name
        self.probability = probability
        self.keys: tuple[DropoutKey, ...] = (DropoutKey(0, 0, 0),)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        if not self.training or self.probability == 0:
            return x_BCHW
        return x_BCHW * noted(lambda: self._factors(x_BCHW))

    def _factors(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Of each channel, shape (B, C, 1, 1)."""
        if not self.keys:
            return functional.dropout2d(x_BCHW.new_ones(*x_BCHW.shape[:2], 1, 1), self.probability)
        kept_BC = torch.stack([self._kept(key, x_BCHW.shape[1]) for key in self.keys])
        return (kept_BC.to(x_BCHW.device, x_BCHW.dtype) / (1 - self.probability))[:, :, None, None]

    def _kept(self, key: DropoutKey, channels: int) -> torch.Tensor:
        words = f"{key.seed}/{key.step}/{key.image}/{self.name}".encode()
        seed = int.from_bytes(hashlib.sha256(words).digest()[:8], "little", signed=True)
        draws = torch.rand(channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return draws >= self.probability


def dropouts(network: nn.Module) -> Iterator[ChannelDropout]:
    """Every dropout of a network."""
    return (module for module in network.modules() if isinstance(module, ChannelDropout))


def set_dropout_key(network: nn.Module, *keys: DropoutKey) -> None:
    """Tell every dropout of `network` what its next draw depends on: one key for a whole batch, or one an image;
    none for torch's generator."""
    own = keys[:1] if len(set(keys)) == 1 else keys
    for module in dropouts(network):
        module.keys = own
