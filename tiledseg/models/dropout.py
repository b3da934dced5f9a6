"""Dropout that does not know how the image is cut.

The channels dropped are drawn from a counter keyed by (seed, step, image, layer), never by rank or tile. So every tile
of an image, on whatever rank, drops the same channels as the whole image would. A network that is called by itself,
without keys, draws as torch's Dropout2d: from torch's generator, other channels at each call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from tiledseg.models.notes import noted
from tiledseg.models.sending import sent


@dataclass(frozen=True)
class DropoutKey:
    """The seed, step and image of a draw, besides the layer."""

    seed: int
    step: int
    image: int


class ChannelDropout(nn.Module):
    """A dropout of whole channels with `probability` while training; it scales the others by 1 / (1 - probability).

    `keys`: what the next draw depends on, one for a whole batch or one an image; none for torch's generator. `draws`:
    those of all dropouts of the network, where `channels` are known.
    """

    def __init__(self, name: str, probability: float, channels: int | None = None) -> None:
        super().__init__()
        self.name = name
        self.probability = probability
        self.channels = channels
        self.keys: tuple[DropoutKey, ...] = (DropoutKey(0, 0, 0),)
        self.draws: DropoutDraws | None = None

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        if not self.training or self.probability == 0:
            return x_BCHW
        if not self.keys:
            return x_BCHW * noted(
                lambda: functional.dropout2d(x_BCHW.new_ones(*x_BCHW.shape[:2], 1, 1), self.probability)
            )
        return self.dropped(x_BCHW, noted(lambda: self.kept(x_BCHW.shape[1], x_BCHW.device)))

    def dropped(self, x_BCHW: torch.Tensor, kept_BC: torch.Tensor) -> torch.Tensor:
        """Return x with the channels that are `kept`, a row an image, or one for the whole batch."""
        return x_BCHW * (kept_BC.to(x_BCHW.dtype) / (1 - self.probability))[:, :, None, None]

    def kept(self, channels: int, device: torch.device) -> torch.Tensor:
        """Return the channels that are kept, kept_BC, bool, by the keys."""
        draws = self.draws
        if draws is None or draws.keys != self.keys or channels != self.channels:
            draws = DropoutDraws(self.keys, {self.name: (self.probability, channels)})
        return draws.of(self.name, device)


class DropoutDraws:
    """The channels that the dropouts of a network keep; `dropped`: (probability, channels) of each by its name. They
    are drawn on the host at the first use, and sent to the device together, for which the host does not wait."""

    def __init__(self, keys: tuple[DropoutKey, ...], dropped: dict[str, tuple[float, int]]) -> None:
        self.keys = keys
        self._dropped = dropped
        self._kept: dict[str, torch.Tensor] = {}

    def of(self, name: str, device: torch.device) -> torch.Tensor:
        """Return kept_BC of one of them, bool."""
        if not self._kept:
            each = [
                torch.cat([_draw(key, name, channels) >= probability for key in self.keys])
                for name, (probability, channels) in self._dropped.items()
            ]
            parts = sent(torch.cat(each), device).split([len(part) for part in each])
            named = zip(self._dropped, parts, strict=True)
            self._kept = {name: part.view(len(self.keys), -1) for name, part in named}
        return self._kept[name]


def _draw(key: DropoutKey, name: str, channels: int) -> torch.Tensor:
    words = f"{key.seed}/{key.step}/{key.image}/{name}".encode()
    seed = int.from_bytes(hashlib.sha256(words).digest()[:8], "little", signed=True)
    return torch.rand(channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dropouts(network: nn.Module) -> Iterator[ChannelDropout]:
    """Yield every dropout of a network."""
    return (module for module in network.modules() if isinstance(module, ChannelDropout))


def set_dropout_key(network: nn.Module, *keys: DropoutKey) -> None:
    """Tell every dropout of `network` what its next draw depends on: one key for a whole batch, or one an image;
    none for torch's generator."""
    own = keys[:1] if len(set(keys)) == 1 else keys
    modules = list(dropouts(network))
    draws = DropoutDraws(own, {m.name: (m.probability, m.channels) for m in modules if m.channels is not None})
    for module in modules:
        module.keys, module.draws = own, draws
