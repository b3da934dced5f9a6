from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.law.cases import relative
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.resnet import BLOCKS, ResNet
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import count_parameters, total_stride
from tiledseg.models.network import build_network

LAST_LAYER = {"resnet18": 513_000, "resnet34": 513_000, "resnet50": 2_049_000}  # of 1000 classes, which we have not


@pytest.mark.parametrize(
    ("encoder", "count"), [("resnet18", 11_689_512), ("resnet34", 21_797_672), ("resnet50", 25_557_032)]
)
def test_encoders_have_the_published_counts(encoder: str, count: int) -> None:
    """torchvision's documentation of each gives them as num_params."""
    graph = Graph(tuple(ResNet(encoder, 64, "batch").nodes()))
    assert count_parameters(graph, 3) + LAST_LAYER[encoder] == count
    assert total_stride(graph) == 32


def test_the_whole_network_has_the_published_count() -> None:
    """segmentation_models_pytorch's Unet("resnet34") of one class."""
    assert count_parameters(ResidualUNet(classes=2).graph(), 3) - (16 * 9 + 1) == 24_436_369


@pytest.mark.parametrize("stride", [32, 8])
@pytest.mark.parametrize("encoder", list(BLOCKS))
def test_an_encoder_is_what_torch_computes_with_its_weights(encoder: str, stride: int) -> None:
    """Written down a second time, as a function of the weights by torchvision's names."""
    graph = Graph(tuple(ResNet(encoder, 8, "batch", stride).nodes()))
    network = build_network(graph, 3, seed=3).double().eval()
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
