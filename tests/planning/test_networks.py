"""The planner's memory of a training step of the sources' networks, with their losses, against torch's allocations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import Network
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.models.network import build_modules
from tiledseg.planning.walk.step_memory import training_memory
from tiledseg.tracing.allocations import AllocationMeter
from tiledseg.training.choose_objective import choose_objective

SIDE, BANDS = 256, 4
EDGES = choose_objective(GatedSCNN(), "cross_entropy", 255)


def loss_of(output: Any, labels_BHW: torch.Tensor) -> torch.Tensor:
    if isinstance(output, tuple):
        return EDGES.sums(output, functional.pad(labels_BHW, (EDGES.margin,) * 4, value=-1))[0]
    return functional.cross_entropy(output, labels_BHW, reduction="sum")


@pytest.mark.parametrize(
    ("network", "tolerance", "side"),
    [
        (SegNet(3, 8, "batch", BANDS, 3), 0.001, SIDE),
        # Steps of single pixels in shortcuts keep a copy of those pixels.
        (ResidualUNet("resnet18", 16, "batch", bands=BANDS), 0.02, SIDE),
        (ResidualUNet("resnet18", 16, "batch", bands=BANDS), 0.01, 192),  # its peak is in a norm's backward pass
        (ResidualUNet("resnet50", 16, "none", "bilinear", BANDS), 0.02, SIDE),
        # What the loss of several outputs keeps is a measured multiple of them.
        (GatedSCNN("resnet18", 16, "batch", bands=BANDS, classes=5), 0.02, SIDE),
        (GatedSCNN("wide38", 8, "none", False, bands=BANDS, classes=3), 0.03, SIDE),
    ],
)
def test_the_memory_of_a_step_is_that_of_torch(network: Network, tolerance: float, side: int) -> None:
    module = build_modules(network, seed=0).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [tensor for p in module.parameters() for tensor in (p, p.grad) if tensor is not None]
    x_BCHW = torch.randn(1, BANDS, side, side).contiguous(memory_format=torch.channels_last)
    labels_BHW = torch.zeros(1, side, side, dtype=torch.long)
    with AllocationMeter([*known, *module.buffers()]) as meter:
        own_BCHW = x_BCHW.clone()
        loss_of(module(own_BCHW), labels_BHW.clone()).backward()
    memory = training_memory(network.graph(), BANDS, (side, side))
    assert memory.activations + memory.backward == pytest.approx(meter.peak, rel=tolerance)
