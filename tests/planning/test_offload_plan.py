"""What a plan says of steps whose kept tensors leave memory: an upper bound of what torch and the window take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.memory.stores import offload
from tiledseg.architecture.unet import UNet
from tiledseg.errors import BudgetError
from tiledseg.models.network import build_modules
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.walk.step_memory import fixed_memory
from tiledseg.tracing.allocations import AllocationMeter

SIDE = 256


def planned(network: UNet, memory: int = 1 << 40, **asked: bool) -> RunPlan:
    return plan_run(RunQuestion(network, (Extent((SIDE, SIDE)),), 1, memory, grid=(1, 1), **asked))  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["none", "instance"])
def test_a_step_takes_at_most_what_is_planned(norm: str, tmp_path: Path) -> None:
    unet = UNet(4, base_channels=8, norm=norm)
    plan, kept = planned(unet, offload=True), planned(unet).memory
    assert plan.offloaded is not None
    network = build_modules(unet, 0).train()
    parameters = list(network.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    labels = torch.zeros(1, SIDE, SIDE, dtype=torch.long)
    peaks = []
    with offload(tmp_path, plan.offloaded.staying) as moving:
        for _ in range(3):
            source = torch.randn(1, unet.bands, SIDE, SIDE)
            with AllocationMeter([t for p in parameters for t in (p, p.grad)]) as meter:
                cross_entropy(network(source), labels, reduction="sum").backward()
            peaks.append(meter.peak)
    assert moving.figures.peak_bytes <= plan.offloaded.staying
    assert moving.figures.bytes_out >= 2 * (plan.offloaded.kept - plan.offloaded.staying)
    activations = plan.memory - fixed_memory(unet.graph(), unet.bands, 4)
    assert 0.5 * activations <= max(peaks) <= activations < kept - fixed_memory(unet.graph(), unet.bands, 4)


def test_tensors_too_small_to_leave_are_planned_to_stay() -> None:
    """The plan of a network whose tensors all stay says so, and needs what a plan of none that leave needs."""
    small = UNet(2, base_channels=1, bands=2)
    plan = planned(small, offload=True)
    assert plan.offloaded is not None
    assert (plan.offloaded.kept, plan.offloaded.staying) == (0, 0)
    assert plan.memory >= planned(small).memory * 0.99
    assert plan.offloaded.in_words("a file").startswith("all tensors stay in memory")
    large = planned(UNet(4, base_channels=8), offload=True).offloaded
    assert large is not None
    assert 0 < large.staying < large.kept
    assert large.in_words("a file").startswith(f"{large.kept / 2**20:.1f} MiB go to a file")


def test_it_needs_less_and_a_budget_that_is_too_small_is_refused() -> None:
    unet = UNet(4, base_channels=8, norm="instance")
    plan, kept = planned(unet, offload=True), planned(unet)
    assert plan.memory < 0.8 * kept.memory
    assert kept.offloaded is None
    assert planned(unet, plan.memory, offload=True, budgeted=True).rebuilt is None
    with pytest.raises(BudgetError, match=rf"memory.offload all a step needs {plan.memory}"):
        planned(unet, plan.memory - 1, offload=True, budgeted=True)
