"""A step makes the host wait for the GPU once: for its loss. Counted without one, by where tensors come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.host_waits import HostWaits
from tiledseg.architecture.unet import UNet
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.errors import TiledsegError
from tiledseg.execution import carrying
from tiledseg.execution.agreement import check_finite
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.models import dropout
from tiledseg.models.network import build_modules
from tiledseg.planning.run.spread import Spread
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.samples.normalizer import Normalizer
from tiledseg.raster.samples.photometry import Photometry
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.raster.statistics import Normalization
from tiledseg.training.losses.objective import Objective, OverlapTerm, PixelTerm
from tiledseg.training.steps import step_loss
from tiledseg.training.steps.step import Stepper, StepRules

SIDE, IGNORED, CLASSES = 48, 255, 3
CPU = torch.device("cpu")
WEIGHTS = (1.0, 2.0, 0.5)
WEIGHTED = PixelTerm(IGNORED, weights=WEIGHTS)
CASES: dict[str, Callable[[], Objective]] = {
    "plain": lambda: Objective((PixelTerm(IGNORED),)),
    "weighted": lambda: Objective((WEIGHTED,)),
    "ratio": lambda: Objective((WEIGHTED, OverlapTerm(IGNORED, CLASSES, weights=WEIGHTS))),
}


def stored(tile: Any, draw: np.random.Generator) -> Sample:
    """Bytes with holes, to which a draw adds noise."""
    shape = tile.context.shape
    scale = Normalization((90.0,) * 4, (40.0,) * 4)
    change = Photometry((1.2,) * 4, (0.1,) * 4, (True,) * 4, 0.1, 7)
    valid_HW, pixels_CHW = draw.random(shape) > 0.1, draw.integers(0, 255, (4, *shape), np.uint8)
    x_CHW = Normalizer(scale, "uint8", "float32")(pixels_CHW, valid_HW)
    change.apply(x_CHW, valid_HW, tile.context, (SIDE, SIDE))
    y_HW = draw.integers(0, CLASSES, tile.core.shape, np.uint8)
    return Sample(0, tile, x_CHW, y_HW, np.ones(tile.core.shape, bool), y_HW, tile.core)


def run(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> HostWaits:
    """The second of two steps of four tiles, with dropout and a short gradient."""
    unet = UNet(2, base_channels=4, classes=CLASSES, dropout=0.2, norm="pixel")
    mesh = Mesh(SERIAL, SerialCommunicator(), CPU, "serial", "here")
    tiling = make_tiling((SIDE, SIDE), (2, 2), network_footprint(unet.graph()))
    parallel = ParallelRun.open(Spread(), build_modules(unet, seed=0), mesh, "fp32")
    passes = parallel.over([tiling])
    parts = passes.mode.share([TileReference(0, k) for k in range(4)])
    draw = np.random.default_rng(0)
    samples = [stored(part.tile, draw) for part in parts]
    optimizer = torch.optim.AdamW(passes.mode.network.parameters(), foreach=True)
    stepper = Stepper(optimizer, mesh, passes, parallel.axes, StepRules(IGNORED, 0, 0.1, True, objective))
    twice = samples * stepper.rounds(parts)
    waits = HostWaits()
    stepper.run(0, iter(twice), parts, stop=False)
    for module in (carrying, dropout, step_loss):
        monkeypatch.setattr(module, "sent", waits.send)
    with waits:
        result = stepper.run(1, iter(twice), parts, stop=False)
    stepper.close()
    assert result.loss is not None
    return waits


@pytest.mark.parametrize(("case", "most"), [("plain", 1), ("weighted", 1), ("ratio", 2)])
def test_a_step_of_four_tiles_waits_once(case: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio wants the sums of the step before the backward pass; what gradients add up to comes after it."""
    places = run(CASES[case](), monkeypatch).places
    assert sum(places.values()) == most, places
    assert all(place.startswith("step_loss.py") for place in places), places


def test_a_checkpoint_is_looked_at_in_one_wait_unless_something_is_wrong() -> None:
    """Finite numbers whose sum is none are right; a number that is none is named."""
    network = build_modules(UNet(2, base_channels=4, norm="batch"), seed=0)
    optimizer = torch.optim.AdamW(network.parameters())
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    mesh = Mesh(SERIAL, SerialCommunicator(), CPU, "serial", "here")
    with HostWaits() as waits:
        check_finite(network, optimizer, mesh, 1)
    assert sum(waits.places.values()) == 1, waits.places
    name, weight = next(iter(network.named_parameters()))
    with torch.no_grad():
        weight.fill_(3e38)
        check_finite(network, optimizer, mesh, 1)
        weight.view(-1)[3] = torch.nan
    with pytest.raises(TiledsegError, match=f"{name} is not finite after step 1"):
        check_finite(network, optimizer, mesh, 1)


def test_reads_and_pageable_copies_are_waits_and_the_host_s_own_are_none() -> None:
    waits = HostWaits()
    weight = torch.nn.Parameter(torch.ones(3))
    with waits:
        host = torch.zeros(3)
        host[0] = 2.0
        assert float(host.sum()) == 2.0
        assert not waits.places
        there = weight * host.to(CPU)  # 1: a pageable copy
        there.sum().item()  # 2
        there.tolist()  # 3
        bool(there[0] > 0)  # 4
        torch.tensor([1.0], device=CPU)  # 5
        there.new_tensor([1.0])  # 6
        there.detach().to("cpu")  # 7
        waits.send(host, CPU).mul_(2)
    assert sum(waits.places.values()) == 7, waits.places
