"""What a frozen encoder saves: memory and time of a training step, measured beside what the planner says.

    OMP_NUM_THREADS=1 python -m benchmarks.frozen_encoder --encoder resnet18 --side 384 --steps 7

A residual U-Net of three bands and two classes with seeded stand-in weights, which cost what published ones do; one
image, fp32, AdamW. Trained as a whole and with its encoder frozen, by turns, a step each. Memory: the most bytes of
living storages in a step, weights included. The planner's time is the multiply-adds of the forward and the backward
pass, which leaves out norms and activations. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.execution.halos.part import Part
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tile, make_tiling
from tiledseg.models.frozen import freeze
from tiledseg.models.network import build_modules
from tiledseg.planning.run.spread import Spread
from tiledseg.planning.step.cost import layer_costs, step_work
from tiledseg.planning.walk.step_memory import training_memory
from tiledseg.raster.samples.dataset import Sample
from tiledseg.tracing.allocations import AllocationMeter
from tiledseg.training.steps.step import Stepper, StepRules

FACTORS = {"all trained": {}, "encoder frozen": {"conv1*": 0.0, "bn1*": 0.0, "layer*": 0.0}}
IGNORED = 255


class Trained:
    """A network that is trained on one image, and what the planner says of a step."""

    def __init__(self, network: ResidualUNet, factors: dict[str, float], side: int) -> None:
        tiling = make_tiling((side, side), (1, 1), network_footprint(network.graph()))
        mesh = Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")
        with AllocationMeter([]) as self.meter:
            modules = freeze(build_modules(network, seed=0), factors).train()
            run = ParallelRun.open(Spread(), modules, mesh, "fp32")
            optimizer = torch.optim.AdamW(modules.parameters(), foreach=True)
            self.stepper = Stepper(optimizer, mesh, run.over([tiling]), run.axes, StepRules(IGNORED, 0))
            self.sample, self.number = _sample(network, tiling.tiles[0], side), 0
            self.step()  # the optimizer makes its values
            self.meter.peak = 0
            self.step()
        graph = modules.graph
        self.planned_bytes = training_memory(graph, network.bands, (side, side)).total
        self.planned_work = step_work(graph, layer_costs(graph, network.bands, (side, side)))
        self.weights = sum(p.numel() for p in modules.parameters() if p.requires_grad)

    def step(self) -> None:
        part = Part(0, self.sample.tile)
        self.stepper.run(self.number, iter([self.sample]), [part], stop=False)
        self.number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--side", type=int, default=384, help="of the image, a multiple of 32 px")
    parser.add_argument("--steps", type=int, default=7)
    flags = parser.parse_args()
    network = ResidualUNet(flags.encoder)
    runs = {name: Trained(network, factors, flags.side) for name, factors in FACTORS.items()}
    seconds = by_turns({name: run.step for name, run in runs.items()}, flags.steps)
    before, after = runs.values()
    lines = {name: _line(run, seconds[name]) for name, run in runs.items()}
    shares = {
        "memory": round(after.meter.peak / before.meter.peak, 3),
        "memory planned": round(after.planned_bytes / before.planned_bytes, 3),
        "seconds": round(statistics.median(seconds["encoder frozen"]) / statistics.median(seconds["all trained"]), 3),
        "multiply-adds planned": round(after.planned_work / before.planned_work, 3),
    }
    print(json.dumps({"encoder": flags.encoder, "side": flags.side, **lines, "frozen over trained": shares}))


def by_turns(steps: dict[str, Callable[[], None]], count: int) -> dict[str, list[float]]:
    """Seconds of each step, so that what disturbs the machine disturbs all."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(count):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - begun)
    return found


def _sample(network: ResidualUNet, tile: Tile, side: int) -> Sample:
    draw = np.random.default_rng(0)
    x_CHW = draw.normal(size=(network.bands, side, side)).astype(np.float32)
    return Sample(0, tile, x_CHW, draw.integers(0, 2, (side, side)).astype(np.uint8), np.ones((side, side), bool))


def _line(run: Trained, seconds: list[float]) -> dict[str, float]:
    return {
        "trained weights": run.weights,
        "memory_mib": round(run.meter.peak / 2**20, 1),
        "planned_mib": round(run.planned_bytes / 2**20, 1),
        "seconds": round(statistics.median(seconds), 3),
        "planned_multiply_adds": run.planned_work,
    }


if __name__ == "__main__":
    main()
