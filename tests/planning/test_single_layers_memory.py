"""The memory of a training step with one layer of each kind that traced modules bring, against torch's allocations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import ImageMax, ImageMean, Multiply
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import Sigmoid
from tiledseg.geometry.layers.resampling import AlignedUpsample, Border, PixelUnshuffle, Upsample
from tiledseg.models.network import build_network
from tiledseg.planning.walk.step_memory import training_memory
from tiledseg.tracing.allocations import AllocationMeter


def after_a_convolution(layer: Layer, out: int = 2, channels: int = 8) -> Graph:
    first = Convolution(channels, 3, padding=1)
    return Graph((Node("first", first), Node("it", layer), Node("last", Convolution(out, 1))))


def gated_by(layer: Layer) -> Graph:
    return Graph(
        (
            Node("first", Convolution(8, 3, padding=1)),
            Node("it", layer),
            Node("gate", Sigmoid()),
            Node("gated", Multiply(), ("first", "gate")),
            Node("last", Convolution(2, 1)),
        )
    )


GRAPHS = {
    "corners aligned": after_a_convolution(AlignedUpsample()),
    "bicubic": after_a_convolution(Upsample("bicubic")),
    "reflected": after_a_convolution(Border(1, 1, 0.0, "reflect"), channels=64),
    "replicated": after_a_convolution(Border(1, 1, 0.0, "replicate"), channels=64),
    "blocks to channels": after_a_convolution(PixelUnshuffle(), 8),
    "maximum": gated_by(ImageMax()),
    "maximum, shared": gated_by(ImageMax(even=True)),
    "sum": gated_by(ImageMean(total=True)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_memory_of_a_step_is_that_of_torch(name: str) -> None:
    """Within 2 %: weights of places, and a few rows at a time, are not counted. A gradient that is not channels last is
    copied within the convolution's backward pass, where the meter does not see it: 11 % here."""
    graph = GRAPHS[name]
    network = build_network(graph, 3, 0).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [tensor for p in network.parameters() for tensor in (p, p.grad) if tensor is not None]
    x_BCHW = torch.randn(1, 3, 256, 256).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(1, *network(x_BCHW).shape[2:], dtype=torch.long)
    with AllocationMeter(known) as meter:
        own_BCHW = x_BCHW.clone()
        functional.cross_entropy(network(own_BCHW), labels.clone(), reduction="sum").backward()
    memory = training_memory(graph, 3, (256, 256))
    unseen = 0.12 if name in ("corners aligned", "bicubic", "blocks to channels") else 0.02
    assert 0.98 * meter.peak <= memory.activations + memory.backward <= (1 + unseen) * meter.peak
