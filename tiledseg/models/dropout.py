"""Dropout that does not depend on how the image is cut.

The dropped channels are drawn by a hash of (seed, step, image, layer), not of rank or tile. So every tile of an image,
on any rank, drops the same channels as the whole image. A network that is called by itself, without keys, draws as
torch's Dropout2d does: from torch's generator, other channels at each call. Stochastic depth is one draw an image, for
all channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from tiledseg.errors import ConfigError
from tiledseg.memory.device import sent
from tiledseg.memory.second_run import noted


@dataclass(frozen=True)
class DropoutKey:
    """The seed, step and image of a draw, besides the layer."""

    seed: int
    step: int
    image: int


class ChannelDropout(nn.Module):
    """A dropout of whole channels with `probability` in training, which scales the others by 1 / (1 - probability).

    `keys`: those of the next draw, one for a whole batch or one an image; empty for torch's generator. `of_images`: one
    draw for all channels of an image.
    """

    def __init__(self, name: str, probability: float, of_images: bool = False) -> None:
        super().__init__()
        self.name, self.probability, self.of_images = name, probability, of_images
        self.keys: tuple[DropoutKey, ...] = (DropoutKey(0, 0, 0),)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        if not self.training or self.probability == 0:
            return x_BCHW
        if not self.keys:
            shape = len(x_BCHW), 1 if self.of_images else x_BCHW.shape[1]
            ones_BC11 = x_BCHW.new_ones(*shape, 1, 1)
            return x_BCHW * noted(lambda: functional.dropout2d(ones_BC11, self.probability))
        return self.dropped(x_BCHW, noted(lambda: self.kept(x_BCHW.shape[1], x_BCHW.device)))

    def dropped(self, x_BCHW: torch.Tensor, kept_BC: torch.Tensor) -> torch.Tensor:
        """Return x without the dropped channels. `kept_BC`: from `kept`, a row an image, or one for the whole batch."""
        return x_BCHW * (kept_BC.to(x_BCHW.dtype) / (1 - self.probability or 1.0))[:, :, None, None]

    def kept(self, channels: int, device: torch.device) -> torch.Tensor:
        """Draw the kept channels from the keys: kept_BC, bool. The host does not wait for the device."""
        drawn = torch.stack([_draw(key, self.name, 1 if self.of_images else channels) for key in self.keys])
        return sent(drawn >= self.probability, device)


class LeafDepth(ChannelDropout):
    """Stochastic depth at `path` inside a module that is one node, in the module's own layout. Each call in a forward
    pass has its own draw for each of `images`."""

    def __init__(self, path: str, probability: float) -> None:
        super().__init__("", probability, of_images=True)
        self.path, self.node, self.images, self.calls = path, "", 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) != self.images:
            raise ConfigError(f"'{self.path}' drops {len(x)} parts of {self.images} images; let it drop whole images")
        self.name, self.calls = f"{self.node}.{self.path}#{self.calls}", self.calls + 1
        return super().forward(x.flatten(1)[:, :, None, None]).view_as(x)


def _draw(key: DropoutKey, name: str, channels: int) -> torch.Tensor:
    words = f"{key.seed}/{key.step}/{key.image}/{name}".encode()
    seed = int.from_bytes(hashlib.sha256(words).digest()[:8], "little", signed=True)
    return torch.rand(channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dropouts(network: nn.Module) -> Iterator[ChannelDropout]:
    return (module for module in network.modules() if isinstance(module, ChannelDropout))


def set_dropout_key(network: nn.Module, *keys: DropoutKey) -> None:
    """Set the keys of every dropout's next draw: one for a batch, one an image, or none for torch's generator."""
    for module in dropouts(network):
        module.keys = keys[:1] if len(set(keys)) == 1 else keys
