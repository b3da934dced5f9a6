"""Shapes of a network's tensors, against those of real tensors."""

from __future__ import annotations

import pytest
import torch

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.models.network import build_modules


@pytest.mark.parametrize(
    ("unet", "size"),
    [
        (UNet(3, 2, 3, 4, "same", "instance", "transposed", bands=3, classes=5), (20, 28)),
        (UNet(3, 1, 5, 3, "same", "none", "bilinear", bands=1, classes=2), (8, 12)),
        (UNet(3, 2, 3, 4, "valid", "pixel", "nearest", bands=2, classes=2), (44, 60)),
        (UNet(1, 1, 3, 2, bands=2, classes=3), (7, 5)),
    ],
    ids=lambda value: f"{value.padding}-{value.upsampling}" if isinstance(value, UNet) else "x".join(map(str, value)),
)
def test_shapes_are_those_of_real_tensors(unet: UNet, size: tuple[int, int]) -> None:
    network = build_modules(unet)
    found: list[tuple[int, ...]] = []
    for module in network.layers.values():
        module.register_forward_hook(lambda module, inputs, output: found.append(tuple(output.shape[1:])))
    with torch.no_grad():
        network(torch.zeros(1, unet.bands, *size))
    assert list(tensor_shapes(unet.graph(), unet.bands, *size)[1:]) == found


def test_no_layers_have_no_shapes() -> None:
    assert tensor_shapes(Graph(()), 4, 10, 10) == ((4, 10, 10),)
