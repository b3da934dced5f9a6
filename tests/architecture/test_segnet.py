from __future__ import annotations

import pytest
import torch

from tiledseg.architecture.segnet import SegNet
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.shapes import count_parameters, tensor_channels, tensor_shapes, total_stride
from tiledseg.models.network import build_modules


def test_the_encoder_is_that_of_vgg_16() -> None:
    """14,714,688 weights with biases (Simonyan and Zisserman, 2015), which are as many as its outputs."""
    graph = SegNet(norm="none").graph()
    channels = tensor_channels(graph, 3)
    encoder = [
        (layer, channels[sources[0]])
        for node, layer, sources in zip(graph.nodes, graph.layers, graph.sources, strict=True)
        if node.name.startswith("encoder")
    ]
    assert sum(layer.parameters(given) for layer, given in encoder) == 14_714_688
    assert sum(isinstance(layer, Convolution) for layer, _ in encoder) == 13
    assert sum(isinstance(layer, Convolution) for layer in graph.layers) == 26


def test_the_count_is_the_published_one() -> None:
    """29.46 M (Paszke et al., 2016, ENet, table 5), of 11 classes, with batch norm: biases before norms too."""
    assert count_parameters(SegNet(norm="batch", classes=11).graph(), 3) == 29_449_355


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_the_output_is_as_large_as_the_image(depth: int) -> None:
    network = SegNet(depth, base_channels=2, classes=5)
    graph = network.graph()
    assert total_stride(graph) == 1 << depth
    assert tensor_shapes(graph, 3, 96, 64)[-1] == (5, 96, 64)
    module = build_modules(network, seed=0).eval()
    assert module(torch.randn(1, 3, 96, 64)).shape == (1, 5, 96, 64)
    assert sum(p.numel() for p in module.parameters()) == count_parameters(graph, 3)
