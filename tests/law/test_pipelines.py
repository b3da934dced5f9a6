"""The law of pipelines over time: ten optimizer steps of the paper's presets, cut by its balances, on six ranks.

Smaller splits and other networks: `tests/pipeline/test_executor.py`; whole runs: `test_pipeline_runs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.law.cases import IGNORED, KEY, Case
from tests.law.test_halo_modes import difference
from tiledseg.architecture.presets import PRESETS
from tiledseg.architecture.unet import UNet
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.config.run import ParallelConfig
from tiledseg.execution.agreement import own_state
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.planning.run.parallelism import parallelism
from tiledseg.planning.run.pipeline import PipelinePlan, micro_batch_size, plan_pipeline
from tiledseg.planning.run.spread import Spread, choose_spread
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.training.losses.objective import Objective
from tiledseg.training.steps.step import Stepper, StepRules

STEPS = 10


@dataclass(frozen=True)
class Strip(Case):
    """A raster of few pixels, whose tiles differ in size."""

    @property
    def raster(self) -> tuple[int, int]:
        unit = self.footprint.alignment
        return 3 * unit + 5, unit + 3


def plans(case: Case, parallel: ParallelConfig, ranks: int) -> tuple[Spread, PipelinePlan | None]:
    layers, tilings = case.unet.graph(), [case.tiling()]
    halo = choose_spread(parallelism(parallel), layers, tilings, ranks, 1, case.unet.bands, 8)
    largest = micro_batch_size(halo, layers, tilings, len(tilings[0]), 1, 8)
    return halo, plan_pipeline(parallelism(parallel), layers, case.unet.bands, largest, None)


def steps(
    case: Case, parallel: ParallelConfig, mesh: Mesh, objective: Objective | None = None
) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    """Losses of ten steps, and the weights after them that this rank holds."""
    network = case.network().train()
    dataset = case.dataset()
    halo, pipeline = plans(case, parallel, mesh.size)
    run = ParallelRun.open(halo, network, mesh, "fp64", pipeline)
    passes = run.over(dataset.tilings)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.002)
    rules = StepRules(IGNORED, KEY.seed, 0.5, objective=objective)
    stepper = Stepper(optimizer, mesh, passes, run.axes, rules)
    parts = passes.mode.share([TileReference(0, tile) for tile in range(len(dataset.tilings[0]))])
    losses = []
    for step in range(STEPS):
        loaded = [part for _ in range(stepper.rounds(parts)) for part in parts if passes.loads]
        samples = (dataset.load(part.image, part.tile) for part in loaded)
        losses.append(stepper.run(KEY.step + step, samples, parts, stop=False).loss)
    stepper.close()
    run.close()
    return losses, {name: tensor.clone() for name, tensor in own_state(network).items()}


def alone(case: Case, objective: Objective | None = None) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    """The undivided raster through the undivided network, on one rank."""
    mesh = Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")
    return steps(replace(case, grid=(1, 1)), ParallelConfig(), mesh, objective)


@pytest.mark.mpi(min_size=6)
@pytest.mark.six
@pytest.mark.parametrize(
    ("preset", "schedule", "recompute"),
    [
        ("small", "1f1b", "never"),
        ("small", "gpipe", "except_last"),
        ("small", "folded", "always"),
        ("medium-2", "1f1b", "always"),
        ("medium-2", "gpipe", "never"),
        ("large", "1f1b", ["always", "never", "except_last", "never", "always", "never"]),
    ],
)
def test_ten_steps_of_a_preset(preset: str, schedule: str, recompute: str | list[str], meshes: dict[str, Mesh]) -> None:
    """A norm over tiles would be refused, so there is none: the layers are as many."""
    torch.set_num_threads(1)
    mesh, named = meshes["gloo"], PRESETS[preset]
    case = Strip(UNet(named.levels, base_channels=1, dropout=0.1, bands=2, classes=3), (4, 1))
    balance = "modelled" if schedule == "folded" else list(named.balance)
    parallel = ParallelConfig(stages=6, schedule=schedule, balance=balance, recompute=recompute)
    losses, own = steps(case, parallel, mesh)
    parts = mesh.communicator.gather_objects(own)
    expected_losses, expected = mesh.on_root(lambda: alone(case))
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert sum(len(part) for part in parts) == len(expected), "each weight is on one stage"
    together = {name: tensor for part in parts for name, tensor in part.items()}
    assert difference(together, expected) < 1e-12
    assert difference(case.network().state_dict(), expected) > 0.01, "the weights have moved"
