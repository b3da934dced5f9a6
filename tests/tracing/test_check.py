"""The halo of traced networks against the support of gradients: drawn networks, and one whose geometry lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.tracing.cases import traced
from tests.tracing.halo_by_gradients import check_halo
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import required_input, total_stride
from tiledseg.models.network import GraphNetwork
from tiledseg.tracing.trace import trace

LINEAR = ("PaddingUNet", "Pointed", "Exchanging", "Unpooling", "Gate", "Weighted", "Shuffled", "ChannelNorm")


class Drawn(nn.Module):
    """Layers as drawn, and back to the size of the input."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return functional.interpolate(y, size=x.shape[2:], mode="nearest")


@st.composite
def layers(draw: st.DrawFn) -> list[nn.Module]:
    found: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 4))):
        kernel = draw(st.tuples(*[st.sampled_from((1, 3, 5))] * 2))
        dilation = draw(st.tuples(*[st.integers(1, 2)] * 2))
        stride = draw(st.sampled_from((1, 1, 2)))
        padding = tuple(d * (k // 2) for k, d in zip(kernel, dilation, strict=True))
        kind = draw(st.sampled_from(("convolution", "average", "up")))
        if kind == "convolution":
            found.append(nn.Conv2d(2, 2, kernel, stride, padding, dilation))
        elif kind == "average":
            found.append(nn.AvgPool2d(3, stride, 1))
        else:
            found += [nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode=draw(st.sampled_from(("nearest", "bilinear"))))]
    return found


@settings(derandomize=True, max_examples=25, deadline=None)
@given(layers())
def test_drawn_networks_reach_as_far_as_their_graphs_say(found: list[nn.Module]) -> None:
    module = Drawn(found).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.1)
    network = trace(module, 2)
    rows, cols = check_halo(network)
    assert _need(network.graph) == rows
    assert _need(network.graph.along_columns) == cols


def _need(graph: Graph) -> Interval:
    """Of an output on the coarsest grid, from its own place."""
    at = 64 * total_stride(graph)
    return required_input(graph, Interval(at, at + 1)).shift(-at)


@pytest.mark.parametrize("name", LINEAR)
def test_networks_in_many_styles_reach_no_farther(name: str) -> None:
    rows, cols = check_halo(traced(name))
    assert rows.contains(Interval(0, 1))
    assert cols.contains(Interval(0, 1))


def test_shares_that_sum_to_one_reach_what_they_see() -> None:
    """Their sum has no gradient."""
    network = trace(nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Softmax(1)).double(), 3)
    assert check_halo(network) == (Interval(-1, 2), Interval(-1, 2))


@pytest.mark.parametrize("activation", [nn.LeakyReLU(-0.2), nn.ELU(-0.5), nn.LeakyReLU(0.2)], ids=str)
def test_slopes_of_either_sign_go_backward(activation: nn.Module) -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), activation, nn.Conv2d(3, 2, 1)).double()
    x_BCHW = torch.randn(1, 2, 16, 16, dtype=torch.float64)
    found = []
    for each in (module, trace(module, 2)):
        module.zero_grad()
        each(x_BCHW).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in module.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_geometry_that_lies_is_found_out() -> None:
    network = trace(nn.Sequential(nn.Conv2d(2, 2, 5, padding=2), nn.ReLU()).double(), 2)
    narrow = replace(network.graph.layers[0], kernel=3, padding=1)
    lying = GraphNetwork(
        network.graph.with_layers([narrow, *network.graph.layers[1:]]), 2, list(network.layers.values())
    )
    with pytest.raises(GeometryError, match="depends on rows"):
        check_halo(lying)


def test_what_sees_the_whole_image_is_not_asked() -> None:
    with pytest.raises(GeometryError, match="whole image"):
        check_halo(traced("Squeezed"))
