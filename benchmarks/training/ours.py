"""Our step, with the trainer's own reader, on one rank or several. `python -m benchmarks.training` starts it.

    python -m benchmarks.training.ours JOB
    mpirun -n 2 python -m benchmarks.training.ours JOB

Rank 0 answers, for all ranks together: the CPU seconds of all, the peak of the largest.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from benchmarks.training.job import BANDS, CLASSES, END, IGNORED, MEAN, STD, Job, measured, together
from tiledseg.comm.session import leave, run_on_mesh
from tiledseg.system.freed_memory import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiledseg.comm.mesh import Mesh

PATIENCE = 3600.0  # seconds: other contestants have their turns meanwhile


def trainer(job: Job, mesh: Mesh) -> Callable[[], float]:
    """What trains an epoch of one optimizer step, and gives its loss. Collective, as what it returns is."""
    import torch  # after MPI, which the session has started

    from tiledseg.config.run import ParallelConfig
    from tiledseg.execution.parallel_run import ParallelRun
    from tiledseg.execution.part_passes import read_ahead
    from tiledseg.execution.precision import make_deterministic
    from tiledseg.models.network import build_modules
    from tiledseg.planning.run.spread import choose_spread, parallelism
    from tiledseg.raster.labels.label_map import LabelMap
    from tiledseg.raster.reader import open_raster
    from tiledseg.raster.samples.dataset import Dataset
    from tiledseg.raster.samples.sampling import TileReference
    from tiledseg.raster.statistics import Normalization
    from tiledseg.training.step import Stepper, StepRules

    torch.set_num_threads(job.threads)
    make_deterministic(True)
    tiling = job.tiling
    asked = parallelism(ParallelConfig(halo=job.halo))
    spread = choose_spread(asked, job.network.graph(), [tiling], mesh.size, 1, BANDS, 4)
    run = ParallelRun.open(spread, build_modules(job.network, 0).train(), mesh, "fp32")
    passes = run.over([tiling])
    parts = passes.mode.share([TileReference(0, tile.index) for tile in tiling.tiles])
    optimizer = torch.optim.SGD(run.network.parameters(), lr=0.0)
    stepper = Stepper(optimizer, mesh, passes, run.axes, StepRules(IGNORED, 0))
    label_map, normalization = LabelMap.from_config(CLASSES, IGNORED), Normalization((MEAN,) * BANDS, (STD,) * BANDS)

    def epoch() -> float:
        dataset = Dataset([open_raster(job.image)], [open_raster(job.labels)], [tiling], label_map, normalization)
        samples = read_ahead(passes, dataset, parts, threads=2, depth=2)
        result = stepper.run(0, samples, parts, stop=False)
        dataset.close()
        return float(result.loss or 0)

    return epoch


def main() -> int:
    job = Job.from_json(sys.argv[1])
    if job.kept:
        keep_freed_memory(os.environ)

    def body(mesh: Mesh) -> None:
        epoch = trainer(job, mesh)
        if mesh.is_root:
            print("ready", flush=True)
        while mesh.on_root(sys.stdin.readline) != END:
            mesh.communicator.barrier()
            each = mesh.communicator.gather_objects(measured(epoch))
            if mesh.is_root:
                print(json.dumps(together(each)), flush=True)

    return run_on_mesh(body, "gloo" if job.ranks > 1 else "auto", PATIENCE)


if __name__ == "__main__":
    leave(main())
