"""What a memory policy drops and rebuilds: the same outputs and gradients to the last bit, and less memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.law.every_layer import EveryLayer, ForeignLayers
from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import Network
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_policy import (
    KEEP,
    REBUILD,
    MemoryPolicy,
    can_rebuild,
    compaction,
    recomputation,
    spread,
)
from tiledseg.models.network import GraphNetwork, build_modules


def drawn(graph: Graph, seed: int) -> MemoryPolicy:
    """Any policy that can be."""
    draw = random.Random(seed)
    words = [draw.choice((KEEP, REBUILD)) if can_rebuild(graph, home) else KEEP for home in range(len(graph.names))]
    inside = [draw.choice((KEEP, REBUILD)) if layer.can_rebuild else KEEP for layer in graph.layers]
    return spread(graph, words.__getitem__, inside)


def everything(graph: Graph, bands: int) -> MemoryPolicy:
    """All that can be rebuilt, from the network's input on."""
    words = [REBUILD if can_rebuild(graph, home) else KEEP for home in range(len(graph.names))]
    return spread(graph, words.__getitem__, [REBUILD if layer.can_rebuild else KEEP for layer in graph.layers])


POLICIES: dict[str, Callable[[Graph, int], MemoryPolicy]] = {
    "compaction": compaction,
    "recomputation": recomputation,
    "everything": everything,
    **{f"drawn{seed}": lambda graph, bands, seed=seed: drawn(graph, seed) for seed in range(4)},
}
NETWORKS: dict[str, tuple[Network, tuple[int, int]]] = {
    "unet": (UNet(3, base_channels=4, dropout=0.3), (32, 48)),
    "unet-valid-batch": (UNet(3, base_channels=4, norm="batch", padding="valid", upsampling="bilinear"), (60, 68)),
    "unet-instance": (UNet(3, base_channels=4, norm="instance", upsampling="nearest", dropout=0.2), (32, 48)),
    "unet-group": (UNet(2, base_channels=8, norm="group"), (32, 48)),
    "unet-pixel": (UNet(2, base_channels=4, norm="pixel"), (32, 48)),
    "segnet": (SegNet(3, 4), (32, 48)),
    "residual": (ResidualUNet("resnet18", 4), (32, 64)),
    "gated": (GatedSCNN("resnet18", 8), (32, 64)),
    "every": (EveryLayer(whole=True), (32, 48)),
    "foreign": (ForeignLayers(whole=True), (32, 48)),
}
PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


@dataclass
class Found:
    """Of two steps."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def steps(network: GraphNetwork, x_BCHW: torch.Tensor, autocast: bool = False) -> Found:
    outputs, source = [], x_BCHW.clone().requires_grad_()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, autocast):
            made = network(source)
        made = made[0] if isinstance(made, tuple) else made
        outputs.append(made.detach().clone())
        (made.double() ** 2).mean().backward()
    assert source.grad is not None
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return Found(outputs, gradients | {"input": source.grad}, dict(network.named_buffers()))


def built(name: str, precision: str = "fp32") -> tuple[GraphNetwork, torch.Tensor]:
    network, size = NETWORKS[name]
    modules = build_modules(network, seed=1).train()
    x_BCHW = torch.randn(2, network.bands, *size, generator=torch.Generator().manual_seed(0))
    if precision == "fp64":
        modules, x_BCHW = modules.double(), x_BCHW.double()
    return modules.to(memory_format=torch.channels_last), x_BCHW.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]


def check_same(found: Found, expected: Found) -> None:
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert torch.equal(one, other)
    for one, other in ((found.gradients, expected.gradients), (found.buffers, expected.buffers)):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_gradients_to_the_last_bit(name: str, precision: str) -> None:
    network, x_BCHW = built(name, precision)
    expected = steps(network, x_BCHW, precision == "bf16")
    for policy in POLICIES.values():
        network, x_BCHW = built(name, precision)
        network.follow(policy(network.graph, network.bands))
        check_same(steps(network, x_BCHW, precision == "bf16"), expected)
