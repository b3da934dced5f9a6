"""Upsampling with aligned corners against torch's: whole, in parts, its memory, and places that a tile cannot have."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.planning.allocations import AllocationMeter
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box
from tiledseg.geometry.convolutions import Convolution
from tiledseg.geometry.graph import chain
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.resampling import AlignedUpsample as Geometry
from tiledseg.geometry.resampling import MaxPool
from tiledseg.models.aligned import AlignedUpsample
from tiledseg.models.network import build_network
from tiledseg.models.places import tile_places
from tiledseg.planning.step_memory import training_memory


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("factors", "size"), [((2, 2), (5, 7)), ((3, 1), (4, 9)), ((1, 4), (3, 1)), ((8, 2), (1, 6))])
def test_outputs_and_gradients_are_torchs(
    factors: tuple[int, int], size: tuple[int, int], layout: torch.memory_format
) -> None:
    x_BCHW = torch.randn(2, 3, *size, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    scale = float(factors[0]), float(factors[1])
    expected = functional.interpolate(x_BCHW, scale_factor=scale, mode="bilinear", align_corners=True)
    found = AlignedUpsample(factors)(x_BCHW)
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    (wanted,), (own,) = (torch.autograd.grad(y, x_BCHW, gradient) for y in (expected, found))
    torch.testing.assert_close(own, wanted, rtol=0, atol=1e-13)


def test_float32_weights_of_a_large_image_are_exact() -> None:
    """torch computes a position in float32: at the far end of 40,000 pixels it is off by thousandths of a pixel."""
    size = 20_000
    x_BCHW = torch.arange(size, dtype=torch.float64)[None, None, :, None] % 2
    exact = functional.interpolate(x_BCHW, scale_factor=(2.0, 1.0), mode="bilinear", align_corners=True)
    found = AlignedUpsample((2, 1))(x_BCHW.float())
    assert (found - exact).abs().max() < 1e-6


def test_a_tile_that_begins_between_coarse_pixels_has_no_place() -> None:
    graph = chain([("pool", MaxPool()), ("up", Geometry())])
    whole = Box.of_shape((64, 64))
    assert list(tile_places(graph, whole, Box(Interval(2, 32), Interval(0, 64)))) == [1]
    with pytest.raises(GeometryError, match="multiples of the network's alignment"):
        tile_places(graph, whole, Box(Interval(3, 33), Interval(0, 64)))


def test_the_memory_of_a_step_is_that_of_torch() -> None:
    graph = chain([("first", Convolution(8, 3, padding=1)), ("up", Geometry()), ("last", Convolution(2, 1))])
    network: nn.Module = build_network(graph, 3, 0).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [tensor for p in network.parameters() for tensor in (p, p.grad) if tensor is not None]
    x_BCHW = torch.randn(1, 3, 256, 256).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(1, 512, 512, dtype=torch.long)
    network(x_BCHW)  # weights of places are kept from here on
    with AllocationMeter(known) as meter:
        own_BCHW, own_labels = x_BCHW.clone(), labels.clone()
        functional.cross_entropy(network(own_BCHW), own_labels, reduction="sum").backward()
    memory = training_memory(graph, 3, (256, 256))
    assert memory.activations + memory.backward == pytest.approx(meter.peak, rel=0.01)
