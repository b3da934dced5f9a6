from __future__ import annotations

import pytest
import torch

from tests.law.cases import Case, as_batch, relative
from tiledseg.architecture.gated_scnn import GRADIENTS, GatedSCNN
from tiledseg.errors import ConfigError
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


def test_contexts_give_the_undivided_outputs() -> None:
    """All three, with the label margin's neighbour: gradients of probabilities are exact at tiles' borders."""
    case = Case(GatedSCNN("resnet18", 8, "pixel", image_mean=False, bands=2, classes=3), (3, 2))
    network = case.network().eval()
    with torch.no_grad():
        whole = network(as_batch(case.dataset((1, 1)).load(0, 0).x_CHW))
        dataset = case.dataset()
        for tile in dataset.tilings[0].tiles:
            outputs = network(as_batch(dataset.load(0, tile).x_CHW))
            for expected, found in zip(whole, outputs, strict=True):
                core_BCHW = found[(..., *tile.core_in_output.slices)]
                assert relative(core_BCHW, expected[(..., *tile.core.slices)]) < 1e-12


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.base_channels is 12; give a multiple of 8 for gated_scnn"):
        GatedSCNN(base_channels=12)
    with pytest.raises(ConfigError, match=r"model.edge_band is true, but the image has 1 band"):
        GatedSCNN(bands=1, edge_band=True)
