"""Max pooling that keeps no indices is torch's, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tiledseg.models.layers.pooling import MaxPoolModule, max_pool
from tiledseg.tracing.allocations import AllocationMeter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("options", [(2,), (3, 2, 1), ((3, 2), 1, (1, 0), (2, 1)), (2, 2, 0, 1)])
def test_it_is_torch_s(options: tuple[int, ...], layout: torch.memory_format, dtype: torch.dtype) -> None:
    """Of values many of which are equal, too."""
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


def test_it_keeps_its_input_only() -> None:
    x_BCHW = torch.randn(1, 4, 32, 32, requires_grad=True)
    with AllocationMeter([x_BCHW]) as meter:
        made = MaxPoolModule(2)(x_BCHW)
        assert meter.bytes == made.nbytes


@pytest.mark.parametrize("side", [(8, 6), (7, 6), (2, 4)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_maxima_without_indices_are_those_of_torch(side: tuple[int, int], layout: torch.memory_format) -> None:
    """Infinite values and numbers that are none too; the layout stays."""
    x_BCHW = torch.randn(2, 5, *side, generator=torch.Generator().manual_seed(1)).contiguous(memory_format=layout)
    x_BCHW[0, 0, :2, :2] = torch.tensor([[float("nan"), 1.0], [float("inf"), float("-inf")]])
    expected = functional.max_pool2d(x_BCHW, 2)
    with torch.no_grad():
        found = max_pool(x_BCHW, ((2, 2),) * 2 + ((0, 0), (1, 1)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.is_contiguous(memory_format=layout)
