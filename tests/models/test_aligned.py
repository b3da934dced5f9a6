"""Upsampling with aligned corners against torch's: whole, in parts, and places that a tile cannot have."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.graph import chain
from tiledseg.geometry.layers.resampling import AlignedUpsample as Geometry
from tiledseg.geometry.layers.resampling import MaxPool
from tiledseg.models.layers.block import tile_places
from tiledseg.models.layers.upsample import AlignedUpsampleModule


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("factors", "size"), [((2, 2), (5, 7)), ((3, 1), (4, 9)), ((1, 4), (3, 1)), ((8, 2), (1, 6))])
def test_outputs_and_gradients_are_torchs(
    factors: tuple[int, int], size: tuple[int, int], layout: torch.memory_format
) -> None:
    x_BCHW = torch.randn(2, 3, *size, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    scale = float(factors[0]), float(factors[1])
    expected = functional.interpolate(x_BCHW, scale_factor=scale, mode="bilinear", align_corners=True)
    found = AlignedUpsampleModule(factors)(x_BCHW)
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    (wanted,), (own,) = (torch.autograd.grad(y, x_BCHW, gradient) for y in (expected, found))
    torch.testing.assert_close(own, wanted, rtol=0, atol=1e-13)


def test_float32_weights_of_a_large_image_are_exact() -> None:
    """torch computes a position in float32: at the far end of 40,000 pixels it is off by thousandths of a pixel."""
    size = 20_000
    x_BCHW = torch.arange(size, dtype=torch.float64)[None, None, :, None] % 2
    exact = functional.interpolate(x_BCHW, scale_factor=(2.0, 1.0), mode="bilinear", align_corners=True)
    found = AlignedUpsampleModule((2, 1))(x_BCHW.float())
    assert (found - exact).abs().max() < 1e-6


def test_a_tile_that_begins_between_coarse_pixels_has_no_place() -> None:
    graph = chain([("pool", MaxPool()), ("up", Geometry())])
    whole = Box.of_shape((64, 64))
    assert list(tile_places(graph, whole, Box(Interval(2, 32), Interval(0, 64)))) == [1]
    with pytest.raises(GeometryError, match="multiples of the network's alignment"):
        tile_places(graph, whole, Box(Interval(3, 33), Interval(0, 64)))
