"""Micro-batches for tests of pipelines, and the undivided network's results on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn import functional

from tiledseg.architecture.unet import UNet
from tiledseg.execution.carrying import autocast
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.models.dropout import DropoutKey, set_dropout_key
from tiledseg.models.network import GraphNetwork, Tensors, build_modules


@dataclass
class Drawn:
    """A micro-batch of so many pixels, the same on every rank; it sums the losses that this rank takes."""

    network: GraphNetwork
    number: int
    size: tuple[int, int]
    losses: list[float] = field(default_factory=list)
    sources: int = 0

    images: ClassVar[int] = 1

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        return tensor_shapes(self.network.graph, self.network.bands, *self.size)

    def source(self) -> torch.Tensor:
        self.sources += 1
        draw = torch.Generator().manual_seed(self.number)
        x_BCHW = torch.randn(1, self.network.bands, *self.size, generator=draw, dtype=torch.float64)
        dtype = next(p.dtype for p in self.network.parameters())
        return x_BCHW.to(dtype).contiguous(memory_format=torch.channels_last)

    def run_nodes(self, tensors: Tensors, first: int, stop: int) -> None:
        set_dropout_key(self.network, DropoutKey(seed=9, step=4, image=self.number))
        self.network.run_nodes(tensors, first, stop)

    def loss(self, *outputs_BKHW: torch.Tensor) -> torch.Tensor:
        (output_BKHW,) = outputs_BKHW
        draw = torch.Generator().manual_seed(1000 + self.number)
        classes, height, width = output_BKHW.shape[1:]
        target_BHW = torch.randint(0, classes, (1, height, width), generator=draw)
        loss = functional.cross_entropy(output_BKHW, target_BHW, reduction="sum")
        self.losses.append(loss.item())
        return loss


@dataclass
class OnDevice(Drawn):
    """A micro-batch on a device, computed in `precision`."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009
    precision: str = "fp32"

    def source(self) -> torch.Tensor:
        return super().source().to(self.device)

    def run_nodes(self, tensors: Tensors, first: int, stop: int) -> None:
        with autocast(self.precision, self.device):
            super().run_nodes(tensors, first, stop)

    def loss(self, *outputs_BKHW: torch.Tensor) -> torch.Tensor:
        return super().loss(*(output.double().cpu() for output in outputs_BKHW))


@dataclass
class Result:
    """Sum of losses, gradients and buffers by name."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def network_of(unet: UNet) -> GraphNetwork:
    return build_modules(unet, seed=2).double().to(memory_format=torch.channels_last).train()


def undivided(unet: UNet, sizes: Sequence[tuple[int, int]]) -> Result:
    """The micro-batches one after the other through the whole network."""
    network = network_of(unet)
    loss = 0.0
    for number, size in enumerate(sizes):
        drawn = Drawn(network, number, size)
        tensors = {0: drawn.source()}
        drawn.run_nodes(tensors, 0, len(network.graph))
        drawn.loss(*tensors.values()).backward()
        loss += drawn.losses[0]
    return result_of(network, loss)


def result_of(network: GraphNetwork, loss: float) -> Result:
    """What a network holds; that of other ranks (on the meta device) is left out."""
    gradients = {k: p.grad for k, p in network.named_parameters() if not p.is_meta and p.grad is not None}
    return Result(loss, gradients, {k: b.clone() for k, b in network.named_buffers() if not b.is_meta})
