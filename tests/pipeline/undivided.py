"""Micro-batches for tests of pipelines, and their network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn import functional

from tiledseg.architecture.unet import UNet
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


def network_of(unet: UNet) -> GraphNetwork:
    return build_modules(unet, seed=2).double().to(memory_format=torch.channels_last).train()
