"""The maximum of an image: outputs and gradients are torch's, which has two ways with equal ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tiledseg.models.layers.joins import WholeImageMax


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_outputs_and_gradients_are_torchs(even: bool, ties: bool, layout: torch.memory_format) -> None:
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
