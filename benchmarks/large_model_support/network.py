"""A U-Net as its author would write it, and one training step of it."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def block(channels: int, out: int, normed: bool = True) -> nn.Sequential:
    """Two convolutions, each with a batch norm, unless not `normed`, and an activation."""
    layers: list[nn.Module] = []
    for taken in (channels, out):
        norms = [nn.BatchNorm2d(out)] if normed else []
        layers += [nn.Conv2d(taken, out, 3, padding=1, bias=not normed), *norms, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class PlainUNet(nn.Module):
    """`recompute`: every block is computed again in the backward pass, as torch.utils.checkpoint does it."""

    def __init__(
        self,
        levels: int,
        base_channels: int,
        bands: int = 4,
        classes: int = 5,
        recompute: bool = False,
        normed: bool = True,
    ) -> None:
        super().__init__()
        widths = [base_channels << level for level in range(levels)]
        self.recompute = recompute
        self.encoders = nn.ModuleList(block(*pair, normed) for pair in pairwise([bands, *widths]))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, stride=2) for c in reversed(widths[:-1]))
        self.decoders = nn.ModuleList(block(2 * c, c, normed) for c in reversed(widths[:-1]))
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(base_channels, classes, 1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for encoder in self.encoders:
            x_BCHW = self._run(encoder, self.pool(x_BCHW) if skips else x_BCHW)
            skips.append(x_BCHW)
        skips.pop()
        for up, decoder in zip(self.ups, self.decoders, strict=True):
            x_BCHW = self._run(decoder, torch.cat((skips.pop(), up(x_BCHW)), 1))
        return self.head(x_BCHW)

    def _run(self, part: nn.Module, x_BCHW: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(part, x_BCHW, use_reentrant=False)
        return part(x_BCHW)


class Step:
    """A step: forward, loss, backward. The same numbers at each call but for the statistics of the norms."""

    def __init__(self, network: nn.Module, size: int, batch: int) -> None:
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._x_BCHW = torch.randn(batch, 4, size, size).to(memory_format=torch.channels_last)
        self._y_BHW = torch.randint(0, 5, (batch, size, size))

    def __call__(self) -> float:
        self.network.zero_grad()
        loss = functional.cross_entropy(self.network(self._x_BCHW), self._y_BHW)
        loss.backward()
        return loss.item()


def make_step(levels: int, base_channels: int, size: int, batch: int, recompute: bool = False) -> Step:
    """Of a network drawn from a seed."""
    torch.manual_seed(0)
    return Step(PlainUNet(levels, base_channels, recompute=recompute), size, batch)
