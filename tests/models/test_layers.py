"""Modules of layers against torch's: outputs, gradients, layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import interpolate, pad

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.resampling import AlignedUpsample, MaxPool
from tiledseg.models.layers.block import cropped, tile_places
from tiledseg.models.layers.joins import WholeImageMax
from tiledseg.models.layers.pooling import MaxIndicesModule, MaxPoolModule, MaxUnpoolModule
from tiledseg.models.layers.resampling import AlignedUpsampleModule, Interpolated, Reflected

Function = Callable[[torch.Tensor], torch.Tensor]
BOUNDS = {torch.float32: 1e-6, torch.float64: 4e-15, torch.bfloat16: 2**-8}
layouts = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])


def check(ours: Function, theirs: Function, x_BCHW: torch.Tensor, layout: torch.memory_format, exact: bool) -> None:
    """Forward as torch (`exact`: its bits, in its layout), backward as torch in float64, relative to the largest."""
    x_BCHW = x_BCHW.contiguous(memory_format=layout).requires_grad_()
    found, expected = ours(x_BCHW), theirs(x_BCHW)
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if exact else 1e-13)
    assert found.stride() == expected.stride() or not exact
    g_BCHW = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).to(found.dtype)
    wide_BCHW = x_BCHW.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(theirs(wide_BCHW), wide_BCHW, g_BCHW.double())
    (dx_BCHW,) = torch.autograd.grad(found, x_BCHW, g_BCHW)
    assert dx_BCHW.dtype == x_BCHW.dtype
    assert (dx_BCHW.double() - right).abs().max() <= BOUNDS[x_BCHW.dtype] * right.abs().max()


def drawn(*shape: int, ties: bool = False) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    if ties:
        return torch.randint(-3, 3, shape, generator=draw).double()
    return torch.randn(shape, generator=draw, dtype=torch.float64)


@layouts
@pytest.mark.parametrize("ties", [False, True])
def test_maxima_are_torchs(ties: bool, layout: torch.memory_format) -> None:
    x_BCHW = drawn(2, 5, 12, 14, ties=ties)
    for even, most in ((True, lambda x: x.amax((2, 3), True)), (False, lambda x: functional.adaptive_max_pool2d(x, 1))):
        check(WholeImageMax(even), lambda x, most=most: most(x).expand(x.shape), x_BCHW, layout, exact=True)
    for options in ((2,), (3, 2, 1), ((3, 2), 1, (1, 0), (2, 1))):
        for dtype in (torch.float32, torch.float64):
            check(MaxPoolModule(*options), nn.MaxPool2d(*options), x_BCHW.to(dtype), layout, exact=True)


def test_unpooling_is_torchs() -> None:
    x_BCHW = drawn(2, 5, 12, 14, ties=True)
    y_BCHW, found_BCHW = functional.max_pool2d(x_BCHW, 2, return_indices=True)
    unpooled_BCHW = MaxUnpoolModule(2)(y_BCHW, MaxIndicesModule(2, 2, 0, 1)(x_BCHW))
    assert torch.equal(unpooled_BCHW, functional.max_unpool2d(y_BCHW, found_BCHW, 2))


@layouts
@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (0, 3, 2, 0), (4, 4, 3, 3), (0, 0, 0, 0)])
def test_reflection_is_torchs(pads: tuple[int, int, int, int], layout: torch.memory_format) -> None:
    """Pads as wide as may be, too, where the pixels of both ends' reflections are the same ones."""
    x_BCHW = drawn(2, 3, 4, 5)
    check(lambda x: Reflected.apply(x, pads), lambda x: pad(x, pads, mode="reflect"), x_BCHW, layout, exact=True)


@layouts
@pytest.mark.parametrize(("factors", "size"), [((2, 2), (5, 7)), ((3, 1), (4, 9)), ((1, 4), (3, 1)), ((8, 2), (1, 6))])
def test_upsampling_with_aligned_corners_is_torchs(
    factors: tuple[int, int], size: tuple[int, int], layout: torch.memory_format
) -> None:
    scale = {"scale_factor": (float(factors[0]), float(factors[1])), "mode": "bilinear", "align_corners": True}
    check(AlignedUpsampleModule(factors), partial(interpolate, **scale), drawn(2, 3, *size), layout, exact=False)


def test_float32_weights_of_a_large_image_are_exact() -> None:
    """torch computes a position in float32: at the far end of 40,000 pixels it is off by thousandths of a pixel."""
    x_BCHW = torch.arange(20_000, dtype=torch.float64)[None, None, :, None] % 2
    exact = interpolate(x_BCHW, scale_factor=(2.0, 1.0), mode="bilinear", align_corners=True)
    assert (AlignedUpsampleModule((2, 1))(x_BCHW.float()) - exact).abs().max() < 1e-6


@layouts
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 3, 1, 7), (2, 4, 5, 1), (2, 3, 9, 11), (1, 8, 32, 34)])
@pytest.mark.parametrize(
    ("mode", "factors"), [("bilinear", (2, 2)), ("bilinear", (3, 5)), ("bicubic", (2, 2)), ("bicubic", (4, 3))]
)
def test_upsampling_by_an_own_adjoint_is_torchs(
    mode: str, factors: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format
) -> None:
    x_BCHW, scale = drawn(*shape).to(dtype), (float(factors[0]), float(factors[1]))
    theirs = partial(interpolate, scale_factor=scale, mode=mode, align_corners=False)
    check(lambda x: Interpolated.apply(x, factors, mode), theirs, x_BCHW, layout, exact=True)


@layouts
@pytest.mark.parametrize("within", [False, True])
def test_a_crop_and_its_gradient_are_those_of_slices(layout: torch.memory_format, within: bool) -> None:
    """Also of a tensor that is itself a part of another."""
    found = []
    for crop in (cropped, lambda x, rows, cols: x[:, :, rows, cols]):
        whole = drawn(2, 3, 9, 12).to(memory_format=layout).requires_grad_()
        x_BCHW = crop(whole, slice(1, 8), slice(1, 11)) if within else whole * 2
        part = crop(x_BCHW, slice(1, 5), slice(2, 9))
        (gradient,) = torch.autograd.grad((part**2).sum() + x_BCHW.sum(), whole)
        found.append((part, gradient))
    assert all(torch.equal(own, sliced) for own, sliced in zip(*found, strict=True))
    assert found[0][1].is_contiguous(memory_format=layout), "the gradient lies as the tensor does"


def test_a_tile_that_begins_between_coarse_pixels_has_no_place() -> None:
    graph, whole = Graph((Node("pool", MaxPool()), Node("up", AlignedUpsample()))), Box.of_shape((64, 64))
    assert list(tile_places(graph, whole, Box(Interval(2, 32), Interval(0, 64)))) == [1]
    with pytest.raises(GeometryError, match="multiples of the network's alignment"):
        tile_places(graph, whole, Box(Interval(3, 33), Interval(0, 64)))
