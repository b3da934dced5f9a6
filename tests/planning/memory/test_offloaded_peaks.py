"""The choice where tensors may be offloaded to a store: a real step takes what is planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.planned_memory.peaks import in_channels_last, module_by, step, weights_of
from tests.memory.stores import ROOM
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.memory_policy import keep_all
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.offload import Offload
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.memory import store
from tiledseg.planning.memory.choice import step_choices
from tiledseg.planning.memory.store import Store
from tiledseg.planning.run.memory import offload_by
from tiledseg.tracing.allocations import AllocationMeter
from tiledseg.training.offloading import hooks_of

QUICK = Store(1e15, 1e15, Machine(1e9, memory_bandwidth=1e9))


@pytest.mark.parametrize("norm", ["none", "instance"])
@pytest.mark.parametrize("share", [0.5])
def test_a_step_takes_at_most_what_is_planned(
    norm: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives the same gradients, to the last bit."""
    monkeypatch.setattr(store, "LEAST", 1)
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
