"""Training steps of one case on one rank, as the trainer does them, with the image in memory.

Every case has its own network from the same seed and its own optimizer, so the losses of all cases must agree, step for
step, with each other and with those of any other number of ranks.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.spatial.step_case import BANDS, CLASSES, StepCase, StepJob
from tiledseg.comm.mesh import Mesh
from tiledseg.execution.halo_modes import Part
from tiledseg.execution.memory import peak_memory
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.precision import make_deterministic
from tiledseg.geometry.sharing.decomposition import MeshShape
from tiledseg.models.network import build_modules
from tiledseg.planning.run.spread import Spread
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.training.step import Stepper, StepResult, StepRules

LEARNING_RATE = 0.01  # above 0, so the loss of a step tells whether the gradients of the step before were right
IGNORED = 255


class Image(NamedTuple):
    """Pixels (float32) and classes, the same on every rank and for every number of ranks."""

    x_CHW: NDArray[np.float32]
    y_HW: NDArray[np.uint8]

    @staticmethod
    def draw(size: int) -> Image:
        generator = np.random.default_rng(1)
        x_CHW = generator.standard_normal((BANDS, size, size), dtype=np.float32)
        return Image(x_CHW, generator.integers(0, CLASSES, (size, size), dtype=np.uint8))

    def sample(self, part: Part) -> Sample:
        """What a rank would load for a part."""
        rows, cols = part.tile.context.slices
        core = part.tile.core
        return Sample(0, part.tile, self.x_CHW[:, rows, cols], self.y_HW[core.slices], np.ones(core.shape, dtype=bool))


class CaseRun:
    """One case on one rank. All methods are collective."""

    def __init__(self, job: StepJob, case: StepCase, mesh: Mesh, image: Image) -> None:
        self.mesh = mesh
        network = build_modules(job.network, seed=0)
        plan = Spread(case.halo, MeshShape(1, *job.mesh), case.fusion, case.overlap)
        self.parallel = ParallelRun.open(plan, network, mesh, "fp32")
        passes = self.parallel.over([job.tiling])
        self.parts = passes.mode.share([TileReference(0, tile.index) for tile in job.tiling.tiles])
        self.samples = [image.sample(part) for part in self.parts]
        optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
        self.stepper = Stepper(optimizer, mesh, passes, self.parallel.axes, StepRules(IGNORED, 0))
        self.results: list[StepResult] = []
        self.cpu_seconds: list[float] = []

    def step(self, step: int) -> None:
        self.mesh.communicator.barrier()
        begun = time.process_time()
        self.results.append(self.stepper.run(step, iter(self.samples), self.parts, stop=False))
        self.cpu_seconds.append(time.process_time() - begun)

    def found(self) -> dict[str, Any]:
        """Losses of all steps; the other figures of the timed ones, `cpu_seconds` being those of all ranks."""
        timed = self.results[1:]
        by_rank = self.mesh.communicator.gather_objects(self.cpu_seconds[1:])
        return {
            "losses": [result.loss for result in self.results],
            **{key: [result.figures[key] for result in timed] for key in ("seconds", "communication_seconds")},
            "cpu_seconds": [sum(ranks) for ranks in zip(*by_rank, strict=True)],
            **{key: timed[-1].figures[key] for key in ("halo_bytes", "halo_messages", "memory_bytes")},
        }

    def close(self) -> None:
        self.stepper.close()
        self.parallel.close()


def run_cases(job: StepJob, mesh: Mesh) -> dict[str, Any]:
    """All cases in turn, step by step. `memory_before_bytes`: what the largest rank held before it had a network."""
    make_deterministic(True)
    image = Image.draw(job.size)
    before = max(mesh.communicator.gather_objects(peak_memory(mesh.device)))
    runs = [CaseRun(job, case, mesh, image) for case in job.cases]
    for step in range(1 + job.steps):
        turn = step % len(runs)
        for run in (*runs[turn:], *runs[:turn]):  # each comes first in its turn
            run.step(step)
    cases = [run.found() for run in runs]
    for run in runs:
        run.close()
    return {
        "transport": mesh.transport,
        "device": str(mesh.device),
        "torch": torch.__version__,
        "memory_before_bytes": before,
        "cases": cases,
    }
