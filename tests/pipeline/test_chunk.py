"""A chunk alone: what it is given keeps its layout."""

from __future__ import annotations

import torch

from tests.pipeline.undivided import Drawn, network_of
from tiledseg.architecture.unet import UNet
from tiledseg.pipeline.chunk import Chunk
from tiledseg.pipeline.partition import cut_network

UNET = UNet(3, 2, 3, 4, bands=2, classes=3)


def test_received_skips_keep_their_layout() -> None:
    """What is concatenated with one of another layout loses its own, and convolutions copy it back and forth."""
    network = network_of(UNET)
    layers = len(network.graph)
    cut = cut_network(network.graph, (layers // 2, layers - layers // 2), "1f1b", 2)
    drawn, sent = Drawn(network, 0, (16, 24)), dict[int, torch.Tensor]()
    strides: dict[str, list[tuple[int, ...]]] = {}
    for name, module in network.layers.items():
        module.register_forward_hook(lambda _, given, out, name=name: strides.setdefault(name, []).append(out.stride()))
    network(drawn.source())
    for index in (0, 1):
        inputs = {name: tensor.clone(memory_format=torch.channels_last) for name, tensor in sent.items()}
        _, sent = Chunk(network, cut, index).forward(drawn, inputs or {0: drawn.source()}, False)
    assert all(undivided == cut for undivided, cut in strides.values())
