"""The choice that keeps a part of the activations: real steps keep what is planned."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.large_model_support.kept import keeping, plain_bytes
from tiledseg.architecture.unet import UNet
from tiledseg.models.network import build_modules
from tiledseg.planning.memory.choice import StepChoices, step_choices
from tiledseg.tracing.allocations import AllocationMeter
from tiledseg.units.widths import ACTIVATION_BYTES

SIZE = 64


def choices_of(unet: UNet) -> StepChoices:
    return step_choices(unet.graph(), unet.bands, (SIZE, SIZE), ACTIVATION_BYTES["fp32"])


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_a_step_keeps_what_is_planned(norm: str) -> None:
    unet = UNet(3, base_channels=8, norm=norm)
    step, plain = choices_of(unet), plain_bytes(unet, SIZE, "fp32")
    network = build_modules(unet, seed=0).train()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    drawn_BCHW = torch.randn(1, unet.bands, SIZE, SIZE).contiguous(memory_format=torch.channels_last)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [tensor for p in network.parameters() for tensor in (p, p.grad) if tensor is not None]
    for most in (plain, plain * 3 // 4, plain // 2):
        found = keeping(step, most)
        assert found is not None
        planned = step.walk.kept(step.walk.needed_words(found.policy))
        network.follow(found.policy)
        with AllocationMeter([*known, *network.buffers()]) as meter:
            x_BCHW = drawn_BCHW.clone()
            labels_BHW = torch.zeros(1, SIZE, SIZE, dtype=torch.long)
            loss = cross_entropy(network(x_BCHW), labels_BHW, reduction="sum")
            kept = meter.bytes
            loss.backward()
        assert planned <= most
        assert kept == pytest.approx(planned, rel=1e-3)
