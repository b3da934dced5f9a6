"""Reflection whose gradient is added up by slices: torch's values, and torch's gradient to rounding."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from tiledseg.models.layers.border import Reflected


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (0, 3, 2, 0), (4, 4, 3, 3), (0, 0, 0, 0)])
def test_it_is_torch_s(pads: tuple[int, int, int, int], layout: torch.memory_format) -> None:
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
