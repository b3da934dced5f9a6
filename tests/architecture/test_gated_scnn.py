from __future__ import annotations

import pytest
import torch

from tiledseg.architecture.gated_scnn import GRADIENTS, GatedSCNN
from tiledseg.geometry.shapes import count_parameters, tensor_shapes, total_stride
from tiledseg.models.network import build_modules

PUBLISHED, UNUSED = 137_278_190, 65  # the modules of network/gscnn.py, counted; dsn1 takes part in nothing


def test_the_count_is_that_of_the_published_code() -> None:
    """Of 19 classes. Its edges are one channel; our gradients of three bands are six, each with a weight."""
    assert count_parameters(GatedSCNN(bands=4, edge_band=True, classes=19).graph(), 4) == PUBLISHED - UNUSED
    assert count_parameters(GatedSCNN(classes=19).graph(), 3) == PUBLISHED - UNUSED + 5


@pytest.mark.parametrize("encoder", ["wide38", "resnet18", "resnet50"])
def test_shapes(encoder: str) -> None:
    network = GatedSCNN(encoder, 8, bands=4, classes=5, edge_band=encoder == "wide38")
    graph = network.graph()
    assert total_stride(graph) == 8
    shapes = dict(zip(graph.names, tensor_shapes(graph, 4, 64, 96), strict=True))
    assert [shapes[name] for name in graph.outputs] == [(5, 64, 96), (1, 64, 96), (10, 64, 96)]
    assert shapes[network.trunk.output(network.taps[4])][1:] == (8, 12), "an eighth"
    module = build_modules(network, seed=0)
    outputs = module(torch.randn(1, 4, 64, 96))
    assert [tuple(output.shape[1:]) for output in outputs] == [(5, 64, 96), (1, 64, 96), (10, 64, 96)]
    assert sum(p.numel() for p in module.parameters()) == count_parameters(graph, 4)
    for output in outputs[:2]:
        output.sum().backward(retain_graph=True)
    assert all(p.grad is not None for p in module.parameters())


def test_the_encoder_does_not_see_the_band_of_edges() -> None:
    module = build_modules(GatedSCNN("resnet18", 8, bands=3, edge_band=True), seed=0).eval()
    kept: list[torch.Tensor] = []
    module.layers["layer4-1-relu"].register_forward_hook(lambda module, inputs, output: kept.append(output.clone()))
    x_BCHW = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        before = module(x_BCHW)
        x_BCHW[:, 2] += 1
        after = module(x_BCHW)
    assert torch.equal(*kept)
    assert torch.equal(before[1], after[1]), "nor does the shape stream"
    assert not torch.equal(before[0], after[0])


def test_the_gradient_of_a_plane_is_its_slope() -> None:
    row, col = (torch.arange(9.0, dtype=torch.float64)[side] for side in ((slice(None), None), (None, slice(None))))
    plane_BCHW = (2 * row + 5 * col)[None, None]
    filters = torch.tensor(GRADIENTS, dtype=torch.float64)[:, None]
    found_BCHW = torch.nn.functional.conv2d(plane_BCHW, filters)
    assert torch.allclose(found_BCHW[0, :, 1, 1], torch.tensor([5.0, 2.0], dtype=torch.float64))
