"""Micro-batches for tests of pipelines, and the undivided network's results on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.shapes import layer_shapes
from tiledseg.models.dropout import DropoutKey, set_dropout_key
from tiledseg.models.unet import FlatNetwork, build_unet


@dataclass
class Drawn:
    """A micro-batch of so many pixels, the same on every rank; it sums the losses that this rank takes."""

    network: FlatNetwork
    number: int
    size: tuple[int, int]
    losses: list[float] = field(default_factory=list)
    sources: int = 0

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        return layer_shapes(self.network.descriptions, self.network.bands, *self.size)

    def source(self) -> torch.Tensor:
        self.sources += 1
        draw = torch.Generator().manual_seed(self.number)
        x_BCHW = torch.randn(1, self.network.bands, *self.size, generator=draw, dtype=torch.float64)
        dtype = next(p.dtype for p in self.network.parameters())
        return x_BCHW.to(dtype).contiguous(memory_format=torch.channels_last)

    def run_layers(self, x_BCHW: torch.Tensor, skips: dict[str, torch.Tensor], first: int, stop: int) -> torch.Tensor:
        set_dropout_key(self.network, DropoutKey(seed=9, step=4, image=self.number))
        return self.network.run_layers(x_BCHW, skips, first, stop)

    def loss(self, output_BKHW: torch.Tensor) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1000 + self.number)
        classes, height, width = output_BKHW.shape[1:]
        target_BHW = torch.randint(0, classes, (1, height, width), generator=draw)
        loss = functional.cross_entropy(output_BKHW, target_BHW, reduction="sum")
        self.losses.append(loss.item())
        return loss


@dataclass
class Result:
    """Sum of losses, gradients and buffers by name."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def network_of(unet: UNet) -> FlatNetwork:
    return build_unet(unet, seed=2).double().to(memory_format=torch.channels_last).train()


def undivided(unet: UNet, sizes: Sequence[tuple[int, int]]) -> Result:
    """The micro-batches one after the other through the whole network."""
    network = network_of(unet)
    loss = 0.0
    for number, size in enumerate(sizes):
        drawn = Drawn(network, number, size)
        drawn.loss(drawn.run_layers(drawn.source(), {}, 0, len(network.descriptions))).backward()
        loss += drawn.losses[0]
    return result_of(network, loss)


def result_of(network: FlatNetwork, loss: float) -> Result:
    """What a network holds; that of other ranks (on the meta device) is left out."""
    gradients = {k: p.grad for k, p in network.named_parameters() if not p.is_meta and p.grad is not None}
    return Result(loss, gradients, {k: b.clone() for k, b in network.named_buffers() if not b.is_meta})
