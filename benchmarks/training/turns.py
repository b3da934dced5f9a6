"""What it costs that a rank's communicators take turns, as NCCL's do: training steps side by side, on CPUs over Gloo.

    mpirun -n 2 python -m benchmarks.training.turns --halo layer --mesh 2 1 --size 512
    mpirun -n 4 python -m benchmarks.training.turns --halo layer --mesh 2 1 --stages 2 --images 6 --size 256
    mpirun -n 2 python -m benchmarks.training.turns --stages 2 --images 8 --size 256

`free`: as it runs over Gloo. `turns`: one communicator at a time, and the messages of a pipeline in one common order.
The steps take turns; both have the same losses. One line of JSON on rank 0.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.spread import Spread, ratios
from tiledseg.comm.session import leave, run_on_mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.config.words import SCHEDULES

if TYPE_CHECKING:
    from tiledseg.comm.mesh import Mesh

BANDS, CLASSES = 4, 5


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--halo", choices=("read", "exchange", "layer"), default="read")
    parser.add_argument("--mesh", type=int, nargs=2, help="ranks along rows and columns of an image")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--size", type=int, default=256, help="pixels of an image's side")
    parser.add_argument("--images", type=int, default=1, help="of a step")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


class Contestant:
    """One way to run the steps, with a network of its own from the same seed."""

    def __init__(self, given: argparse.Namespace, mesh: Mesh) -> None:
        import torch

        from tiledseg.architecture.unet import UNet
        from tiledseg.execution.parallel_run import ParallelRun
        from tiledseg.geometry.halo import network_footprint
        from tiledseg.geometry.tiling import make_tiling
        from tiledseg.models.network import build_modules
        from tiledseg.planning.run.parallelism import parallelism
        from tiledseg.planning.run.pipeline import micro_batch_size, plan_pipeline
        from tiledseg.planning.run.spread import choose_spread
        from tiledseg.raster.samples.sampling import TileReference
        from tiledseg.training.steps.step import Stepper, StepRules

        norm = "instance" if given.halo == "layer" else "none"
        unet = UNet(4, 2, 3, given.channels, "same", norm, "transposed", bands=BANDS, classes=CLASSES)
        layers = unet.graph()
        tilings = [make_tiling((given.size, given.size), (2, 2), network_footprint(layers))] * given.images
        parallel = ParallelConfig(
            halo=given.halo,
            mesh=given.mesh or "auto",
            stages=given.stages,
            schedule=given.schedule,
            balance="modelled",
        )
        halo = choose_spread(parallelism(parallel), layers, tilings, mesh.size, given.images, BANDS, 4)
        largest = micro_batch_size(halo, layers, tilings, 4 * given.images, given.images, 4)
        network = build_modules(unet, seed=0).train()
        pipeline = plan_pipeline(parallelism(parallel), layers, BANDS, largest, None)
        run = ParallelRun.open(halo, network, mesh, "fp32", pipeline)
        self.passes = run.over(tilings)
        self.mesh, self.losses = mesh, list[float | None]()
        self.parts = self.passes.mode.share([TileReference(i, t) for i in range(given.images) for t in range(4)])
        self.samples = [_noise(part) for part in self.parts]
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        self.stepper = Stepper(optimizer, mesh, self.passes, run.axes, StepRules(255, 0, 1.0))

    def step(self, number: int) -> float:
        """Its seconds."""
        self.mesh.communicator.barrier()
        begun = time.perf_counter()
        samples = iter(self.samples if self.passes.loads else [])
        self.losses.append(self.stepper.run(number, samples, self.parts, stop=False).loss)
        self.mesh.communicator.barrier()
        return time.perf_counter() - begun


def _noise(part: Any) -> Any:
    """What a rank would load for a part: pixels by their place, the same on every rank."""
    import numpy as np

    from tiledseg.raster.samples.dataset import Sample

    rows, cols = part.tile.context.slices
    y_HW, x_HW = np.mgrid[rows, cols].astype(np.float32)
    x_CHW = np.stack([np.sin(y_HW * (b + 1) + x_HW * 0.7 + part.image) for b in range(BANDS)]).astype(np.float32)
    core = part.tile.core
    labels_HW = np.add.outer(np.arange(core.row.start, core.row.stop), np.arange(core.col.start, core.col.stop)) // 9
    return Sample(part.image, part.tile, x_CHW, (labels_HW % CLASSES).astype(np.uint8), np.ones(core.shape, bool))


def in_turns(mesh: Mesh) -> Mesh:
    """The same ranks, whose communicators take turns."""
    from tiledseg.comm.transports.turns import TurnCommunicator

    return replace(mesh, communicator=TurnCommunicator(mesh.communicator))


def measure(given: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    ways = {"free": Contestant(given, mesh), "turns": Contestant(given, in_turns(mesh))}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.steps + 2):  # two to warm up
        for name, contestant in ways.items():
            seconds[name].append(contestant.step(number))
    timed = {name: values[2:] for name, values in seconds.items()}
    assert ways["free"].losses == ways["turns"].losses
    return {
        **vars(given),
        "ranks": mesh.size,
        "seconds": {name: Spread.of(values).to_dict() for name, values in timed.items()},
        "turns_over_free": ratios(timed["turns"], timed["free"]).to_dict(),
    }


def main() -> int:
    given = parse()

    def body(mesh: Mesh) -> None:
        found = measure(given, mesh)
        if mesh.is_root:
            print(json.dumps(found), flush=True)

    return run_on_mesh(body, "gloo")


if __name__ == "__main__":
    leave(main())
