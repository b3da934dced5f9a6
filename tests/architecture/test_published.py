"""Networks against their publications: numbers of weights, sizes of outputs, and ResNets written down a second time."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.law.cases import relative
from tiledseg.architecture.gated_scnn import GRADIENTS, GatedSCNN
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.resnet import BLOCKS, ResNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import count_parameters, tensor_shapes, total_stride
from tiledseg.models.network import build_modules, build_network


def resnet(encoder: str, channels: int = 64, stride: int = 32) -> Graph:
    return Graph(tuple(ResNet(encoder, channels, "batch", stride).nodes()))


GATED = 137_278_190 - 65  # network/gscnn.py, without dsn1, which takes part in nothing
COUNTS = {
    # torchvision's num_params, without the last layer of 1000 classes.
    "resnet18": (resnet("resnet18"), 11_689_512 - 513_000),
    "resnet34": (resnet("resnet34"), 21_797_672 - 513_000),
    "resnet50": (resnet("resnet50"), 25_557_032 - 2_049_000),
    # segmentation_models_pytorch's Unet("resnet34"), with a class more.
    "residual U-Net": (ResidualUNet(classes=2).graph(), 24_436_369 + 16 * 9 + 1),
    # 29.46 M (Paszke et al., 2016, ENet, table 5): biases before norms too.
    "SegNet": (SegNet(norm="batch", classes=11).graph(), 29_449_355),
    # Edges of one channel; our gradients of three bands are six, each with a weight.
    "G-SCNN with edges": (GatedSCNN(bands=4, edge_band=True, classes=19).graph(), GATED),
    "G-SCNN": (GatedSCNN(classes=19).graph(), GATED + 5),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_count_is_the_published_one(name: str) -> None:
    graph, count = COUNTS[name]
    assert count_parameters(graph, 4 if name == "G-SCNN with edges" else 3) == count


NETWORKS: list[tuple[Any, int]] = [
    *((SegNet(depth, base_channels=2, bands=4, classes=5), 1 << depth) for depth in (1, 3, 5)),
    (ResidualUNet("resnet18", 8, bands=4, classes=5), 32),
    *(
        (GatedSCNN(encoder, 8, bands=4, classes=5, edge_band=encoder == "wide38"), 8)
        for encoder in ("wide38", "resnet18", "resnet50")
    ),
]


@pytest.mark.parametrize(("network", "stride"), NETWORKS)
def test_modules_have_the_shapes_and_weights_of_the_graph(network: Any, stride: int) -> None:
    graph, module = network.graph(), build_modules(network, seed=0)
    assert total_stride(graph) == stride
    shapes = [tensor_shapes(graph, 4, 64, 96)[tensor] for tensor in graph.results]
    assert shapes == [(5, 64, 96), (1, 64, 96), (10, 64, 96)][: len(shapes)]
    made = module(torch.randn(1, 4, 64, 96))
    outputs = made if len(shapes) > 1 else (made,)
    assert [tuple(output.shape[1:]) for output in outputs] == shapes
    assert sum(p.numel() for p in module.parameters()) == count_parameters(graph, 4)
    sum(output.sum() for output in outputs[:2]).backward()
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
    row, col = torch.meshgrid(torch.arange(9.0), torch.arange(9.0), indexing="ij")
    found_BCHW = functional.conv2d((2 * row + 5 * col)[None, None], torch.tensor(GRADIENTS)[:, None])
    torch.testing.assert_close(found_BCHW[0, :, 1, 1], torch.tensor([5.0, 2.0]))


@pytest.mark.parametrize("stride", [32, 8])
@pytest.mark.parametrize("encoder", list(BLOCKS))
def test_an_encoder_is_what_torch_computes_with_its_weights(encoder: str, stride: int) -> None:
    """Written down a second time, as a function of the weights by torchvision's names."""
    network = build_network(resnet(encoder, 8, stride), 3, seed=3).double().eval()
    for number, tensor in enumerate(network.state_dict().values()):
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(number))
    state = {name.removeprefix("layers.").replace("-", "."): t for name, t in network.state_dict().items()}
    x_BCHW = torch.randn(2, 3, 64, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert relative(network(x_BCHW), reference_resnet(state, encoder, stride, x_BCHW)) < 1e-13


def reference_resnet(state: dict[str, torch.Tensor], encoder: str, stride: int, x: torch.Tensor) -> torch.Tensor:
    def unit(x: torch.Tensor, conv: str, norm: str, stride: int = 1, dilation: int = 1) -> torch.Tensor:
        weight = state[f"{conv}.weight"]
        y = functional.conv2d(x, weight, None, stride, dilation * (weight.shape[2] // 2), dilation)
        statistics = (state[f"{norm}.{key}"] for key in ("running_mean", "running_var", "weight", "bias"))
        return functional.batch_norm(y, *statistics)

    x = functional.max_pool2d(unit(x, "conv1", "bn1", 2).relu(), 3, 2, 1)
    reach = 1
    for layer, count in enumerate(BLOCKS[encoder], start=1):
        step, before = (1 if layer == 1 else 2), reach
        if stride == 8 and layer > 2:
            reach, step = reach * 2, 1
        for block in range(count):
            name, s, d = f"layer{layer}.{block}", step if block == 0 else 1, before if block == 0 else reach
            y, shortcut = x, x
            if encoder == "resnet50":
                y = unit(y, f"{name}.conv1", f"{name}.bn1").relu()
                y = unit(y, f"{name}.conv2", f"{name}.bn2", s, d).relu()
                y = unit(y, f"{name}.conv3", f"{name}.bn3")
            else:
                y = unit(y, f"{name}.conv1", f"{name}.bn1", s, d).relu()
                y = unit(y, f"{name}.conv2", f"{name}.bn2", 1, d)
            if f"{name}.downsample.0.weight" in state:
                shortcut = unit(x, f"{name}.downsample.0", f"{name}.downsample.1", s)
            x = (y + shortcut).relu()
    return x
