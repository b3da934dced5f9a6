"""What a plan says of steps whose kept tensors leave memory: an upper bound of what torch and the window take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.planned_memory.peaks import in_channels_last, module_by, step, weights_of
from tests.memory.stores import ROOM, offload
from tiledseg.architecture.unet import UNet
from tiledseg.errors import BudgetError
from tiledseg.geometry.memory_policy import keep_all
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.offload import Offload
from tiledseg.models.network import build_modules
from tiledseg.planning.run.memory import offload_by
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.walk import choice
from tiledseg.planning.walk.choice import step_choices
from tiledseg.planning.walk.cost_model import Machine, Store
from tiledseg.planning.walk.step_memory import fixed_memory
from tiledseg.training.offloading import hooks_of

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


QUICK = Store(1e15, 1e15, Machine(1e9, memory_bandwidth=1e9))


@pytest.mark.parametrize("norm", ["none", "instance"])
@pytest.mark.parametrize("share", [0.5])
def test_a_step_of_some_tensors_that_leave_takes_what_is_planned(
    norm: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives the same gradients, to the last bit."""
    monkeypatch.setattr(choice, "LEAST", 1)
    unet, side = UNet(4, base_channels=8, norm=norm), 256
    choices = step_choices(unet.graph(), unet.bands, (side, side), 4, QUICK)
    low = choices.fixed + max(choices.walk.base)
    found = choices.choose(int(low + share * (choices.kept - low)))
    assert found is not None, "it fits"
    plan = offload_by(found)
    assert plan is not None, "something leaves"
    x_BCHW = torch.randn(1, unet.bands, side, side).contiguous(memory_format=torch.channels_last)
    kept = in_channels_last(module_by(unet, keep_all(unet.graph())))
    with AllocationMeter(weights_of(kept)):  # who is followed sums weights' gradients in another order
        for _ in range(3):
            step(kept, x_BCHW)
    with Offload(lambda: FileStore(tmp_path, ROOM), plan.staying, 1, all_kept=False) as moving:
        module = in_channels_last(module_by(unet, found.policy, hooks_of(moving)))
        peaks = []
        for _ in range(3):
            with AllocationMeter(weights_of(module)) as meter:
                step(module, x_BCHW.clone())
            peaks.append(meter.peak)
    assert moving.figures.bytes_out > 0
    assert moving.figures.peak_bytes <= plan.staying
    assert max(peaks) == pytest.approx(found.peak - choices.fixed, rel=0.002)
    assert all(torch.equal(*grads) for grads in zip(weights_of(kept), weights_of(module), strict=True))
