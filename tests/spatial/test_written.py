"""Activations that write into a tensor that is there, against the modules: the same bits, forward and backward, but for
exponentials, whose last bit depends on how torch walks over memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tiledseg.spatial.convert import IN_PLACE
from tiledseg.spatial.written import written

MODULES = [nn.ReLU(True), nn.ReLU6(True), nn.LeakyReLU(0.2, True), nn.ELU(0.7, True), nn.SELU(True), nn.CELU(0.6, True)]


EXPONENTIALS = nn.ELU, nn.SELU, nn.CELU


def check_same(found: torch.Tensor, expected: torch.Tensor, module: nn.Module) -> None:
    exact = not isinstance(module, EXPONENTIALS)
    tolerance = 0.0 if exact else 4 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_are_those_of_the_module(module: nn.Module, dtype: torch.dtype) -> None:
    x_BCHW = 3 * torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    x_BCHW[0, 0, 0, :4] = torch.tensor([-0.0, 0.0, float("inf"), -float("inf")])
    g_BCHW = torch.randn(x_BCHW.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    leaf_BCHW = x_BCHW.clone().requires_grad_()
    y_BCHW = module(leaf_BCHW * 1)
    (dx_BCHW,) = torch.autograd.grad(y_BCHW, leaf_BCHW, g_BCHW)
    form = written(module)
    assert form is not None
    window_BCHW, part = torch.zeros(2, 3, 9, 11, dtype=dtype), (..., slice(1, 8), slice(1, 10))
    form.apply(x_BCHW, out=window_BCHW[part])
    check_same(window_BCHW[part], y_BCHW.detach(), module)
    window_BCHW[part] = y_BCHW.detach()
    found_BCHW = torch.zeros_like(window_BCHW)
    form.gradient(g_BCHW, window_BCHW[part], grad_input=found_BCHW[part])
    check_same(found_BCHW[part], dx_BCHW, module)


def test_all_that_write_over_their_input_are_known() -> None:
    assert {type(module) for module in MODULES} == set(IN_PLACE)


def test_who_leaves_the_input_alone_has_none() -> None:
    assert written(nn.LeakyReLU()) is None
    assert written(nn.GELU()) is None
