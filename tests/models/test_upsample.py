"""Upsampling with an adjoint of its own: torch's forward bits, torch's gradient to rounding."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import interpolate

from tests.law.cases import Case, undivided
from tiledseg.architecture.unet import UNet
from tiledseg.models.layers import upsample as module
from tiledseg.models.layers.upsample import Interpolated, takes_own_adjoint, upsample

SHAPES = [(1, 1, 1, 1), (1, 3, 1, 7), (2, 4, 5, 1), (2, 3, 9, 11), (1, 8, 32, 34)]
KINDS = [("bilinear", (2, 2)), ("bilinear", (3, 5)), ("bicubic", (2, 2)), ("bicubic", (4, 3))]
BOUNDS = {torch.float32: 1e-6, torch.float64: 4e-15, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("mode", "factors"), KINDS)
def test_it_is_torchs(
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


@pytest.mark.parametrize(("mode", "factors"), KINDS)
def test_its_gradient_is_that_of_its_function(mode: str, factors: tuple[int, int]) -> None:
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Interpolated.apply, (x, factors, mode))


def test_the_adjoint_identity_holds_exactly() -> None:
    """<Ax, y> = <x, A*y> of whole numbers: all values are sixteenths."""
    draw = torch.Generator().manual_seed(2)
    x, y = (torch.randint(-9, 10, s, generator=draw).float() for s in ((1, 2, 7, 9), (1, 2, 14, 18)))
    x.requires_grad_()
    up = Interpolated.apply(x, (2, 2), "bilinear")
    (back,) = torch.autograd.grad(up, x, y)
    assert (up * y).sum() == (x * back).sum()


def test_where_torchs_own_serves() -> None:
    """Slow, or missing, are those of a GPU where deterministic algorithms are asked for."""
    assert takes_own_adjoint("bilinear", "cuda", True)
    assert takes_own_adjoint("bicubic", "cuda", True)
    for case in (("nearest", "cuda", True), ("bicubic", "cpu", True), ("bilinear", "cuda", False)):
        assert not takes_own_adjoint(*case)


def test_a_network_learns_the_same_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(UNet(3, base_channels=2, upsampling="bilinear", bands=2, classes=3), (2, 2))
    expected = undivided(case)
    calls = []
    monkeypatch.setattr(module, "takes_own_adjoint", lambda mode, *_: calls.append(mode) or mode == "bilinear")
    found = undivided(case)
    assert calls == ["bilinear"] * 2
    assert torch.equal(found.logits_KHW, expected.logits_KHW)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-12, atol=1e-14)
