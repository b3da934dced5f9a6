"""Modules of layers against torch's: outputs, gradients, layouts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import interpolate, pad

from tests.geometry.drawn import chain
from tests.law.cases import Case, undivided
from tiledseg.architecture.unet import UNet
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.layers.resampling import AlignedUpsample as Geometry
from tiledseg.geometry.layers.resampling import MaxPool
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.models.layers import resampling as module
from tiledseg.models.layers.block import cropped, tile_places
from tiledseg.models.layers.joins import WholeImageMax
from tiledseg.models.layers.pooling import MaxPoolModule
from tiledseg.models.layers.resampling import AlignedUpsampleModule, Interpolated, Reflected, upsample


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_maximum_of_an_image_is_torchs(even: bool, ties: bool, layout: torch.memory_format) -> None:
    draw = torch.Generator().manual_seed(0)
    x_BCHW = torch.randn(2, 3, 6, 5, generator=draw, dtype=torch.float64)
    x_BCHW = (x_BCHW.sign() if ties else x_BCHW).contiguous(memory_format=layout).requires_grad_()
    expected = x_BCHW.amax((2, 3), keepdim=True) if even else functional.adaptive_max_pool2d(x_BCHW, 1)
    found = WholeImageMax(even)(x_BCHW)
    assert torch.equal(found, expected.expand(x_BCHW.shape))
    gradient = torch.randn(x_BCHW.shape, generator=draw, dtype=torch.float64)
    (own,) = torch.autograd.grad(found, x_BCHW, gradient)
    (wanted,) = torch.autograd.grad(expected.expand(x_BCHW.shape), x_BCHW, gradient)
    torch.testing.assert_close(own, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (0, 3, 2, 0), (4, 4, 3, 3), (0, 0, 0, 0)])
def test_reflection_is_torchs(pads: tuple[int, int, int, int], layout: torch.memory_format) -> None:
    """Pads as wide as may be, too, where the pixels of both ends' reflections are the same ones."""
    draw = torch.Generator().manual_seed(0)
    x_BCHW = torch.randn(2, 3, 4, 5, generator=draw, dtype=torch.float64).contiguous(memory_format=layout)
    x_BCHW.requires_grad_()
    expected, found = pad(x_BCHW, pads, mode="reflect"), Reflected.apply(x_BCHW, pads)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    g_BCHW = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    (right,), (dx_BCHW,) = (torch.autograd.grad(made, x_BCHW, g_BCHW) for made in (expected, found))
    torch.testing.assert_close(dx_BCHW, right, rtol=1e-14, atol=1e-14)


ROWS, COLS = slice(1, 5), slice(2, 9)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("within", [False, True])
def test_a_crop_and_its_gradient_are_those_of_slices(layout: torch.memory_format, within: bool) -> None:
    """Also of a tensor that is itself a part of another."""
    found = []
    for crop in (cropped, lambda x, rows, cols: x[:, :, rows, cols]):
        whole = torch.rand(2, 3, 9, 12, generator=torch.Generator().manual_seed(0)).to(memory_format=layout)
        whole.requires_grad_()
        x_BCHW = crop(whole, slice(1, 8), slice(1, 11)) if within else whole * 2
        part = crop(x_BCHW, ROWS, COLS)
        (gradient,) = torch.autograd.grad((part**2).sum() + x_BCHW.sum(), whole)
        found.append((part, gradient))
    (part, gradient), (sliced, wanted) = found
    assert torch.equal(part, sliced)
    assert torch.equal(gradient, wanted)
    assert gradient.is_contiguous(memory_format=layout), "the gradient lies as the tensor does"


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("factors", "size"), [((2, 2), (5, 7)), ((3, 1), (4, 9)), ((1, 4), (3, 1)), ((8, 2), (1, 6))])
def test_upsampling_with_aligned_corners_is_torchs(
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


SHAPES = [(1, 1, 1, 1), (1, 3, 1, 7), (2, 4, 5, 1), (2, 3, 9, 11), (1, 8, 32, 34)]
KINDS = [("bilinear", (2, 2)), ("bilinear", (3, 5)), ("bicubic", (2, 2)), ("bicubic", (4, 3))]
BOUNDS = {torch.float32: 1e-6, torch.float64: 4e-15, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("mode", "factors"), KINDS)
def test_upsampling_by_an_own_adjoint_is_torchs(
    mode: str, factors: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format
) -> None:
    """Forward to the bit, and in torch's layout; backward against torch's in float64, relative to the largest."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(shape, generator=draw).to(dtype).contiguous(memory_format=layout).requires_grad_()
    expected, found = upsample(x, factors, mode), Interpolated.apply(x, factors, mode)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    g = torch.randn(found.shape, generator=draw).to(dtype)
    wide = x.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(
        interpolate(wide, scale_factor=tuple(map(float, factors)), mode=mode, align_corners=False), wide, g.double()
    )
    (dx,) = torch.autograd.grad(found, x, g)
    assert dx.dtype == dtype
    assert (dx.double() - right).abs().max() <= BOUNDS[dtype] * right.abs().max()


def test_the_adjoint_identity_holds_exactly() -> None:
    """<Ax, y> = <x, A*y> of whole numbers: all values are sixteenths."""
    draw = torch.Generator().manual_seed(2)
    x, y = (torch.randint(-9, 10, s, generator=draw).float() for s in ((1, 2, 7, 9), (1, 2, 14, 18)))
    x.requires_grad_()
    up = Interpolated.apply(x, (2, 2), "bilinear")
    (back,) = torch.autograd.grad(up, x, y)
    assert (up * y).sum() == (x * back).sum()


def test_a_network_learns_the_same_by_the_own_adjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(UNet(3, base_channels=2, upsampling="bilinear", bands=2, classes=3), (2, 2))
    expected = undivided(case)
    calls = []
    monkeypatch.setattr(module, "takes_own_adjoint", lambda mode, *_: calls.append(mode) or mode == "bilinear")
    found = undivided(case)
    assert calls == ["bilinear"] * 2
    assert torch.equal(found.logits_KHW, expected.logits_KHW)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("options", [(2,), (3, 2, 1), ((3, 2), 1, (1, 0), (2, 1)), (2, 2, 0, 1)])
def test_max_pooling_is_torchs(options: tuple[int, ...], layout: torch.memory_format, dtype: torch.dtype) -> None:
    """Values may be equal, too."""
    draw = torch.Generator().manual_seed(0)
    x_BCHW = torch.randint(-3, 3, (2, 5, 12, 14), generator=draw).to(dtype).contiguous(memory_format=layout)
    found = []
    for kind in (nn.MaxPool2d, MaxPoolModule):
        source = x_BCHW.clone().requires_grad_()
        made = kind(*options)(source)
        made.backward(torch.arange(made.numel()).reshape(made.shape).to(dtype))
        assert source.grad is not None
        found.append((made.detach(), source.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_max_pooling_keeps_its_input_only() -> None:
    x_BCHW = torch.randn(1, 4, 32, 32, requires_grad=True)
    with AllocationMeter([x_BCHW]) as meter:
        made = MaxPoolModule(2)(x_BCHW)
        assert meter.bytes == made.nbytes
