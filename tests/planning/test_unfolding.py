"""What convolutions in float64 lay out for the moment: counted, and as PyTorch's allocator reports it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.planned_memory.peaks import allocator_peak
from tiledseg.geometry.layers.convolutions import Convolution, TransposedConvolution
from tiledseg.planning.step.cost import LayerCost, unfolded_bytes

CHANNELS, SIDE = 16, 64
CASES = {
    "3 x 3": (Convolution(8, 3, padding=1), nn.Conv2d(CHANNELS, 8, 3, padding=1)),
    "5 x 5": (Convolution(8, 5), nn.Conv2d(CHANNELS, 8, 5)),
    "step 2": (Convolution(8, 3, stride=2, padding=1), nn.Conv2d(CHANNELS, 8, 3, stride=2, padding=1)),
    "dilated": (Convolution(8, 3, padding=2, dilation=2), nn.Conv2d(CHANNELS, 8, 3, padding=2, dilation=2)),
    "up 2 x 2": (TransposedConvolution(8), nn.ConvTranspose2d(CHANNELS, 8, 2, stride=2)),
    "up 4 x 4": (
        TransposedConvolution(8, 4, stride=2, padding=1),
        nn.ConvTranspose2d(CHANNELS, 8, 4, stride=2, padding=1),
    ),
}


@pytest.mark.parametrize(("layer", "module"), CASES.values(), ids=CASES)
def test_float64_unfolds_what_is_counted(layer: Convolution | TransposedConvolution, module: nn.Module) -> None:
    """Within 1 %; other precisions nothing."""
    x_BCHW = torch.randn(1, CHANNELS, SIDE, SIDE, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    module = module.double().to(memory_format=torch.channels_last)
    with torch.no_grad():
        y_BCHW = module(x_BCHW)
        found = allocator_peak(lambda: module(x_BCHW)) - y_BCHW.nbytes
    shape = tuple(y_BCHW.shape[1:])
    work = layer.multiply_adds(CHANNELS) * shape[1] * shape[2]
    cost = LayerCost("", "", shape, 0, work, (x_BCHW.nbytes,), y_BCHW.nbytes, 0)
    assert unfolded_bytes(layer, cost, 8) == pytest.approx(found, rel=0.01)
    assert unfolded_bytes(layer, cost, 4) == unfolded_bytes(layer, cost, 2) == 0
